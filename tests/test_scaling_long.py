"""200 epochs on 64 rows of which one overflows float16: nothing may ever become nan, and the other rows are learnt.

By hand: 64 rows in batches of 8 are 8 steps an epoch, and the bad row spoils one of them wherever it comes: 200 of 1600.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest

from mp_hydra.precision import scoped_policy

EPOCHS, ROWS, BATCH = 200, 64, 8
EACH = ROWS // BATCH  # steps of an epoch
STEPS = EPOCHS * EACH
SCALES = {"dynamic": 2.0**15, "fixed": 2.0**15, "none": 1.0}


def data() -> tuple[Any, Any]:
    """Two features, of which the larger one is the class; the first row is the bad one."""
    x = np.random.default_rng(0).normal(size=(ROWS, 2)).astype("float32")
    y = (x[:, 0] > x[:, 1]).astype("int32")
    x[0] = 60000.0  # fits float16 itself, but not times weights that add up to more than 1.1
    return x, y


def passes(first: int = 0) -> Any:
    """The rows from `first` on, shuffled anew on each pass; without an end, which spares Keras an iterator for each epoch."""
    import tensorflow as tf

    x, y = data()
    return tf.data.Dataset.from_tensor_slices((x[first:], y[first:])).shuffle(ROWS, seed=0).batch(BATCH).repeat()


def network(*, normalized: bool) -> Any:
    import keras

    keras.utils.set_random_seed(0)
    # The first unit's column adds up to 6: overflow in the first layer, as long as it stays above 1.1.
    kernel = keras.initializers.Constant(np.array([[3.0, 3.0, -3.0, 1.0], [3.0, -2.0, -3.0, -1.0]]))
    middle = [keras.layers.BatchNormalization(momentum=0.9)] if normalized else []
    return keras.Sequential(
        [
            keras.Input((2,)),
            keras.layers.Dense(4, kernel_initializer=kernel),
            *middle,
            keras.layers.ReLU(),
            keras.layers.Dense(2, dtype="float32"),
        ]
    )


def compiled(model: Any, optimizer: Any) -> Any:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(
        optimizer,
        loss,
        # Gradients below 65504 / 2^15 = 2, so that no batch of clean rows overflows under the fixed scale.
        loss_weights=0.25,
        metrics=["accuracy"],
        auto_scale_loss=False,
        jit_compile=False,
        steps_per_execution=EACH,
    )
    return model


@cache
def trained(policy: str, mode: str, *, normalized: bool, bad_row: bool = True) -> tuple[Any, list[float], Any]:
    """The model, the epochs' losses, and the counts of batches."""
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    with scoped_policy(policy, tf32=False):
        model = compiled(network(normalized=normalized), keras.optimizers.SGD(0.2))
        model.optimizer = ScaledOptimizer(model.optimizer, mode=mode, scale=SCALES[mode])
        model.optimizer.build(model.trainable_variables)
        rows = passes(first=0 if bad_row else 1)
        with finite_steps(model, model.optimizer) as batches:
            history = model.fit(rows, steps_per_epoch=EACH, epochs=EPOCHS, verbose=0)
        return model, history.history["loss"], batches.read()


def on_clean_rows(model: Any) -> tuple[float, float]:
    """Loss and accuracy."""
    x, y = data()
    loss, accuracy = model.evaluate(x[1:], y[1:], batch_size=ROWS, verbose=0)
    return loss, accuracy


def test_stock_keras_halves_the_scale_to_zero_and_then_writes_nan_into_every_weight() -> None:
    import keras

    with scoped_policy("mixed_float16", tf32=False):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.2))
        model = compiled(network(normalized=False), optimizer)
        model.fit(passes(), steps_per_epoch=EACH, epochs=EPOCHS, verbose=0)
    assert float(optimizer.dynamic_scale) == 0.0
    assert all(np.isnan(weight).all() for weight in model.get_weights())


@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("mode", SCALES)
def test_all_variables_stay_finite_and_every_step_is_accounted_for(mode: str, normalized: bool) -> None:
    model, losses, batches = trained("mixed_float16", mode, normalized=normalized)
    counters = model.optimizer.counters()
    assert (counters.steps, counters.applied, counters.skipped) == (STEPS, STEPS - EPOCHS, EPOCHS) == (1600, 1400, 200)
    assert int(model.optimizer.iterations) == STEPS - EPOCHS
    assert batches == (STEPS, EPOCHS)
    for variable in [*model.variables, *model.optimizer.variables, *model.metrics_variables]:
        assert np.isfinite(variable.numpy()).all(), variable.path
    assert len(losses) == EPOCHS
    assert np.isfinite(losses).all()
    assert counters.norm_max < 2.0
    # 15 halvings bring 2^15 to the floor of 1, and 1400 good steps are no 2000 in a row.
    assert counters.scale_used == {"dynamic": 1.0, "fixed": 2.0**15, "none": 1.0}[mode]


@pytest.mark.parametrize("normalized", [False, True], ids=["plain", "normalized"])
@pytest.mark.parametrize("mode", SCALES)
def test_clean_rows_are_learnt_as_in_float32_without_the_bad_row(mode: str, normalized: bool) -> None:
    model, losses, _ = trained("mixed_float16", mode, normalized=normalized)
    reference, _, _ = trained("float32", "none", normalized=normalized, bad_row=False)
    assert reference.optimizer.counters().skipped == 0
    loss, accuracy = on_clean_rows(model)
    expected_loss, expected_accuracy = on_clean_rows(reference)
    assert expected_accuracy >= 0.95
    assert accuracy >= 0.95
    assert losses[-1] < 0.5 * losses[0]
    assert loss == pytest.approx(expected_loss, abs=0.0075)
