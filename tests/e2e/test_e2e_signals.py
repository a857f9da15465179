"""Ctrl-C and SIGTERM: the run ends as killed, at once and in one line, wherever they arrive."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from tests.e2e.app_driver import BRIEF, ROOT, Tracked, client, tracked

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

pytestmark = pytest.mark.process

APP = ROOT / "tests" / "apps" / "own_model"
DEADLINE_SECONDS = 90.0
LONG = ("model=mlp", "model.widths=[8]", "epochs=100000")


@dataclass(frozen=True)
class Training:
    """A process that trains, and what it has said so far."""

    process: subprocess.Popen[bytes]
    said: Path

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + DEADLINE_SECONDS
        while text not in self.said.read_text(errors="replace"):
            assert self.process.poll() is None, self.said.read_text(errors="replace")
            assert time.monotonic() < end, f"no {text!r} in {self.said.read_text(errors='replace')}"
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(timeout=DEADLINE_SECONDS)

    def last_words(self) -> list[str]:
        """What it said beside figures and TensorFlow's own log lines."""
        lines = self.said.read_text(errors="replace").splitlines()
        return [line for line in lines if not line.startswith(("epoch ", "loading", "E0000", "I0000", "W0000"))]


@contextmanager
def training(directory: Path, *overrides: str) -> Iterator[Training]:
    """`python train.py` in a process of its own, which does not outlive the block."""
    words = [*BRIEF, *overrides, f"hydra.run.dir={directory}/out"]
    with (directory / "said.txt").open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, ROOT / "train.py", *words], cwd=APP, env=dict(os.environ), stdout=said, stderr=said
        )
    try:
        yield Training(process, directory / "said.txt")
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _last_run() -> Tracked:
    run = tracked()[-1]
    running = client().search_runs([run.run.info.experiment_id], "attributes.status = 'RUNNING'")
    assert not running
    return run


@pytest.mark.parametrize(
    ("number", "code", "line"),
    [
        pytest.param(signal.SIGINT, 130, "mp_hydra: interrupted", id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, "mp_hydra: terminated", id="SIGTERM"),
    ],
)
def test_a_signal_during_training_ends_the_run_as_killed_with_one_line(
    number: signal.Signals, code: int, line: str, tmp_path: Path
) -> None:
    with training(tmp_path, *LONG) as process:
        process.wait_for("epoch 2/")
        process.process.send_signal(number)
        assert process.end() == code
        assert process.last_words() == [line]
    run = _last_run()
    assert (run.status, run.outcome) == ("KILLED", "killed")
    assert run.metrics["loss_scale/applied_steps"] >= 21  # of the epochs before


def test_an_impatient_user_with_two_ctrl_c_leaves_no_running_run_and_no_traceback(tmp_path: Path) -> None:
    with training(tmp_path, *LONG) as process:
        process.wait_for("epoch 1/")
        process.process.send_signal(signal.SIGINT)
        time.sleep(0.02)
        process.process.send_signal(signal.SIGINT)
        assert process.end() in (130, -signal.SIGINT)  # the second may meet an interpreter that is shutting down
        assert process.last_words() == ["mp_hydra: interrupted"]
    run = _last_run()
    assert (run.status, run.outcome) == ("KILLED", "killed")


def test_ctrl_c_while_data_are_loaded_ends_the_run_as_killed(tmp_path: Path) -> None:
    with training(tmp_path, "dataset=custom", "dataset._target_=my_data.endless") as process:
        process.wait_for("loading")
        process.process.send_signal(signal.SIGINT)
        assert process.end() == 130
        assert process.last_words() == ["mp_hydra: interrupted"]
    run = _last_run()
    assert (run.status, run.outcome) == ("KILLED", "killed")


def test_sigterm_while_tensorflow_is_imported_is_one_line_and_leaves_no_run(tmp_path: Path) -> None:
    before = len(tracked())
    with training(tmp_path, *LONG, "hydra.verbose=true") as process:
        process.wait_for("Hydra")  # Hydra's own debug lines are the last sign before the import
        time.sleep(0.5)
        process.process.send_signal(signal.SIGTERM)
        assert process.end() == 143
        assert process.last_words()[-1] == "mp_hydra: terminated"
        assert "Traceback" not in process.said.read_text()
    assert len(tracked()) == before
