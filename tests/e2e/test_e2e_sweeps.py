"""Sweeps with Hydra's basic launcher, all jobs in one process: nothing leaks from job to job."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

from tests.e2e.app_driver import BASIC, BRIEF, ROOT, JobReturns, Tracked, sweep, tracked, train, type_command

if TYPE_CHECKING:
    from pathlib import Path

ORDER = ("mixed_float16", "fp32", "mixed_bfloat16")
COMPUTES_IN = {"mixed_float16": "float16", "fp32": "float32", "mixed_bfloat16": "bfloat16"}
RESULTS = tuple(f"{split}/{name}" for split in ("train", "val", "test") for name in ("loss", "accuracy"))


@dataclass(frozen=True)
class Swept:
    """The runs of a sweep over three precisions, and what each job returned to the sweeper."""

    runs: dict[str, Tracked]
    returned: list[Any]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    before = len(JobReturns.values)
    words = (f"precision={','.join(ORDER)}", "seed=7", f"+hydra.callbacks.returns._target_={JobReturns.TARGET}")
    runs = sweep(*words, cwd=tmp_path_factory.mktemp("sweep"))
    returned = JobReturns.values[before:]
    return Swept(dict(zip(ORDER, runs, strict=True)), returned)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tracked]:
    """The same jobs, each as a run of its own, in another order."""
    cwd = tmp_path_factory.mktemp("alone")
    names = sorted(ORDER)
    return {name: train(f"precision={name}", "seed=7", f"hydra.run.dir={cwd}/{name}", cwd=cwd) for name in names}


@pytest.mark.parametrize("precision", ORDER)
def test_each_job_of_a_sweep_computes_in_the_precision_that_it_was_given(swept: Swept, precision: str) -> None:
    run = swept.runs[precision]
    assert run.params["precision.name"] == precision
    dtypes = Counter(layer["compute_dtype"] for layer in run.json("audit.json")["layers"])
    assert dtypes == Counter({COMPUTES_IN[precision]: 6}) + Counter({"float32": 1})


@pytest.mark.parametrize("precision", ORDER)
def test_a_job_gives_the_results_of_the_same_run_alone(swept: Swept, alone: dict[str, Tracked], precision: str) -> None:
    job, run = swept.runs[precision].metrics, alone[precision].metrics
    assert {key for key in job if not key.startswith("compare/")} == run.keys()  # the sweep's comparison adds its own
    assert {key: job[key] for key in RESULTS} == pytest.approx({key: run[key] for key in RESULTS}, abs=1e-6)
    for key in ("loss_scale/value", "loss_scale/applied_steps", "loss_scale/skipped_steps", "memory/state_mib"):
        assert job[key] == run[key]


@pytest.mark.process
def test_training_memory_of_the_last_job_is_that_of_a_process_of_its_own(swept: Swept, tmp_path: Path) -> None:
    words = [*BRIEF, "precision=mixed_bfloat16", "seed=7", f"hydra.run.dir={tmp_path}/out"]
    subprocess.run([sys.executable, ROOT / "train.py", *words], cwd=tmp_path, env=dict(os.environ), check=True)
    run = tracked()[-1].metrics
    job = swept.runs["mixed_bfloat16"].metrics
    # Which kernels run side by side moves the peak of so small a net by a quarter; that of float16, two jobs before,
    # would be several times as high.
    assert job["memory/training_mib"] == pytest.approx(run["memory/training_mib"], rel=0.4)
    assert swept.runs["mixed_float16"].metrics["memory/training_mib"] > 2 * job["memory/training_mib"]
    assert job["test/loss"] == pytest.approx(run["test/loss"], abs=1e-6)


def test_jobs_have_runs_and_names_of_their_own_and_say_which_sweep_they_belong_to(swept: Swept) -> None:
    runs = list(swept.runs.values())
    assert len({run.run.info.run_id for run in runs}) == len({run.run.info.run_name for run in runs}) == len(ORDER)
    assert all(run.run.info.status == "FINISHED" for run in runs)
    (directory,) = {run.tags["mp_hydra.sweep"] for run in runs}
    assert directory.endswith("/sweep")


def test_a_sweeper_gets_the_objective_of_each_job(swept: Swept) -> None:
    assert swept.returned == pytest.approx([swept.runs[name].metrics["test/accuracy"] for name in ORDER])


def test_a_job_with_a_bad_value_is_one_line_and_the_other_jobs_run(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    before = len(tracked())
    words = ("--multirun", BASIC, *BRIEF, "model=mlp", "model.widths=[-1],[8]", f"hydra.sweep.dir={tmp_path}/sweep")
    assert type_command(*words, cwd=tmp_path) == 1
    said = capfd.readouterr()
    assert "Traceback" not in said.err + said.out
    assert "mp_hydra: 1 of 2 jobs failed" in said.err
    assert "): model.widths=[-1]: give a list" in said.err.splitlines()[-1]
    failed, done = tracked()[before:]
    assert (failed.status, failed.outcome) == ("FAILED", "error")
    assert (done.status, done.outcome) == ("FINISHED", "ok")
    assert math.isfinite(done.metrics["test/loss"])
