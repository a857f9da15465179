"""Launches jobs of any Hydra app with the launcher `isolated`, inside the test's process, and looks for what they leave."""

from __future__ import annotations

import os
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from hydra import initialize
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext, RunMode

from mp_hydra.isolation import processes
from mp_hydra.isolation.servers import servers

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mp_hydra.isolation.jobs import End, Job

# Set before any server starts, so that it stands in the environment of the server and of all that comes from it.
MARK = "MP_HYDRA_TEST_MARK"
os.environ[MARK] = uuid.uuid4().hex

BARE = "hydra.launcher.preload=[]"


@dataclass
class Observer:
    """A Hydra callback that keeps what the launcher tells of jobs."""

    planned: list[int] = field(default_factory=list)
    events: list[tuple[str, int]] = field(default_factory=list)
    ends: dict[int, End] = field(default_factory=dict)
    jobs: dict[int, Job] = field(default_factory=dict)

    def jobs_planned(self, jobs: Sequence[Job]) -> None:
        self.planned += [job.number for job in jobs]
        self.jobs.update({job.number: job for job in jobs})

    def job_started(self, job: Job) -> None:
        self.events.append(("started", job.number))

    def job_ended(self, job: Job, end: End) -> None:
        self.events.append(("ended", job.number))
        self.ends[job.number] = end

    def on_job_start(self, **_: Any) -> None: ...

    def on_job_end(self, **_: Any) -> None: ...


@dataclass(frozen=True)
class Launch:
    """What became of the jobs."""

    returns: list[JobReturn]
    observer: Observer
    directory: Path

    def ok(self, number: int) -> bool:
        return self.returns[number].status is JobStatus.COMPLETED

    def value(self, number: int) -> Any:
        """What a job returned, or the exception that stands for it."""
        return self.returns[number]._return_value

    def end(self, number: int) -> End:
        return self.observer.ends[number]

    def output(self, number: int) -> str:
        return (self.directory / str(number) / "output.log").read_text(encoding="utf-8")


def launch(
    task: Callable[[Any], Any],
    directory: Path,
    jobs: Sequence[Sequence[str]],
    *settings: str,
    first: int = 0,
    callbacks: Sequence[Any] = (),
) -> Launch:
    """Run `task` once for each list of overrides.

    Functions in functions are best: they travel by value, so that no job imports the test module.
    """
    observer = Observer()
    with initialize(version_base="1.3", config_path=None, job_name="test"):
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        config = hydra.compose_config(
            config_name=None,
            overrides=["hydra/launcher=isolated", BARE, f"hydra.sweep.dir={directory}", *settings],
            run_mode=RunMode.MULTIRUN,
        )
        context = HydraContext(hydra.config_loader, callbacks=_Callbacks([observer, *callbacks]))  # type: ignore[arg-type]
        launcher = Plugins.instance().instantiate_launcher(hydra_context=context, task_function=task, config=config)
        returns = launcher.launch(jobs, first)
    return Launch(list(returns), observer, directory)


class _Callbacks:
    def __init__(self, callbacks: list[Any]) -> None:
        self.callbacks = callbacks

    def on_job_start(self, **_: Any) -> None: ...

    def on_job_end(self, **_: Any) -> None: ...

    def __reduce__(self) -> Any:
        return SimpleNamespace, (), {"on_job_start": print_nothing, "on_job_end": print_nothing}


def print_nothing(**_: Any) -> None: ...


def marked(mark: str = os.environ[MARK]) -> list[int]:
    """All processes that stem from this test process, or from one that was given the mark."""
    entry = f"{MARK}={mark}".encode()
    found = []
    for process in processes.table():
        try:
            environ = Path(f"/proc/{process.pid}/environ").read_bytes()
        except OSError:
            continue
        if entry in environ.split(b"\0") and process.pid != os.getpid():
            found.append(process.pid)
    return found


def left_over() -> list[int]:
    """Processes other than the servers that are kept for the next launch."""
    kept = {server._process.pid for server in servers._servers if server.alive}
    return [pid for pid in marked() if pid not in kept]


def gone_within(seconds: float, mark: str) -> bool:
    """Whether no process with the mark is left after some time at the most."""
    end = time.monotonic() + seconds
    while marked(mark):
        if time.monotonic() >= end:
            return False
        time.sleep(0.02)
    return True
