"""A run as the comparison sees it: plain values, whatever store they came from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy as np


@dataclass(frozen=True)
class Series:
    """The history of one metric: `steps` (int64) and `values` (float64), of equal length, in order of steps."""

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True)
class RunRecord:
    """One run.

    Attributes:
        run_id: MLflow's id.
        experiment_id: MLflow's id of its experiment.
        name: the run's name.
        status: MLflow's status: RUNNING, FINISHED, FAILED, KILLED ...
        params: the flattened config, as text (`mp_hydra.tracking.flatten`).
        tags: all tags.
        metrics: the last value of each metric.
        started: milliseconds since the epoch.
        dataset: name and digest of its training data; None if none was recorded.
        environment: environment.json; empty if it could not be read.
        series: the history of the metrics that the comparison draws, by name; empty until asked for.
        correct: whether each test sample was predicted correctly (bool, in the order of the test set); None if unknown.
        labels: the labels of the test samples, to check that two runs saw the same ones; None if unknown.
        step_ms: milliseconds of each steady training step; None if unknown.
        missing: what could not be read, and why; one line each.
    """

    run_id: str
    experiment_id: str
    name: str
    status: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    metrics: Mapping[str, float]
    started: int = 0
    dataset: tuple[str, str] | None = None
    environment: Mapping[str, object] = field(default_factory=dict)
    series: Mapping[str, Series] = field(default_factory=dict)
    correct: np.ndarray | None = None
    labels: np.ndarray | None = None
    step_ms: np.ndarray | None = None
    missing: tuple[str, ...] = ()

    @property
    def outcome(self) -> str:
        """How it ended: a value of `mp_hydra.tracking.Outcome`, "running", or "unknown" where no tag tells."""
        return self.tags.get("mp_hydra.outcome") or ("running" if self.status == "RUNNING" else "unknown")
