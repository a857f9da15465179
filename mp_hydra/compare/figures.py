"""Memory, time, energy and skipped steps of a row: each with its source and spread, or why it is missing."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from mp_hydra.compare.identity import batch_size_of, memory_of
from mp_hydra.compare.model import Compared, Figure
from mp_hydra.compare.ratios import RatioEstimate, memory_saving, paired_ratio, within_run_ratio
from mp_hydra.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mp_hydra.compare.model import Pair, PairedGroup, PairedRow
    from mp_hydra.compare.records import RunRecord

MOST_REASONS = 3
SIXTEEN_BITS = ("mixed_float16", "mixed_bfloat16")


@dataclass(frozen=True)
class Quantity:
    """A metric that is compared as a ratio.

    Attributes:
        metric: its name in the store.
        unit: its unit.
        source: what measured it, if the tag does not tell.
        tag: the tag that tells.
    """

    metric: str
    unit: str
    source: str = ""
    tag: str = ""

    def value(self, record: RunRecord) -> float | None:
        """What the run recorded; None if nothing."""
        return record.metrics.get(self.metric)

    def why_missing(self, record: RunRecord) -> str:
        """The reason that the run gives, or that it gives none."""
        reason = record.tags.get(f"mp_hydra.absent.{self.metric}")
        return reason or f"{record.name} recorded no {self.metric}"

    def measured_by(self, record: RunRecord) -> str:
        """The source of the run's value."""
        return record.tags.get(self.tag) or self.source


TRAINING_MEMORY = Quantity("memory/training_mib", "MiB", "TensorFlow allocator", "mp_hydra.memory_source")
PEAK_MEMORY = Quantity("memory/peak_mib", "MiB", "TensorFlow allocator", "mp_hydra.memory_source")
STATE_MEMORY = Quantity("memory/state_mib", "MiB", "counted: elements x bytes")
HELD_MEMORY = Quantity("memory/baseline_mib", "MiB", "TensorFlow allocator", "mp_hydra.memory_source")
STEP_TIME = Quantity("time/step_ms", "ms", "clock: median of the steady steps")
THROUGHPUT = Quantity("time/samples_per_second", "samples/s", "clock: samples over seconds of all steady steps")
FIRST_STEP = Quantity("time/first_step_seconds", "s", "clock: with tracing and compilation")
ENERGY = Quantity("energy/joules", "J", "NVML: energy of the GPU over the training")
COMPARED = (TRAINING_MEMORY, PEAK_MEMORY, STATE_MEMORY, HELD_MEMORY, THROUGHPUT, FIRST_STEP, ENERGY)


@dataclass(frozen=True)
class Arms:
    """The runs of a row.

    Attributes:
        pairs: (baseline, mixed) for every pair that is compared.
        seeds: the seeds of `pairs`.
        baseline: the runs to show of the baseline: those of the pairs, or all finished ones if there are no pairs.
        mixed: likewise.
        problem: why there are no pairs.
    """

    pairs: tuple[tuple[RunRecord, RunRecord], ...]
    seeds: tuple[str, ...]
    baseline: tuple[RunRecord, ...]
    mixed: tuple[RunRecord, ...]
    problem: str

    @classmethod
    def of(cls, group: PairedGroup, row: PairedRow, records: Mapping[str, RunRecord]) -> Arms:
        """Look the runs up by their ids."""
        good = [pair for pair in row.pairs if pair.compared and pair.baseline is not None]
        pairs = tuple((records[pair.baseline.run_id], records[pair.mixed.run_id]) for pair in good if pair.baseline)
        finished = tuple(records[run.run_id] for run in group.baselines if run.finished)
        return cls(
            pairs=pairs,
            seeds=tuple(pair.seed for pair in good),
            baseline=tuple(first for first, _ in pairs) or finished,
            mixed=tuple(second for _, second in pairs)
            or tuple(records[pair.mixed.run_id] for pair in row.pairs if pair.mixed.finished),
            problem="" if pairs else joined(_problem(pair) for pair in row.pairs),
        )


def _problem(pair: Pair) -> str:
    """Why a pair is not compared, without the reasons of its endings, which may be long and stand beside the pair."""
    for run, whose in ((pair.mixed, "the run"), (pair.baseline, "its baseline")):
        if run is not None and not run.finished:
            return f"{whose} is still running" if run.outcome == "running" else f"{whose} ended as {run.outcome}"
    return pair.problem


