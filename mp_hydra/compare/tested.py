"""Accuracy of a row: the equivalence test on the test samples, or why it cannot be done."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from mp_hydra.compare.accuracy import AccuracyComparison, compare_accuracy
from mp_hydra.compare.figures import Quantity, joined, mean_of, seeded, value_range
from mp_hydra.compare.model import Accuracy, Figure

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_hydra.compare.figures import Arms
    from mp_hydra.compare.records import RunRecord


def judge_accuracy(arms: Arms, *, margin: float, level: float) -> tuple[Accuracy, list[str]]:
    """The test of accuracy, and what a reader should know about the pairs that are not in it.

    Args:
        arms: the runs of a row.
        margin: of equivalence, in points.
        level: of the interval.
    """
    pairs = dict(zip(arms.seeds, arms.pairs, strict=True))
    diverged = {seed: [record.outcome == "diverged" for record in pair] for seed, pair in pairs.items()}
    remarks = [
        f"{seeded(seed)}: {'both runs' if all(which) else 'the baseline' if which[0] else 'the run'} diverged"
        for seed, which in diverged.items()
        if any(which)
    ]
    sound = {seed: pair for seed, pair in pairs.items() if not any(diverged[seed])}
    testable, untestable = {}, []
    for seed, pair in sound.items():
        reason = _untestable(*pair)
        if reason:
            untestable.append(reason)
        else:
            testable[seed] = pair
    reason = arms.problem
    alone = [seed for seed, which in diverged.items() if which[1] and not which[0]]
    if not reason and alone:
        # The seeds that are left were chosen by their success: a test on them would flatter the precision.
        reason = f"diverged where the baseline did not: {', '.join(map(seeded, alone))}"
    if not reason and not sound:
        reason = "the baseline diverged"
    if not reason and not testable:
        reason = joined(untestable)
    if not reason:
        remarks += dict.fromkeys(f"not in the test of accuracy: {line}" for line in untestable)
        reason = _unequal_samples(list(testable.values()))
    loss = _loss_difference(list(sound.values()) if sound else [], arms.problem)
    if reason:
        shown = [
            [pair[arm] for pair in sound.values()] or list(runs) for arm, runs in enumerate((arms.baseline, arms.mixed))
        ]
        first, second = (_mean("test/accuracy", "share", records) for records in shown)
        return Accuracy(first, second, Figure(None, "points", missing=reason), None, loss), remarks
    arrays = [np.stack([np.asarray(pair[arm].correct) for pair in testable.values()]) for arm in (0, 1)]
    comparison = compare_accuracy(*arrays, margin=margin, level=level)
    by_seed = 100 * (arrays[1].mean(axis=1) - arrays[0].mean(axis=1))
    first, second = (_share(array) for array in arrays)
    return Accuracy(first, second, _difference(comparison, by_seed), comparison, loss), remarks


def _difference(comparison: AccuracyComparison, by_seed: np.ndarray) -> Figure:
    return Figure(
        value=comparison.difference,
        unit="points",
        interval=(comparison.low, comparison.high),
        level=comparison.level,
        range=value_range(by_seed),
        runs=comparison.seeds,
        source=f"correct or not, for each of {comparison.samples:,} test samples",
        method=comparison.method,
    )


def _untestable(baseline: RunRecord, mixed: RunRecord) -> str:
    """Why the test samples of two runs cannot be compared one by one; empty if they can."""
    for record in (baseline, mixed):
        if record.correct is None:
            return f"{record.name} does not tell which test samples it got right (regression, or no predictions.npz)"
        if record.labels is None:
            return f"{record.name} does not tell the labels of its test samples"
        if record.correct.ndim != 1 or record.correct.dtype != np.bool_ or not record.correct.size:
            return f"{record.name} has no single right or wrong for each test sample"
    if not np.array_equal(np.asarray(baseline.labels), np.asarray(mixed.labels)):
        return f"{mixed.name} and {baseline.name} were not tested on the same samples: their labels differ"
    if np.asarray(baseline.correct).shape != np.asarray(mixed.correct).shape:
        return f"{mixed.name} and {baseline.name} were not tested on the same number of samples"
    return ""


def _unequal_samples(pairs: Sequence[tuple[RunRecord, RunRecord]]) -> str:
    labels = [np.asarray(baseline.labels) for baseline, _ in pairs]
    if all(np.array_equal(labels[0], other) for other in labels[1:]):
        return ""
    return "the test samples are not the same for all seeds, which the test needs"


def _loss_difference(pairs: Sequence[tuple[RunRecord, RunRecord]], problem: str) -> Figure:
    name = "test/loss"
    having = [pair for pair in pairs if all(name in record.metrics for record in pair)]
    if not having:
        quantity = Quantity(name, "")
        lacking = [record for pair in pairs for record in pair if name not in record.metrics]
        reason = problem or joined(quantity.why_missing(record) for record in lacking) or "no pair that did not diverge"
        return Figure(None, "", missing=reason)
    values = np.array([mixed.metrics[name] - baseline.metrics[name] for baseline, mixed in having])
    return Figure(
        value=float(values.mean()),
        unit="",
        range=value_range(values),
        runs=len(having),
        source="Keras: mean over the test set",
        method=mean_of("mean difference", len(having)),
    )


def _mean(metric: str, unit: str, records: Sequence[RunRecord]) -> Figure:
    having = [record for record in records if metric in record.metrics]
    if not having:
        quantity = Quantity(metric, unit)
        missing = joined(quantity.why_missing(record) for record in records) or "no run has finished"
        return Figure(None, unit, missing=missing)
    values = np.array([record.metrics[metric] for record in having])
    method = mean_of("mean", len(having))
    return Figure(
        float(values.mean()),
        unit,
        range=value_range(values),
        runs=len(having),
        source="Keras: over the test set",
        method=method,
    )


def _share(correct: np.ndarray) -> Figure:
    shares = correct.mean(axis=1)
    return Figure(
        value=float(shares.mean()),
        unit="share",
        range=value_range(shares),
        runs=len(shares),
        source=f"correct or not, for each of {correct.shape[1]:,} test samples",
        method=mean_of("mean", len(shares)),
    )
