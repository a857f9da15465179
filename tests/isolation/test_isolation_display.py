"""The display of a sweep's jobs: its rules by hand-worked values, and what a terminal shows in the end."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import pytest
from omegaconf import OmegaConf
from rich.cells import cell_len
from rich.console import Console
from rich.file_proxy import FileProxy

from mp_hydra.isolation.display import Display, frame, make_display
from mp_hydra.isolation.display_rules import (
    Row,
    count_text,
    figure_names,
    job_line,
    seconds_left,
    select_columns,
    select_rows,
    share,
)
from mp_hydra.isolation.display_text import clean, crop, duration, fit_overrides, number, split_overrides, tail
from mp_hydra.isolation.jobs import Cause, End, Job, Progress

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DONE, KILLED = End(Cause.completed, seconds=12.3), End(Cause.signalled, "killed by SIGKILL", seconds=3.2)
STOPPED = End(Cause.stopped, "Ctrl-C", seconds=1.0)


def job(num: int, *overrides: str, output: Path | None = Path("/sweep/output.log")) -> Job:
    return Job(num, overrides or (f"seed={num}",), OmegaConf.create(), Path("/sweep"), output)


class Clock:
    """Time that passes only when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def terminal(width: int = 100, height: int = 30) -> Console:
    # rich would take COLUMNS and TERM of whoever runs the tests.
    return Console(file=io.StringIO(), force_terminal=True, width=width, height=height, color_system=None, _environ={})


def written(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def screen(text: str) -> list[str]:
    """What a terminal shows, scrolled-off lines included, after the text with its control codes."""
    lines, row, column = [""], 0, 0
    for code, character in re.findall(r"\x1b\[(\??[0-9;]*[A-Za-z])|([^\x1b])", text):
        if code == "2K":
            lines[row] = ""
        elif code == "1A":
            row -= 1
        elif code:
            assert code in {"?25l", "?25h"}, code
        elif character == "\r":
            column = 0
        elif character == "\n":
            row, column = row + 1, 0
            lines += [""] * (row + 1 - len(lines))
        else:
            lines[row] = lines[row][:column].ljust(column) + character + lines[row][column + 1 :]
            column += 1
    return [line.rstrip() for line in lines]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def live(clock: Clock) -> Display:
    """In a terminal; redrawn at changes of state alone."""
    return Display(terminal(), clock=clock, refresh_per_second=0.001)


@pytest.fixture
def plain(clock: Clock) -> Display:
    return Display(Console(file=io.StringIO(), width=40, _environ={}), clock=clock)


def console_of(display: Display) -> Console:
    return display._console


def lines_of(display: Display) -> list[str]:
    return screen(written(display._console))


# Rules


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [
        (0.0, "0.0 s"),
        (59.94, "59.9 s"),
        (59.96, "1 min 0 s"),
        (83.4, "1 min 23 s"),
        (3599.6, "1 h 0 min"),
        (86399.0, "1 d 0 h"),
        (90000.0, "1 d 1 h"),
    ],
)
def test_duration_carries_over_where_rounding_fills_a_unit(seconds: float, shown: str) -> None:
    assert duration(seconds) == shown


def test_duration_without_tenths_is_whole_seconds() -> None:
    assert [duration(value, tenths=False) for value in (12.4, 59.6)] == ["12 s", "1 min 0 s"]


@pytest.mark.parametrize(
    ("fraction", "elapsed", "since", "left"),
    [
        (0.25, 10.0, 0.0, 30.0),
        (0.25, 10.0, 12.0, 18.0),
        (0.25, 10.0, 30.5, None),  # the countdown is over: the estimate was wrong
        (1.0, 10.0, 0.0, 0.0),
        (1.5, 10.0, 0.0, 0.0),
        (0.0, 10.0, 0.0, None),
        (math.nan, 10.0, 0.0, None),
    ],
)
def test_time_left_goes_by_the_pace_so_far(fraction: float, elapsed: float, since: float, left: float | None) -> None:
    assert seconds_left(fraction, elapsed, since) == left


