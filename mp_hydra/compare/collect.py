"""Runs as the comparison sees them, read from MLflow; a broken run is a partial record, never an exception.

store = Store.open(store_uri(settings))
selection = find(None, store, cwd=Path.cwd())
records = read_records(selection.store, selection.runs, series=["val/loss", "loss_scale/value"])
"""

from __future__ import annotations

import hashlib
import sys
from typing import TYPE_CHECKING, Any

from mp_hydra.compare.artifacts import Artifacts, read_artifacts
from mp_hydra.compare.history import read_series
from mp_hydra.compare.records import RunRecord, Series
from mp_hydra.compare.store import Store
from mp_hydra.compare.which import Selection, find
from mp_hydra.tracking.store import quiet

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    import numpy as np

__all__ = ["Selection", "Store", "find", "read_records"]


def read_records(store: Store, runs: Sequence[Any], *, series: Collection[str] = ()) -> list[RunRecord]:
    """Read everything that a comparison needs of some runs.

    Args:
        store: where they are.
        runs: `mlflow.entities.Run`, as `find` gives them.
        series: the metrics whose history is wanted; a run that never logged one has no series of it.

    Returns:
        A record for each run, in their order. What could not be read is named in its `missing`. Equal arrays of labels
        are one array.
    """
    with quiet():
        histories, problems = read_series(store, runs, series)
        shared: dict[bytes, np.ndarray] = {}
        return [
            _record(run, histories.get(run.info.run_id, {}), problems.get(run.info.run_id, []), files, shared)
            for run, files in zip(runs, read_artifacts(store, runs), strict=True)
        ]


def _record(
    run: Any,
    series: Mapping[str, Series],
    problems: Sequence[str],
    files: Artifacts,
    shared: dict[bytes, np.ndarray],
) -> RunRecord:
    metrics, strange = _finite(run.data.metrics)
    if not run.data.metrics:
        strange = ["metrics: the run has logged none"]
    return RunRecord(
        run_id=run.info.run_id,
        experiment_id=run.info.experiment_id,
        name=run.info.run_name or run.info.run_id,
        status=run.info.status,
        params=run.data.params,
        tags=run.data.tags,
        metrics=metrics,
        started=run.info.start_time or 0,
        dataset=_dataset(run),
        environment=files.environment,
        series=series,
        correct=files.correct,
        labels=_shared(files.labels, shared),
        step_ms=files.step_ms,
        missing=(*strange, *problems, *files.missing),
    )


def _finite(metrics: Mapping[str, float]) -> tuple[dict[str, float], list[str]]:
    """The metrics that are finite numbers, and a line on each other; MLflow stores an infinity as the largest float."""
    finite = {name: value for name, value in metrics.items() if abs(value) < sys.float_info.max}  # False for nan
    lines = [
        f"{name}: the stored value is {value}, no finite number" for name, value in metrics.items() - finite.items()
    ]
    return finite, sorted(lines)


def _dataset(run: Any) -> tuple[str, str] | None:
    """Name and digest of the training data."""
    inputs = run.inputs.dataset_inputs if run.inputs else []
    training = [item for item in inputs if any(tag.value == "training" for tag in item.tags)]
    for item in [*training, *inputs]:
        return item.dataset.name, item.dataset.digest
    return None


def _shared(labels: np.ndarray | None, shared: dict[bytes, np.ndarray]) -> np.ndarray | None:
    """An equal array that another run has brought already, so that a thousand runs on one test set hold its labels once."""
    if labels is None:
        return None
    digest = hashlib.sha256(f"{labels.dtype}{labels.shape}".encode() + labels.tobytes()).digest()
    return shared.setdefault(digest, labels)
