"""Signals to launcher and server: running jobs are ended, nothing is left, and the last will is called when it should be."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from mp_hydra.isolation import processes
from tests.isolation.isolated_driver import BARE, MARK, gone_within, marked

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
APP = ROOT / "tests" / "apps" / "isolated" / "app.py"
DEADLINE = 30.0
STOPPED = ["started 0", "started 1", "ended 0 stopped", "ended 1 stopped"]


@dataclass(frozen=True)
class Sweeping:
    """A launcher in a process of its own."""

    process: subprocess.Popen[bytes]
    mark: str
    directory: Path

    @property
    def diary(self) -> list[str]:
        file = self.directory / "diary"
        return file.read_text(encoding="utf-8").splitlines() if file.exists() else []

    @property
    def said(self) -> str:
        return (self.directory / "said").read_text(encoding="utf-8", errors="replace")

    def wait_for(self, condition: Callable[[], bool]) -> None:
        end = time.monotonic() + DEADLINE
        while not condition():
            assert self.process.poll() is None, self.said
            assert time.monotonic() < end, self.said
            time.sleep(0.02)

    def wait_until_running(self, *numbers: int) -> None:
        """Until these jobs have started what they start, and their starts are told."""
        self.wait_for(lambda: all((self.directory / "jobs" / str(number) / "ready").exists() for number in numbers))
        self.wait_for(lambda: all(f"started {number}" in self.diary for number in numbers))

    def server(self) -> int:
        return next(process.pid for process in processes.table() if process.parent == self.process.pid)

    def exit_code(self) -> int:
        return self.process.wait(timeout=DEADLINE)

    def nothing_is_left(self, within: float = 3.0) -> bool:
        """Whether in time all processes and all temporary files are gone."""
        return gone_within(within, self.mark) and not list((self.directory / "tmp").iterdir())


@contextmanager
def sweeping(directory: Path, *overrides: str, jobs: str = "0,1") -> Iterator[Sweeping]:
    """Runs of the app, two at a time; what the block leaves is killed."""
    mark = uuid.uuid4().hex
    (directory / "tmp").mkdir()
    environ = {**os.environ, "PYTHONPATH": f"{ROOT}:{directory}", "TMPDIR": str(directory / "tmp"), MARK: mark}
    words = [
        *(
            "-m",
            f"+n={jobs}",
            "hydra/launcher=isolated",
            BARE,
            "hydra.launcher.n_jobs=2",
            f"hydra.sweep.dir={directory}/jobs",
        ),
        *("+hydra.callbacks.diary._target_=__main__.Diary", f"+hydra.callbacks.diary.file={directory}/diary"),
    ]
    with (directory / "said").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, APP, *words, *overrides],
            cwd=directory,
            env=environ,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        yield Sweeping(process, mark, directory)
    finally:
        process.kill()
        process.wait()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.parametrize("to_group", [False, True], ids=["alone", "group"])
def test_ctrl_c_stops_the_running_jobs(tmp_path: Path, to_group: bool) -> None:
    with sweeping(tmp_path, jobs="0,1,2") as sweep:
        sweep.wait_until_running(0, 1)
        if to_group:
            os.killpg(sweep.process.pid, signal.SIGINT)
        else:
            sweep.process.send_signal(signal.SIGINT)
        assert sweep.exit_code() != 0
        assert sorted(sweep.diary) == sorted(STOPPED)  # the third never started, and the will was not called
        assert "KeyboardInterrupt" in sweep.said
        assert sweep.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_programs_stops_the_running_jobs(tmp_path: Path, number: signal.Signals) -> None:
    with sweeping(tmp_path) as sweep:
        sweep.wait_until_running(0, 1)
        sweep.process.send_signal(number)
        assert sweep.exit_code() == 128 + number
        assert sorted(sweep.diary) == sorted(STOPPED)
        assert sweep.nothing_is_left()


def test_jobs_that_do_not_listen_are_killed_after_their_grace(tmp_path: Path) -> None:
    with sweeping(tmp_path, "+stubborn=true", "hydra.launcher.grace=0.8") as sweep:
        sweep.wait_until_running(0, 1)
        start = time.monotonic()
        sweep.process.send_signal(signal.SIGINT)
        sweep.exit_code()
        assert time.monotonic() - start >= 0.8
        assert sorted(sweep.diary) == sorted(STOPPED)
        assert sweep.nothing_is_left()


def test_a_second_ctrl_c_does_not_wait_for_the_grace(tmp_path: Path) -> None:
    with sweeping(tmp_path, "+stubborn=true", "hydra.launcher.grace=60") as sweep:
        sweep.wait_until_running(0, 1)
        sweep.process.send_signal(signal.SIGINT)
        time.sleep(0.5)
        assert sweep.process.poll() is None
        sweep.process.send_signal(signal.SIGINT)
        sweep.exit_code()
        assert sorted(sweep.diary) == sorted(STOPPED)
        assert sweep.nothing_is_left()


@pytest.mark.parametrize(
    "overrides", [(), ("+stubborn=true", "hydra.launcher.grace=0.5"), ("hydra.launcher.start=exec",)]
)
def test_the_death_of_the_launcher_ends_all_and_calls_the_will(tmp_path: Path, overrides: tuple[str, ...]) -> None:
    with sweeping(tmp_path, *overrides) as sweep:
        sweep.wait_until_running(0, 1)
        sweep.process.kill()
        sweep.exit_code()
        assert sweep.nothing_is_left(within=6.0)
        assert sorted(sweep.diary) == ["started 0", "started 1", f"will in {tmp_path}"]


def test_the_death_of_the_server_fails_the_running_jobs_alone(tmp_path: Path) -> None:
    with sweeping(tmp_path, "+stubborn=true", "+wait=[0,1]", jobs="0,1,2,3") as sweep:
        sweep.wait_until_running(0, 1)
        os.kill(sweep.server(), signal.SIGKILL)
        assert sweep.exit_code() != 0
        expected = [f"started {n}" for n in range(4)] + [
            "ended 0 lost",
            "ended 1 lost",
            "ended 2 completed",
            "ended 3 completed",
        ]
        assert sorted(sweep.diary) == sorted(expected)
        assert "lost, because the job server was killed by SIGKILL" in sweep.said
        assert sweep.nothing_is_left()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_an_end_during_the_preload_leaves_nothing(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "slow.py").write_text("import pathlib, time; pathlib.Path('importing').touch(); time.sleep(2)")
    with sweeping(tmp_path, "hydra.launcher.preload=[slow]") as sweep:
        sweep.wait_for((tmp_path / "importing").exists)
        sweep.process.send_signal(number)
        assert sweep.exit_code() != 0
        assert sweep.nothing_is_left(within=5.0)
        assert sweep.diary == ([f"will in {tmp_path}"] if number == signal.SIGKILL else [])


def test_an_ordinary_end_leaves_nothing_and_calls_no_will(tmp_path: Path) -> None:
    with sweeping(tmp_path, "+wait=[]") as sweep:
        assert sweep.exit_code() == 0, sweep.said
        assert sorted(sweep.diary) == ["ended 0 completed", "ended 1 completed", "started 0", "started 1"]
        assert sweep.nothing_is_left()
