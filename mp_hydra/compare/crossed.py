"""Noise of a mean over seeds and test samples that are crossed: every seed is tested on the same samples.

Two-way analysis of variance without replication, d[s, i] = mean + seed[s] + sample[i] + rest[s, i], all three random.
With the mean squares M over S seeds and n samples,

    variance of the mean = (M_seeds + M_samples - M_rest) / (S n)
                         =  M_samples / (S n)             samples, for these seeds' models
                         + (M_seeds - M_rest) / (S n)     seeds, on top.

docs/statistics.md says where each formula comes from and how it was checked.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mp_hydra.compare.paired_proportions import score_interval

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class Crossed:
    """What the interval needs to know of the outcomes d[s, i]: -1 (lost), 0, or 1 (gained).

    Attributes:
        seeds: S.
        samples: n, of the test set.
        gained: share of the S n outcomes that are 1.
        lost: share that are -1.
        mean_square_seeds: M_seeds; 0 for one seed, where it is not known.
        mean_square_samples: M_samples; 0 for one sample, where it is not known.
        mean_square_rest: M_rest; 0 for one seed or one sample.
    """

    seeds: int
    samples: int
    gained: float
    lost: float
    mean_square_seeds: float
    mean_square_samples: float
    mean_square_rest: float

    @property
    def estimate(self) -> float:
        """The mean of all outcomes."""
        return self.gained - self.lost

    @property
    def variance(self) -> float:
        """The variance of one outcome."""
        return self.gained + self.lost - self.estimate**2

    def resized(self, seeds: int, samples: int) -> Crossed:
        """What another number of seeds (if there are several now) or samples would show, if the noise is as estimated.

        A component whose estimate is negative counts as 0.
        """
        if self.seeds == 1:
            return replace(self, seeds=seeds, samples=samples)
        rest = self.mean_square_rest
        seed = max(0.0, self.mean_square_seeds - rest) / self.samples
        sample = max(0.0, self.mean_square_samples - rest) / self.seeds
        return replace(
            self,
            seeds=seeds,
            samples=samples,
            mean_square_seeds=samples * seed + rest,
            mean_square_samples=seeds * sample + rest,
        )


def analyse(outcomes: np.ndarray) -> Crossed:
    """The analysis of variance of `outcomes` (seeds, samples), integers -1, 0 or 1.

    >>> import numpy as np
    >>> analyse(np.array([[1, 0, 0, -1], [1, 1, 0, 0]])).mean_square_samples
    0.8333333333333334
    """
    seeds, samples = outcomes.shape
    by_seed = outcomes.sum(axis=1, dtype="int64")
    by_sample = outcomes.sum(axis=0, dtype="int64")
    total = int(by_seed.sum())
    discordant = int((outcomes != 0).sum())
    correction = total * total / (seeds * samples)
    of_seeds = int((by_seed**2).sum()) / samples - correction
    of_samples = int((by_sample**2).sum()) / seeds - correction
    of_rest = max(0.0, discordant - correction - of_seeds - of_samples)
    return Crossed(
        seeds=seeds,
        samples=samples,
        gained=(discordant + total) / 2 / outcomes.size,
        lost=(discordant - total) / 2 / outcomes.size,
        mean_square_seeds=max(0.0, of_seeds) / (seeds - 1) if seeds > 1 else 0.0,
        mean_square_samples=max(0.0, of_samples) / (samples - 1) if samples > 1 else 0.0,
        mean_square_rest=of_rest / ((seeds - 1) * (samples - 1)) if seeds > 1 and samples > 1 else 0.0,
    )


def interval(crossed: Crossed, *, level: float) -> tuple[float, float]:
    """Two-sided interval for the mean over all seeds and samples; for one seed, over all samples for its two models.

    Sample noise is Tango's score interval at the effective number of samples; what seeds add is joined to it by the
    sum of squares (the variances recovered from the limits: Zou and Donner 2008), each mean square with its own
    quantile (Banerjee 1960), so that few seeds are paid for in full. An end is never nearer to the estimate than the
    rate that a test set of n samples misses altogether with probability (1 - level) / 2, however many seeds there are.
    """
    estimate = crossed.estimate
    size = _effective_samples(crossed)
    low, high = score_interval(crossed.gained * size, crossed.lost * size, size, level=level)
    seeds = _seed_part(crossed, level)
    missed = -math.expm1(math.log((1 - level) / 2) / crossed.samples)
    below = max(math.hypot(estimate - low, seeds), missed)
    above = max(math.hypot(high - estimate, seeds), missed)
    return max(-1.0, estimate - below), min(1.0, estimate + above)


def _effective_samples(crossed: Crossed) -> float:
    """How many independent outcomes would tell as much as S outcomes on each of n samples: between n and S n.

    n where all seeds agree on every sample, S n where they are unrelated (the design effect of cluster sampling).
    """
    noise = max(crossed.mean_square_samples, crossed.mean_square_rest) / (crossed.seeds * crossed.samples)
    if crossed.seeds == 1 or noise == 0:
        return float(crossed.samples)
    return min(max(crossed.variance / noise, crossed.samples), float(crossed.seeds * crossed.samples))


def _seed_part(crossed: Crossed, level: float) -> float:
    """Half-width that seeds add to the sample noise; 0 for one seed, from which it cannot be told."""
    if crossed.seeds == 1:
        return 0.0
    from scipy.special import ndtri, stdtrit  # type: ignore[import-untyped]

    tail = 0.5 + level / 2
    quantile, normal = float(stdtrit(crossed.seeds - 1, tail)), float(ndtri(tail))
    added = quantile**2 * crossed.mean_square_seeds - normal**2 * crossed.mean_square_rest
    return math.sqrt(max(0.0, added) / (crossed.seeds * crossed.samples))
