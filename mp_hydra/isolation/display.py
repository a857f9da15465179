"""What a sweep shows while it runs: a live table of its jobs in a terminal, plain lines elsewhere.

Rules (which rows, which columns, what is said of a time left) are pure functions; `Display` keeps the state and draws.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import re
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, TextIO

from rich.cells import cell_len, set_cell_size
from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mp_hydra.isolation.jobs import Cause, End, Job, Progress

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from rich.console import RenderableType
    from typing_extensions import Self

log = logging.getLogger(__name__)

MOST_FIGURES = 4
TAIL_LINES = 15
_SECONDS_BETWEEN_PROGRESS_LINES = 30.0
_TAIL_BYTES = 64 * 1024
_LONGEST_TAIL_LINE = 300
_LONGEST_PROGRESS_TEXT = 24
_BAR_WIDTH = 10
_MINUTE, _HOUR, _DAY = 60, 3600, 86400  # seconds
_GAP = 2
_LINES_BESIDE_ROWS = 4  # title, heading, the line that counts the rest, and one left free above

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()*+].|[@-Z\\^_=>78])")


class State(str, Enum):
    """Where a job stands."""

    waiting = "waiting"
    running = "running"
    done = "done"
    failed = "failed"
    stopped = "stopped"


_STYLE = {
    State.waiting: "dim",
    State.running: "cyan",
    State.done: "green",
    State.failed: "bold red",
    State.stopped: "yellow",
}


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


def duration(seconds: float, *, tenths: bool = True) -> str:
    """A length of time in the two largest units that matter.

    >>> [duration(value) for value in (3.21, 59.96, 83.4, 7500, 90000)]
    ['3.2 s', '1 min 0 s', '1 min 23 s', '2 h 5 min', '1 d 1 h']
    """
    if tenths and round(seconds, 1) < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    minutes = round(seconds / _MINUTE)
    if minutes * _MINUTE < _DAY:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24} d {hours % 24} h"


def split_overrides(jobs: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The overrides that all jobs share, and each job's others. A single job keeps all of its own.

    >>> split_overrides([["epochs=3", "seed=0"], ["epochs=3", "seed=1"]])
    (('epochs=3',), [('seed=0',), ('seed=1',)])
    """
    if len(jobs) < 2:  # noqa: PLR2004 - nothing to compare with
        return (), [tuple(job) for job in jobs]
    shared = set(jobs[0]).intersection(*jobs[1:])
    return (
        tuple(override for override in jobs[0] if override in shared),
        [tuple(override for override in job if override not in shared) for job in jobs],
    )