def test_share_done_is_kept_between_nothing_and_all() -> None:
    assert [share(value) for value in (-1.0, 0.5, 7.0, math.nan, math.inf)] == [0.0, 0.5, 1.0, 0.0, 1.0]


def test_only_overrides_that_differ_stand_in_the_rows() -> None:
    common, own = split_overrides([("a=1", "b=1", "c=1"), ("b=1", "c=1", "a=2"), ("c=1", "b=1")])
    assert common == ("b=1", "c=1")
    assert own == [("a=1",), ("a=2",), ()]


def test_single_job_keeps_its_overrides_for_there_is_nothing_to_compare() -> None:
    assert split_overrides([("a=1", "b=1")]) == ((), [("a=1", "b=1")])
    assert split_overrides([]) == ((), [])


@pytest.mark.parametrize(
    ("width", "heading", "shown"),
    [
        (28, "overrides", ["+model.dense.units=16 seed=1", "+model.dense.units=8 seed=2"]),
        (16, "overrides", ["units=16 seed=1", "units=8 seed=2"]),
        (14, "units seed", ["16 1", "8 2"]),
        (3, "..d", ["..1", "8 2"]),
    ],
)
def test_overrides_lose_paths_then_keys_then_their_middle_as_width_falls(
    width: int, heading: str, shown: list[str]
) -> None:
    rows = [("+model.dense.units=16", "seed=1"), ("+model.dense.units=8", "seed=2")]
    assert fit_overrides(rows, width) == (heading, shown)


def test_paths_of_keys_are_kept_where_two_keys_end_alike() -> None:
    assert fit_overrides([("encoder.units=1", "decoder.units=2")], 17) == ("units units", ["1 2"])


def test_values_of_different_keys_are_not_headed_by_those_of_the_first_row() -> None:
    assert fit_overrides([("learning_rate=1",), ("weight_decay=2",)], 9) == ("overrides", ["1", "2"])


@pytest.mark.parametrize(("width", "shown"), [(19, "learning_rate=0.001"), (12, "learn..0.001"), (2, ".."), (1, ".")])
def test_long_text_is_cut_in_the_middle(width: int, shown: str) -> None:
    assert crop("learning_rate=0.001", width) == shown


def test_wide_characters_count_twice_when_text_is_cut() -> None:
    assert cell_len(crop("\u6570" * 10, 8)) == 8


def rows_of(states: str) -> list[Row]:
    """Rows by a letter each: r(unning), w(aiting), d(one); later rows ended later."""
    made = {
        "w": lambda at: Row(job(at)),
        "r": lambda at: Row(job(at), started_at=1.0),
        "d": lambda at: Row(job(at), started_at=1.0, end=DONE, ended_at=float(at)),
    }
    return [made[state](at) for at, state in enumerate(states)]


@pytest.mark.parametrize(
    ("states", "room", "shown"),
    [
        ("ddrww", 5, [0, 1, 2, 3, 4]),
        ("dddddrwwwww", 5, [3, 4, 5, 6, 7]),  # one running, two last ended, two next waiting
        ("dddddrwwwww", 4, [3, 4, 5, 6]),
        ("dddddr", 4, [2, 3, 4, 5]),  # none waits: their room goes to the ended
        ("drwwwww", 5, [0, 1, 2, 3, 4]),  # and the other way round
        ("rrrrr", 3, [0, 1, 2]),
        ("drw", 1, [1]),
        ("dw", 1, [0]),
    ],
)
def test_rows_shown_are_the_running_ones_the_last_ended_and_the_next(states: str, room: int, shown: list[int]) -> None:
    assert select_rows(rows_of(states), room) == shown


def test_last_ended_go_by_when_they_ended_and_not_by_their_number() -> None:
    late, early = (Row(job(at), started_at=1.0, end=DONE, ended_at=9.0 - at) for at in (0, 1))
    assert select_rows([late, early], 1) == [0]


