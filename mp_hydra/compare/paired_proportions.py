"""The score interval for the difference of two proportions measured on the same samples.

>>> from mp_hydra.compare.paired_proportions import score_interval
>>> low, high = score_interval(gained=6, lost=16, samples=161, level=0.95)
>>> print(f"{low:.4f} to {high:.4f}")
-0.1240 to -0.0054
"""

from __future__ import annotations

import math


def score_interval(gained: float, lost: float, samples: float, *, level: float) -> tuple[float, float]:
    """Interval for the difference (gained - lost) / samples, by inversion of the score test.

    Source: T. Tango, Equivalence test and confidence interval for the difference in proportions for the paired-sample
    design, Statistics in Medicine 17 (1998) 891-908. Without a discordant sample it is +-z^2 / (samples + z^2), not 0.

    Args:
        gained: samples that the second model alone has right; need not be whole (effective counts).
        lost: samples that the first model alone has right; likewise.
        samples: all samples, at least gained + lost, above 0.
        level: of the two-sided interval, between 0 and 1.

    Returns:
        The two ends, each between -1 and 1.
    """
    from scipy.special import ndtri  # type: ignore[import-untyped]

    z = float(ndtri(0.5 + level / 2))
    return _lower(gained, lost, samples, z), -_lower(lost, gained, samples, z)


def _lower(gained: float, lost: float, samples: float, z: float) -> float:
    """The smallest difference that the score test at quantile z does not reject."""
    from scipy.optimize import brentq  # type: ignore[import-untyped]

    estimate = (gained - lost) / samples

    def excess(difference: float) -> float:
        variance = _constrained_variance(gained, lost, samples, difference)
        return (estimate - difference) * math.sqrt(samples) - z * math.sqrt(variance)

    # At the estimate itself the variance can be 0, which is a root but not the end of the interval.
    upper = estimate - 1e-12
    if upper <= -1 or excess(upper) >= 0:
        return max(-1.0, estimate)
    return float(brentq(excess, -1.0, upper, xtol=1e-13, rtol=1e-13))


def _constrained_variance(gained: float, lost: float, samples: float, difference: float) -> float:
    """Variance of one sample's score if the true difference were `difference`: Tango's 2 q + d (1 - d).

    q is the likeliest probability of a lost sample under that difference, a root of 2 n q^2 + b q + c = 0.
    """
    b = (2 * samples - gained + lost) * difference - gained - lost
    c = -lost * difference * (1 - difference)
    root = math.sqrt(max(0.0, b * b - 8 * samples * c))
    # Of the two forms of the same root, the one that does not subtract nearly equal numbers.
    probability = (root - b) / (4 * samples) if b <= 0 else -2 * c / (root + b)
    return max(0.0, 2 * probability + difference * (1 - difference))
