"""Where to cut a model for recomputation: a rule over the bytes of its steps, without a framework.

A recomputed segment keeps the tensors that later segments use. The backward pass goes from the last to the first, and what was
kept is free again behind it: while it is at a segment, what the segments before keep is there, and everything inside this one.
The largest such sum is to be least. Early segments may so be larger than late ones. (Chen et al., Training Deep Nets with
Sublinear Memory Cost, arXiv 1604.06174, have equal segments of a chain.)
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

_PRECISION = 0.01  # of the peak that is searched for


@dataclass(frozen=True)
class Step:
    """One call of a layer or operation, in the order in which they run.

    Attributes:
        uses: the tensors that it reads.
        gives: the tensors that it makes, with their bytes.
        inside: bytes that its backward pass needs, its results included.
        alone: in no segment: it sees to its own recomputation, or must run once.
    """

    uses: Sequence[Hashable]
    gives: Sequence[tuple[Hashable, int]]
    inside: int
    alone: bool = False


@dataclass(frozen=True)
class Segment:
    """Steps `first` to before `end`, run as one.

    Attributes:
        first: an index.
        end: an index.
        kept: bytes of what it makes and later segments or the caller use.
        inside: bytes of all that its backward pass needs.
        recomputed: whether it gives up its tensors.
        alone: made of steps that are to be in no segment.
    """

    first: int
    end: int
    kept: int = 0
    inside: int = 0
    recomputed: bool = field(default=True)
    alone: bool = field(default=False)


def segments(
    steps: Sequence[Step], results: Sequence[Hashable], *, last_too: bool = False, every: int = 1
) -> list[Segment]:
    """Cut the steps so that the peak of the backward pass is least.

    The last segment is not recomputed, as its backward pass follows at once, and no segment that would keep as much as it
    gives up.

    Args:
        steps: in the order in which they run.
        results: the tensors that the caller gets.
        last_too: recompute the last one; for a model inside another.
        every: join this many neighbours into one. More memory, as a rule; fewer tensors kept where segments are small.

    >>> chain = [Step([i], [(i + 1, 1)], inside=10) for i in range(4)]
    >>> [(s.first, s.end, s.recomputed) for s in segments(chain, results=[4])]
    [(0, 1, True), (1, 2, True), (2, 3, True), (3, 4, False)]
    """
    last_use = _last_uses(steps, results)
    found: list[Segment] = []
    for alone, group in groupby(range(len(steps)), key=lambda i: steps[i].alone):
        run = list(group)
        if alone:
            found.extend(Segment(i, i + 1, recomputed=False, alone=True) for i in run)
        else:
            cuts = _best_cuts(steps, last_use, run[0], run[-1] + 1)[::every]
            pairs = zip(cuts, [*cuts[1:], run[-1] + 1], strict=True)
            found.extend(_segment(steps, last_use, first, end) for first, end in pairs)
    if found and not last_too:
        found[-1] = _plain(found[-1])
    return [_plain(s) if s.recomputed and s.inside <= s.kept else s for s in found]


def _plain(segment: Segment) -> Segment:
    return Segment(segment.first, segment.end, segment.kept, segment.inside, recomputed=False, alone=segment.alone)


def _segment(steps: Sequence[Step], last_use: Mapping[Hashable, int], first: int, end: int) -> Segment:
    kept = sum(size for step in steps[first:end] for key, size in step.gives if last_use.get(key, -1) >= end)
    return Segment(first, end, kept, sum(step.inside for step in steps[first:end]))


def _last_uses(steps: Sequence[Step], results: Sequence[Hashable]) -> dict[Hashable, int]:
    """The index of the last step that uses a tensor; that after the last step for a result."""
    found = {key: i for i, step in enumerate(steps) for key in step.uses}
    return found | dict.fromkeys(results, len(steps))


def _best_cuts(steps: Sequence[Step], last_use: Mapping[Hashable, int], first: int, end: int) -> list[int]:
    """The first indices of the segments of steps `first` to before `end`: those that keep least at the least peak, to 1 %."""
    too_low, enough = 0.0, float(sum(step.inside + sum(size for _, size in step.gives) for step in steps[first:end]))
    while enough - too_low > max(1.0, _PRECISION * enough) / 2:
        peak = (too_low + enough) / 2
        if _cuts_within(steps, last_use, first, end, peak) is None:
            too_low = peak
        else:
            enough = peak
    return _cuts_within(steps, last_use, first, end, enough) or [first]


def _cuts_within(
    steps: Sequence[Step], last_use: Mapping[Hashable, int], first: int, end: int, peak: float
) -> list[int] | None:
    """The cuts that keep least, if the backward pass of each segment finds room under `peak`; None if there are none.

    What a segment keeps does not depend on where the others are cut: a tensor made in it and used after it is kept once. So
    the least that can be kept up to a step is also best for all that follow.
    """
    # Per end of a segment: what is kept up to it, how many tensors were passed on, where it begins.
    reached: dict[int, tuple[int, int, int]] = {first: (0, 0, first)}
    for stop in range(first + 1, end + 1):
        kept = passed = inside = 0
        for start in range(stop - 1, first - 1, -1):
            step = steps[start]
            inside += step.inside
            if inside > peak:
                break
            later = [size for key, size in step.gives if last_use.get(key, -1) >= stop]
            kept, passed = kept + sum(later), passed + len(later) + sum(last_use[key] >= stop for key in step.uses)
            if start not in reached or reached[start][0] + inside > peak:
                continue
            before, tensors, _ = reached[start]
            # Of cuts that keep as much, one where a single tensor is live: the end of a block.
            candidate = before + kept, tensors + passed, start
            if stop not in reached or candidate[:2] < reached[stop][:2]:
                reached[stop] = candidate
    if end not in reached:
        return None
    cuts, at = [], end
    while at > first:
        at = reached[at][2]
        cuts.append(at)
    return cuts[::-1]
