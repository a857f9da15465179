"""Which batch size to dry-run next, and when to stop: the rules, as a pure function of what was measured."""

from __future__ import annotations

from dataclasses import dataclass

from mp_hydra.forecast.line import REACH, Line
from mp_hydra.sizes import shown

FIRST = (8, 16, 32)
HOST_SHARE = 0.5  # of the memory that is available: no dry run after the first is to take more
SECONDS = 30.0  # of the dry runs of one precision beyond the first three


@dataclass(frozen=True)
class Goal:
    """What the dry runs are for.

    Attributes:
        batch_sizes: those that will be asked for.
        limit_bytes: the largest batch within it is wanted, too; None for what the device has.
        samples: training samples: no batch is larger than they.
        exactly: dry-run these batch sizes and no others; empty for the rules here.
        seconds: what dry runs beyond the first three may take.
    """

    batch_sizes: tuple[int, ...] = ()
    limit_bytes: int | None = None
    samples: int = 2**31
    exactly: tuple[int, ...] = ()
    seconds: float = SECONDS


@dataclass(frozen=True)
class Step:
    """What to do next.

    Attributes:
        batch_size: to dry-run; None to stop.
        reason: why it stops before it has what it wants; None where it has.
        planned: whether it is dry-run in any case; what comes after may take `Goal.seconds`.
    """

    batch_size: int | None
    reason: str | None = None
    planned: bool = False


def following(
    goal: Goal, line: Line | None, *, available_bytes: int | None, seconds_left: float, seconds_needed: float
) -> Step:
    """The next batch size: doubled from 8 on until two slopes agree and all that is wanted lies within `REACH` of the last one.

    Args:
        goal: what is wanted.
        line: through what was measured so far; None at the beginning.
        available_bytes: memory that there was before the first one; None where that cannot be known.
        seconds_left: of what the dry runs may take.
        seconds_needed: what a batch twice as large as the last one is expected to take.
    """
    planned = _planned(goal)
    if line is None:
        return Step(planned[0], planned=True)
    rest = [size for size in planned if size > line.largest_dry_run]
    if not rest:
        if goal.exactly or _reached(goal, line, available_bytes):
            return Step(None)
        if seconds_needed > seconds_left:
            return Step(None, f"a batch of {2 * line.largest_dry_run} would take about {seconds_needed:.0f} s")
    size = rest[0] if rest else 2 * line.largest_dry_run
    if available_bytes is not None and line.upper_at(size) > HOST_SHARE * available_bytes:
        need = shown(line.upper_at(size))
        return Step(
            None, f"a batch of {size} would take up to {need} of the {shown(available_bytes)} that are available"
        )
    return Step(size, planned=bool(rest))


def _planned(goal: Goal) -> list[int]:
    """The batch sizes that are dry-run in any case, rising."""
    if goal.exactly:
        return sorted(set(goal.exactly))
    return sorted({*FIRST, *(size for size in goal.batch_sizes if size < FIRST[0])})


def _reached(goal: Goal, line: Line, available_bytes: int | None) -> bool:
    """Whether larger dry runs would not serve the goal; they serve unsettled slopes up to the largest batch that is wanted."""
    limit = available_bytes if goal.limit_bytes is None else goal.limit_bytes
    largest = None if limit is None else line.largest(limit, goal.samples)
    wanted = max([largest or 0, *goal.batch_sizes])
    reach = REACH * line.largest_dry_run if line.settled else 2 * line.largest_dry_run - 1
    return wanted <= reach