def compare_quantity(quantity: Quantity, arms: Arms, level: float) -> Compared:
    """Both arms and their ratio, from the pairs that have the quantity.

    Args:
        quantity: what to compare.
        arms: the runs.
        level: of the interval.
    """
    chosen = [pair for pair in arms.pairs if all(quantity.value(record) is not None for record in pair)]
    if not chosen:
        lacking = [record for pair in arms.pairs for record in pair if quantity.value(record) is None]
        reason = arms.problem or joined(quantity.why_missing(record) for record in lacking)
        ratio = Figure(None, "x", missing=reason)
        return Compared(_arm(quantity, arms.baseline), _arm(quantity, arms.mixed), ratio)
    first, second = ([pair[arm] for pair in chosen] for arm in (0, 1))
    return Compared(_arm(quantity, first), _arm(quantity, second), _ratio(quantity, first, second, level))


def _ratio(quantity: Quantity, baseline: Sequence[RunRecord], mixed: Sequence[RunRecord], level: float) -> Figure:
    sources = dict.fromkeys(quantity.measured_by(record) for record in (*baseline, *mixed))
    if len(sources) > 1:
        return Figure(None, "x", missing=f"not measured in the same way: {', and '.join(sources)}")
    values = [np.array([record.metrics[quantity.metric] for record in arm]) for arm in (baseline, mixed)]
    try:
        estimate = paired_ratio(*values, level=level)
    except DataError as error:
        return Figure(None, "x", missing=f"{quantity.metric}: {error}")
    return _ratio_figure(estimate, values[1] / values[0], next(iter(sources)))


def _ratio_figure(estimate: RatioEstimate, ratios: np.ndarray, source: str) -> Figure:
    interval = None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)
    return Figure(
        value=estimate.value,
        unit="x",
        interval=interval,
        level=estimate.level if interval else None,
        range=value_range(ratios),
        runs=estimate.pairs,
        source=source,
        method=estimate.method,
    )


def batch_sizes(arms: Arms) -> Compared:
    """Samples of a step of both arms, and their ratio: exactly 1 where they are equal."""
    both = [pair for pair in arms.pairs if None not in map(batch_size_of, pair)]
    first, second = ([pair[arm] for pair in both] for arm in (0, 1)) if both else (arms.baseline, arms.mixed)
    baseline, mixed = _batch_size(first), _batch_size(second)
    if not both:
        reason = arms.problem or "no pair of runs recorded its batch sizes"
        return Compared(baseline, mixed, Figure(None, "x", missing=reason))
    ratios = np.array([(batch_size_of(other) or 0) / (batch_size_of(base) or 1) for base, other in both])
    value = float(np.exp(np.log(ratios).mean()))
    return Compared(baseline, mixed, Figure(value, "x", range=value_range(ratios), runs=len(both), source="config"))


def _batch_size(records: Sequence[RunRecord]) -> Figure:
    sizes = np.array([size for record in records if (size := batch_size_of(record)) is not None], dtype="float64")
    if not sizes.size:
        return Figure(None, "samples", missing="no run recorded its batch size" if records else "no run has finished")
    return Figure(
        value=float(np.median(sizes)),
        unit="samples",
        range=value_range(sizes),
        runs=sizes.size,
        source="config",
        method=mean_of("median", sizes.size),
    )


def without_step_time(step_time: Compared, sizes: Compared) -> Compared:
    """The step times of both arms and no ratio, since their batches are not the same work."""
    both = f"{sizes.baseline.value:,.0f} and {sizes.mixed.value:,.0f}"
    reason = f"a step is not the same work: {both} samples; speed is the ratio of samples per second"
    return replace(step_time, ratio=Figure(None, "x", missing=reason))


def compare_step_time(arms: Arms, level: float) -> Compared:
    """As `compare_quantity`; with one pair, the interval comes from the steps of its runs."""
    compared = compare_quantity(STEP_TIME, arms, level)
    if len(arms.pairs) != 1 or not compared.ratio:
        return compared
    baseline, mixed = arms.pairs[0]
    if baseline.step_ms is None or mixed.step_ms is None:
        return compared
    try:
        estimate = within_run_ratio(baseline.step_ms, mixed.step_ms, level=level)
    except DataError:
        return compared
    return replace(compared, ratio=_ratio_figure(estimate, np.array([estimate.value]), compared.ratio.source))


