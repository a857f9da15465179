"""The launcher `slurm` through submitit's local executor: a process for every job, and what the others returned when one dies."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
from omegaconf import OmegaConf

pytest.importorskip("submitit", reason="submitit is not installed: pip install 'mp_hydra[slurm]'")
pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="hydra-submitit-launcher is not installed")

if TYPE_CHECKING:
    from mp_hydra.isolation.jobs import End, Job

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
APP = """
import json, os, signal, sys, time
from pathlib import Path

import hydra
from hydra.core.config_store import ConfigStore
from hydra.experimental.callback import Callback
from submitit.core.core import Job

Job._results_timeout_s = 0  # a shared file system may be late; this one is not


class Watch(Callback):
    def say(self, *what):
        with Path(os.environ["HEARD"]).open("a") as file:
            file.write(json.dumps(what) + "\\n")

    def jobs_planned(self, jobs):
        self.say("planned", len(jobs))

    def job_started(self, job):
        self.say("started", job.number)

    def job_ended(self, job, end):
        self.say("ended", job.number, end.cause.value, end.reason)


ConfigStore.instance().store("config", {"do": "nothing", "hydra": {"callbacks": {"watch": {"_target_": "app.Watch"}}}})


@hydra.main(version_base="1.3", config_path=None, config_name="config")
def main(config):
    Path(os.environ["HEARD"] + config["do"]).write_text(str(os.getpid()))
    if config["do"] == "raise":
        raise ValueError("no good")
    if config["do"] == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if config["do"].startswith("hang"):
        time.sleep(1000)
    return os.getpid()


if __name__ == "__main__":
    main()
"""


def sweeping(directory: Path, *words: str) -> tuple[subprocess.Popen[bytes], Path]:
    """A sweep of `APP` in a process of its own, and the file that its observer writes; it says things to `said`."""
    (directory / "app.py").write_text(APP, encoding="utf-8")
    heard = directory / "heard"
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{directory}", "HEARD": str(heard)}
    command = [
        sys.executable,
        "app.py",
        "-m",
        "hydra/launcher=slurm_local",
        *words,
        f"hydra.sweep.dir={directory}/sweep",
    ]
    with (directory / "said").open("wb") as said:
        return subprocess.Popen(command, cwd=directory, env=environment, stdout=said, stderr=said), heard


def ends(heard: Path) -> dict[int, tuple[str, str]]:
    """Cause and reason by job."""
    said = [json.loads(line) for line in heard.read_text().splitlines()]
    return {line[1]: (line[2], line[3]) for line in said if line[0] == "ended"}


def test_a_job_that_dies_costs_only_its_own_result_and_observers_hear_of_all(tmp_path: Path) -> None:
    process, heard = sweeping(tmp_path, "hydra/sweeper=grid", "do=a,raise,kill,b")
    assert process.wait(120) == 1
    said = (tmp_path / "said").read_text()
    assert [ends(heard)[number][0] for number in range(4)] == ["completed", "raised", "exited", "completed"]
    assert ends(heard)[1][1] == "ValueError: no good"
    assert "it was killed, crashed, or called sys.exit; see" in ends(heard)[2][1]
    assert "2 of 4 jobs failed" in said
    lines = heard.read_text().splitlines()
    assert lines[0] == '["planned", 4]'
    assert {line for line in lines if "started" in line} == {f'["started", {number}]' for number in range(4)}
    pids = {(tmp_path / f"heard{name}").read_text() for name in ("a", "raise", "kill", "b")}
    assert len(pids) == 4
    assert not [pid for pid in pids if Path(f"/proc/{pid}").exists()]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, None), (signal.SIGTERM, 143)])
def test_a_signal_cancels_the_jobs(number: signal.Signals, code: int | None, tmp_path: Path) -> None:
    process, heard = sweeping(tmp_path, "do=hang0,hang1")
    files = [Path(f"{heard}hang{at}") for at in (0, 1)]
    try:
        deadline = time.monotonic() + 60
        while not all(file.exists() and file.read_text() for file in files):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(number)
        left_with = process.wait(30)
    finally:
        process.kill()
    assert left_with == code or (code is None and left_with != 0)
    assert ends(heard) == dict.fromkeys((0, 1), ("stopped", "it was cancelled with the sweep"))
    assert not [file for file in files if Path(f"/proc/{file.read_text()}").exists()]


@pytest.mark.parametrize(
    ("state", "cause"), [("OUT_OF_MEMORY", "out_of_memory"), ("TIMEOUT", "timeout"), ("FAILED", "exited")]
)
def test_what_slurm_says_of_a_dead_job_is_its_cause(state: str, cause: str) -> None:
    from submitit.core.utils import UncompletedJobError

    from mp_hydra.isolation.observers import Observers
    from mp_hydra.remote.submitit_jobs import _Submitted

    class Handle:
        paths = SimpleNamespace(stdout="out", stderr="err")

        def __init__(self) -> None:
            self.state = state

        def done(self) -> bool:
            return True

        def results(self) -> Any:
            raise UncompletedJobError

    class Watch:
        heard: str = ""

        def job_ended(self, _job: Job, end: End) -> None:
            self.heard = end.cause.value

    watch = Watch()
    hydra = {"overrides": {"task": []}, "runtime": {"output_dir": "/"}, "job": {"name": "a"}}
    job: Any = SimpleNamespace(number=0, overrides=(), config=OmegaConf.create({"hydra": hydra}), output=None)
    submitted = _Submitted(job, Handle(), Observers([watch]))
    assert submitted.has_ended()
    submitted.result()
    assert watch.heard == cause


def test_a_job_of_our_app_that_is_killed_has_a_run_that_says_so_beside_the_other_under_one_parent(
    tmp_path: Path,
) -> None:
    from mp_hydra.tracking import open_client

    faults = ROOT / "tests" / "apps" / "own_model"
    fault = ("+callbacks.fault._target_=my_faults.Fault", "+callbacks.fault.seed=${seed}")  # kills itself with seed 3
    words = ["-m", "hydra/launcher=slurm_local", "model=mlp", "model.widths=[8]", "epochs=1", "seed=3,0", *fault]
    command = [sys.executable, str(ROOT / "train.py"), *words, f"hydra.sweep.dir={tmp_path}/sweep"]
    environment = {**os.environ, "MP_HYDRA_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        command, cwd=faults, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 1
    assert "mp_hydra: 1 of 2 jobs failed" in done.stderr
    client = open_client(f"sqlite:///{tmp_path}/home/mlflow.db")
    runs = client.search_runs([experiment.experiment_id for experiment in client.search_experiments()])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = {run.data.params["seed"]: run for run in runs if run is not parent}
    assert {run.data.tags["mlflow.parentRunId"] for run in children.values()} == {parent.info.run_id}
    assert {seed: (run.info.status, run.data.tags["mp_hydra.outcome"]) for seed, run in children.items()} == {
        "3": ("FAILED", "error"),
        "0": ("FINISHED", "ok"),
    }
    assert "it was killed, crashed, or called sys.exit" in children["3"].data.tags["mp_hydra.reason"]
    numbers = {OmegaConf.load(tmp_path / "sweep" / str(n) / ".hydra" / "hydra.yaml").hydra.job.num for n in (0, 1)}
    assert numbers == {0, 1}
