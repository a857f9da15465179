"""The Hydra callback that makes a sweep one thing in MLflow: one parent run, whatever launcher runs the jobs.

In the process that sweeps it holds the parent run; it travels to the jobs, and there says which sweep they belong to.
"""

from __future__ import annotations

import atexit
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.experimental.callback import Callback
from omegaconf import OmegaConf

from mp_hydra import tracking
from mp_hydra.errors import ConfigError, UserError, quit_with
from mp_hydra.isolation.jobs import Cause
from mp_hydra.sweep import membership
from mp_hydra.sweep.comparing import compare_sweep
from mp_hydra.sweep.identity import job_key
from mp_hydra.sweep.membership import Membership
from mp_hydra.sweep.session import Session, open_session
from mp_hydra.tracking import Outcome
from mp_hydra.tracking.links import links
from mp_hydra.tracking.store import sqlite_path

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from omegaconf import DictConfig

    from mp_hydra.isolation.jobs import End, Job

GRID = "GridSweeper"


class SweepCallback(Callback):
    """Opens the parent run of a sweep before its first job, and ends it after the last.

    Args:
        tracking: the keys of `mp_hydra.tracking.Settings`; None for the config's own `tracking` group, or its defaults.
        check: called by the sweeper `grid` with the config of every job before the first one starts; it raises
            `mp_hydra.config.InvalidConfigError` for values that cannot be used.

    Attributes:
        session: the parent run; None before it is opened, where nothing is tracked, and within jobs.
        resuming: whether an earlier sweep goes on.
        composed: configs of jobs by their overrides, where the sweeper has composed them already.
    """

    def __init__(
        self, tracking: Mapping[str, Any] | None = None, check: Callable[[DictConfig], object] | None = None
    ) -> None:
        self.session: Session | None = None
        self.check = check
        self.resuming = False
        self.composed: dict[tuple[str, ...], DictConfig] = {}
        self._given = tracking
        self._directory = Path()
        self._uri: str | None = None
        self._parent_run_id: str | None = None
        self._finished: dict[str, float] = {}
        self._sweep: dict[str, Any] = {}
        self._swept = self._stopped = self._went_well = False

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        """Open the parent run; the sweeper `grid` does so itself, when it has checked all jobs."""
        global _active  # noqa: PLW0603 - the application ends what Hydra's hooks leave open
        _active = self
        self._swept = True
        if not str(config.hydra.sweeper._target_).endswith(f".{GRID}"):
            try:
                self.open(config)
            except UserError as error:
                # Hydra would make a warning of it, and go on without a parent run.
                quit_with(str(error))

    def open(self, config: DictConfig) -> None:
        """Open the parent run that the sweep's config asks for; with `tracking=off` there is none.

        Raises:
            ConfigError: there is no such store, or no such sweep to go on with.
            TrackingError: the store cannot be used.
        """
        cwd = Path.cwd()
        self._directory = (cwd / str(config.hydra.sweep.dir)).absolute()
        self._sweep = _plain(config, "sweep")
        resume = self._sweep.get("resume")
        self.resuming = resume is not None
        settings = self._settings(config)
        if settings.kind == "off":
            if self.resuming:
                raise ConfigError("sweep.resume", resume, "nothing tells what is finished with tracking=off")
            return
        self.session = open_session(
            settings,
            directory=self._directory,
            cwd=cwd,
            overrides=list(config.hydra.overrides.task),
            resume=None if resume is None else str(resume),
        )
        self._uri, self._parent_run_id = self.session.uri, self.session.parent_run_id
        self._finished = self.session.finished
        atexit.register(self.close)

    @property
    def directory(self) -> Path:
        """The sweep's directory, absolute."""
        return self._directory

    @property
    def finished(self) -> Mapping[str, float]:
        """Objective by job key, of the jobs that need not run again."""
        return self._finished

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        """Note that all went well: Hydra does not call this after any other end."""
        self._went_well = True

    def close(self, outcome: Outcome | None = None, reason: str | None = None) -> list[str]:
        """End the parent run, once.

        Args:
            outcome: None for what is known of the jobs: ok, killed or error.
            reason: why, in one line.

        Returns:
            Lines that tell where the sweep can be looked at.
        """
        global _active  # noqa: PLW0603 - as in `on_multirun_start`
        _active = None
        if self.session is None:
            return []
        session, self.session = self.session, None
        atexit.unregister(self.close)
        if outcome is None:
            outcome = Outcome.ok if self._went_well else Outcome.killed if self._stopped else Outcome.error
        session.close(outcome, reason)
        page = None if outcome is Outcome.killed else compare_sweep(session, self._directory, self._sweep)
        return where_to_look(session, self._directory, page)

    def on_job_start(self, config: DictConfig, **_: Any) -> None:
        """Within a job of a sweep: say which sweep it belongs to."""
        if not self._swept:
            return
        belongs = Membership(str(self._directory), job_key(config), self._uri, self._parent_run_id, self._finished)
        membership.enter(belongs)

    def on_job_end(self, config: DictConfig, job_return: Any, **_: Any) -> None:
        """Within a job: it is over."""
        membership.enter(None)

    def job_ended(self, job: Job, end: End) -> None:
        """Called by the launchers of mp_hydra when a job's process is gone: end its run where it could not."""
        self._stopped = self._stopped or end.cause is Cause.stopped
        if self.session is not None and end.cause not in (Cause.completed, Cause.raised):
            self.session.job_ended(job_key(job.config), end)

    def composed_config(self, overrides: Sequence[str]) -> DictConfig | None:
        """Called by the launchers of mp_hydra: the config of a job, once, if it has been composed already."""
        return self.composed.pop(tuple(overrides), None)

    def last_will(self) -> Callable[[], None] | None:
        """Called by the launcher `isolated`: what is to be done if this process is killed."""
        return self.session.last_will() if self.session is not None else None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "session": None, "composed": {}}

    def _settings(self, config: DictConfig) -> tracking.Settings:
        return tracking.Settings(**(_plain(config, "tracking") if self._given is None else dict(self._given)))


def where_to_look(session: Session, directory: Path, page: Path | None) -> list[str]:
    """What to open to see a sweep: its files, its comparison, its runs side by side, and their table."""
    try:
        runs = [run.info.run_id for run in session.children()]
    except UserError:
        runs = []
    found = {"sweep": str(directory)}
    if page is not None:
        found["page"] = page.as_uri()
    found |= links(session.uri, session.experiment_id, session.parent_run_id, runs, view=page is not None)
    lines = [f"{name:<9}{address}" for name, address in found.items()]
    return [*lines, "         (mp-hydra ui serves these pages)"] if sqlite_path(session.uri) is not None else lines


def _plain(config: DictConfig, section: str) -> dict[str, Any]:
    """A section of the config in plain containers; empty if there is none."""
    node = OmegaConf.select(config, section)
    return dict(OmegaConf.to_container(node, resolve=True)) if OmegaConf.is_dict(node) else {}  # type: ignore[arg-type]


_active: SweepCallback | None = None


def active() -> SweepCallback | None:
    """The callback of the sweep that this process runs; None if it runs none."""
    return _active
