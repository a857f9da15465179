"""The life of one tracked run: opened with everything that is known, fed through a buffer, closed with a status.

Opening fails loudly, with a `TrackingError`. From then on nothing that happens to the store reaches the training: what
cannot be sent stays in memory, is written to a spool file as well, and is tried again later.
"""

from __future__ import annotations

import contextlib
import getpass
import logging
import math
import shlex
import sys
import time
from enum import Enum
from functools import partial
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Any

from mp_hydra.signals import signals_held_back
from mp_hydra.tracking.batch import Artifact, Batch, Dataset, End, Metric, send
from mp_hydra.tracking.params import MAX_TAG_VALUE, clean_key, cut, flatten, text
from mp_hydra.tracking.spool import Header, Spool
from mp_hydra.tracking.store import (
    Settings,
    explain,
    find_experiment,
    open_client,
    public,
    quiet,
    sqlite_path,
    store_uri,
    unusable,
)

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    Deliver = Callable[[Batch], tuple[Batch, Exception | None]]

FLUSH_SECONDS = 10.0
FLUSH_VALUES = 1000
RETRY_SECONDS = 30.0
MAX_RETRY_SECONDS = 600.0
_MAX_DIGEST = 36  # MLflow's limits
_MAX_DATASET_NAME = 500
_MAX_DATASET_SCHEMA = 1_048_575

_logger = logging.getLogger(__name__)


class Outcome(str, Enum):
    """How a run ended."""

    ok = "ok"
    diverged = "diverged"
    out_of_memory = "out_of_memory"
    no_updates = "no_updates"
    killed = "killed"
    error = "error"

    @property
    def status(self) -> str:
        """The MLflow status. A run that diverged did its job, and its numbers are a result."""
        if self in (Outcome.ok, Outcome.diverged):
            return "FINISHED"
        return "KILLED" if self is Outcome.killed else "FAILED"


