"""From pairs of runs to figures and verdicts: what each number is, where it comes from, or why it is missing.

Ratios are paired by seed; with one pair the interval of the step time comes from the steps of the two runs. Accuracy is tested on
the same test samples. A figure uses every pair that has it; how many these are is in `Figure.runs`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mp_hydra.compare import figures
from mp_hydra.compare.best_batches import best_batches
from mp_hydra.compare.identity import batch_size_of
from mp_hydra.compare.model import Comparison, Figure, Group, Row
from mp_hydra.compare.recommend import Case, Measured, best, recommend
from mp_hydra.compare.tested import judge_accuracy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence

    from mp_hydra.compare.model import Compared, Pair, PairedGroup, PairedRow, Pairing
    from mp_hydra.compare.records import RunRecord

MARGIN = 0.1
ACCURACY_LEVEL = 0.90
RATIO_LEVEL = 0.95
BREAKDOWNS = ("diverged", "out_of_memory", "no_updates")
_BATCHES_DIFFER = (
    "the batch sizes differ: speed is the ratio of samples per second, and step times are not compared",
    "memory is that of each at its own batch size: a ratio of it is no saving",
    "accuracy is compared although the batch size differs, which by itself changes what is learned",
)


def judge(
    pairing: Pairing,
    records: Iterable[RunRecord],
    *,
    title: str = "",
    margin: float = MARGIN,
    accuracy_level: float = ACCURACY_LEVEL,
    ratio_level: float = RATIO_LEVEL,
    remarks: Sequence[str] = (),
) -> Comparison:
    """Work out every figure.

    Args:
        pairing: as `mp_hydra.compare.pairing.pair` gives it.
        records: all of the runs, those of `pairing.run_ids()` with their arrays.
        title: what is compared.
        margin: of equivalence, in points of accuracy.
        accuracy_level: of the intervals of accuracy; 0.90 makes an equivalence test at 5 %.
        ratio_level: of the intervals of ratios.
        remarks: of the collector, such as runs that could not be read.

    Raises:
        ConfigError: margin or a level is out of range.
    """
    by_id = {record.run_id: record for record in records}
    levels = _Levels(margin, accuracy_level, ratio_level)
    unread: dict[str, list[str]] = {}
    for record in by_id.values():
        for line in record.missing:
            unread.setdefault(line, []).append(record.name)
    groups = tuple(_group(group, by_id, levels) for group in pairing.groups)
    return Comparison(
        title=title,
        baseline=pairing.baseline,
        margin=margin,
        accuracy_level=accuracy_level,
        ratio_level=ratio_level,
        groups=groups,
        excluded=pairing.excluded,
        remarks=(*remarks, *(f"{line} ({figures.joined(names)})" for line, names in unread.items())),
        throughputs=best_batches(groups, by_id),
        records=by_id,
    )


@dataclass(frozen=True)
class _Levels:
    margin: float
    accuracy: float
    ratio: float


def _group(group: PairedGroup, records: Mapping[str, RunRecord], levels: _Levels) -> Group:
    rows = tuple(_row(group, row, records, levels) for row in group.rows)
    merits = [(row.label, row.recommendation, _merit(row)) for row in rows]
    return Group(
        label=group.label,
        settings=group.settings,
        baseline=group.baseline,
        baselines=group.baselines,
        rows=rows,
        excluded=group.excluded,
        problem=group.problem,
        remarks=group.remarks,
        recommendation=best(group.baseline, merits, "" if group.baselines else group.problem),
    )


def _merit(row: Row) -> float:
    memory = None if row.batches_differ else row.training_memory.ratio.value
    return (row.speed.value or 1.0) / (memory or 1.0)


def _row(group: PairedGroup, row: PairedRow, records: Mapping[str, RunRecord], levels: _Levels) -> Row:
    arms = figures.Arms.of(group, row, records)
    compared = {quantity: figures.compare_quantity(quantity, arms, levels.ratio) for quantity in figures.COMPARED}
    step_time = figures.compare_step_time(arms, levels.ratio)
    accuracy, remarks = judge_accuracy(arms, margin=levels.margin, level=levels.accuracy)
    skipped, steps = figures.skipped_steps(arms.mixed)
    training, state = compared[figures.TRAINING_MEMORY], compared[figures.STATE_MEMORY]
    attained, attainable = figures.attained_saving(row, arms, training, compared[figures.HELD_MEMORY], state)
    sizes = figures.batch_sizes(arms)
    remarks += _row_remarks(arms, [*compared.values(), step_time])
    speed = figures.inverse(step_time.ratio)
    if sizes.ratio.value not in (None, 1.0):
        step_time = figures.without_step_time(step_time, sizes)
        speed = compared[figures.THROUGHPUT].ratio
        reason = "each ran at its own batch size, so that this is no saving"
        attained, attainable = Figure(None, "share", missing=reason), Figure(None, "x", missing=reason)
        remarks += _BATCHES_DIFFER
    judged = Row(
        precision=row.precision,
        label=row.label,
        settings=row.settings,
        pairs=row.pairs,
        excluded=row.excluded,
        batch_size=sizes,
        training_memory=training,
        peak_memory=compared[figures.PEAK_MEMORY],
        state_memory=state,
        attained=attained,
        attainable_peak=attainable,
        step_time=step_time,
        speed=speed,
        throughput=compared[figures.THROUGHPUT],
        first_step=compared[figures.FIRST_STEP],
        energy=compared[figures.ENERGY],
        skipped=skipped,
        steps=steps,
        accuracy=accuracy,
        recommendation=recommend(Case(row.label, group.baseline, len(row.pairs), 0)),
        remarks=tuple(remarks),
    )
    return replace(judged, recommendation=recommend(_case(group, judged, levels.margin)))


def _row_remarks(arms: figures.Arms, compared: Sequence[Compared]) -> list[str]:
    remarks = []
    for seed, pair in zip(arms.seeds, arms.pairs, strict=True):
        steps = [_steps(record) for record in pair]
        if batch_size_of(pair[0]) != batch_size_of(pair[1]):
            continue
        if None not in steps and steps[0] != steps[1]:
            remarks.append(f"{figures.seeded(seed)}: {steps[1]:,} training steps, {steps[0]:,} of the baseline")
    short = [one for one in compared if one.ratio and one.ratio.runs < len(arms.pairs)]
    if short:
        fewest = min(one.ratio.runs for one in short)
        remarks.append(f"some figures come from {fewest} of {len(arms.pairs)} pairs, since not every run recorded them")
    return remarks


def _steps(record: RunRecord) -> int | None:
    counts = [record.metrics.get(f"loss_scale/{kind}_steps") for kind in ("applied", "skipped")]
    return None if None in counts else int(sum(count for count in counts if count is not None))


def _case(group: PairedGroup, row: Row, margin: float) -> Case:
    comparison = row.accuracy.comparison
    baselines_out = [
        pair for pair in row.pairs if pair.baseline is not None and pair.baseline.outcome == "out_of_memory"
    ]
    label, saving = row.label, _measured(row.training_memory.ratio, lambda ratio: 1 / ratio)
    if row.batches_differ:
        sizes = row.batch_size
        label += f" at batch {sizes.mixed.value:,.0f}, {group.baseline} at {sizes.baseline.value:,.0f}"
        saving = None
    return Case(
        label=label,
        baseline=group.baseline,
        seeds=len(row.pairs),
        compared=len(row.compared),
        tested=0 if comparison is None else comparison.seeds,
        breakdowns=[pair.mixed.outcome for pair in row.pairs if _broke_down(pair)],
        problems=[pair.problem for pair in row.pairs if not pair.compared],
        baseline_out_of_memory=bool(row.pairs)
        and len(baselines_out) == len(row.pairs)
        and all(pair.mixed.finished for pair in row.pairs),
        saving=saving,
        speed=_measured(row.speed, float),
        accuracy=row.accuracy.verdict,
        margin=margin,
        difference=None if comparison is None else (comparison.difference, comparison.low, comparison.high),
        next_seeds=None if comparison is None else comparison.more_seeds,
        next_samples=None if comparison is None else comparison.more_samples,
        prospect=None if comparison is None or comparison.prospect is None else comparison.prospect.value,
        detectable=None if comparison is None else comparison.detectable,
        untested=row.accuracy.difference.missing,
    )


def _broke_down(pair: Pair) -> bool:
    """Whether the run failed in a way that precision can be blamed for: its baseline, at the same seed, is sound."""
    sound = pair.baseline is not None and pair.baseline.finished and pair.baseline.outcome != "diverged"
    return sound and pair.mixed.outcome in BREAKDOWNS


def _measured(ratio: Figure, better: Callable[[float], float]) -> Measured | None:
    if ratio.value is None:
        return None
    ends = sorted(map(better, ratio.interval)) if ratio.interval else (None, None)
    return Measured(better(ratio.value), *ends)
