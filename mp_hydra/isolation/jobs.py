"""What a launcher knows of a job: what is to run, what it says while it runs, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from omegaconf import DictConfig

OUTPUT_FILE = "output.log"  # in a job's directory: everything that it printed


@dataclass(frozen=True)
class Job:
    """One job of a sweep, before it runs.

    Attributes:
        number: `hydra.job.num`.
        overrides: the job's own overrides, as typed.
        config: the composed config, with its `hydra` node.
        output_dir: absolute directory of the job.
        output: the file that takes everything the job prints; None where it goes to the terminal.
    """

    number: int
    overrides: tuple[str, ...]
    config: DictConfig
    output_dir: Path
    output: Path | None


@dataclass(frozen=True)
class Progress:
    """What a running job says of itself.

    Attributes:
        fraction: the share of its work that is done, 0 to 1.
        text: where it stands, such as "epoch 2/3".
        figures: the newest values worth a column, by name.
    """

    fraction: float
    text: str = ""
    figures: Mapping[str, float] = field(default_factory=dict)


class Cause(str, Enum):
    """What ended a job's process."""

    completed = "completed"  # the task function returned
    raised = "raised"  # an exception came out of it
    exited = "exited"  # sys.exit, os._exit, or an end without a result
    signalled = "signalled"  # killed by a signal that the launcher did not send
    out_of_memory = "out_of_memory"  # killed by the kernel, which had no memory left
    timeout = "timeout"
    stopped = "stopped"  # by the launcher: Ctrl-C, SIGTERM, or its own death
    lost = "lost"  # the job server died


@dataclass(frozen=True)
class End:
    """How a job ended.

    Attributes:
        cause: what ended it.
        reason: one line that a person understands; empty if it completed.
        seconds: wall clock from start to end.
        cpu_seconds: processor time of the process and the children that it waited for; None if unknown.
        max_rss_bytes: the largest resident memory of the process; None if unknown.
    """

    cause: Cause
    reason: str = ""
    seconds: float = 0.0
    cpu_seconds: float | None = None
    max_rss_bytes: int | None = None

    @property
    def ok(self) -> bool:
        """Whether the job returned a result."""
        return self.cause is Cause.completed


class Observer(Protocol):
    """Methods that a Hydra callback may have, each of which the launchers of mp_hydra then call in the process that sweeps.

    An exception from one is a warning, as with Hydra's own hooks.
    """

    def composed_config(self, overrides: Sequence[str]) -> DictConfig | None:
        """The config of a job with these overrides, to be owned by the launcher; None if the launcher is to compose it."""

    def jobs_planned(self, jobs: Sequence[Job]) -> None:
        """Before the first job of a batch starts."""

    def job_started(self, job: Job) -> None:
        """A job's process has started."""

    def job_ended(self, job: Job, end: End) -> None:
        """A job's process is gone, and with it everything that it started."""

    def last_will(self) -> Callable[[], None] | None:
        """What is to be called, in another process, if the launcher's own is killed; all jobs are gone by then.

        Asked by the launcher `isolated` alone, whose job server outlives the launcher. It must survive cloudpickle.
        """