def crop(text: str, width: int) -> str:
    """The text in at most `width` cells, cut in the middle: values stand at the end.

    >>> crop("learning_rate=0.001", 12)
    'learn..0.001'
    """
    if cell_len(text) <= width:
        return text
    head = max(0, (width - 2) // 2)
    tail = max(0, width - 2 - head)
    return set_cell_size(text[:head] + ".." + text[len(text) - tail :], width)


def fit_overrides(rows: Sequence[Sequence[str]], width: int) -> tuple[str, list[str]]:
    """Overrides in at most `width` cells, all rows in the same style.

    In full if all fit; else keys without their path, where that confuses none; else values alone; these cropped at last.

    Returns:
        A heading, which names the keys where values stand alone, and one text a row.

    >>> fit_overrides([["model.dense.units=16", "seed=1"]], 15)
    ('overrides', ['units=16 seed=1'])
    >>> fit_overrides([["model.dense.units=16", "seed=1"]], 10)
    ('units seed', ['16 1'])
    """
    keys = [[override.partition("=")[0] for override in row] for row in rows]
    distinct = {key for row in keys for key in row}
    styles: list[Callable[[str], str]] = [str]
    if len({_last_part(key) for key in distinct}) == len(distinct):
        styles.append(_without_path)
    for style in styles:
        texts = [" ".join(map(style, row)) for row in rows]
        if all(cell_len(text) <= width for text in texts):
            return "overrides", texts
    heading = " ".join(map(_last_part, keys[0])) if all(row == keys[0] for row in keys) else "overrides"
    return crop(heading, width), [crop(" ".join(map(_value, row)), width) for row in rows]


def _last_part(key: str) -> str:
    return re.split(r"[./]", key)[-1].lstrip("+~")


def _without_path(override: str) -> str:
    key, sign, value = override.partition("=")
    return _last_part(key) + sign + value


def _value(override: str) -> str:
    return override.partition("=")[2] or override


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
    used = -_GAP
    for column, needed in wanted.items():
        if len(kept) < 3 or used + _GAP + needed <= width:  # noqa: PLR2004 - number, overrides, state
            kept.add(column)
            used += _GAP + needed
    return kept


def figure_names(rows: Iterable[Row]) -> list[str]:
    """Names of the figures that any job has told, in order of appearance; the first few of them."""
    return list(dict.fromkeys(name for row in rows for name in row.figures))[:MOST_FIGURES]


def number(value: float) -> str:
    """The value in four significant digits; whole ones, such as loss scales, in full up to seven digits.

    >>> [number(value) for value in (0.98123, 32768.0, 12345.6, float("nan"))]
    ['0.9812', '32768', '1.235e+04', 'nan']
    """
    return f"{value:.0f}" if abs(value) < 1e7 and value == math.floor(value) else f"{value:.4g}"  # noqa: PLR2004


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


def clean(text: str) -> str:
    """The text without terminal codes and other characters that do not print."""
    text = _ESCAPE.sub("", text).expandtabs(4)
    return text if text.isprintable() else "".join(character for character in text if character.isprintable())


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of what a job printed, fit to be shown; blank ones at the end are left out.

    Of a line that was overwritten by carriage returns, what was left standing. Only the end of a large file is read.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode(errors="replace")
    shown = []
    for line in text.split("\n"):
        parts = [clean(part).rstrip() for part in line.split("\r")]
        shown.append(next((part for part in reversed(parts) if part), ""))
    if size > _TAIL_BYTES and len(shown) > 1:
        del shown[0]  # its beginning was not read
    while shown and not shown[-1]:
        shown.pop()
    return [line if len(line) <= _LONGEST_TAIL_LINE else line[:_LONGEST_TAIL_LINE] + ".." for line in shown[-lines:]]


def frame(
    rows: Sequence[Row],
    own_overrides: Sequence[Sequence[str]],
    title: str,
    *,
    now: float,
    width: int,
    height: int,
) -> RenderableType:
    """The table of jobs: a title, a row a job as far as the height allows, and a line that counts the rest.

    Args:
        rows: all jobs.
        own_overrides: of each job, the overrides to show.
        title: the line above the table.
        now: reading of the clock.
        width: columns of the terminal.
        height: lines of the terminal.
    """
    positions = select_rows(rows, max(1, height - _LINES_BESIDE_ROWS))
    shown = [rows[position] for position in positions]
    overrides = [[clean(override) for override in own_overrides[position]] for position in positions]
    figures = figure_names(rows)
    cells = [_cells(row, figures, now) for row in shown]
    widths = {name: max([cell_len(name), *(cell_len(row[name]) for row in cells)]) for name in _headings(figures)}
    natural = max([len("overrides"), *(cell_len(" ".join(row)) for row in overrides)])
    widths["overrides"] = min(natural, max(16, 2 * width // 5))
    if any(row.progress is not None for row in rows):
        widths["bar"] = _BAR_WIDTH
    else:
        del widths["progress"]
    kept = select_columns(_by_importance(widths, figures), width)
    others = sum(widths[name] + _GAP for name in kept if name != "overrides")
    heading, fitted = fit_overrides(overrides, max(1, min(natural, width - others)))

    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="bold")
    columns = [name for name in _in_place(figures) if name in kept]
    for name in columns:
        right = name in {"#", "time", "left", *figures}
        shown_as = {"bar": "", "overrides": heading}.get(name, name)
        table.add_column(Text(clean(shown_as)), justify="right" if right else "left", no_wrap=True)
    for row, text, texts in zip(shown, fitted, cells, strict=True):
        state = Text(row.state.value, style=_STYLE[row.state])
        table.add_row(
            *(
                state
                if name == "state"
                else Text(text)
                if name == "overrides"
                else _bar(row)
                if name == "bar"
                else Text(texts[name])
                for name in columns
            ),
            style="dim" if row.state is State.waiting else None,
        )
    parts: list[RenderableType] = [_one_line(clean(title), width, "bold"), table]
    if len(shown) < len(rows):
        hidden = [row for position, row in enumerate(rows) if position not in set(positions)]
        rest = f"and {len(hidden)} more: {count_text(hidden)}"
        parts.append(_one_line(rest, width, "dim"))
    return Group(*parts)


def _one_line(text: str, width: int, style: str) -> Text:
    line = Text(text, style=style)
    line.truncate(width, overflow="crop")
    return line


def _headings(figures: Sequence[str]) -> list[str]:
    return ["#", "state", "progress", "time", "left", *figures]


def _in_place(figures: Sequence[str]) -> list[str]:
    return ["#", "overrides", "state", "progress", "bar", "time", "left", *figures]


def _by_importance(widths: Mapping[str, int], figures: Sequence[str]) -> dict[str, int]:
    order = ["#", "overrides", "state", "progress", "time", *figures[:1], "left", *figures[1:], "bar"]
    return {name: widths[name] for name in order if name in widths}


def _cells(row: Row, figures: Sequence[str], now: float) -> dict[str, str]:
    seconds, left = row.seconds(now), row.seconds_left(now)
    ended = row.end is not None
    return {
        "#": str(row.job.number),
        "state": row.state.value,
        "progress": crop(row.progress_text, _LONGEST_PROGRESS_TEXT),
        "time": "" if seconds is None else duration(seconds, tenths=ended),
        "left": "" if left is None else duration(left, tenths=False),
        **{name: number(row.figures[name]) if name in row.figures else "" for name in figures},
    }


def _bar(row: Row) -> RenderableType:
    if row.state is not State.running or row.progress is None:
        return Text("")
    return ProgressBar(total=1.0, completed=share(row.progress.fraction), width=_BAR_WIDTH)


class Display:
    """Shows the jobs of a sweep on a console from entry to exit; its methods may be called from any thread.

    Live where the console is an interactive terminal and every job prints into a file; a line for each change
    of state elsewhere. What others print meanwhile, through `sys.stdout`, `sys.stderr` or handlers of `logging`, appears
    above the table. Failures are told in lines that stay, with the end of the job's output. A console that can no
    longer be written to (a terminal that was closed) ends the display and not the sweep.

    It may be entered again for a further batch: rows add up.

    Args:
        console: where to show them.
        clock: monotonic seconds.
        refresh_per_second: how often the table is redrawn without a change of state.
    """

    def __init__(
        self,
        console: Console,
        *,
        clock: Callable[[], float] = time.monotonic,
        refresh_per_second: float = 4.0,
    ) -> None:
        self._console, self._clock, self._refresh_per_second = console, clock, refresh_per_second
        # Never held while anything is printed: the thread that redraws takes rich's locks first and then this one.
        self._lock = threading.RLock()
        self._rows: dict[int, Row] = {}
        self._common: tuple[str, ...] = ()
        self._own: list[tuple[str, ...]] = []
        self._said_at: dict[int, float] = {}
        self._live: Live | None = None
        self._began_at: float | None = None
        self._rows_at_entry = 0
        self._closing = False
        self._broken = False

    def __enter__(self) -> Self:
        self._began_at = self._clock() if self._began_at is None else self._began_at
        self._rows_at_entry, self._closing = len(self._rows), False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._closing = True
        self._stop_live()
        rows, now = self._snapshot()
        if rows and self._began_at is not None:
            took = duration(now - self._began_at)
            self._print(f"{jobs_text(len(rows))}: {count_text(rows, over=True)} in {took}")

    def planned(self, jobs: Sequence[Job]) -> None:
        """Further jobs, which wait."""
        if not jobs:
            return
        with self._lock:
            before = len(self._rows)
            self._rows.update({job.number: Row(job) for job in jobs})
            self._common, self._own = split_overrides([row.job.overrides for row in self._rows.values()])
            more = f"{len(self._rows) - before} more, {jobs_text(len(self._rows))}" if before else jobs_text(len(jobs))
            heading = more + (f", all with {clean(' '.join(self._common))}" if self._common else "")
        self._start_or_stop_live()
        if self._live is None:
            self._print(heading)
        self._redraw()

    def started(self, job: Job) -> None:
        """A job's process has started."""
        self._change(job, started_at=self._clock())

    def progress(self, job: Job, progress: Progress) -> None:
        """A running job has told where it stands; figures that it leaves out keep their last value."""
        with self._lock:
            row, now = self._row(job), self._clock()
            progress = replace(progress, figures={**row.figures, **progress.figures})
            row = self._rows[job.number] = replace(row, progress=progress, progress_at=now)
            due = now - self._said_at.get(job.number, -math.inf) >= _SECONDS_BETWEEN_PROGRESS_LINES
            if self._live is not None or row.state is not State.running or not due:
                return
            self._said_at[job.number] = now
            line = job_line(row, self._head(row), now)
        self._print(line)

    def ended(self, job: Job, end: End) -> None:
        """A job's process is gone."""
        self._change(job, end=end, ended_at=self._clock())

    def _change(
        self, job: Job, *, started_at: float | None = None, end: End | None = None, ended_at: float = 0
    ) -> None:
        with self._lock:
            row, now = self._row(job), self._clock()
            row = replace(row, started_at=row.started_at if started_at is None else started_at)
            row = self._rows[job.number] = replace(row, end=end, ended_at=ended_at)
            self._said_at[job.number] = now
            line, state = job_line(row, self._head(row), now), row.state
        if state is State.failed:
            self._print("\n".join([line, *_quoted_tail(job.output)]), style=_STYLE[state])
        elif self._live is None:
            self._print(line)
        self._redraw()

    def _row(self, job: Job) -> Row:
        if job.number not in self._rows:
            self._rows[job.number] = Row(job)
            self._own.append(job.overrides)
        return self._rows[job.number]

    def _head(self, row: Row) -> str:
        place = list(self._rows).index(row.job.number)
        own = clean(" ".join(self._own[place]))
        return f"job {place + 1} of {len(self._rows)} (#{row.job.number})" + (f": {own}" if own else "")

    def _snapshot(self) -> tuple[list[Row], float]:
        with self._lock:
            return list(self._rows.values()), self._clock()

    def _frame(self) -> RenderableType:
        with self._lock:
            rows, now = self._snapshot()
            first = self._rows_at_entry if self._closing else 0  # what stays behind shows no batch twice
            common = f"  {' '.join(self._common)}" if self._common else ""
            title = f"{jobs_text(len(rows))}: {count_text(rows, over=self._closing)}{common}"
            rows, own = rows[first:], self._own[first:]
        size = self._console.size
        # A terminal may wrap a line that ends in its last column.
        return frame(rows, own, title, now=now, width=max(1, size.width - 1), height=size.height)

    def _start_or_stop_live(self) -> None:
        with self._lock:
            files = all(row.job.output is not None for row in self._rows.values())
        if not files:
            self._stop_live()
        elif self._live is None and not self._broken and self._console.is_terminal and self._console.is_interactive:
            self._live = Live(
                get_renderable=self._frame,
                console=self._console,
                refresh_per_second=self._refresh_per_second,
                redirect_stdout=self._on_screen(sys.stdout),
                redirect_stderr=self._on_screen(sys.stderr),
                vertical_overflow="crop",
            )
            try:
                self._live.start()
            except (OSError, ValueError) as error:
                self._give_up(error)
            # rich replaces sys.stdout and sys.stderr, but handlers made before hold the streams themselves.
            for handler in _stream_handlers():
                if self._on_screen(handler.stream) and not isinstance(handler.stream, FileProxy):
                    handler.setStream(_as_stream(FileProxy(self._console, handler.stream)))

    def _stop_live(self) -> None:
        if self._live is None:
            return
        try:
            for stream in (sys.stdout, sys.stderr):
                if isinstance(stream, FileProxy):
                    stream.flush()  # an unfinished line would be lost
            self._live.stop()
        except (OSError, ValueError) as error:
            self._give_up(error)
        finally:
            self._live = None
            for handler in _stream_handlers():
                if isinstance(handler.stream, FileProxy):
                    handler.setStream(_as_stream(handler.stream.rich_proxied_file))
            if not self._broken:
                self._console.show_cursor(True)

    def _on_screen(self, stream: TextIO) -> bool:
        """Whether what goes to the stream would fall into the table; one sent to a file goes on to that file."""
        try:
            return stream is self._console.file or stream.isatty()
        except (AttributeError, ValueError):  # not quite a stream, or a closed one
            return False

    def _redraw(self) -> None:
        if self._live is not None and not self._broken:
            try:
                self._live.refresh()
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _print(self, text: str, *, style: str = "") -> None:
        first, newline, rest = text.partition("\n")
        if not self._broken:
            try:
                shown = Text.assemble((first, style), newline, rest)
                self._console.print(shown, highlight=False, soft_wrap=True)
            except (OSError, ValueError) as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        if not self._broken:
            self._broken = True
            log.warning("the state of the jobs is no longer shown: %s", error)


def _quoted_tail(path: Path | None) -> list[str]:
    if path is None:
        return []
    try:
        return [f"  | {line}" for line in tail(path)] or ["  (it printed nothing)"]
    except OSError as error:
        return [f"  (its output cannot be read: {error.strerror or error})"]


def _stream_handlers() -> list[logging.StreamHandler[TextIO]]:
    loggers = [
        logging.root,
        *(one for one in logging.root.manager.loggerDict.values() if isinstance(one, logging.Logger)),
    ]
    handlers = dict.fromkeys(handler for logger in loggers for handler in logger.handlers)
    return [
        handler
        for handler in handlers
        if isinstance(handler, logging.StreamHandler) and not isinstance(handler, logging.FileHandler)
    ]


def _as_stream(stream: object) -> TextIO:
    return stream  # type: ignore[return-value]  # a FileProxy has what a handler needs


class _Console(Console):
    """A console whose closed pipe is an error like others; by default rich ends the process."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))


def make_display(console: Console | None = None, *, clock: Callable[[], float] = time.monotonic) -> Display:
    """The display of a sweep's jobs.

    Args:
        console: where to show them; standard error if None.
        clock: monotonic seconds.
    """
    if console is None:
        # Variables such as FORCE_COLOR make rich take a file for a terminal, and a live table would fill it.
        console = _Console(stderr=True, force_interactive=None if sys.stderr.isatty() else False)
    return Display(console, clock=clock)
