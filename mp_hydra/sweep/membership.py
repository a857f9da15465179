"""Which sweep the job at hand belongs to; known within a job, wherever it runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping


@dataclass(frozen=True)
class Membership:
    """What a job knows of its sweep.

    Attributes:
        directory: the sweep's directory, absolute on the machine that started it.
        job_key: the identity of the job, `mp_hydra.sweep.identity.job_key`.
        uri: the address of the store that holds the parent run; None if nothing is tracked.
        parent_run_id: MLflow's id of the parent run; None if nothing is tracked.
        finished: objective by job key, of the jobs that need not run again.
    """

    directory: str
    job_key: str
    uri: str | None = None
    parent_run_id: str | None = None
    finished: Mapping[str, float] = field(default_factory=dict)

    def tags(self, uri: str | None) -> dict[str, str]:
        """The tags of the job's run in the store `uri`; a parent in another store is not named."""
        tags = {"mp_hydra.sweep": self.directory, "mp_hydra.job_key": self.job_key}
        if self.parent_run_id is not None and uri == self.uri:
            tags["mlflow.parentRunId"] = self.parent_run_id
        return tags


_current: Membership | None = None


def current() -> Membership | None:
    """The membership of the job that runs in this process; None outside a sweep that is tracked as one."""
    return _current


def enter(membership: Membership | None) -> None:
    """Say which sweep the job that now runs in this process belongs to."""
    global _current  # noqa: PLW0603 - a Hydra callback and the task function share nothing else
    _current = membership
