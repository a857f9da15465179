"""Every file of multirun_examples/ runs as it stands, here at reduced size: each job is trained, in one sweep."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.e2e.app_driver import client

pytestmark = pytest.mark.process
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "multirun_examples"
TINY = ("epochs=1",)
MLP = ("model=mlp", "model.widths=[8]")  # where the example does not depend on the model


@dataclass(frozen=True)
class Case:
    """An example at the size of two jobs; jobs of a single precision are not compared, which is tested elsewhere.

    Attributes:
        words: further words of the command.
        values: variables that the example takes its values from.
        needs: a module without which it cannot run.
    """

    words: tuple[str, ...] = MLP
    values: dict[str, str] = field(default_factory=dict)
    needs: str = "mp_hydra"


TWO_PRECISIONS = {"PRECISIONS": "fp32,mixed_bfloat16", "SEEDS": "0"}
TWO_SEEDS = {"PRECISIONS": "fp32", "SEEDS": "0,1"}
CASES = {
    "precision_by_seed.sh": Case(values=TWO_PRECISIONS),
    "loss_scales.sh": Case(values={"SCALES": "1,1024"}),
    "batch_sizes.sh": Case(values={"PRECISIONS": "fp32", "SIZES": "64,128"}),
    "memory_modes.sh": Case(
        ("model.depth=1", "model.width=16"), {"PRECISIONS": "mixed_bfloat16", "MODES": "stock,lean"}
    ),
    "largest_batches.sh": Case(values={"PRECISIONS": "fp32", "SIZES": "64,max", "LIMIT": "1GB"}),
    "models_by_precision.sh": Case((), {"MODELS": "mlp,cnn", "PRECISIONS": "mixed_bfloat16"}),
    "optuna_search.sh": Case((*MLP, "hydra.sweeper.n_trials=2"), needs="optuna"),
    "ray_cluster.sh": Case((*MLP, "+hydra.launcher.init.include_dashboard=false"), TWO_SEEDS, needs="ray"),
    "slurm_cluster.sh": Case(values=TWO_SEEDS, needs="submitit"),
    "own_model.py": Case((), {"PRECISIONS": "fp32,mixed_bfloat16"}),
}


@pytest.mark.parametrize("name", CASES)
def test_an_example_trains_every_job_of_its_sweep_under_one_parent(name: str, tmp_path: Path) -> None:
    case, experiment = CASES[name], f"example {name}"
    if find_spec(case.needs) is None:
        pytest.skip(f"{case.needs} is not installed")
    if case.needs == "optuna" and find_spec("hydra_plugins.hydra_optuna_sweeper") is not None:
        pytest.skip("hydra-optuna-sweeper, which works with Optuna 2 alone, has the name of our sweeper")
    # `python` in the scripts is the interpreter of this test.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    starter = [sys.executable] if name.endswith(".py") else []
    where = (f"tracking.experiment={experiment}", f"hydra.sweep.dir={tmp_path}/sweep")
    command = [*starter, str(EXAMPLES / name), *TINY, *case.words, *where]
    environment = {**os.environ, **case.values, "PATH": path}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    runs = client().search_runs([client().get_experiment_by_name(experiment).experiment_id])
    (parent,) = [run for run in runs if "mlflow.parentRunId" not in run.data.tags]
    children = [run for run in runs if run is not parent]
    assert len([run for run in children if "test/accuracy" in run.data.metrics]) == len(children) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    assert {(run.info.status, run.data.tags["mp_hydra.outcome"]) for run in runs} == {("FINISHED", "ok")}


def test_every_example_is_tested_and_described() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.suffix in {".sh", ".py"}}
    assert files == set(CASES)
    readme = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for name in files:
        assert f"`{name}`" in readme
        assert shutil.which(str(EXAMPLES / name)) or name.endswith(".py"), f"{name} is not executable"
