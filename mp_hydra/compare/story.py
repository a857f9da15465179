"""A comparison from the store to the judged result, and back into the store."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

from mp_hydra.compare import figures
from mp_hydra.compare.accuracy import check_margin
from mp_hydra.compare.collect import Selection, Store, find, read_records
from mp_hydra.compare.identity import batch_size_of, precision_of
from mp_hydra.compare.judge import MARGIN, judge
from mp_hydra.compare.pages import FOLDER, NOTE
from mp_hydra.compare.pairing import pair
from mp_hydra.compare.report import markdown, page, tables
from mp_hydra.consistency import NAMED
from mp_hydra.errors import ConfigError, UserError
from mp_hydra.tracking.batch import Artifact, Batch, Metric, send
from mp_hydra.tracking.links import view_tag
from mp_hydra.tracking.store import quiet, unusable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mp_hydra.compare.model import Comparison, Pair
    from mp_hydra.compare.records import RunRecord

BASELINE = "fp32"
DRAWN = ("train/loss", "val/loss", "loss_scale/value")
MAX_DRAWN = 200  # runs whose curves are read: more than that nobody can tell apart in a plot

# For each run that has a twin, the baseline of the same seed: its figure over the twin's.
RATIOS = {
    "compare/training_memory_ratio": figures.TRAINING_MEMORY,
    "compare/peak_memory_ratio": figures.PEAK_MEMORY,
    "compare/step_time_ratio": figures.STEP_TIME,
    "compare/throughput_ratio": figures.THROUGHPUT,
    "compare/energy_ratio": figures.ENERGY,
}
BY_BATCH = (figures.TRAINING_MEMORY, figures.PEAK_MEMORY, figures.STEP_TIME)
TWIN_TAG = "mp_hydra.compared_with"
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
    experiment: str | None = None,
    baseline: str = BASELINE,
    margin: float = MARGIN,
) -> tuple[Comparison, Selection]:
    """Compare runs that a store holds.

    Args:
        target: what is meant, see `mp_hydra.compare.collect.find`.
        store: where to look.
        cwd: the directory in which the user typed the command.
        experiment: where the latest sweep is looked for; None: in all experiments.
        baseline: the precision that the others are compared with.
        margin: of equivalence, in points of accuracy.

    Raises:
        UserError: there is nothing of that name, or no run of a baseline that is none of the known precisions.
        ConfigError: margin is out of range.
        TrackingError: the store cannot be read.
    """
    check_margin(margin)
    selection = find(target, store, cwd=cwd, experiment=experiment)
    series = DRAWN if len(selection.runs) <= MAX_DRAWN else ()
    records = read_records(selection.store, selection.runs, series=series)
    there = dict.fromkeys(filter(None, map(precision_of, records)))
    if there and baseline not in (*there, *NAMED):  # one of those may be missing: the table says so
        raise UserError(f"no run of {selection.title} has the precision {baseline}; there is {', '.join(there)}")
    judged = judge(
        pair(records, baseline=baseline), records, title=selection.title, margin=margin, remarks=selection.notes
    )
    return judged, selection


def publish(comparison: Comparison, selection: Selection) -> None:
    """Put a sweep's comparison where its runs are: files and description of the parent run, ratios at the children.

    The experiment gets a view of the runs with their figures, for the MLflow UI. Doing so again replaces what is there;
    selections that are no sweep are left as they are.

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
        for record, twin, metrics in ratios(comparison):
            news = Batch(metrics=[_news(record, name, value) for name, value in metrics.items()])
            news.metrics = [metric for metric in news.metrics if record.metrics.get(metric.key) != metric.value]
            if record.tags.get(TWIN_TAG) != twin.run_id:
                news.tags[TWIN_TAG] = twin.run_id
            if news:
                batches[record.run_id] = news
        for run_id, batch in batches.items():
            _, error = send(store.client, run_id, batch)
            if error is not None:
                raise unusable(store.uri, error) from error
    try:
        with quiet():
            for experiment_id in {run.info.experiment_id for run in selection.runs}:
                store.client.set_experiment_tag(experiment_id, *view_tag(parent))
    except Exception as error:
        raise unusable(store.uri, error) from error


def save(comparison: Comparison, directory: Path) -> list[Path]:
    """Write the comparison in every form: comparison.html, .md, .csv and .json; return the files."""
    files = [directory / f"comparison{suffix}" for suffix in _FORMS]
    for path in files:
        write(path, form(path)(comparison))
    return files


def write(path: Path, text: str) -> None:
    """Write a file.

    Raises:
        UserError: it cannot be written.
    """
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from error


def form(path: Path) -> Callable[[Comparison], str]:
    """What renders a comparison for a file of this name.

    Raises:
        ConfigError: the name tells no form.
    """
    try:
        return _FORMS[path.suffix.lower()]
    except KeyError:
        raise ConfigError("--output", str(path), f"end the name with one of {', '.join(_FORMS)}") from None


def ratios(comparison: Comparison) -> Iterator[tuple[RunRecord, RunRecord, dict[str, float]]]:
    """Each run that is compared, the baseline of the same seed, and the ratios of their figures; `RATIOS` names them.

    A ratio of figures that were not measured in the same way is left out; so are those of memory and step time where the batch
    sizes differ.
    """
    for _, row in comparison.rows():
        for pairing in row.compared:
            mixed, baseline = _records(comparison, pairing)
            values = {
                name: figure / of
                for name, quantity in RATIOS.items()
                if (figure := quantity.value(mixed)) is not None
                and (of := quantity.value(baseline)) is not None
                and of > 0
                and quantity.measured_by(mixed) == quantity.measured_by(baseline)
                and (quantity not in BY_BATCH or batch_size_of(mixed) == batch_size_of(baseline))
            }
            if {"test/accuracy"} <= mixed.metrics.keys() & baseline.metrics.keys():
                values[DIFFERENCE] = 100 * (mixed.metrics["test/accuracy"] - baseline.metrics["test/accuracy"])
            yield mixed, baseline, values


def _news(record: RunRecord, name: str, value: float) -> Metric:
    """A value for the store: at the time of the run if it is the first, so that to send it twice does no harm.

    Of several values MLflow shows the one with the latest time.
    """
    return Metric(name, value, int(time.time() * 1000) if name in record.metrics else record.started, 0)


def _records(comparison: Comparison, pairing: Pair) -> tuple[RunRecord, RunRecord]:
    assert pairing.baseline is not None  # noqa: S101 - a pair that is compared has one
    return comparison.records[pairing.mixed.run_id], comparison.records[pairing.baseline.run_id]
