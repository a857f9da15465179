"""A user's own models, data and callbacks, from files beside the command and outside the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import traceback
from typing import TYPE_CHECKING

import numpy as np
import pytest

from tests.e2e.app_driver import BRIEF, ROOT, Tracked, tracked, train, type_command

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

APP = ROOT / "tests" / "apps" / "own_model"
PRECISIONS = ("fp32", "mixed_float16", "mixed_bfloat16")
SCALES = {"fp32": 1.0, "mixed_float16": 2.0**15, "mixed_bfloat16": 1.0}
QUICK = ("batch_size=32", "epochs=4", "optimizer.learning_rate=0.01")
BATCHES = 4 * 8  # 256 images, a tenth for validation, 32 a batch
IMAGES = ("dataset=custom", "dataset._target_=my_data.arrays", *QUICK)
MODEL = ("model=custom", "model._target_=my_model.functional")


@pytest.fixture
def app(tmp_path: Path) -> Iterator[Path]:
    """The user's directory, with the modules unknown to Python as in a new process."""
    shutil.copytree(APP, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    yield tmp_path
    for name in ("my_model", "my_data", "my_callbacks"):
        sys.modules.pop(name, None)


def _computed_in(run: Tracked) -> set[str]:
    return {layer["compute_dtype"] for layer in run.json("audit.json")["layers"]}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("target", ["functional", "Subclassed", "compiled"])
def test_a_model_of_ones_own_trains_in_every_precision(target: str, precision: str, app: Path) -> None:
    data = "my_data.streams" if target == "Subclassed" else "my_data.arrays"
    words = ("dataset=custom", f"dataset._target_={data}", *QUICK, "model=custom")
    run = train(*words, f"model._target_=my_model.{target}", f"precision={precision}", cwd=app)
    assert (run.status, run.outcome) == ("FINISHED", "ok")
    assert run.metrics["test/accuracy"] > 0.8  # dark against bright
    assert run.metrics["loss_scale/value"] == SCALES[precision]
    assert run.metrics["loss_scale/applied_steps"] == BATCHES
    sixteen_bit = {"fp32": set(), "mixed_float16": {"float16"}, "mixed_bfloat16": {"bfloat16"}}[precision]
    assert _computed_in(run) == {"float32"} | sixteen_bit


def test_arguments_of_ones_own_come_from_the_command_line(app: Path) -> None:
    run = train(*IMAGES, *MODEL, "+model.hidden=5", "+dataset.size=128", cwd=app)
    parameters = sum(layer["parameters"] for layer in run.json("audit.json")["layers"])
    assert parameters == (64 * 5 + 5) + (5 * 2 + 2)
    assert run.params["model.hidden"] == "5"
    assert run.metrics["loss_scale/applied_steps"] == 4 * 4  # 128 images less 13, 32 a batch


def test_a_compiled_model_keeps_its_optimizer_and_loss(app: Path) -> None:
    words = ("model=custom", "model._target_=my_model.compiled", "precision=mixed_float16")
    run = train(*IMAGES, *words, cwd=app)
    parameters = (64 * 32 + 32) + (32 * 2 + 2)
    without_moments = run.metrics["memory/state_mib"] * 2**20 - parameters * 4
    assert 0 <= without_moments <= 1024  # its SGD has no momentum, where Adam would have two moments


def test_a_compiled_model_can_be_given_the_configured_optimizer_instead(app: Path) -> None:
    words = ("model=custom", "model._target_=my_model.compiled", "compile.replace=true", "objective=test/loss")
    run = train(*IMAGES, *words, "compile.loss=sparse_categorical_crossentropy", cwd=app)
    parameters = (64 * 32 + 32) + (32 * 2 + 2)
    assert 0 <= run.metrics["memory/state_mib"] * 2**20 - parameters * 4 * 3 <= 1024


@pytest.mark.process
def test_a_console_script_finds_the_modules_in_the_directory_where_it_is_typed(tmp_path: Path, app: Path) -> None:
    script = tmp_path / "bin" / "mp-hydra-train"  # as an installer writes it, in a directory of its own
    script.parent.mkdir()
    script.write_text("import sys\nfrom mp_hydra.app import main\nsys.exit(main())\n", encoding="utf-8")
    words = [*BRIEF, *IMAGES, *MODEL, "precision=mixed_bfloat16", f"hydra.run.dir={tmp_path}/out"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, *words], cwd=app, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out" / "predictions.npz") as samples:
        assert samples["correct"].mean() > 0.8


def test_a_bug_in_the_users_model_shows_their_own_exception_and_fails_the_run(app: Path) -> None:
    with pytest.raises(NameError, match="undefined_name") as raised:
        type_command(*BRIEF, *IMAGES, "model=custom", "model._target_=my_model.broken", cwd=app)
    assert "my_model.py" in "".join(traceback.format_tb(raised.tb))
    run = tracked()[-1]
    assert (run.status, run.outcome) == ("FAILED", "error")
    assert "NameError" in run.tags["mp_hydra.reason"]


def test_a_value_error_in_the_users_call_is_their_own_and_not_a_matter_of_shapes(app: Path) -> None:
    with pytest.raises(ValueError, match="invalid literal for int") as raised:
        type_command(*BRIEF, *IMAGES, "model=custom", "model._target_=my_model.Stumbling", cwd=app)
    assert "my_model.py" in "".join(traceback.format_tb(raised.tb))
    assert (tracked()[-1].status, tracked()[-1].outcome) == ("FAILED", "error")


def _raising(what: str) -> tuple[str, ...]:
    return (f"+callbacks.mine={{_target_: my_callbacks.Raise, what: {what}}}", *IMAGES, *MODEL)


def test_a_bug_in_a_callback_in_the_middle_of_training_shows_it_and_fails_the_run(app: Path) -> None:
    with pytest.raises(RuntimeError, match="a bug called horst"):
        type_command(*BRIEF, *_raising("horst"), cwd=app)
    run = tracked()[-1]
    assert (run.status, run.outcome) == ("FAILED", "error")
    assert run.metrics["loss_scale/applied_steps"] == 8  # what was measured before is kept


@pytest.mark.parametrize("what", ["device", "host"])
def test_a_lack_of_memory_in_the_middle_of_training_is_one_line_and_an_outcome(
    what: str, app: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert type_command(*BRIEF, *_raising(what), cwd=app) == 1
    said = capfd.readouterr()
    lines = [line for line in said.err.splitlines() if line.startswith("mp_hydra: ")]
    assert len(lines) == 1
    assert lines[0].startswith("mp_hydra: out of memory: ")
    assert lines[0].endswith("try a smaller batch_size")
    assert "Traceback" not in said.err + said.out
    run = tracked()[-1]
    assert (run.status, run.outcome) == ("FAILED", "out_of_memory")
    assert run.tags["mp_hydra.reason"]


def test_a_module_that_is_not_there_is_one_line_that_says_where_modules_are_looked_for(
    app: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert type_command(*BRIEF, *IMAGES, "model=custom", "model._target_=their_model.functional", cwd=app) == 1
    said = capfd.readouterr().err
    assert "mp_hydra: model._target_=their_model.functional: cannot be imported" in said
    assert "Traceback" not in said
