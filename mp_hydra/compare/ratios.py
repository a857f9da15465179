"""Ratios of mixed to baseline: time, throughput, memory; each with the noise that was measured, and no other.

The methods and their sources are in docs/statistics.md.

    >>> import numpy as np
    >>> ratio = paired_ratio(np.array([100.0, 104.0, 98.0]), np.array([52.0, 53.0, 50.0]))
    >>> print(f"{ratio.value:.3f} ({ratio.low:.3f} to {ratio.high:.3f})")
    0.513 (0.499 to 0.528)
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mp_hydra.errors import ConfigError, DataError

BATCHES = 10
STEPS_PER_BATCH = 5
FEWEST_STEPS = 20


@dataclass(frozen=True)
class RatioEstimate:
    """The ratio mixed / baseline of a positive quantity.

    Attributes:
        value: the ratio; without a unit.
        low: lower end of the two-sided interval; None where no spread was measured.
        high: its upper end; likewise; may be infinite.
        level: of the interval.
        pairs: pairs of runs behind it.
        method: how value and interval were made, and which noise the interval holds.
    """

    value: float
    low: float | None
    high: float | None
    level: float
    pairs: int
    method: str


@dataclass(frozen=True)
class MemorySaving:
    """How much of the peak went away, and how much could have.

    Attributes:
        peak_ratio: (state + mixed_training) / (state + baseline_training).
        attainable_peak_ratio: the same if every training byte were halved: (state + baseline_training / 2) / (...).
        share: (baseline_training - mixed_training) / (baseline_training / 2): 1 where all of them were halved, 0 where
            nothing was saved, negative where more was used, above 1 where some tensors are no longer kept at all.
        reason: why a number is None; empty otherwise.
    """

    peak_ratio: float | None
    attainable_peak_ratio: float | None
    share: float | None
    reason: str = ""


def paired_ratio(baseline: np.ndarray, mixed: np.ndarray, *, level: float = 0.95) -> RatioEstimate:
    """Geometric mean of the ratios of pairs, with a t interval on their logarithms.

    With one pair there is no interval. Pairs that agree exactly, as counted bytes may, give an interval of width 0.

    Args:
        baseline: one positive number per seed; (pairs,), any unit.
        mixed: likewise, in the same unit and order of seeds.
        level: of the two-sided interval, between 0 and 1.

    Raises:
        ConfigError: level is out of range.
        DataError: the arrays are not of one shape (pairs,), are empty, or hold a number that is not positive and finite.
    """
    baseline, mixed = _positive("baseline", baseline), _positive("mixed", mixed)
    if baseline.shape != mixed.shape:
        raise DataError(f"baseline and mixed must be paired by seed; there are {baseline.size} and {mixed.size} values")
    _check_level(level)
    logs = np.log(mixed) - np.log(baseline)
    pairs, centre = logs.size, float(logs.mean())
    if pairs == 1:
        return RatioEstimate(math.exp(centre), None, None, level, 1, "ratio of one pair of runs; no spread is known")
    half = _t_quantile(pairs - 1, level) * float(logs.std(ddof=1)) / math.sqrt(pairs)
    method = "geometric mean of the ratios of pairs, t interval on their logarithms: noise from run to run"
    return RatioEstimate(math.exp(centre), _exp(centre - half), _exp(centre + half), level, pairs, method)


def within_run_ratio(baseline: np.ndarray, mixed: np.ndarray, *, level: float = 0.95) -> RatioEstimate:
    """Ratio of the medians of two series of step times: what one pair of runs can tell.

    Steps of a run are not independent, so each run is cut into batches of consecutive steps; the spread of the batches'
    log medians gives the noise of the run's (batch means: Schmeiser 1982), and Welch's t interval joins the two runs.

    Args:
        baseline: durations of the steady steps, in order; (steps,), any unit.
        mixed: likewise, in the same unit; the number of steps may differ.
        level: of the two-sided interval, between 0 and 1.

    Returns:
        An estimate whose method says that it holds the noise within the two runs only. Without an interval if one of
        them has fewer than 20 steps.

    Raises:
        ConfigError: level is out of range.
        DataError: an array is not of shape (steps,), is empty, or holds a number that is not positive and finite.
    """
    baseline, mixed = _positive("baseline", baseline), _positive("mixed", mixed)
    _check_level(level)
    ratio = float(np.median(mixed) / np.median(baseline))
    fewest = min(baseline.size, mixed.size)
    if fewest < FEWEST_STEPS:
        method = f"ratio of median step times of one pair of runs; {fewest} steps are too few for an interval"
        return RatioEstimate(ratio, None, None, level, 1, method)
    variances, degrees = zip(_median_noise(baseline), _median_noise(mixed), strict=True)
    noise = sum(variances)
    half = 0.0
    if noise > 0:
        freedom = noise**2 / sum(part**2 / df for part, df in zip(variances, degrees, strict=True))
        half = _t_quantile(freedom, level) * math.sqrt(noise)
    method = (
        "ratio of median step times of one pair of runs, interval from batches of steps: noise within these runs only"
    )
    return RatioEstimate(ratio, ratio * _exp(-half), ratio * _exp(half), level, 1, method)


def memory_saving(baseline_training: float, mixed_training: float, state: float) -> MemorySaving:
    """What share of the saving that mixed precision can give was had.

    Variables and optimizer state stay in float32, so only what a step needs on top of them can shrink, at best to half.

    Args:
        baseline_training: memory/training_mib of the baseline, MiB.
        mixed_training: the same of the mixed run, MiB.
        state: what both hold before the first step: memory/baseline_mib or memory/state_mib of the baseline, MiB.

    Raises:
        DataError: a number is negative or not finite.

    >>> saving = memory_saving(baseline_training=400, mixed_training=220, state=100)
    >>> saving.peak_ratio, saving.attainable_peak_ratio, saving.share
    (0.64, 0.6, 0.9)
    """
    given = {"baseline_training": baseline_training, "mixed_training": mixed_training, "state": state}
    for name, value in given.items():
        if not (math.isfinite(value) and value >= 0):
            raise DataError(f"{name}: memory must be a finite number of MiB of at least 0; this is {value}")
    peak = state + baseline_training
    if peak == 0:
        return MemorySaving(None, None, None, "the baseline used no memory")
    ratio, attainable = (state + mixed_training) / peak, (state + baseline_training / 2) / peak
    if baseline_training == 0:
        return MemorySaving(ratio, attainable, None, "the baseline's steps used no memory on top of the state")
    return MemorySaving(ratio, attainable, 2 * (baseline_training - mixed_training) / baseline_training)


def _median_noise(series: np.ndarray) -> tuple[float, int]:
    """Variance of the log median of a series in order, and its degrees of freedom, from batches of equal length."""
    batches = min(BATCHES, series.size // STEPS_PER_BATCH)
    length = series.size // batches
    logs = np.log(np.median(series[-batches * length :].reshape(batches, length), axis=1))
    return float(logs.var(ddof=1)) / batches, batches - 1


def _positive(name: str, values: np.ndarray) -> np.ndarray:
    values = np.asarray(values, dtype="float64")
    if values.ndim != 1 or values.size == 0:
        raise DataError(f"{name}: give at least one number, in one dimension; the shape is {values.shape}")
    if not (np.isfinite(values) & (values > 0)).all():
        raise DataError(
            f"{name}: a ratio needs positive, finite numbers; found {values[~(values > 0) | np.isinf(values)][0]}"
        )
    return values


def _check_level(level: float) -> None:
    if not 0 < level < 1:
        raise ConfigError("level", level, "give a number between 0 and 1, such as 0.95")


def _exp(logarithm: float) -> float:
    """Infinite where a float cannot hold the number: two pairs that disagree at a high level."""
    with np.errstate(over="ignore"):
        return float(np.exp(logarithm))


def _t_quantile(degrees: float, level: float) -> float:
    from scipy.special import stdtrit  # type: ignore[import-untyped]

    return float(stdtrit(degrees, 0.5 + level / 2))
