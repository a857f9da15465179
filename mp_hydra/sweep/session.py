"""The parent run of a sweep, from before the first job to after the last, whatever ends the sweep."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from mp_hydra import tracking
from mp_hydra.errors import ConfigError, TrackingError
from mp_hydra.isolation.jobs import Cause
from mp_hydra.sweep.resume import KEY, Manifest, find_parent, finished
from mp_hydra.tracking import Outcome, public
from mp_hydra.tracking.family import KIND_TAG, SWEEP_KIND
from mp_hydra.tracking.store import find_experiment, quiet

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from filelock import FileLock

    from mp_hydra.compare.store import Store
    from mp_hydra.isolation.jobs import End

log = logging.getLogger(__name__)

_MAX_NAME = 100
# A job that was stopped or told to end has closed its run as killed; how it really ended is known here.
_OUTCOMES = {Cause.stopped: Outcome.killed, Cause.out_of_memory: Outcome.out_of_memory}


class Session:
    """A sweep's parent run in the store; made by `open_session`.

    Attributes:
        uri: the address of the store.
        experiment_id: MLflow's id of the experiment.
        parent_run_id: MLflow's id of the parent run.
        finished: objective by job key, of the jobs that an earlier part of the sweep has finished.
    """

    def __init__(self, client: Any, run: tracking.Run, lock: FileLock, done: Mapping[str, float]) -> None:
        self.uri = run.uri
        self.experiment_id, self.parent_run_id = str(run.experiment_id), str(run.run_id)
        self.finished = dict(done)
        self._client, self._run, self._lock = client, run, lock

    def job_ended(self, key: str, end: End) -> None:
        """Give the run of a job whose process did not end it itself, or not in these words, its outcome and reason."""
        if end.cause in (Cause.completed, Cause.raised):
            return
        mine = [
            run
            for run in tracking.children(self._client, self.experiment_id, self.parent_run_id)
            if run.data.tags.get("mp_hydra.job_key") == key
        ]
        if mine and mine[-1].info.status != "FINISHED":
            error = tracking.end_run(
                self._client, mine[-1].info.run_id, _OUTCOMES.get(end.cause, Outcome.error), end.reason
            )
            if error is not None:
                log.warning("tracking: the run %s of a dead job could not be ended: %s", mine[-1].info.run_id, error)

    def close(self, outcome: Outcome, reason: str | None = None) -> None:
        """End the parent run, and before it whatever child is still marked as running."""
        orphaned = Outcome.killed if outcome is Outcome.killed else Outcome.error
        try:
            tracking.end_children(
                self._client,
                self.experiment_id,
                self.parent_run_id,
                orphaned,
                reason or "its process ended without a word",
            )
        except TrackingError as error:
            log.warning("tracking: %s", error)
        self._run.close(outcome, reason=reason)
        self._lock.release()

    def children(self) -> list[Any]:
        """The runs of the sweep, as MLflow's own objects."""
        return tracking.children(self._client, self.experiment_id, self.parent_run_id)

    def store(self) -> Store:
        """The store, for the comparison."""
        from mp_hydra.compare.store import Store

        return Store(self._client, self.uri)

    def last_will(self) -> Callable[[], None]:
        """What another process is to do when this one has been killed."""
        return partial(end_sweep, self.uri, self.experiment_id, self.parent_run_id)


def open_session(
    settings: tracking.Settings, *, directory: Path, cwd: Path, overrides: Sequence[str], resume: str | None
) -> Session:
    """Open the parent run of a sweep, a new one or that of the sweep that is to go on.

    Args:
        settings: the `tracking` group; not of kind "off".
        directory: the sweep's directory; sweep.json is written there.
        cwd: the directory in which the user typed the command.
        overrides: what the user typed; the parent's name, unless the settings give one.
        resume: see `find_parent`; None for a new sweep.

    Raises:
        ConfigError: the settings name no usable store, or there is no such sweep.
        TrackingError: the store cannot be used.
    """
    uri = tracking.store_uri(settings, cwd)
    client = tracking.open_client(uri)
    tags = {
        **tracking.git_state(cwd).tags(),
        KIND_TAG: SWEEP_KIND,
        "mp_hydra.sweep": str(directory),
        "mp_hydra.overrides": " ".join(word for word in overrides if not word.startswith(f"{KEY}=")),
    }
    done: dict[str, float] = {}
    if resume is None:
        name = settings.run_name or " ".join(overrides) or "sweep"
        run = tracking.open_run(settings, name=name[:_MAX_NAME], params={}, tags=tags, spool=directory, cwd=cwd)
        lock = _lock(str(run.run_id))
        lock.acquire()
    else:
        parent = find_parent(client, find_experiment(client, uri, settings.experiment), uri, resume, cwd)
        lock = _locked(parent.info.run_id, resume)
        # Only a sweep that was killed with all its processes leaves runs like these.
        tracking.end_children(
            client, parent.info.experiment_id, parent.info.run_id, Outcome.killed, "its sweep was interrupted"
        )
        done = finished(client, parent)
        run = tracking.reopen_run(settings, parent.info.run_id, spool=directory, cwd=cwd)
        run.set_tags(tags)
        run.flush()
    Manifest(str(run.run_id), str(run.experiment_id), public(uri)).save(directory)
    return Session(client, run, lock, done)


def end_sweep(uri: str, experiment_id: str, parent_run_id: str) -> None:
    """End a sweep whose process was killed: its running children and the parent become KILLED; one that has ended stays.

    Raises:
        TrackingError: the store does not take it.
    """
    client = tracking.open_client(uri)
    with quiet():
        if client.get_run(parent_run_id).info.status != "RUNNING":
            return
    reason = "the process that ran the sweep was killed"
    tracking.end_children(client, experiment_id, parent_run_id, Outcome.killed, reason)
    tracking.end_run(client, parent_run_id, Outcome.killed, reason)


def _lock(parent_run_id: str) -> FileLock:
    from filelock import FileLock

    directory = tracking.home() / "sweeps"
    directory.mkdir(parents=True, exist_ok=True)
    return FileLock(directory / f"{parent_run_id}.lock", timeout=0)


def _locked(parent_run_id: str, resume: str) -> FileLock:
    from filelock import Timeout

    lock = _lock(parent_run_id)
    try:
        lock.acquire()
    except Timeout:
        raise ConfigError(KEY, resume, "this sweep is still running; wait for its end, or stop it first") from None
    return lock