def _arm(quantity: Quantity, records: Sequence[RunRecord]) -> Figure:
    """One quantity over several runs: their geometric mean."""
    having = [record for record in records if quantity.value(record) is not None]
    if not having:
        missing = joined(quantity.why_missing(record) for record in records) or "no run has finished"
        return Figure(None, quantity.unit, missing=missing)
    values = np.array([record.metrics[quantity.metric] for record in having], dtype="float64")
    positive = bool((values > 0).all())
    return Figure(
        value=float(np.exp(np.log(values).mean())) if positive else float(values.mean()),
        unit=quantity.unit,
        range=value_range(values),
        runs=len(having),
        source="; ".join(dict.fromkeys(quantity.measured_by(record) for record in having)),
        method=mean_of("geometric mean" if positive else "mean", len(having)),
    )


def inverse(ratio: Figure) -> Figure:
    """Speed: baseline step time / mixed step time."""
    if ratio.value is None:
        return ratio
    turned = [None if ends is None else (1 / ends[1], 1 / ends[0]) for ends in (ratio.interval, ratio.range)]
    return replace(
        ratio, value=1 / ratio.value, interval=turned[0], range=turned[1], method=f"inverse of: {ratio.method}"
    )


def attained_saving(
    row: PairedRow, arms: Arms, training: Compared, held: Compared, state: Compared
) -> tuple[Figure, Figure]:
    """Which share of the saving of training memory was had, and the peak ratio if all of it were."""
    reason = training.ratio.missing
    policies = [
        {record.params.get("precision.policy") or record.params.get("precision.name") for record in arm}
        for arm in (arms.baseline, arms.mixed)
    ]
    if not reason and row.precision not in SIXTEEN_BITS and not policies[1] & set(SIXTEEN_BITS):
        modes = [{memory_of(record) for record in arm} for arm in (arms.baseline, arms.mixed)]
        saves = "which saves no memory" if modes[0] == modes[1] else "so that what it saves comes from its memory mode"
        reason = f"{row.precision} keeps float32, {saves}"
    if not reason and policies[0] & set(SIXTEEN_BITS):
        reason = "the baseline computes in 16 bits, too"
    at_rest = held.baseline.value if held.baseline.value is not None else state.baseline.value
    if not reason and at_rest is None:
        reason = held.baseline.missing
    if reason or training.baseline.value is None or training.mixed.value is None or at_rest is None:
        return Figure(None, "share", missing=reason), Figure(None, "x", missing=reason)
    saving = memory_saving(training.baseline.value, training.mixed.value, at_rest)
    share = Figure(
        value=saving.share,
        unit="share",
        runs=training.ratio.runs,
        source=training.ratio.source,
        method="half of the baseline's training memory is what 16 bits can save at best",
        missing=saving.reason,
    )
    return share, replace(share, value=saving.attainable_peak_ratio, unit="x")


def skipped_steps(mixed: Sequence[RunRecord]) -> tuple[Figure, Figure]:
    """The most skipped steps of a run, and all steps of that run."""
    name, applied = "loss_scale/skipped_steps", "loss_scale/applied_steps"
    having = [record for record in mixed if name in record.metrics]
    if not having:
        quantity = Quantity(name, "steps")
        reason = joined(quantity.why_missing(record) for record in mixed) or "no run has finished"
        return Figure(None, "steps", missing=reason), Figure(None, "steps", missing=reason)
    most = max(having, key=lambda record: record.metrics[name])
    values = np.array([record.metrics[name] for record in having])
    skipped = Figure(
        value=most.metrics[name],
        unit="steps",
        range=value_range(values),
        runs=len(having),
        source="counted by the optimizer",
        method="the most of any run" if len(having) > 1 else "",
    )
    if applied not in most.metrics:
        return skipped, Figure(None, "steps", missing=f"{most.name} recorded no {applied}")
    return skipped, replace(skipped, value=most.metrics[name] + most.metrics[applied], range=None, method="", runs=1)


def value_range(values: np.ndarray) -> tuple[float, float] | None:
    """The least and the greatest; None for one value."""
    return (float(values.min()), float(values.max())) if values.size > 1 else None


def mean_of(kind: str, runs: int) -> str:
    """How several runs became one value; empty for one run."""
    return f"{kind} of {runs}" if runs > 1 else ""


def seeded(seed: str) -> str:
    """A seed in words."""
    return f"seed {seed}" if seed else "no seed"


def joined(reasons: Iterable[str]) -> str:
    """The first few different reasons in one line."""
    different = list(dict.fromkeys(reason for reason in reasons if reason))
    more = len(different) - MOST_REASONS
    return "; ".join(different[:MOST_REASONS]) + (f"; and {more} more" if more > 0 else "")
