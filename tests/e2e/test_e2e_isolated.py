"""Sweeps with the launcher `isolated` as a user types them: faults, signals, going on, several at a time, and no leaks."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import psutil
import pytest

from mp_hydra import tracking
from tests.e2e.app_driver import ROOT, Tracked

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.process, pytest.mark.timeout(280)]

APP = ROOT / "tests" / "apps" / "own_model"
SMALL = ("epochs=1", "batch_size=256")
MLP = ("model=mlp", "model.widths=[8]")
PRECISIONS = ("mixed_bfloat16", "fp32", "mixed_float16")
MARK = "MP_HYDRA_TEST_SWEEP"  # in the environment of every process that a sweep starts
DEADLINE_SECONDS = 120.0


@dataclass(frozen=True)
class Lab:
    """A store and a working directory of the test's own."""

    directory: Path

    @property
    def environment(self) -> dict[str, str]:
        path = os.pathsep.join([str(ROOT), str(APP)])
        return {
            **os.environ,
            "MP_HYDRA_HOME": str(self.directory / "home"),
            "PYTHONPATH": path,
            MARK: str(self.directory),
        }

    def command(self, *overrides: str) -> list[str]:
        words = ["-m", *SMALL, f"hydra.sweep.dir={self.directory}/sweep", *overrides]
        return [sys.executable, str(ROOT / "train.py"), *words]

    def sweep(self, *overrides: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            self.command(*overrides),
            cwd=self.directory,
            env={**self.environment, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        self.no_process_is_left()
        return done

    @contextmanager
    def started(self, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
        with (self.directory / "said.txt").open("wb") as said:
            process = subprocess.Popen(
                self.command(*overrides), cwd=self.directory, env=self.environment, stdout=said, stderr=said
            )
        try:
            yield process
        finally:
            process.kill()
            process.wait()

    def runs(self) -> tuple[Tracked, list[Tracked]]:
        """The parent run, and the runs of the jobs in the order of their start."""
        client = tracking.open_client(f"sqlite:///{self.directory}/home/mlflow.db")
        found = client.search_runs(["1"], order_by=["attributes.start_time ASC"])
        all_runs = [Tracked(run, Path(run.info.artifact_uri.removeprefix("file://"))) for run in found]
        (parent,) = [run for run in all_runs if run.tags.get("mp_hydra.kind") == "sweep"]
        children = [run for run in all_runs if run is not parent]
        assert {run.tags["mlflow.parentRunId"] for run in children} <= {parent.run.info.run_id}
        return parent, children

    def by_seed(self) -> dict[str, list[Tracked]]:
        found: dict[str, list[Tracked]] = {}
        for run in self.runs()[1]:
            found.setdefault(run.params["seed"], []).append(run)
        return found

    def no_process_is_left(self, seconds: float = 0.0) -> None:
        end = time.monotonic() + seconds
        while (left := self._processes()) and time.monotonic() < end:
            time.sleep(0.1)
        assert not left

    def _processes(self) -> list[str]:
        mark = f"{MARK}={self.directory}".encode()
        found = []
        for process in psutil.process_iter(["pid", "cmdline", "status"]):
            try:
                environ = Path(f"/proc/{process.pid}/environ").read_bytes()
            except OSError:
                continue
            if mark in environ.split(b"\0") and process.info["status"] != psutil.STATUS_ZOMBIE:
                found.append(f"{process.pid} {process.info['cmdline']}")
        return found


@pytest.fixture
def lab(tmp_path: Path) -> Lab:
    return Lab(tmp_path)


def ended(run: Tracked) -> tuple[str, str]:
    return run.status, run.outcome


@pytest.fixture
def memory_cgroup() -> Iterator[Path]:
    """A control group in which 300 MiB are all the memory there is."""
    for root, limit in (
        (Path("/sys/fs/cgroup/memory"), "memory.limit_in_bytes"),
        (Path("/sys/fs/cgroup"), "memory.max"),
    ):
        group = root / f"mp_hydra_test_{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            (group / limit).write_text(str(300 * 2**20), encoding="ascii")
            yield group
        except OSError:
            continue
        else:
            return
        finally:
            group.rmdir()
    pytest.skip("this user may not make a memory control group")


def test_a_job_that_the_kernel_kills_for_want_of_memory_is_recorded_as_such(lab: Lab, memory_cgroup: Path) -> None:
    words = (*MLP, "seed=6,0", "+callbacks.fault._target_=my_faults.Fault", "+callbacks.fault.seed=${seed}")
    done = lab.sweep(*words, MEMORY_CGROUP=str(memory_cgroup))
    assert done.returncode == 1, done.stderr
    runs = lab.by_seed()
    assert ended(runs["6"][0]) == ("FAILED", "out_of_memory")
    assert "the kernel had no memory left" in runs["6"][0].tags["mp_hydra.reason"]
    assert ended(runs["0"][0]) == ("FINISHED", "ok")
    assert "mp_hydra: 1 of 2 jobs failed" in done.stderr


def test_every_fault_is_a_failed_job_with_a_reason_and_resume_runs_only_those(lab: Lab) -> None:
    words = (*MLP, "seed=0,1,2,3,4,5", "+callbacks.fault._target_=my_faults.Fault", "+callbacks.fault.seed=${seed}")
    done = lab.sweep(*words, "hydra.launcher.timeout=25", "hydra.launcher.grace=1")
    assert done.returncode == 1, done.stderr
    parent, _ = lab.runs()
    assert ended(parent) == ("FAILED", "error")
    first = {seed: runs[0] for seed, runs in lab.by_seed().items()}
    assert {seed: ended(run) for seed, run in first.items()} == {
        "0": ("FINISHED", "ok"),
        "1": ("FAILED", "error"),
        "2": ("FAILED", "error"),
        "3": ("FAILED", "error"),
        "4": ("FAILED", "out_of_memory"),
        "5": ("FAILED", "error"),
    }
    reasons = {seed: run.tags.get("mp_hydra.reason", "") for seed, run in first.items()}
    assert "a bug of the user's" in reasons["1"]
    assert "3" in reasons["2"]
    assert "SIGKILL" in reasons["3"]
    assert "Unable to allocate" in reasons["4"]
    assert "25 s" in reasons["5"]
    last = done.stderr.splitlines()[-5:]
    assert last[0] == "mp_hydra: 4 of 6 jobs failed"  # running out of memory is a result
    for line, seed in zip(last[1:], ("1", "2", "3", "5"), strict=True):
        number = seed
        assert line.startswith(f"mp_hydra: job {number} (")
        assert f"seed={seed}" in line
        (output,) = re.findall(r"\S+/output\.log", line)
        assert Path(output).is_file()

    again = lab.sweep(*words, "sweep.resume=last", FAULTS="off")
    assert again.returncode == 0, again.stderr
    runs = lab.by_seed()
    assert {seed: len(of_seed) for seed, of_seed in runs.items()} == {"0": 1, "1": 2, "2": 2, "3": 2, "4": 2, "5": 2}
    assert all(ended(of_seed[-1]) == ("FINISHED", "ok") for of_seed in runs.values())
    assert runs["0"][0].run.info.run_id == first["0"].run.info.run_id
    now, _ = lab.runs()
    assert now.run.info.run_id == parent.run.info.run_id
    assert ended(now) == ("FINISHED", "ok")


@pytest.mark.parametrize(
    ("number", "code"),
    [
        pytest.param(signal.SIGINT, 130, id="Ctrl-C"),
        pytest.param(signal.SIGTERM, 143, id="SIGTERM"),
        pytest.param(signal.SIGKILL, -9, id="SIGKILL"),
    ],
)
def test_a_sweep_that_is_stopped_leaves_no_process_and_no_open_run_and_can_go_on(
    lab: Lab, number: signal.Signals, code: int
) -> None:
    words = (*MLP, "seed=0,1,2", "+callbacks.hang._target_=my_faults.Hang", "+callbacks.hang.seed=${seed}")
    with lab.started(*words, "hydra.launcher.grace=10") as process:
        output = lab.directory / "sweep" / "1" / "output.log"
        end = time.monotonic() + DEADLINE_SECONDS
        while not (output.is_file() and "hanging" in output.read_text(errors="replace")):
            assert process.poll() is None, (lab.directory / "said.txt").read_text(errors="replace")
            assert time.monotonic() < end
            time.sleep(0.05)
        process.send_signal(number)
        assert process.wait(timeout=60) == code
        lab.no_process_is_left(60 if number is signal.SIGKILL else 5)
    parent, children = lab.runs()
    assert ended(parent) == ("KILLED", "killed")
    assert [ended(run) for run in children] == [("FINISHED", "ok"), ("KILLED", "killed")]

    (lab.directory / "go on").touch()
    again = lab.sweep(*words, "sweep.resume=last")
    assert again.returncode == 0, again.stderr
    now, runs = lab.runs()
    assert (now.run.info.run_id, *ended(now)) == (parent.run.info.run_id, "FINISHED", "ok")
    assert [run.params["seed"] for run in runs] == ["0", "1", "1", "2"]
    assert [run.status for run in runs] == ["FINISHED", "KILLED", "FINISHED", "FINISHED"]


def test_four_jobs_at_a_time_into_a_store_that_did_not_exist_lose_no_metric(lab: Lab) -> None:
    done = lab.sweep(*MLP, "seed=0,1,2,3", "hydra.launcher.n_jobs=4", "epochs=2", "log_every_batches=1")
    assert done.returncode == 0, done.stderr
    parent, children = lab.runs()
    assert ended(parent) == ("FINISHED", "ok")
    assert sorted(run.params["seed"] for run in children) == ["0", "1", "2", "3"]
    client = tracking.open_client(f"sqlite:///{lab.directory}/home/mlflow.db")
    batches = 6  # 1294 training images in batches of 256
    for run in children:
        assert "epoch 2/2" in (run.artifacts / "output.log").read_text(encoding="utf-8")
        assert run.metrics.keys() == children[0].metrics.keys()
        lengths = {
            key: len(client.get_metric_history(run.run.info.run_id, key)) for key in ("train/loss", "loss_scale/value")
        }
        assert lengths["train/loss"] == 2
        assert lengths["loss_scale/value"] >= 2 * (batches - 1)
        assert run.metrics["loss_scale/applied_steps"] == 2 * batches


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Tracked, int, str]]:
    """Each precision as a run of its own in a process of its own, and its first random numbers."""
    found = {}
    for precision in PRECISIONS:
        lab = Lab(tmp_path_factory.mktemp(precision))
        words = [*SMALL, *NUMBERS, f"precision={precision}", f"hydra.run.dir={lab.directory}/out"]
        command = [sys.executable, str(ROOT / "train.py"), *words]
        done = subprocess.run(
            command, cwd=lab.directory, env=lab.environment, check=True, capture_output=True, text=True
        )
        client = tracking.open_client(f"sqlite:///{lab.directory}/home/mlflow.db")
        (run,) = client.search_runs(["1"])
        found[precision] = Tracked(run, Path(run.info.artifact_uri.removeprefix("file://"))), *first_said(done.stdout)
    return found


NUMBERS = ("model=custom", "model._target_=my_faults.first_numbers", "seed=3")


def first_said(text: str) -> tuple[int, str]:
    """The bytes that the allocator held when the model was built, and the first random numbers."""
    (held,) = re.findall(r"^allocator \{'current': (\d+)", text, flags=re.MULTILINE)
    (numbers,) = re.findall(r"^first numbers .*$", text, flags=re.MULTILINE)
    return int(held), str(numbers)


@pytest.mark.parametrize("order", [PRECISIONS, PRECISIONS[::-1], PRECISIONS[1:] + PRECISIONS[:1]], ids="-".join)
def test_a_job_is_what_the_same_run_alone_is_for_every_order(
    lab: Lab, alone: dict[str, tuple[Tracked, int, str]], order: tuple[str, ...]
) -> None:
    done = lab.sweep(*NUMBERS, f"precision={','.join(order)}")
    assert done.returncode == 0, done.stderr
    _, children = lab.runs()
    assert [run.params["precision.name"] for run in children] == list(order)
    for number, (name, run) in enumerate(zip(order, children, strict=True)):
        expected, held, numbers = alone[name]
        said = first_said((lab.directory / "sweep" / str(number) / "output.log").read_text())
        assert said[1] == numbers
        assert said[0] == pytest.approx(held, abs=2**17)  # TensorFlow frees some kilobytes sooner or later
        assert run.json("audit.json") == expected.json("audit.json")
        for metric in ("test/loss", "train/loss", "memory/state_mib", "loss_scale/value"):
            assert run.metrics[metric] == expected.metrics[metric], metric
        # What TensorFlow holds for a moment when training begins differs by 0.1 MiB from run to run, alone too.
        assert run.metrics["memory/baseline_mib"] == pytest.approx(expected.metrics["memory/baseline_mib"], abs=0.2)
