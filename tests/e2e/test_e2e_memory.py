"""The group `memory` as a user meets it: what is recorded, what is saved, what goes wrong, and that a lean run learns as well."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

from mp_hydra.activation_memory.install import is_lean
from tests.e2e.app_driver import BRIEF, Tracked, small_images, tracked, train, type_command

MODEL = ("model=resnet", "model.depth=8", "batch_size=64", "precision=mixed_bfloat16")
RESNET = (
    *("dataset=synthetic", "dataset.kind=image", "dataset.shape=[16,16,3]", "dataset.size=128", "dataset.test_size=32"),
    *MODEL,
)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Tracked]:
    """The same training in each mode; its activations outweigh what other tests left in the allocator."""
    folder = tmp_path_factory.mktemp("modes")
    small_images(folder / "images.npz", side=32, train_size=128)
    words = (*MODEL, "model.depth=14", "dataset=npz", f"dataset.path={folder}/images.npz", "epochs=2")
    return {mode: train(*words, f"memory={mode}", cwd=folder / mode) for mode in ("stock", "auto", "recompute")}


def test_run_name_says_the_mode_that_was_asked_for(runs: dict[str, Tracked]) -> None:
    names = {mode: run.run.info.run_name for mode, run in runs.items()}
    assert names == {
        "stock": "resnet-npz-mixed_bfloat16-stock-s0",
        "auto": "resnet-npz-mixed_bfloat16-s0",
        "recompute": "resnet-npz-mixed_bfloat16-recompute-s0",
    }


def test_run_records_what_was_asked_and_what_it_came_to(runs: dict[str, Tracked]) -> None:
    found = {mode: (run.params["memory.mode"], run.tags["mp_hydra.memory_resolved"]) for mode, run in runs.items()}
    assert found == {"stock": ("stock", "stock"), "auto": ("auto", "lean"), "recompute": ("recompute", "recompute")}


@pytest.mark.parametrize(("mode", "became"), [("auto", "stock"), ("lean", "lean")])
def test_fp32_is_stock_unless_lean_is_asked_for(mode: str, became: str, tmp_path: Path) -> None:
    run = train("model=mlp", "model.widths=[8]", "precision=fp32", f"memory={mode}", cwd=tmp_path)
    assert (run.outcome, run.tags["mp_hydra.memory_resolved"]) == ("ok", became)


def test_each_mode_takes_less_memory_than_the_one_before(runs: dict[str, Tracked]) -> None:
    stock, lean, recompute = (run.metrics["memory/training_mib"] for run in runs.values())
    assert lean < 0.85 * stock
    assert recompute < 0.75 * lean


def test_all_go_through_the_same_losses_to_bfloat16s_rounding(runs: dict[str, Tracked]) -> None:
    stock, lean, recompute = (run.metrics["train/loss"] for run in runs.values())
    assert abs(lean - stock) < 0.03 * stock
    assert abs(recompute - lean) < 0.005 * lean


def test_checkpoint_of_a_lean_run_opens_in_stock_keras_and_goes_on_lean(tmp_path: Path) -> None:
    first = train(*RESNET, "memory=lean", "callbacks=checkpoint", cwd=tmp_path / "first")
    assert first.outcome == "ok"
    (saved,) = (tmp_path / "first").rglob("*.keras")
    opened = keras.saving.load_model(saved, compile=False)
    assert not any(is_lean(layer) for layer in opened._flatten_layers())
    assert np.isfinite(np.asarray(opened(np.ones((1, 16, 16, 3), "float32")), "float32")).all()
    again = train(*RESNET, "memory=lean", f"resume={saved}", "epochs=2", cwd=tmp_path / "again")
    assert (again.outcome, again.tags["mp_hydra.memory_resolved"]) == ("ok", "lean")


def test_pattern_that_matches_no_layer_ends_the_run_in_one_line_that_names_near_misses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = (*RESNET, "memory=recompute", "memory.recompute=[stage_9.*]")
    assert type_command(*BRIEF, *words, cwd=tmp_path) != 0
    said = capsys.readouterr().err.strip().splitlines()[-1]
    assert "memory.recompute=" in said
    assert "matches no layer" in said
    assert tracked()[-1].status == "FAILED"


@pytest.mark.process
def test_largest_batch_is_forecast_tried_out_recorded_and_trained_with(tmp_path: Path) -> None:
    words = ("model=mlp", "precision=mixed_bfloat16", "batch_size=max", "memory.limit=4MB")
    run = train(*words, cwd=tmp_path)
    assert (run.outcome, run.run.info.run_name) == ("ok", "mlp-digits-mixed_bfloat16-largest-s0")
    found = run.json("forecast.json")
    assert found["memory_bytes"] == 4_000_000
    assert 0 < found["measured_bytes"] <= 4_000_000
    assert found["batch_size"] % 8 == 0
    assert int(run.params["batch_size"]) == found["batch_size"] >= 64
    assert run.tags["mp_hydra.batch_size_requested"] == "max"
    assert run.metrics["loss_scale/applied_steps"] == math.ceil(1294 / found["batch_size"])  # digits to train on


@pytest.mark.process
def test_tensorflow_has_nothing_to_say_of_a_lean_run(tmp_path: Path) -> None:
    words = (
        "model=vit",
        "model.depth=1",
        "precision=mixed_bfloat16",
        "epochs=1",
        "tracking=off",
        f"hydra.run.dir={tmp_path}/out",
    )
    loud = {key: value for key, value in os.environ.items() if key != "TF_CPP_MIN_LOG_LEVEL"}
    command = [sys.executable, str(Path(__file__).resolve().parents[2] / "train.py"), *words]
    done = subprocess.run(command, cwd=tmp_path, env=loud, check=True, capture_output=True, text=True)
    assert "op_level_cost_estimator" not in done.stderr  # a warning, if it cannot tell the shapes of lean attention
    assert "XLA service" not in done.stderr
