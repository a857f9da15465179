"""What is said of the jobs of a sweep, and which of them, and how much of each, a terminal has room for."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

from mp_hydra.isolation.display_text import clean, duration, number
from mp_hydra.isolation.jobs import Cause

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mp_hydra.isolation.jobs import End, Job, Progress

GAP = 2  # columns between two of the table's
MOST_FIGURES = 4


class State(str, Enum):
    """Where a job stands."""

    waiting = "waiting"
    running = "running"
    done = "done"
    failed = "failed"
    stopped = "stopped"


@dataclass(frozen=True)
class Row:
    """What is known of a job; times are readings of the display's clock, in seconds."""

    job: Job
    started_at: float | None = None
    progress: Progress | None = None
    progress_at: float = 0.0
    end: End | None = None
    ended_at: float = 0.0

    @property
    def state(self) -> State:
        """Where the job stands."""
        if self.end is not None:
            return State.done if self.end.ok else State.stopped if self.end.cause is Cause.stopped else State.failed
        return State.waiting if self.started_at is None else State.running

    @property
    def figures(self) -> Mapping[str, float]:
        """The newest value of each figure that the job has told."""
        return {} if self.progress is None else self.progress.figures

    @property
    def progress_text(self) -> str:
        """Where the job says that it stands; the share done if it has no words for it."""
        if self.progress is None:
            return ""
        return clean(self.progress.text) or f"{share(self.progress.fraction):.0%}"

    def seconds(self, now: float) -> float | None:
        """Time that the job has taken; None if it never started."""
        if self.end is not None:
            return self.end.seconds if self.started_at is not None else None
        return None if self.started_at is None else now - self.started_at

    def seconds_left(self, now: float) -> float | None:
        """Estimate of the time that the running job will yet take; None if there is no ground for one."""
        if self.state is not State.running or self.progress is None or self.started_at is None:
            return None
        return seconds_left(self.progress.fraction, self.progress_at - self.started_at, now - self.progress_at)


def share(fraction: float) -> float:
    """The fraction as a number from 0 to 1; nan counts as nothing done."""
    return 0.0 if math.isnan(fraction) else min(1.0, max(0.0, fraction))


def seconds_left(fraction: float, elapsed: float, since: float = 0.0) -> float | None:
    """Time left at the pace so far: `elapsed * (1 - fraction) / fraction`, counted down since the report.

    Args:
        fraction: share of the work that was done when the job last reported.
        elapsed: seconds from the start to that report.
        since: seconds from that report to now.

    Returns:
        Seconds; None if nothing was done yet, or if the countdown is over and so was wrong.

    >>> seconds_left(0.25, 10.0), seconds_left(0.25, 10.0, since=6.0), seconds_left(0.25, 10.0, since=31.0)
    (30.0, 24.0, None)
    """
    done = share(fraction)
    if done == 0.0:
        return None
    left = elapsed * (1.0 - done) / done - since
    return left if left >= 0.0 else None


def select_rows(rows: Sequence[Row], room: int) -> list[int]:
    """Which rows a terminal with room for `room` shows: running ones, then the last ended and the next waiting.

    Returns:
        Positions in `rows`, ascending.
    """
    if len(rows) <= room:
        return list(range(len(rows)))
    positions: dict[State, list[int]] = {}
    for position, row in enumerate(rows):
        positions.setdefault(row.state, []).append(position)
    running, waiting = positions.pop(State.running, [])[:room], positions.pop(State.waiting, [])
    ended = sorted(
        (position for some in positions.values() for position in some),
        key=lambda position: (rows[position].ended_at, position),
        reverse=True,
    )
    rest = room - len(running)
    ended = ended[: max(rest - rest // 2, rest - len(waiting))]
    return sorted(running + ended + waiting[: rest - len(ended)])


def select_columns(wanted: Mapping[str, int], width: int) -> set[str]:
    """Those columns that fit side by side in `width` cells; the first three are always kept.

    Args:
        wanted: cells that each column needs, the most important first.
        width: cells that there are.
    """
    kept: set[str] = set()
    used = -GAP
    for column, needed in wanted.items():
        if len(kept) < 3 or used + GAP + needed <= width:  # noqa: PLR2004 - number, overrides, state
            kept.add(column)
            used += GAP + needed
    return kept


def figure_names(rows: Iterable[Row]) -> list[str]:
    """Names of the figures that any job has told, in order of appearance; the first few of them."""
    return list(dict.fromkeys(name for row in rows for name in row.figures))[:MOST_FIGURES]


def figure_text(figures: Mapping[str, float]) -> str:
    """Figures in a line of text, with four significant digits.

    >>> figure_text({"test/accuracy": 0.98123, "loss": 12.34567})
    'test/accuracy 0.9812, loss 12.35'
    """
    return ", ".join(f"{clean(name)} {number(value)}" for name, value in list(figures.items())[:MOST_FIGURES])


def count_text(rows: Iterable[Row], *, over: bool = False) -> str:
    """How many jobs are in which state, such as "4 done, 1 failed"; `over`: nothing will run any more."""
    counts = Counter(row.state for row in rows)
    names = {State.running: "not ended", State.waiting: "not run"} if over else {}
    order = (State.done, State.failed, State.stopped, State.running, State.waiting)
    return ", ".join(f"{counts[state]} {names.get(state, state.value)}" for state in order if counts[state])


def jobs_text(count: int) -> str:
    """A number of jobs, in words that agree."""
    return "1 job" if count == 1 else f"{count} jobs"


def job_line(row: Row, head: str, now: float) -> str:
    """What a line says of a job.

    Args:
        row: the job.
        head: what names it.
        now: reading of the clock.
    """
    seconds = row.seconds(now)
    if row.end is not None:
        reason = clean(" ".join(row.end.reason.split()))
        when = "before it started" if seconds is None else f"after {duration(seconds)}"
        if row.state is State.done:
            figures = figure_text(row.figures)
            return f"{head}: done in {duration(row.end.seconds)}" + (f", {figures}" if figures else "")
        if row.state is State.stopped:
            return f"{head}: stopped {when}" + (f": {reason}" if reason else "")
        where = "" if row.job.output is None else f"; its output is in {row.job.output}"
        return f"{head}: FAILED {when}: {reason or row.end.cause.value.replace('_', ' ')}{where}"
    if row.state is State.waiting:
        return f"{head}: waiting"
    left = row.seconds_left(now)
    said = (
        row.progress_text,
        "" if left is None else f"about {duration(left, tenths=False)} left",
        figure_text(row.figures),
    )
    return f"{head}: " + (", ".join(part for part in said if part) or "running")
