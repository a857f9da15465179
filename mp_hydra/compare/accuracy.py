"""Whether a mixed-precision model is as accurate as its baseline: an equivalence test on their test samples.

The method, its assumptions and its sources are in docs/statistics.md.

    >>> import numpy as np
    >>> right = np.ones((1, 10_000), dtype=bool)
    >>> same = compare_accuracy(right, right, margin=0.1)
    >>> print(same.verdict.value, f"{same.low:.3f} to {same.high:.3f} points, {same.scope}")
    equivalent -0.030 to 0.030 points, these two models only
    >>> compare_accuracy(right[:, :500], right[:, :500], margin=0.1).verdict.value
    'undecided'
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from mp_hydra.compare.crossed import Crossed, analyse, interval
from mp_hydra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable

ONE_SEED_METHOD = "score interval for the difference of two proportions on the same samples (Tango 1998)"
SEEDS_METHOD = (
    "crossed analysis of variance over seeds and test samples; "
    "score interval (Tango 1998) for the samples, t quantiles for the seeds"
)
ONE_SEED_SCOPE = "these two models only"
SEEDS_SCOPE = "training with this recipe"
SEEDS_AND_SAMPLES = 2
FEW_SEEDS = 3
MOST_SEEDS = 1_000
MOST_SAMPLES = 100_000_000


class Verdict(str, Enum):
    """What the interval says about the margin.

    Attributes:
        equivalent: the whole interval lies within the margin, even where it leaves out 0.
        worse: the whole interval lies below minus the margin.
        better: the whole interval lies above the margin.
        undecided: it lies on both sides of an end of the margin, even where it leaves out 0.
    """

    equivalent = "equivalent"
    worse = "worse"
    better = "better"
    undecided = "undecided"


@dataclass(frozen=True)
class AccuracyComparison:
    """A mixed model against its baseline; differences are mixed - baseline, in percentage points of accuracy.

    Attributes:
        difference: the mean over seeds and samples.
        low: lower end of the interval.
        high: its upper end.
        level: of the two-sided interval; at 0.90 each one-sided claim of the verdict has an error rate of 5 %.
        margin: the largest difference that does not matter.
        verdict: see `Verdict`.
        seeds: pairs of models.
        samples: size of the test set.
        discordant: outcomes that mixed alone has right, and that the baseline alone has right; summed over seeds.
        method: how the interval was made.
        scope: what the verdict speaks of.
        more_seeds: how many more seeds, at this test set, would decide; None where that is not known or not enough,
            as a remark says, and where it is decided.
        more_samples: how many more test samples, at these seeds; likewise.
        prospect: the verdict that more of them would lead to; None where neither number is given.
        detectable: the longer arm of the interval: no smaller margin could be shown to hold here even at an estimate of
            0, and a true difference of this size is told from 0 about every second time.
        remarks: what a reader has to know; one sentence each.
    """

    difference: float
    low: float
    high: float
    level: float
    margin: float
    verdict: Verdict
    seeds: int
    samples: int
    discordant: tuple[int, int]
    method: str
    scope: str
    more_seeds: int | None
    more_samples: int | None
    prospect: Verdict | None
    detectable: float
    remarks: tuple[str, ...]


def compare_accuracy(
    baseline: np.ndarray, mixed: np.ndarray, *, margin: float = 0.1, level: float = 0.90
) -> AccuracyComparison:
    """Compare models that were trained in pairs, by seed, and tested on the same samples.

    Args:
        baseline: whether each sample was predicted correctly; bool, (seeds, samples).
        mixed: likewise; row s has the seed of the baseline's row s, column i is the same sample in all rows.
        margin: the largest difference that does not matter, in percentage points; above 0.
        level: of the two-sided interval, between 0 and 1; 0.90 gives an equivalence test at 5 %.

    Raises:
        ConfigError: margin or level is out of range.
        DataError: the arrays are not bool, not of one shape, or empty.
    """
    _check(baseline, mixed, margin, level)
    crossed = analyse(mixed.astype("int8") - baseline.astype("int8"))
    low, high = interval(crossed, level=level)
    verdict = judge(100 * low, 100 * high, margin)
    more_seeds, more_samples, prospect, advice = _advice(crossed, verdict, margin, level)
    total = crossed.seeds * crossed.samples
    return AccuracyComparison(
        difference=100 * crossed.estimate,
        low=100 * low,
        high=100 * high,
        level=level,
        margin=margin,
        verdict=verdict,
        seeds=crossed.seeds,
        samples=crossed.samples,
        discordant=(round(crossed.gained * total), round(crossed.lost * total)),
        method=ONE_SEED_METHOD if crossed.seeds == 1 else SEEDS_METHOD,
        scope=ONE_SEED_SCOPE if crossed.seeds == 1 else SEEDS_SCOPE,
        more_seeds=more_seeds,
        more_samples=more_samples,
        prospect=prospect,
        detectable=100 * max(crossed.estimate - low, high - crossed.estimate),
        remarks=(*_remarks(crossed, 100 * low, 100 * high, margin, verdict), *advice),
    )


def judge(low: float, high: float, margin: float) -> Verdict:
    """The verdict of an interval; all three in the same unit.

    >>> [judge(*ends, 0.1).value for ends in ((-0.09, -0.01), (-0.7, -0.3), (-0.2, -0.01), (0.2, 0.3))]
    ['equivalent', 'worse', 'undecided', 'better']
    """
    if -margin < low and high < margin:
        return Verdict.equivalent
    if high < -margin:
        return Verdict.worse
    return Verdict.better if low > margin else Verdict.undecided


def check_margin(margin: float) -> None:
    """Raise a `ConfigError` unless accuracy can be equivalent within so many points."""
    if not (math.isfinite(margin) and margin > 0):
        raise ConfigError("margin", margin, "give percentage points of accuracy above 0, such as 0.1")


def _check(baseline: np.ndarray, mixed: np.ndarray, margin: float, level: float) -> None:
    check_margin(margin)
    if not 0 < level < 1:
        raise ConfigError("level", level, "give a number between 0 and 1, such as 0.9")
    for name, array in (("baseline", baseline), ("mixed", mixed)):
        if array.dtype != np.bool_ or array.ndim != SEEDS_AND_SAMPLES or array.size == 0:
            raise DataError(
                f"{name}: correct or not must be bool of shape (seeds, samples), neither of them 0; "
                f"this is {array.dtype} of shape {array.shape}"
            )
    if baseline.shape != mixed.shape:
        raise DataError(
            f"baseline and mixed must have the same seeds and test samples; "
            f"their shapes (seeds, samples) are {baseline.shape} and {mixed.shape}"
        )


def _remarks(crossed: Crossed, low: float, high: float, margin: float, verdict: Verdict) -> list[str]:
    """What the figures do not say by themselves; differences in points."""
    remarks = []
    if crossed.seeds == 1:
        remarks.append("One seed: how much accuracy varies from training to training is not in the interval.")
    elif crossed.seeds < FEW_SEEDS:
        remarks.append(
            "Two seeds tell little about the noise of training: the interval is wide; three or more narrow it."
        )
    if crossed.gained == crossed.lost == 0:
        remarks.append(
            "All predictions agree in being right or wrong; the interval is what this test set may have missed."
        )
    if 100 / crossed.samples > margin:
        remarks.append(f"One test sample is {100 / crossed.samples:.3g} points, more than the margin of {margin:g}.")
    side = "lower" if high < 0 else "higher"
    if low > 0 or high < 0:
        if verdict is Verdict.equivalent:
            remarks.append(f"Accuracy is {side}, by less than the margin.")
        elif verdict is Verdict.undecided:
            remarks.append(f"Accuracy is {side}, but whether by more than the margin is open.")
    return remarks


def _advice(
    crossed: Crossed, verdict: Verdict, margin: float, level: float
) -> tuple[int | None, int | None, Verdict | None, list[str]]:
    """More seeds, more samples, the verdict that they would lead to, and why there is no number where there is none.

    It supposes that the difference and the noise are what they are estimated to be.
    """
    if verdict is not Verdict.undecided:
        return None, None, None, []

    def expected(seeds: int, samples: int) -> Verdict:
        low, high = interval(crossed.resized(seeds, samples), level=level)
        return judge(100 * low, 100 * high, margin)

    remarks = []
    more_seeds = None
    if crossed.seeds == 1:
        remarks.append("How many seeds it would take cannot be told from one; start with three.")
    else:
        more_seeds = _more(crossed.seeds, MOST_SEEDS, lambda seeds: expected(seeds, crossed.samples))
        if more_seeds is None:
            remarks.append(f"Even {MOST_SEEDS:,} seeds would not decide this on {crossed.samples:,} test samples.")
    more_samples = _more(crossed.samples, MOST_SAMPLES, lambda samples: expected(crossed.seeds, samples))
    if more_samples is None:
        remarks.append(f"Even {MOST_SAMPLES:,} test samples would not decide this at this number of seeds.")
    prospect = None
    if more_seeds is not None:
        prospect = expected(crossed.seeds + more_seeds, crossed.samples)
    elif more_samples is not None:
        prospect = expected(crossed.seeds, crossed.samples + more_samples)
    if prospect in (Verdict.worse, Verdict.better):
        shown = f"if it holds, more data would show {prospect.value}, not equivalent."
        remarks.append(f"The estimate lies outside the margin: {shown}")
    return more_seeds, more_samples, prospect, remarks


def _more(now: int, most: int, expected: Callable[[int], Verdict]) -> int | None:
    """The smallest number to add to `now` with a verdict; None if `most` in all would not be enough."""
    if now >= most or expected(most) is Verdict.undecided:
        return None
    few, enough = now, most
    while enough - few > 1:
        middle = (few + enough) // 2 if enough < 4 * few else 2 * few
        few, enough = (middle, enough) if expected(middle) is Verdict.undecided else (few, middle)
    return enough - now
