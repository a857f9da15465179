"""What a sweep shows while it runs: a live table of its jobs in a terminal, plain lines elsewhere.

`display_rules` has what is said of jobs, and `display_text` how; here it is drawn, and what others print kept out of the table.
"""

from __future__ import annotations

import errno
import logging
import math
import os
import sys
import threading
import time
from dataclasses import replace
from typing import TYPE_CHECKING, TextIO

from rich.cells import cell_len
from rich.console import Console, Group
from rich.file_proxy import FileProxy
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from mp_hydra.isolation.display_rules import (
    GAP,
    Row,
    State,
    count_text,
    figure_names,
    job_line,
    jobs_text,
    select_columns,
    select_rows,
    share,
)
from mp_hydra.isolation.display_text import clean, crop, duration, fit_overrides, number, split_overrides, tail

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from rich.console import RenderableType
    from typing_extensions import Self

    from mp_hydra.isolation.jobs import End, Job, Progress

log = logging.getLogger(__name__)

_SECONDS_BETWEEN_PROGRESS_LINES = 30.0
_LONGEST_PROGRESS_TEXT = 24
_BAR_WIDTH = 10
_LINES_BESIDE_ROWS = 4  # title, heading, the line that counts the rest, and one left free above
_STYLE = {
    State.waiting: "dim",
    State.running: "cyan",
    State.done: "green",
    State.failed: "bold red",
    State.stopped: "yellow",
}


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
    others = sum(widths[name] + GAP for name in kept if name != "overrides")
    heading, fitted = fit_overrides(overrides, max(1, min(natural, width - others)))

    table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False, header_style="bold")
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
