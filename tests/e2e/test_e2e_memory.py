"""The group `memory` as a user meets it: what is recorded, what is saved, what goes wrong, and that a lean run learns as well."""

from __future__ import annotations

from typing import TYPE_CHECKING

import keras
import numpy as np
import pytest

from mp_hydra.activation_memory.install import is_lean
from tests.e2e.app_driver import BRIEF, small_images, tracked, train, type_command

if TYPE_CHECKING:
    from pathlib import Path

RESNET = (
    *("dataset=synthetic", "dataset.kind=image", "dataset.shape=[16,16,3]", "dataset.size=128", "dataset.test_size=32"),
    *("model=resnet", "model.depth=8", "model.width=8", "batch_size=64", "precision=mixed_bfloat16"),
)


@pytest.mark.parametrize(
    ("overrides", "asked", "became"),
    [
        (("precision=fp32",), "auto", "stock"),
        (("precision=mixed_bfloat16",), "auto", "lean"),
        (("precision=mixed_bfloat16", "memory=stock"), "stock", "stock"),
        (("precision=fp32", "memory=lean"), "lean", "lean"),
        (("precision=mixed_float16", "memory=recompute"), "recompute", "recompute"),
    ],
)
def test_run_records_what_was_asked_and_what_it_came_to(
    overrides: tuple[str, ...], asked: str, became: str, tmp_path: Path
) -> None:
    small_images(tmp_path / "images.npz")
    run = train(
        *("dataset=npz", "dataset.path=images.npz", "model=resnet", "model.depth=8", "model.width=4", "batch_size=32"),
        *overrides,
        cwd=tmp_path,
    )
    assert run.outcome == "ok"
    assert (run.params["memory.mode"], run.tags["mp_hydra.memory_resolved"]) == (asked, became)
    assert run.metrics["loss_scale/applied_steps"] + run.metrics["loss_scale/skipped_steps"] == 3


def test_each_mode_takes_less_memory_than_the_one_before(tmp_path: Path) -> None:
    taken = [train(*RESNET, f"memory={mode}", cwd=tmp_path / mode) for mode in ("stock", "lean", "recompute")]
    stock, lean, recompute = (run.metrics["memory/training_mib"] for run in taken)
    assert lean < 0.85 * stock
    assert recompute < 0.85 * lean


def test_lean_and_recompute_go_through_the_same_losses_as_stock_to_bfloat16s_rounding(tmp_path: Path) -> None:
    small_images(tmp_path / "images.npz", train_size=256)
    words = ("dataset=npz", f"dataset.path={tmp_path}/images.npz", "model=vit", "model.depth=2", "model.width=16")
    runs = [
        train(*words, "precision=mixed_bfloat16", "epochs=3", f"memory={mode}", cwd=tmp_path / mode)
        for mode in ("stock", "lean", "recompute")
    ]
    stock, lean, recompute = (run.metrics["train/loss"] for run in runs)
    assert abs(lean - stock) < 0.02 * stock
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
