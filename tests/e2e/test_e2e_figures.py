"""Figures that a user is promised: accuracy on MNIST after one epoch, and memory that a 16-bit precision saves."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.app_driver import ROOT, train

if TYPE_CHECKING:
    from pathlib import Path

MNIST = ROOT.parent / "shared" / "data" / "mnist.npz"


@pytest.mark.skipif(not MNIST.exists(), reason=f"{MNIST} is not there")
def test_one_epoch_of_mnist_in_bfloat16_reaches_the_accuracy_of_float32(tmp_path: Path) -> None:
    words = ("dataset=npz", f"dataset.path={MNIST}", "model=cnn", "precision=mixed_bfloat16", "batch_size=128")
    run = train(*words, cwd=tmp_path)
    assert run.outcome == "ok"
    assert run.metrics["test/accuracy"] >= 0.975
    assert run.metrics["loss_scale/applied_steps"] == 422  # 54000 images, 128 a batch
    # The largest activations: the first convolution's output, with what backpropagation needs of it.
    assert 128 * 28 * 28 * 32 * 2 / 2**20 < run.metrics["memory/training_mib"] < 80


def test_a_resnet_needs_less_training_memory_in_bfloat16_than_in_float32_and_lean_about_half(tmp_path: Path) -> None:
    words = ("model=resnet", "dataset=synthetic", "dataset.shape=[32,32,3]", "batch_size=64")
    short = ("dataset.size=256", "dataset.validation_fraction=0", "dataset.test_size=64")

    def needs(precision: str, memory: str) -> dict[str, float]:
        of_its_own = (f"precision={precision}", f"memory={memory}", f"hydra.run.dir={tmp_path}/{precision}-{memory}")
        return train(*words, *short, *of_its_own, cwd=tmp_path).metrics

    full, stock, lean = needs("fp32", "stock"), needs("mixed_bfloat16", "stock"), needs("mixed_bfloat16", "lean")
    # Half of it would be 0.5; stock Keras keeps float32 tensors of every batch normalisation for the backward pass.
    assert 0.5 < stock["memory/training_mib"] / full["memory/training_mib"] < 0.95
    assert 0.35 < lean["memory/training_mib"] / full["memory/training_mib"] < 0.65
    # float32 variables either way: the precision changes what a step needs, not what the model weighs.
    assert full["memory/state_mib"] == stock["memory/state_mib"] == lean["memory/state_mib"]