def test_columns_that_do_not_fit_are_left_out_and_lesser_ones_take_the_room() -> None:
    wanted = {"#": 1, "overrides": 10, "state": 7, "time": 11, "left": 11, "bar": 5}
    assert select_columns(wanted, 44) == {"#", "overrides", "state", "time", "bar"}  # 1+2+10+2+7+2+11+2+5 = 42
    assert select_columns(wanted, 5) == {"#", "overrides", "state"}


def test_figure_columns_are_the_union_of_names_and_at_most_four() -> None:
    rows = [
        Row(job(at), progress=Progress(0.0, figures=dict.fromkeys(names, 1.0)))
        for at, names in enumerate(("ab", "ca", "def"))
    ]
    assert figure_names(rows) == ["a", "b", "c", "d"]


def test_whole_numbers_are_shown_in_full_and_others_in_four_digits() -> None:
    values = (1 / 3, 32768.0, 123456.7, 1e9, -2.0, math.inf, math.nan)
    assert [number(value) for value in values] == ["0.3333", "32768", "1.235e+05", "1e+09", "-2", "inf", "nan"]


def test_counts_name_what_never_ran_once_all_is_over() -> None:
    rows = [*rows_of("ddrw"), Row(job(9), 1.0, end=KILLED), Row(job(10), 1.0, end=STOPPED)]
    assert count_text(rows) == "2 done, 1 failed, 1 stopped, 1 running, 1 waiting"
    assert count_text(rows, over=True) == "2 done, 1 failed, 1 stopped, 1 not ended, 1 not run"


@pytest.mark.parametrize(
    ("end", "line"),
    [
        (DONE, "job 1: done in 12.3 s, acc 0.9812"),
        (KILLED, "job 1: FAILED after 3.2 s: killed by SIGKILL; its output is in /sweep/output.log"),
        (End(Cause.out_of_memory), "job 1: FAILED after 0.0 s: out of memory; its output is in /sweep/output.log"),
        (
            End(Cause.raised, "two\nlines \x1b[31mred"),
            "job 1: FAILED after 0.0 s: two lines red; its output is in /sweep/output.log",
        ),
        (STOPPED, "job 1: stopped after 1.0 s: Ctrl-C"),
    ],
)
def test_line_says_how_a_job_ended(end: End, line: str) -> None:
    assert job_line(Row(job(1), 1.0, Progress(1.0, figures={"acc": 0.98123}), end=end), "job 1", now=50.0) == line


def test_line_of_a_job_that_never_started_gives_no_time() -> None:
    assert job_line(Row(job(1), end=STOPPED), "job 1", now=50.0) == "job 1: stopped before it started: Ctrl-C"


# The end of a job's output


def test_tail_is_read_without_codes_junk_and_what_was_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_bytes(
        b"first\n\x1b[1;31mred\x1b[0m \x1b]0;title\x07plain\n 10%\r100%\r\n\x00\x07nul\xff\n\tindented\n\n\n"
    )
    assert tail(path) == ["first", "red plain", "100%", "nul\ufffd", "    indented"]
    assert tail(path, 2) == ["nul\ufffd", "    indented"]


