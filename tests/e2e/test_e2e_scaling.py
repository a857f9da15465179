"""Loss scaling in whole runs: what MLflow and the terminal say equals a training loop that is written out here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra import datasets
from mp_hydra.precision import scoped_policy
from tests.e2e.app_driver import BRIEF, ROOT, tracked, train, type_command

if TYPE_CHECKING:
    from pathlib import Path

MNIST = ROOT.parent / "shared" / "data" / "mnist.npz"
TRAIN, TEST, BATCH, WIDTH, RATE = 6000, 500, 512, 16, 0.001  # 12 steps, the last one of 368 samples
STEPS = 12
POLICIES = {"fp32": "float32", "mixed_float16": "mixed_float16", "mixed_bfloat16": "mixed_bfloat16"}
# Both compute each number in the same dtype, but not in the same graph; measured: 2e-8, 5e-8 and 1e-7.
TOLERANCE = {"fp32": 1e-6, "mixed_float16": 1e-4, "mixed_bfloat16": 1e-4}
GROWTH_INTERVAL = 1  # 2^15 doubles until float16 overflows
SCALING = {
    "auto": ("loss_scale=auto",),
    "dynamic": ("loss_scale=dynamic", f"loss_scale.growth_interval={GROWTH_INTERVAL}", "loss_scale.force=true"),
    "fixed": ("loss_scale=fixed", "loss_scale.value=1024", "loss_scale.force=true"),
}


@pytest.fixture(scope="module")
def digits(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A part of MNIST, small enough for float16 on a CPU."""
    if not MNIST.is_file():
        pytest.skip(f"{MNIST} is not there")
    path = tmp_path_factory.mktemp("mnist") / "mnist.npz"
    with np.load(MNIST) as whole:
        parts = {f"{name}_train": whole[f"{name}_train"][:TRAIN] for name in ("x", "y")}
        np.savez(path, **parts, **{f"{name}_test": whole[f"{name}_test"][:TEST] for name in ("x", "y")})
    return path


def mnist(path: Path) -> tuple[str, ...]:
    words = ("dataset=npz", f"dataset.path={path}", "dataset.validation_fraction=0", f"batch_size={BATCH}")
    return (*words, "model=mlp", f"model.widths=[{WIDTH}]", f"optimizer.learning_rate={RATE}", "log_every_batches=0")


@dataclass(frozen=True)
class Loop:
    """What a training loop came to: the scale of its last step, which steps it skipped, and norms of the others."""

    scale: float
    skipped: list[int]
    norms: list[float]


def loop(path: Path, policy: str, *, scale: float, growth_interval: int | None, batch: int = BATCH) -> Loop:
    """Dynamic scaling (fixed for None) as Micikevicius et al. describe it, in Python numbers around a GradientTape."""
    import keras
    import tensorflow as tf

    node = {"_target_": "mp_hydra.datasets.npz", "name": "npz", "path": str(path), "validation_fraction": 0}
    batches = datasets.load(node, seed=0).train.batches(batch, shuffle_seed=0, epoch=tf.Variable(0, dtype="int64"))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    skipped, norms, used, in_a_row = [], [], scale, 0
    with scoped_policy(policy, tf32=False):
        keras.utils.set_random_seed(0)
        layers = [keras.layers.Flatten(), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(10, dtype="float32")]
        model = keras.Sequential([keras.Input((28, 28, 1)), *layers])
        adam = keras.optimizers.Adam(RATE)

        @tf.function
        def gradients_of(x: Any, y: Any, factor: Any) -> Any:
            with tf.GradientTape() as tape:
                scaled = loss(y, model(x, training=True)) * factor
            return tape.gradient(scaled, model.trainable_variables)

        for step, (x, y) in enumerate(batches, start=1):
            used = scale
            gradients = [g.numpy() / np.float32(scale) for g in gradients_of(x, y, tf.constant(scale, "float32"))]
            if all(np.isfinite(g).all() for g in gradients):
                norms.append(float(np.sqrt(sum((g.astype("float64") ** 2).sum() for g in gradients))))
                adam.apply([tf.constant(g) for g in gradients], model.trainable_variables)
                in_a_row += 1
                if in_a_row == growth_interval:
                    scale, in_a_row = scale * 2, 0
            else:
                skipped.append(step)
                scale, in_a_row = scale if growth_interval is None else scale / 2, 0
    return Loop(used, skipped, norms)