class Run:
    """A run that takes numbers, tags and files; made by `open_run`.

    Attributes:
        run_id: MLflow's id of the run; None if nothing is tracked.
        experiment_id: MLflow's id of its experiment; None if nothing is tracked.
        uri: the address of the store; empty if nothing is tracked.
    """

    run_id: str | None
    experiment_id: str | None
    uri: str

    def __init__(self, header: Header, deliver: Deliver, spool: Path) -> None:
        self.uri = header.uri
        self.experiment_id = header.experiment_id
        self.run_id = header.run_id
        self._deliver = deliver
        self._spool = Spool(spool, header)
        self._pending = Batch()
        self._unspooled = Batch()
        self._flushed_at = self._tried_at = monotonic()
        self._retry_seconds = 0.0  # 0: the store answered last time
        self._latest = 0  # milliseconds since the epoch, of the metrics
        self._warned = False
        self._spool_works = True
        self._closed = False

    def log_metrics(self, metrics: Mapping[str, float], *, step: int) -> None:
        """Add one value to each of several series; nothing is averaged or dropped.

        A value that is no finite number is not logged; the tag ``mp_hydra.absent.<metric>`` says what it was.

        Args:
            metrics: values by name.
            step: training batches seen so far.
        """
        # MLflow shows the larger of two values of one step and time, not the later one.
        now = self._latest = max(_milliseconds(), self._latest + 1)
        batch = Batch()
        for name, value in metrics.items():
            key = clean_key(name)
            number = _finite(value)
            if number is None:
                batch.tags[clean_key(f"mp_hydra.absent.{name}")] = cut(
                    f"not finite: {value} at step {step}", MAX_TAG_VALUE
                )
            else:
                batch.metrics.append(Metric(key, number, now, int(step)))
        self._add(batch)

    def set_tags(self, tags: Mapping[str, Any]) -> None:
        """Set tags; a later value replaces an earlier one."""
        self._add(Batch(tags=_clean_tags(tags)))

    def log_dataset(
        self, *, name: str, digest: str, source: str, schema: str | None, profile: str | None, context: str = "training"
    ) -> None:
        """Record a data set as an input of the run; the data themselves are not looked at.

        Args:
            name: its name.
            digest: of the data; MLflow keeps the first 36 characters.
            source: where the data came from, as text.
            schema: JSON text, or None.
            profile: JSON text, or None.
            context: what it was used for.
        """
        schema = schema if schema is None else cut(schema, _MAX_DATASET_SCHEMA)
        dataset = Dataset(cut(name, _MAX_DATASET_NAME), digest[:_MAX_DIGEST], source, schema, profile, context)
        self._add(Batch(datasets=[dataset]))

    def log_artifacts(self, path: Path, artifact_path: str | None = None) -> None:
        """Copy a file, or a directory under its own name, to the run's artifacts.

        Args:
            path: what to copy.
            artifact_path: the directory among the artifacts to copy it into; None for the top.
        """
        self._add(Batch(artifacts=[Artifact(str(Path(path).absolute()), artifact_path)]))
        self.flush()  # now, because the file may change or go

    def flush(self) -> None:
        """Send what waits; while the store is away, put it into the spool instead."""
        self._flushed_at = monotonic()
        if self._pending and monotonic() - self._tried_at >= self._retry_seconds:
            self._attempt()
        self._keep()

    def close(self, outcome: Outcome, *, reason: str | None = None) -> None:
        """Send what waits and end the run. A second call does nothing.

        In the main thread SIGINT and SIGTERM wait until the run is closed, so that it is never left half closed; a run
        that is closed as killed swallows them.

        Args:
            outcome: decides the status; recorded in the tag ``mp_hydra.outcome``.
            reason: recorded in the tag ``mp_hydra.reason``.
        """
        if self._closed:
            return
        with signals_held_back(lost=outcome is Outcome.killed):
            self._closed = True
            tags = {"mp_hydra.outcome": outcome.value} | ({"mp_hydra.reason": reason} if reason else {})
            last = Batch(tags=_clean_tags(tags), end=End(outcome.status, _milliseconds()))
            self._pending.add(last)
            self._unspooled.add(last)
            error = self._attempt()
            self._keep()
            self._spool.release()
            if error is not None and self._spool_works:
                _logger.warning(
                    "tracking: part of run %s has not reached %s (%s); it is kept in %s. Send it later with: "
                    "mp-hydra sync %s",
                    self.run_id,
                    public(self.uri),
                    explain(error),
                    self._spool.path,
                    shlex.quote(str(self._spool.path)),
                )
            elif error is not None:
                _logger.warning(
                    "tracking: part of run %s has not reached %s (%s) and is lost, because %s could not be written",
                    self.run_id,
                    public(self.uri),
                    explain(error),
                    self._spool.path,
                )

    def url(self) -> str | None:
        """The run's web address on its server; None where no server is known."""
        if not self.uri or sqlite_path(self.uri) is not None:
            return None
        return f"{public(self.uri)}/#/experiments/{self.experiment_id}/runs/{self.run_id}"

    def ui_command(self) -> str:
        """What to type, or the address to open, to look at the run; empty if nothing is tracked."""
        if not self.uri:
            return ""
        # One worker and no job execution: 0.5 GB and 8 s to start, against 2.5 GB and 22 s.
        start = "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false mlflow ui --workers 1 --backend-store-uri"
        return self.url() or f"{start} {shlex.quote(self.uri)}"

    def _add(self, batch: Batch) -> None:
        if self._closed:
            raise RuntimeError(f"run {self.run_id} is closed")
        self._pending.add(batch)
        self._unspooled.add(batch)
        if monotonic() - self._flushed_at >= FLUSH_SECONDS or len(self._unspooled.metrics) > FLUSH_VALUES:
            self.flush()

    def _attempt(self) -> Exception | None:
        """Send what waits; say once that it did not work."""
        left, error = self._deliver(self._pending)
        self._pending = left
        self._tried_at = monotonic()
        if error is None:
            self._unspooled = Batch()
            self._retry_seconds = 0.0
            with contextlib.suppress(OSError):
                self._spool.remove()
        else:
            self._retry_seconds = min(max(2 * self._retry_seconds, RETRY_SECONDS), MAX_RETRY_SECONDS)
            if not self._warned and not self._closed:
                self._warned = True
                _logger.warning(
                    "tracking: %s does not take what this run sends (%s); training goes on, the values are kept in %s "
                    "and sent again later",
                    public(self.uri),
                    explain(error),
                    self._spool.path,
                )
        return error

    def _keep(self) -> None:
        """Write to the spool what waits and is not in it yet."""
        if not (self._pending and self._unspooled):
            return
        try:
            self._spool.append(self._unspooled)
        except OSError as error:
            if self._spool_works:
                self._spool_works = False
                _logger.warning(
                    "tracking: %s cannot be written (%s); what waits is kept in memory", self._spool.path, error
                )
        else:
            self._spool_works = True
            self._unspooled = Batch()