def test_tail_of_a_huge_file_reads_its_end_alone(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    with path.open("wb") as file:
        file.truncate(1 << 40)  # a terabyte of nothing takes no room on disk
        file.seek(0, io.SEEK_END)
        file.write(b"\nlast words\n")
    assert tail(path) == ["last words"]


def test_tail_of_one_endless_line_is_cut(tmp_path: Path) -> None:
    path = tmp_path / "output.log"
    path.write_text("x" * 200_000)
    assert tail(path) == ["x" * 300 + ".."]


def test_text_of_others_keeps_no_terminal_code() -> None:
    assert clean("a\x1b[2Jb\x1b(Bc\rd\x9bK\u202e") == "abcdK"


# Plain lines


def test_plain_lines_tell_each_change_of_state_in_one_unbroken_line(plain: Display, clock: Clock) -> None:
    first, second = job(0, "precision=fp32", "epochs=3"), job(1, "precision=mixed_float16", "epochs=3")
    with plain:
        plain.planned([first, second])
        plain.started(first)
        clock.now += 12.3
        plain.progress(first, Progress(1.0, "epoch 3/3", {"test/accuracy": 0.98123}))
        plain.ended(first, DONE)
        plain.started(second)
        plain.ended(second, STOPPED)
        clock.now += 70.9
    assert written(console_of(plain)).splitlines() == [
        "2 jobs, all with epochs=3",
        "job 1 of 2 (#0): precision=fp32: running",
        "job 1 of 2 (#0): precision=fp32: done in 12.3 s, test/accuracy 0.9812",
        "job 2 of 2 (#1): precision=mixed_float16: running",
        "job 2 of 2 (#1): precision=mixed_float16: stopped after 1.0 s: Ctrl-C",
        "2 jobs: 1 done, 1 stopped in 1 min 23 s",
    ]


def test_plain_progress_is_told_every_thirty_seconds_at_most(plain: Display, clock: Clock) -> None:
    with plain:
        plain.planned([job(0)])
        plain.started(job(0))
        for second in range(1, 66):
            clock.now = 100.0 + second
            plain.progress(job(0), Progress(second / 120, f"step {second}", {"loss": 0.5}))
    assert [line for line in written(console_of(plain)).splitlines() if "step" in line] == [
        "job 1 of 1 (#0): seed=0: step 30, about 1 min 30 s left, loss 0.5",
        "job 1 of 1 (#0): seed=0: step 60, about 1 min 0 s left, loss 0.5",
    ]


def test_figures_that_a_report_leaves_out_keep_their_last_value(plain: Display) -> None:
    with plain:
        plain.started(job(0))
        plain.progress(job(0), Progress(0.5, figures={"loss": 0.5}))
        plain.progress(job(0), Progress(1.0, figures={"accuracy": 0.9}))
        plain.ended(job(0), DONE)
    assert "done in 12.3 s, loss 0.5, accuracy 0.9" in written(console_of(plain))


def test_failure_shows_the_end_of_the_output(plain: Display, tmp_path: Path) -> None:
    output = tmp_path / "output.log"
    output.write_text("".join(f"line {at}\n" for at in range(20)))
    with plain:
        plain.started(job(0, output=output))
        plain.ended(job(0, output=output), KILLED)
    lines = written(console_of(plain)).splitlines()
    assert lines[1] == f"job 1 of 1 (#0): seed=0: FAILED after 3.2 s: killed by SIGKILL; its output is in {output}"
    assert lines[2:-1] == [f"  | line {at}" for at in range(5, 20)]


@pytest.mark.parametrize(
    ("made", "said"),
    [(False, "(its output cannot be read: No such file or directory)"), (True, "(it printed nothing)")],
)
def test_failure_without_output_says_so(made: bool, said: str, plain: Display, tmp_path: Path) -> None:
    if made:
        (tmp_path / "output.log").touch()
    with plain:
        plain.ended(job(0, output=tmp_path / "output.log"), KILLED)
    assert said in written(console_of(plain))


def test_brackets_in_overrides_are_text_and_no_markup(plain: Display) -> None:
    with plain:
        plain.planned([job(0, "layers=[bold]", "a=:smile:")])
        plain.started(job(0, "layers=[bold]", "a=:smile:"))
    assert "job 1 of 1 (#0): layers=[bold] a=:smile:: running" in written(console_of(plain))


def test_display_without_jobs_says_nothing(plain: Display, live: Display) -> None:
    with plain, live:
        plain.planned([])
        live.planned([])
    assert written(console_of(plain)) == ""
    assert "jobs" not in written(console_of(live))


def test_later_batches_add_to_the_count(plain: Display) -> None:
    with plain:
        plain.planned([job(0)])
        plain.planned([job(1), job(2)])
        plain.started(job(2))
    lines = written(console_of(plain)).splitlines()
    assert lines[:3] == ["1 job", "2 more, 3 jobs", "job 3 of 3 (#2): seed=2: running"]
    assert lines[3].startswith("3 jobs: 1 not ended, 2 not run in")


# The table


def drawn(rows: Sequence[Row], own: Sequence[Sequence[str]], *, now: float, width: int, height: int = 30) -> list[str]:
    console = terminal(width, height)
    console.print(frame(rows, own, "title", now=now, width=width, height=height))
    return [line.rstrip() for line in written(console).splitlines()]


def test_table_shows_state_progress_times_and_figures() -> None:
    rows = [
        Row(job(0), 0.0, Progress(1.0, "epoch 3/3", {"loss": 0.123456}), 9.0, DONE, 12.3),
        Row(job(1), 10.0, Progress(0.25, "epoch 1/4", {"loss": 2.0}), 20.0),
        Row(job(2)),
    ]
    assert drawn(rows, [["seed=0"], ["seed=1"], ["seed=2"]], now=24.0, width=80) == [
        "title",
        "#  overrides  state    progress                 time  left    loss",
        "0  seed=0     done     epoch 3/3              12.3 s        0.1235",
        "1  seed=1     running  epoch 1/4  \u2501\u2501\u2578           14 s  26 s       2",
        "2  seed=2     waiting",
    ]


@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (60, 12), (40, 10), (24, 6)])
def test_table_of_500_jobs_keeps_within_the_terminal(width: int, height: int) -> None:
    rows = rows_of("d" * 200 + "rr" + "w" * 298)
    own = [[f"model.optimizer.learning_rate={at / 1000}", f"model={'m' * 300}{at}"] for at in range(500)]
    lines = drawn(rows, own, now=5.0, width=width, height=height)
    assert len(lines) <= height - 1
    assert max(map(len, lines)) <= width
    assert sum(" running" in line for line in lines[2:-1]) == 2
    assert lines[-1].startswith(f"and {500 - (height - 4)} more: "[:width])


