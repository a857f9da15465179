"""A comparison from the store to the judged result, and back into the store."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from mp_hydra.compare.collect import Selection, Store, find, read_records
from mp_hydra.compare.judge import MARGIN, judge
from mp_hydra.compare.pairing import pair
from mp_hydra.compare.report import markdown, page, tables
from mp_hydra.errors import ConfigError
from mp_hydra.tracking.batch import Artifact, Batch, Metric, send
from mp_hydra.tracking.store import unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mp_hydra.compare.model import Comparison, Pair
    from mp_hydra.compare.records import RunRecord

BASELINE = "fp32"
DRAWN = ("train/loss", "val/loss", "loss_scale/value")
MAX_DRAWN = 200  # runs whose curves are read: more than that nobody can tell apart in a plot
FOLDER = "comparison"
NOTE = "mlflow.note.content"

# For each run that has a twin: its figure over the twin's.
RATIOS = {
    "compare/training_memory_ratio": "memory/training_mib",
    "compare/peak_memory_ratio": "memory/peak_mib",
    "compare/step_time_ratio": "time/step_ms",
    "compare/energy_ratio": "energy/joules",
}
_FORMS: dict[str, Callable[[Comparison], str]] = {
    ".html": page.render,
    ".md": markdown.render,
    ".csv": tables.to_csv,
    ".json": tables.to_json,
}
DIFFERENCE = "compare/accuracy_difference_points"


def compare(
    target: str | Sequence[str] | None,
    store: Store,
    *,
    cwd: Path,
    experiment: str = "mp_hydra",
    baseline: str = BASELINE,
    margin: float = MARGIN,
) -> tuple[Comparison, Selection]:
    """Compare runs that a store holds.

    Args:
        target: what is meant, see `mp_hydra.compare.collect.find`.
        store: where to look.
        cwd: the directory in which the user typed the command.
        experiment: the experiment in which the latest sweep is looked for.
        baseline: the precision that the others are compared with.
        margin: of equivalence, in points of accuracy.

    Raises:
        UserError: there is nothing of that name.
        ConfigError: margin is out of range.
        TrackingError: the store cannot be read.
    """
    selection = find(target, store, cwd=cwd, experiment=experiment)
    series = DRAWN if len(selection.runs) <= MAX_DRAWN else ()
    records = read_records(selection.store, selection.runs, series=series)
    judged = judge(
        pair(records, baseline=baseline), records, title=selection.title, margin=margin, remarks=selection.notes
    )
    return judged, selection


def publish(comparison: Comparison, selection: Selection) -> None:
    """Put a sweep's comparison where its runs are: files and description of the parent run, ratios at the children.

    Doing so again replaces what is there.

    Raises:
        TrackingError: the store does not take it.
    """
    store, parent = selection.store, selection.parent_run_id
    if parent is None:
        return
    with tempfile.TemporaryDirectory() as directory:
        files = save(comparison, Path(directory))
        batches = {parent: Batch(tags={NOTE: markdown.render(comparison)})}
        batches[parent].artifacts = [Artifact(str(path), FOLDER) for path in files]
        for record, metrics in ratios(comparison):
            # At the time of the run, so that MLflow knows an equal value for the same one.
            values = [Metric(name, value, record.started, 0) for name, value in metrics.items()]
            batches[record.run_id] = Batch(metrics=values)
        for run_id, batch in batches.items():
            _, error = send(store.client, run_id, batch)
            if error is not None:
                raise unusable(store.uri, error) from error


def save(comparison: Comparison, directory: Path) -> list[Path]:
    """Write the comparison in every form: comparison.html, .md, .csv and .json; return the files."""
    files = [directory / f"comparison{suffix}" for suffix in _FORMS]
    for path in files:
        path.write_text(form(path)(comparison), encoding="utf-8")
    return files


def form(path: Path) -> Callable[[Comparison], str]:
    """What renders a comparison for a file of this name.

    Raises:
        ConfigError: the name tells no form.
    """
    try:
        return _FORMS[path.suffix.lower()]
    except KeyError:
        raise ConfigError("--output", str(path), f"end the name with one of {', '.join(_FORMS)}") from None


def ratios(comparison: Comparison) -> Iterator[tuple[RunRecord, dict[str, float]]]:
    """For each run that is compared, its figures over those of the baseline with the same seed; `RATIOS` names them."""
    for _, row in comparison.rows():
        for pairing in row.compared:
            mixed, baseline = _records(comparison, pairing)
            values = {
                name: mixed.metrics[metric] / baseline.metrics[metric]
                for name, metric in RATIOS.items()
                if metric in mixed.metrics and baseline.metrics.get(metric, 0) > 0
            }
            if {"test/accuracy"} <= mixed.metrics.keys() & baseline.metrics.keys():
                values[DIFFERENCE] = 100 * (mixed.metrics["test/accuracy"] - baseline.metrics["test/accuracy"])
            if values:
                yield mixed, values


def _records(comparison: Comparison, pairing: Pair) -> tuple[RunRecord, RunRecord]:
    assert pairing.baseline is not None  # noqa: S101 - a pair that is compared has one
    return comparison.records[pairing.mixed.run_id], comparison.records[pairing.baseline.run_id]