@pytest.mark.parametrize("scaling", SCALING)
@pytest.mark.parametrize("precision", POLICIES)
def test_scale_counters_and_norms_in_mlflow_are_those_of_a_plain_loop(
    precision: str, scaling: str, digits: Path, tmp_path: Path
) -> None:
    run = train(f"precision={precision}", *SCALING[scaling], *mnist(digits), cwd=tmp_path)
    automatic = 2.0**15 if precision == "mixed_float16" else 1.0
    first = {"auto": automatic, "dynamic": 2.0**15, "fixed": 1024.0}[scaling]
    interval = {"auto": 2000 if precision == "mixed_float16" else None, "dynamic": GROWTH_INTERVAL, "fixed": None}
    expected = loop(digits, POLICIES[precision], scale=first, growth_interval=interval[scaling])
    if (precision, scaling) == ("mixed_float16", "dynamic"):
        assert expected.skipped
    else:
        assert expected.scale == (2.0 ** (15 + STEPS - 1) if scaling == "dynamic" else first)
    assert run.outcome == "ok"
    assert run.steps("loss_scale/value") == [STEPS]
    found = {name: run.metrics[f"loss_scale/{name}"] for name in ("value", "applied_steps", "skipped_steps")}
    assert found == {
        "value": expected.scale,
        "applied_steps": STEPS - len(expected.skipped),
        "skipped_steps": len(expected.skipped),
    }
    tolerance = TOLERANCE[precision]
    assert run.metrics["gradients/global_norm"] == pytest.approx(np.mean(expected.norms), rel=tolerance)
    assert run.metrics["gradients/global_norm_max"] == pytest.approx(max(expected.norms), rel=tolerance)
    assert ("mp_hydra.nonfinite_gradient" in run.tags) == bool(expected.skipped)


def test_first_steps_that_a_high_initial_scale_costs_are_in_the_summary_and_their_layer_in_a_tag(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("precision=mixed_float16", "loss_scale=dynamic", f"loss_scale.initial={2**32}")
    run = train(*words, *mnist(digits), "batch_size=128", cwd=tmp_path)
    steps = 47  # of 128 samples, the last one of 112
    expected = loop(digits, "mixed_float16", scale=2.0**32, growth_interval=2000, batch=128)
    k = len(expected.skipped)
    assert expected.skipped == list(range(1, k + 1))
    assert 0 < k < steps
    assert run.metrics["loss_scale/skipped_steps"] == k
    assert run.metrics["loss_scale/applied_steps"] == steps - k
    assert run.metrics["loss_scale/value"] == 2.0 ** (32 - k)
    line = f"2^{32 - k}; {k} of {steps} steps skipped, all in the first {k}"
    assert line in " ".join(capsys.readouterr().err.split())
    assert run.tags["mp_hydra.nonfinite_gradient"] in ("dense_1/kernel", "dense_1/bias")  # the head is in float32


def test_fixed_scale_that_always_overflows_ends_as_no_updates_and_says_what_to_try(
    digits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ("precision=mixed_float16", "loss_scale=fixed", "loss_scale.value=1e30")
    assert type_command(*BRIEF, *words, *mnist(digits), cwd=tmp_path) == 1
    run = tracked()[-1]
    assert (run.status, run.outcome) == ("FAILED", "no_updates")
    said = " ".join(capsys.readouterr().err.split())
    assert f"none of the {STEPS} steps of epoch 1 was applied" in said
    assert "Try a smaller learning rate, loss_scale=dynamic or precision=mixed_bfloat16" in said
    assert "Traceback" not in said


def test_first_visit_to_the_floor_is_one_warning_with_the_share_of_skipped_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # 8 steps an epoch, of which the one with the bad row is skipped: 4 -> 2 -> 1, the floor, after 2 of 16 steps.
    random = np.random.default_rng(0)
    x, y = random.normal(size=(64, 256)).astype("float32"), np.arange(64) % 2
    x[5] = 60000.0  # times the sum of 256 weights: more than float16 holds, in some of 16 linear units
    np.savez(tmp_path / "rows.npz", x_train=x, y_train=y, x_test=x[:4], y_test=y[:4])
    data = ("dataset=npz", f"dataset.path={tmp_path}/rows.npz", "dataset.validation_fraction=0", "batch_size=8")
    model = ("model=mlp", "model.widths=[16]", "model.activation=linear", "precision=mixed_float16")
    run = train(*data, *model, "loss_scale.initial=4", "epochs=4", cwd=tmp_path)
    assert run.outcome == "ok"
    assert run.metrics["loss_scale/value"] == 1.0
    assert (run.metrics["loss_scale/skipped_steps"], run.metrics["loss_scale/applied_steps"]) == (4, 28)
    (warning,) = [line for line in capsys.readouterr().out.splitlines() if "floor" in line]
    assert "WARNING the loss scale has come down to its floor, 1: 2 of 16 steps so far (12.5 %) were skipped" in warning