def test_table_is_live_and_stays_behind_as_it_was_at_the_end(live: Display, clock: Clock) -> None:
    with live:
        live.planned([job(0), job(1)])
        live.started(job(0))
        clock.now += 3.2
        live.ended(job(0), DONE)
    assert lines_of(live) == [
        "2 jobs: 1 done, 1 not run",
        "#  overrides  state      time  left",
        "0  seed=0     done     12.3 s",
        "1  seed=1     waiting",
        "2 jobs: 1 done, 1 not run in 3.2 s",
        "",
    ]


def test_table_of_a_further_batch_leaves_the_rows_of_that_batch_behind(live: Display) -> None:
    for number_ in (0, 1):
        with live:
            live.planned([job(number_)])
            live.started(job(number_))
            live.ended(job(number_, output=None), DONE)
    last = lines_of(live)[lines_of(live).index("2 jobs: 2 done") :]
    assert [line[:9] for line in last if line[:1] in {"0", "1"}] == ["1  seed=1"]


def test_failure_stays_above_the_live_table(live: Display, tmp_path: Path) -> None:
    output = tmp_path / "o"
    output.write_text("Traceback\nBoom\n")
    with live:
        live.planned([job(0, output=output), job(1, output=output)])
        live.started(job(0))
        live.ended(job(0, output=output), KILLED)
        live.started(job(1))
    lines = lines_of(live)
    assert lines[0].startswith("job 1 of 2 (#0): seed=0: FAILED after 3.2 s: killed by SIGKILL; its output is in")
    at = lines.index("  | Boom")
    assert lines[at - 1] == "  | Traceback"
    assert lines[at + 1] == "2 jobs: 1 failed, 1 not ended"


def test_jobs_that_print_to_the_terminal_get_plain_lines_there(live: Display) -> None:
    with live:
        live.planned([job(0)])
        live.planned([job(1, output=None)])
        live.started(job(1, output=None))
    assert "job 2 of 2 (#1): seed=1: running" in lines_of(live)


@pytest.fixture
def logger(live: Display) -> Iterator[logging.Logger]:
    """A logger whose handler holds the terminal's own stream from before, as Hydra's do."""
    logger, handler = logging.getLogger("test_isolation_display"), logging.StreamHandler(console_of(live).file)
    logger.addHandler(handler)
    logger.propagate = False
    yield logger
    assert handler.stream is console_of(live).file
    logger.removeHandler(handler)


