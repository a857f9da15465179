"""From the peaks of a few small batches to those of larger ones: the rules, as pure functions of numbers.

While a training step runs, the memory in use at each moment is a part that does not depend on the batch plus one that is
proportional to it. The peak is the largest of these sums: piecewise linear in the batch, its slope never falling. At the moments
that make the peak of large batches, what does not grow is gradients and what goes with the weights; at those of small ones it
can be a kernel's workspace, too. Measured peaks scatter by some percent about that, since parallel operations run in another
order each time, and small batches are computed by other kernels.

>>> line = Line(((8, 100), (16, 180), (32, 340)), state_bytes=20, gradient_bytes=20)
>>> round(line.bytes_at(128)), line.band_at(128)
(1300, 0.08)
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

AGREEMENT = 0.2  # slopes that differ by no more than this share of the larger one are the same
REACH = 4  # times the largest dry run: so far the near band holds
SCATTER = 0.03  # between batches that were dry-run: how far a peak lies from that of another time
NEAR = 0.08  # up to REACH
DOUBLED = 0.04  # what each further doubling adds
UNSETTLED = 2.0  # how much wider, at least, all bands are where no line is found
STEP = 8  # batch sizes that are proposed are multiples of it: tensor cores want them
_WEIGHT_COPIES = 3  # what does not grow: gradients, the same unscaled or clipped, weights and gradients in 16 bits


@dataclass(frozen=True)
class Line:
    """Peaks by batch size.

    Attributes:
        points: (batch size, peak in bytes), rising by batch size; at least one.
        state_bytes: the part of each peak that is there before and after a step.
        gradient_bytes: a gradient for each trainable variable.
        kept_bytes: of each sample, the tensors of the forward pass that the backward pass reads; 0 where that is not known.
        kept_fixed_bytes: the same whatever the batch, such as weights in 16 bits.
    """

    points: tuple[tuple[int, int], ...]
    state_bytes: int
    gradient_bytes: int
    kept_bytes: int = 0
    kept_fixed_bytes: int = 0

    def __post_init__(self) -> None:
        """Refuse what no line goes through."""
        sizes = [size for size, _ in self.points]
        if not sizes or sizes != sorted(set(sizes)) or sizes[0] < 1:
            raise ValueError(f"batch sizes {sizes}: give at least one, rising, none twice")

    @property
    def largest_dry_run(self) -> int:
        """The largest batch size that was measured."""
        return self.points[-1][0]

    @property
    def settled(self) -> bool:
        """Whether the last two slopes agree, and what does not grow is no more than can stay when the batch does."""
        return self._agree and not self._overtaken

    @property
    def _agree(self) -> bool:
        """Whether the last two slopes do."""
        return len(self._agreeing) > 2  # noqa: PLR2004 - points, of which three have two slopes

    @cached_property
    def _agreeing(self) -> tuple[tuple[int, int], ...]:
        """The last points that lie on one line, at least two where there are two."""
        points = self.points
        first = max(len(points) - 2, 0)
        while first > 0 and _agree(_slope(points[first - 1], points[first]), _slope(points[first], points[first + 1])):
            first -= 1
        return points[first:]

    @cached_property
    def _free(self) -> tuple[float, float]:
        """Part that does not grow, without the state, and bytes for each further sample: what the last points say by themselves.

        Least squares with weights 1/peak, as the scatter grows with the peak.
        """
        points = [(size, float(peak - self.state_bytes)) for size, peak in self._agreeing]
        weights = [1 / max(peak, 1.0) for _, peak in points]
        total = sum(weights)
        mean_size = sum(w * size for w, (size, _) in zip(weights, points, strict=True)) / total
        mean_peak = sum(w * peak for w, (_, peak) in zip(weights, points, strict=True)) / total
        spread = sum(w * (size - mean_size) ** 2 for w, (size, _) in zip(weights, points, strict=True))
        if spread == 0:
            return 0.0, max(mean_peak, 0.0) / mean_size
        slope = (
            sum(w * (size - mean_size) * (peak - mean_peak) for w, (size, peak) in zip(weights, points, strict=True))
            / spread
        )
        return mean_peak - slope * mean_size, slope

    @property
    def _lasting(self) -> float:
        """The most that can be in the part that does not grow, at the moments which a large batch makes the peak."""
        return float(_WEIGHT_COPIES * self.gradient_bytes)

    @cached_property
    def _fit(self) -> tuple[float, float]:
        """As `_free`, the first part brought between 0 and what can be in it."""
        constant, slope = self._free
        within = min(max(constant, 0.0), self._lasting)
        if within != constant:
            points = [(size, float(peak - self.state_bytes)) for size, peak in self._agreeing]
            weights = [1 / max(peak, 1.0) for _, peak in points]
            slope = sum(w * s * (p - within) for w, (s, p) in zip(weights, points, strict=True)) / sum(
                w * s**2 for w, (s, _) in zip(weights, points, strict=True)
            )
        return within, max(slope, 0.0)

    @cached_property
    def _overtaken(self) -> bool:
        """Whether the peaks are those of a moment whose workspace does not grow, so that another moment will have larger ones.

        That is so where more does not grow than can last, and slopes still rise, or the two lines which bound the forecast, the
        free one and one with a part that can last, lie further apart than the band at `REACH`.
        """
        if len(self.points) < 2:  # noqa: PLR2004 - no slope
            return False
        size = REACH * self.largest_dry_run
        least, most = self._free_at(size), self._most_at(size, self._lasting)
        return most > least and (not self._agree or most - least > NEAR * (most + least))

    def _free_at(self, batch_size: int) -> float:
        """Beyond the dry runs the peak is at least this: the slope of a largest of lines never falls."""
        constant, slope = self._free
        return self.state_bytes + constant + max(slope, 0.0) * batch_size

    def _kept_at(self, batch_size: int) -> int:
        """What is there when the backward pass begins; 0 where the measured peaks belie it."""
        largest, peak = self.points[-1]
        fixed = self.state_bytes + self.kept_fixed_bytes
        return fixed + self.kept_bytes * batch_size if fixed + self.kept_bytes * largest <= peak else 0

    def _most_at(self, batch_size: int, constant: float) -> float:
        """Beyond the dry runs: a moment with this part that does not grow had no more than the peak at the last one."""
        largest, peak = self.points[-1]
        return self.state_bytes + constant + (peak - self.state_bytes - constant) * batch_size / largest

    def bytes_at(self, batch_size: int) -> int:
        """The peak at a batch size: measured, between two measured ones, or on the line through the last ones.

        It never falls from one batch size to the next, and below the smallest measured one it is that one's.
        """
        peaks = _rising([peak for _, peak in self.points])
        sizes = [size for size, _ in self.points]
        if batch_size >= sizes[-1]:
            return peaks[-1] if batch_size == sizes[-1] else max(peaks[-1], round(self._beyond(batch_size)))
        if batch_size <= sizes[0]:
            return peaks[0]
        place = max(index for index, size in enumerate(sizes) if size <= batch_size)
        share = (batch_size - sizes[place]) / (sizes[place + 1] - sizes[place])
        return round(peaks[place] + share * (peaks[place + 1] - peaks[place]))

    def _beyond(self, batch_size: int) -> float:
        if self._overtaken:  # it lies between the two
            least = max(self._free_at(batch_size), self._kept_at(batch_size))
            return (least + max(self._most_at(batch_size, self._lasting), least)) / 2
        constant, slope = self._fit
        return max(self.state_bytes + constant + slope * batch_size, self._kept_at(batch_size))

    def band_at(self, batch_size: int) -> float:
        """How far the true peak may lie from `bytes_at`, as a share of it, either way."""
        if batch_size <= self.largest_dry_run:
            return SCATTER
        further = max(math.log2(batch_size / (REACH * self.largest_dry_run)), 0.0)
        if self.settled:
            return NEAR + DOUBLED * further
        steepest = self._most_at(batch_size, 0.0) / max(self.bytes_at(batch_size), 1) - 1
        return max((NEAR + DOUBLED * further) * UNSETTLED, steepest)

    def is_measured(self, batch_size: int) -> bool:
        """Whether this batch size was dry-run."""
        return any(size == batch_size for size, _ in self.points)

    def upper_at(self, batch_size: int) -> int:
        """The upper edge of the band in bytes."""
        return math.ceil(self.bytes_at(batch_size) * (1 + self.band_at(batch_size)))

    def largest(self, limit: int, most: int) -> int | None:
        """The largest multiple of `STEP` up to `most` whose upper edge lies within `limit` bytes; None if none does."""
        low, high = 0, most // STEP
        while low < high:
            middle = (low + high + 1) // 2
            if self.upper_at(middle * STEP) <= limit:
                low = middle
            else:
                high = middle - 1
        return low * STEP or None


def _slope(one: tuple[int, int], other: tuple[int, int]) -> float:
    return (other[1] - one[1]) / (other[0] - one[0])


def _agree(one: float, other: float) -> bool:
    """Whether two slopes are the same within `AGREEMENT`.

    >>> _agree(10.0, 8.1), _agree(10.0, 7.9), _agree(-1.0, -1.0)
    (True, False, False)
    """
    return min(one, other) > 0 and abs(one - other) <= AGREEMENT * max(one, other)


def _rising(peaks: list[int]) -> list[int]:
    """Each peak, or a higher one before it.

    >>> _rising([3, 2, 5])
    [3, 3, 5]
    """
    return [max(peaks[: index + 1]) for index in range(len(peaks))]