class OffRun(Run):
    """A run that is not tracked (``tracking=off``): it takes everything and writes nothing."""

    def __init__(self) -> None:
        super().__init__(Header("", "", "", ""), lambda _: (Batch(), None), Path())
        self.run_id = None
        self.experiment_id = None


def open_run(
    settings: Settings, *, name: str, params: Mapping[str, Any], tags: Mapping[str, str], spool: Path, cwd: Path
) -> Run:
    """Open a run, with its parameters and tags in the store.

    Args:
        settings: the ``tracking`` group.
        name: the run's name, unless the settings give one.
        params: the config, nested or flat.
        tags: the run's tags; the user's own, from the settings, are added and do not replace these.
        spool: the directory for what cannot be sent; made only if it is needed.
        cwd: the directory in which the user typed the command: a relative ``tracking.uri`` or ``spool`` starts there.

    Returns:
        A run with the status RUNNING, which the caller closes whatever happens; an `OffRun` for ``kind: off``.

    Raises:
        ConfigError: the settings name no usable store.
        TrackingError: the store cannot be used. A server that does not answer is given up after about 15 s, unless
            MLFLOW_HTTP_REQUEST_MAX_RETRIES or MLFLOW_HTTP_REQUEST_TIMEOUT say otherwise. No run stays RUNNING.
    """
    if settings.kind == "off":
        return OffRun()
    uri = store_uri(settings, cwd)
    client = open_client(uri)
    experiment_id = find_experiment(client, uri, settings.experiment)
    name = cut(settings.run_name or name, 250)
    first = Batch(params=flatten(params), tags=_clean_tags({**_source(), **settings.tags, **tags}))
    run_id = None
    try:
        with quiet(), signals_held_back(lost=False):  # no run without its id known here
            run_id = client.create_run(experiment_id, start_time=_milliseconds(), run_name=name).info.run_id
        _, failure = send(client, run_id, first)
    except Exception as error:
        raise unusable(uri, error) from error
    except BaseException:  # Ctrl-C
        if run_id is not None:
            send(client, run_id, Batch(end=End("KILLED", _milliseconds())))
        raise
    if failure is not None:
        send(client, run_id, Batch(end=End("FAILED", _milliseconds())))
        raise unusable(uri, failure) from failure
    file = cwd / spool / f"mlflow-spool-{run_id}.jsonl"
    return Run(Header(uri, experiment_id, run_id, name), partial(send, client, run_id), file)


def reopen_run(settings: Settings, run_id: str, *, spool: Path, cwd: Path) -> Run:
    """Open a run that has ended, to add to it; its status becomes RUNNING again.

    Args:
        settings: of the store that holds it.
        run_id: MLflow's id of the run.
        spool: the directory for what cannot be sent; made only if it is needed.
        cwd: the directory in which the user typed the command.

    Raises:
        ConfigError: the settings name no usable store.
        TrackingError: the store cannot be used, or does not have the run.
    """
    uri = store_uri(settings, cwd)
    client = open_client(uri)
    try:
        with quiet():
            client.update_run(run_id, status="RUNNING")
            info = client.get_run(run_id).info
    except Exception as error:
        raise unusable(uri, error) from error
    file = cwd / spool / f"mlflow-spool-{run_id}.jsonl"
    return Run(Header(uri, info.experiment_id, run_id, info.run_name), partial(send, client, run_id), file)


def _source() -> dict[str, str]:
    """What the columns User and Source of the MLflow UI show."""
    tags = {"mlflow.source.name": sys.argv[0] or "python", "mlflow.source.type": "LOCAL"}
    with contextlib.suppress(OSError, KeyError, ImportError):  # a container's user may have no name
        tags["mlflow.user"] = getpass.getuser()
    return tags


def _clean_tags(tags: Mapping[str, Any]) -> dict[str, str]:
    return {clean_key(str(key)): cut(text(value), MAX_TAG_VALUE) for key, value in tags.items()}


def _finite(value: object) -> float | None:
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def _milliseconds() -> int:
    return int(time.time() * 1000)