def test_what_others_print_and_log_appears_above_the_table(
    live: Display, logger: logging.Logger, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = console_of(live).file
    monkeypatch.setattr(sys, "stderr", file)
    monkeypatch.setattr(sys, "stdout", file)
    with live:
        live.planned([job(0)])
        live.started(job(0))
        logger.warning("from a logger")
        print("from print")
        sys.stderr.write("unfinished line")
    assert sys.stderr is file
    assert sys.stdout is file
    lines = lines_of(live)
    assert lines[:3] == ["from a logger", "from print", "unfinished line"]
    assert lines[3] == "1 job: 1 not ended"
    assert sum(line.startswith("0  seed=0") for line in lines) == 1


def test_handler_made_while_the_table_is_live_gets_the_stream_itself_afterwards(
    live: Display, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = console_of(live).file
    monkeypatch.setattr(sys, "stderr", file)
    logger = logging.getLogger("test_isolation_display.late")
    with live:
        live.planned([job(0)])
        logger.addHandler(logging.StreamHandler())
        assert isinstance(logger.handlers[0].stream, FileProxy)  # type: ignore[attr-defined]
    assert logger.handlers.pop().stream is file  # type: ignore[attr-defined]


def test_stream_that_goes_to_a_file_is_left_alone(live: Display, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", elsewhere := io.StringIO())
    with live:
        live.planned([job(0)])
        print("result")
    assert elsewhere.getvalue() == "result\n"
    assert "result" not in written(console_of(live))


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_terminal_is_given_back_whatever_ends_the_sweep(error: type[BaseException], live: Display) -> None:
    before = sys.stdout, sys.stderr

    def sweep() -> None:
        with live:
            live.planned([job(0)])
            live.started(job(0))
            raise error

    with pytest.raises(error):
        sweep()
    assert (sys.stdout, sys.stderr) == before
    shown = written(console_of(live))
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")
    assert "1 job: 1 not ended in 0.0 s" in lines_of(live)


class Gone(io.StringIO):
    """A terminal that is closed while the sweep runs."""

    gone = False

    def write(self, text: str) -> int:
        if self.gone:
            raise OSError(5, "Input/output error")
        return super().write(text)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_terminal_that_goes_away_ends_the_display_and_not_the_sweep(
    is_terminal: bool, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    file = Gone()
    display = Display(
        Console(file=file, force_terminal=is_terminal, _environ={}), clock=clock, refresh_per_second=0.001
    )
    with display:
        display.planned([job(0)])
        file.gone = True
        display.started(job(0))
        display.progress(job(0), Progress(0.5))
        display.ended(job(0), KILLED)
    assert [record.message for record in caplog.records] == [
        "the state of the jobs is no longer shown: [Errno 5] Input/output error"
    ]


def test_reader_of_the_lines_that_goes_away_does_not_end_the_sweep(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    file = io.TextIOWrapper(io.FileIO(writing, "w"), write_through=True)
    monkeypatch.setattr(sys, "stderr", file)
    with make_display() as display:
        display.planned([job(0)])
        display.started(job(0))
        display.ended(job(0), DONE)
    assert [record.message for record in caplog.records] == [
        "the state of the jobs is no longer shown: [Errno 32] Broken pipe"
    ]
    with contextlib.suppress(BrokenPipeError):
        file.close()


def test_file_is_no_terminal_even_where_colours_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    file: TextIO = io.StringIO()
    monkeypatch.setattr(sys, "stderr", file)
    with make_display() as display:
        display.planned([job(0)])
        display.started(job(0))
    assert "running" in written(console_of(display))
    assert "\x1b[?25l" not in written(console_of(display))


def test_size_of_the_terminal_is_read_anew_for_each_frame(live: Display) -> None:
    with live:
        live.planned([job(at) for at in range(20)])
        assert "and" not in "".join(lines_of(live))
        console_of(live).height = 10
        live.started(job(0))
        assert [line for line in lines_of(live) if line][-1] == "and 14 more: 14 waiting"
