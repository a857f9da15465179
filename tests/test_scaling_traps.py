"""The traps of loss scaling in Keras 3.15: each test shows first what stock Keras does, then that ours does the right thing.

The docstring of a test says what stock Keras does. What happens under several replicas is in test_mirrored.py.
"""

from __future__ import annotations

import json
import math
import sys
import types
import warnings
import zipfile
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.errors import ModelError, NoUpdatesError, PrecisionError
from mp_hydra.loss_scale import Rule, effective_mode
from mp_hydra.precision import census, needs_loss_scaling, require, scoped_policy

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

MIXED = ("mixed_float16", "mixed_bfloat16")
START = 2.0**15
FEW = 4  # batches of an epoch


@pytest.fixture
def float16() -> Iterator[None]:
    with scoped_policy("mixed_float16", tf32=False):
        yield


def wrapped(inner: Any = None, **settings: Any) -> Any:
    """Keras' own loss scaling around an optimizer."""
    import keras

    return keras.optimizers.LossScaleOptimizer(inner or keras.optimizers.SGD(1.0), **settings)


def scaled(inner: Any = None, *, mode: str = "dynamic", scale: float = START, **rule: Any) -> Any:
    """Ours around an optimizer."""
    import keras

    from mp_hydra.scaled_optimizer import ScaledOptimizer

    return ScaledOptimizer(inner or keras.optimizers.SGD(1.0), mode=mode, scale=scale, rule=Rule(**rule))


def linear(*, kind: Any = None, inputs: int = 1, dtype: str | None = None, weight: float = 1.0) -> Any:
    """y = w x with w = `weight`."""
    import keras

    head = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Constant(weight), dtype=dtype)
    return (kind or keras.Sequential)([keras.Input((inputs,)), head])


def compiled(model: Any, optimizer: Any, loss: Any = "mse", **settings: Any) -> Any:
    model.compile(optimizer, loss, auto_scale_loss=False, **{"jit_compile": False, **settings})
    return model


def with_ours(model: Any, optimizer: Any, loss: Any = "mse", **settings: Any) -> Any:
    """Compiled as the docstring of `mp_hydra.scaled_optimizer` says."""
    compiled(model, optimizer.inner_optimizer, loss, **settings)
    model.optimizer = optimizer
    optimizer.build(model.trainable_variables)
    return model


def applied(optimizer: Any, *gradients: float) -> Any:
    """One weight, 1.0 at first, after these gradients as the optimizer receives them."""
    import keras
    import tensorflow as tf

    weight = keras.Variable([1.0])
    optimizer.build([weight])
    for gradient in gradients:
        optimizer.apply([tf.constant([gradient])], [weight])
    return weight


def batches(*values: float, target: float = 3.0) -> Any:
    """Batches of one sample."""
    import tensorflow as tf

    x = np.array(values, "float32")[:, None]
    return tf.data.Dataset.from_tensor_slices((x, np.full_like(x, target))).batch(1)


# --- which scale is in force -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("policy", "layer"), [("float32", "mixed_float16"), ("mixed_float16", "float32")])
def test_scaling_is_decided_by_what_layers_compute_in(policy: str, layer: str) -> None:
    """Stock Keras scales by the name of the model's policy: float16 layers go without, float32 layers are scaled."""
    with scoped_policy(policy, tf32=False) as scope:
        model = linear(dtype=layer)
        model.compile("sgd", "mse")
        assert type(model.optimizer).__name__ == ("SGD" if layer == "mixed_float16" else "LossScaleOptimizer")
        mode = effective_mode("auto", float16=needs_loss_scaling(census(model, scope)))
    assert mode == ("dynamic" if layer == "mixed_float16" else "none")


def test_fixed_scale_is_kept_and_the_users_optimizer_left_alone(float16: None) -> None:
    """Stock Keras drops `loss_scale_factor` for a dynamic scale of 2^15, and sets it to None in the user's object."""
    import keras

    theirs = keras.optimizers.SGD(loss_scale_factor=128.0)
    stock = linear(dtype="float32")
    stock.compile(theirs, "mse")
    assert (stock.optimizer.initial_scale, stock.optimizer.loss_scale_factor) == (START, None)
    assert theirs.loss_scale_factor is None

    theirs = keras.optimizers.SGD(loss_scale_factor=128.0)
    with pytest.raises(ValueError, match="scales the loss already"):
        scaled(theirs, mode="fixed", scale=128.0)
    assert theirs.loss_scale_factor == 128.0
    theirs = keras.optimizers.SGD(0.25)
    before = theirs.get_config()
    model = with_ours(linear(dtype="float32"), scaled(theirs, mode="fixed", scale=128.0))
    model.fit(batches(1.0), verbose=0)
    assert model.optimizer.counters().scale_used == 128.0
    assert theirs.get_config() == before


def test_overflow_under_a_fixed_scale_is_skipped() -> None:
    """Stock Keras does not look at gradients under a fixed scale: one overflow, and the weight is -inf for ever."""
    import keras

    stock = compiled(linear(), keras.optimizers.SGD(1.0, loss_scale_factor=128.0))
    stock.fit(batches(math.inf), verbose=0)
    assert stock.get_weights()[0] == -math.inf

    model = with_ours(linear(), scaled(mode="fixed", scale=128.0))
    model.fit(batches(math.inf), verbose=0)
    assert model.get_weights()[0] == 1.0
    assert model.optimizer.counters().skipped == 1


def test_scale_has_a_floor() -> None:
    """Stock Keras halves the scale down to 0, and the next good gradient, 0/0, writes nan into the weight."""
    halvings = 15 + 126 + 1  # from 2^15 to float32's smallest normal number 2^-126, and below it
    optimizer = wrapped()
    weight = applied(optimizer, *[math.inf] * halvings, 0.0)  # any loss times the scale 0 has a gradient of 0
    assert float(optimizer.dynamic_scale) == 0.0
    assert math.isnan(weight.numpy()[0])

    optimizer = scaled()
    weight = applied(optimizer, *[math.inf] * halvings, 0.5)
    assert float(optimizer.dynamic_scale) == 1.0
    assert weight.numpy()[0] == 1.0 - 0.5


def test_scale_has_a_ceiling() -> None:
    """Stock Keras lets the scale grow to inf, from where halving never brings it back."""
    optimizer = wrapped(initial_scale=2.0**126, dynamic_growth_steps=1)
    applied(optimizer, 0.0, 0.0, math.inf, math.inf)
    assert float(optimizer.dynamic_scale) == math.inf

    optimizer = scaled(scale=2.0**31, growth_interval=1)
    applied(optimizer, 0.0, 0.0, math.inf)  # 2^32, 2^32 again, and half of it
    assert float(optimizer.dynamic_scale) == 2.0**31


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        *[({"initial_scale": scale}, {"scale": scale}) for scale in (0.0, -1.0, math.nan, math.inf)],
        *[({"dynamic_growth_steps": steps}, {"growth_interval": steps}) for steps in (0, -5)],
    ],
)
def test_arguments_are_checked(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    """Stock Keras accepts scales and intervals that cannot work."""
    wrapped(**theirs)

    with pytest.raises(ValueError, match=next(iter(ours))):
        scaled(**ours)


def test_nesting_is_refused() -> None:
    """Stock Keras accepts loss scaling around loss scaling."""
    wrapped(wrapped())

    with pytest.raises(ValueError, match="scales the loss already"):
        scaled(wrapped())
    with pytest.raises(ValueError, match="scales the loss already"):
        scaled(scaled())


# --- counting --------------------------------------------------------------------------------------------------------


def test_skipped_steps_are_counted_under_accumulation() -> None:
    """Stock Keras counts no skipped steps; steps less iterations says 3 of these 5, of which one was."""
    import keras

    gradients = (1.0, math.inf, 1.0, 1.0, 1.0)
    optimizer = wrapped(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    applied(optimizer, *gradients)
    assert len(gradients) - int(optimizer.iterations) == 3
    assert not hasattr(optimizer, "counters")

    optimizer = scaled(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2))
    applied(optimizer, *gradients)
    assert (optimizer.counters().steps, optimizer.counters().skipped) == (5, 1)
    assert int(optimizer.iterations) == 2  # four finite micro-batches


def test_single_steps_are_counted_under_steps_per_execution() -> None:
    """Stock Keras shows callbacks the scale once for all steps of an execution: that two were skipped and one grew is lost."""
    import keras

    class Scales(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            seen.append(float(self.model.optimizer.dynamic_scale))

    seen: list[float] = []
    values = (1.0, math.inf, math.inf, 1.0)
    stock = compiled(linear(), wrapped(keras.optimizers.SGD(0.0), dynamic_growth_steps=1), steps_per_execution=FEW)
    stock.fit(batches(*values), verbose=0, callbacks=[Scales()])
    assert seen == [START]  # doubled, halved, halved, doubled: as if nothing had happened

    optimizer = scaled(keras.optimizers.SGD(0.0), growth_interval=1)
    with_ours(linear(), optimizer, steps_per_execution=FEW).fit(batches(*values), verbose=0)
    counters = optimizer.counters()
    assert (counters.steps, counters.applied, counters.skipped, counters.last_skipped) == (4, 2, 2, 3)


def test_scale_used_is_that_of_the_step() -> None:
    """Stock Keras shows after a step the scale of the next one: 16 for gradients that carried 8."""
    optimizer = wrapped(initial_scale=8.0, dynamic_growth_steps=1)
    weight = applied(optimizer, 4.0)
    assert weight.numpy()[0] == 1.0 - 4.0 / 8.0
    assert float(optimizer.dynamic_scale) == 16.0

    optimizer = scaled(scale=8.0, growth_interval=1)
    weight = applied(optimizer, 4.0)
    assert weight.numpy()[0] == 1.0 - 4.0 / 8.0
    assert optimizer.counters().scale_used == 8.0


# --- gradient norms --------------------------------------------------------------------------------------------------


def test_norm_is_unscaled() -> None:
    """Stock Keras hands a train_step scaled gradients; divided by the scale after the step, a norm of 4 becomes 2."""
    import keras
    import tensorflow as tf

    class Logging(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.optimizer.scale_loss(self.compute_loss(x=x, y=y, y_pred=self(x, training=True)))
            gradients = tape.gradient(loss, self.trainable_variables)
            self.optimizer.apply(gradients, self.trainable_variables)
            norm = tf.linalg.global_norm(gradients)
            return {"norm": norm, "divided": norm / self.optimizer.dynamic_scale}

    # d/dw (w - 3)^2 at w = 1 is -4.
    stock = compiled(linear(kind=Logging), wrapped(initial_scale=8.0, dynamic_growth_steps=1))
    logs = stock.fit(batches(1.0), verbose=0).history
    assert (logs["norm"], logs["divided"]) == ([4.0 * 8.0], [4.0 * 8.0 / 16.0])

    model = with_ours(linear(kind=Logging), scaled(scale=8.0, growth_interval=1))
    model.fit(batches(1.0), verbose=0)
    assert (model.optimizer.counters().norm_sum, model.optimizer.counters().norm_max) == (4.0, 4.0)


def test_norm_adds_the_gradients_of_a_repeated_embedding_id() -> None:
    """Stock TensorFlow's global_norm squares each occurrence: sqrt(2 (3 + 1)) where the gradient's norm is sqrt(2 (9 + 1))."""
    import keras
    import tensorflow as tf

    ids = np.array([[7, 2, 7, 7]])
    model = keras.Sequential([keras.Input((4,), dtype="int32"), keras.layers.Embedding(9, 2)])
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(model(ids))
    gradients = tape.gradient(loss, model.trainable_variables)
    assert float(tf.linalg.global_norm(gradients)) == pytest.approx(math.sqrt(8))
    assert float(tf.linalg.global_norm([tf.convert_to_tensor(gradients[0])])) == pytest.approx(math.sqrt(20))

    optimizer = scaled(mode="none", scale=1.0)
    optimizer.build(model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)
    assert optimizer.counters().norm_sum == pytest.approx(math.sqrt(20))


def test_mean_norm_is_over_applied_steps() -> None:
    """Stock Keras' Mean over the norms of all steps is inf from the first skipped one on."""
    import keras

    mean = keras.metrics.Mean()
    for norm in (3.0, math.inf, 5.0):
        mean.update_state(norm)
    assert float(mean.result()) == math.inf

    optimizer = scaled(mode="fixed", scale=8.0)
    applied(optimizer, 3.0 * 8.0, math.inf, -5.0 * 8.0)
    counters = optimizer.counters()
    assert counters.norm_sum / counters.applied == (3.0 + 5.0) / 2
    assert counters.norm_max == 5.0


# --- what a bad batch leaves behind ----------------------------------------------------------------------------------


def normalized() -> Any:
    """Two inputs, summed in float16 by one unit, then a BatchNormalization with momentum 0.99."""
    import keras

    ones = keras.initializers.Constant(1.0)
    layers = [keras.layers.Dense(1, kernel_initializer=ones), keras.layers.BatchNormalization()]
    return keras.Sequential([keras.Input((2,)), *layers, keras.layers.Dense(1, dtype="float32")])


def test_skipped_step_leaves_moving_statistics_alone(float16: None) -> None:
    """Stock Keras has moved BatchNorm's statistics when it skips: the mean is inf for ever, and evaluation gives nan."""
    import keras

    from mp_hydra.finite_steps import finite_steps

    x, y = np.ones((2 * FEW, 2), "float32"), np.ones((2 * FEW, 1), "float32")
    x[2] = 60000.0  # 60000 + 60000 is inf in float16
    still = keras.optimizers.SGD(0.0)
    stock = compiled(normalized(), wrapped(still))
    stock.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    assert float(stock.optimizer.dynamic_scale) == START / 2  # a healthy training: one step skipped
    assert stock.layers[1].moving_mean.numpy() == math.inf
    assert math.isnan(stock.evaluate(x[:2], y[:2], verbose=0))

    model = with_ours(normalized(), scaled(keras.optimizers.SGD(0.0)))
    with finite_steps(model, model.optimizer):
        model.fit(x, y, batch_size=2, shuffle=False, verbose=0)
    assert model.optimizer.counters().skipped == 1
    # Three batches of 1 + 1 = 2, without variance.
    assert model.layers[1].moving_mean.numpy() == pytest.approx(2 * (1 - 0.99**3), rel=1e-5)
    assert model.layers[1].moving_variance.numpy() == pytest.approx(0.99**3, rel=1e-5)
    assert math.isfinite(model.evaluate(x[:2], y[:2], verbose=0))


def test_epoch_loss_is_over_finite_batches_and_terminate_on_nan_understands_it() -> None:
    """Stock Keras averages the bad batch in: the loss is nan, and TerminateOnNaN ends a training whose weights are well."""
    import keras

    from mp_hydra.finite_steps import finite_steps

    # (w - 3)^2 = 4 at w = 1, in the three good batches.
    data = batches(1.0, math.nan, 1.0, 1.0)
    stock = compiled(linear(), wrapped(keras.optimizers.SGD(0.0)))
    history = stock.fit(data, epochs=2, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]).history["loss"]
    assert len(history) == 1
    assert math.isnan(history[0])
    assert stock.stop_training
    assert stock.get_weights()[0] == 1.0

    model = with_ours(linear(), scaled(keras.optimizers.SGD(0.0)))
    with finite_steps(model, model.optimizer) as counted:
        history = model.fit(data, epochs=2, verbose=0, callbacks=[keras.callbacks.TerminateOnNaN()]).history["loss"]
    assert history == [4.0, 4.0]
    assert not model.stop_training
    assert counted.read() == (2 * FEW, 2)


@pytest.mark.parametrize(
    ("limit", "line"),
    [
        (None, "none of the 4 steps of epoch 1 was applied"),
        (2, "4 steps in a row were skipped, more than loss_scale.max_skipped_in_a_row=2"),
    ],
)
def test_training_without_one_update_is_an_error(float16: None, limit: int | None, line: str) -> None:
    """Stock Keras ends such a fit normally, with a finite loss that does not change."""
    from mp_hydra.scaling_limits import ScalingLimits

    # A scaled gradient of 4 * 2^100 is inf in float16; 16 halvings are far from enough.
    data = batches(*[1.0] * FEW)
    stock = compiled(linear(), wrapped(initial_scale=2.0**100))
    assert stock.fit(data, epochs=2, verbose=0).history["loss"] == [4.0, 4.0]
    assert int(stock.optimizer.iterations) == 0

    model = with_ours(linear(), scaled(mode="fixed", scale=2.0**100))
    limits = ScalingLimits(model.optimizer, max_skipped_in_a_row=limit)
    with pytest.raises(NoUpdatesError, match=line) as raised:
        model.fit(data, epochs=2, verbose=0, callbacks=[limits])
    assert "precision=mixed_bfloat16" in str(raised.value)
    assert model.get_weights()[0] == 1.0


# --- a train_step of one's own ---------------------------------------------------------------------------------------


def own_step(scale: bool) -> Any:
    """A model class whose train_step scales the loss, or forgets to."""
    import keras
    import tensorflow as tf

    class OwnStep(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                wanted = self.optimizer.scale_loss(loss) if scale else loss
            self.optimizer.apply(tape.gradient(wanted, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    return OwnStep


def test_step_that_forgets_the_scale_is_refused_before_training() -> None:
    """Stock Keras divides unscaled gradients by the scale: with SGD the weight moves by 2^-15 where it should move by 1."""
    import keras

    from mp_hydra.scaling_check import require_scaled_loss

    stock = compiled(linear(kind=own_step(scale=False)), wrapped(keras.optimizers.SGD(0.25)))
    stock.fit(batches(1.0), verbose=0)
    assert stock.get_weights()[0] == 1.0 + 0.25 * 4.0 / START

    batch = next(iter(batches(1.0)))
    model = with_ours(linear(kind=own_step(scale=False)), scaled())
    with pytest.raises(ModelError, match=r"OwnStep.train_step does not scale the loss: write `loss = "):
        require_scaled_loss(model, model.optimizer, batch)
    assert model.get_weights()[0] == 1.0
    model = with_ours(linear(kind=own_step(scale=True)), scaled(keras.optimizers.SGD(0.25)))
    require_scaled_loss(model, model.optimizer, batch)
    assert model.optimizer.counters().steps == 0
    model.fit(batches(1.0), verbose=0)
    assert model.get_weights()[0] == 1.0 + 0.25 * 4.0


# --- losses and metrics in 16 bits -----------------------------------------------------------------------------------


def extra_loss(kind: str) -> Any:
    """Rows of three ones through units of kernel 0.5 (h = 1.5), or rows of one 8 through 4096 units of kernel 1 (h = 8).

    The head gives 3.0 for the target 3.0, so that the whole loss is the additional one.
    """
    import keras

    class Adding(keras.layers.Layer):
        def call(self, h: Any) -> Any:
            self.add_loss(0.25 * keras.ops.mean(h))
            return h

    units, inputs, weight = (4096, 1, 1.0) if kind == "wide" else (4, 3, 0.5)
    regularizer = {"wide": keras.regularizers.L2(1e-6), "activity": keras.regularizers.L2(0.01), "add_loss": None}[kind]
    constant = keras.initializers.Constant
    hidden = keras.layers.Dense(units, kernel_initializer=constant(weight), activity_regularizer=regularizer)
    head = keras.layers.Dense(1, kernel_initializer=constant(0.0), bias_initializer=constant(3.0), dtype="float32")
    middle = [Adding()] if kind == "add_loss" else []
    return keras.Sequential([keras.Input((inputs,)), hidden, *middle, head])


# Keras divides an activity regularizer by the batch size: for each row 4 * 1.5^2 * 0.01, 4096 * 8^2 * 1e-6; 0.25 * 1.5.
EXTRA = {"activity": 0.09, "wide": 0.262144, "add_loss": 0.375}


@pytest.mark.parametrize("kind", EXTRA)
@pytest.mark.parametrize("policy", ["float32", *MIXED])
def test_additional_losses_are_summed_in_float32(policy: str, kind: str) -> None:
    """Stock Keras raises TypeError for them under both mixed policies, in fit and in evaluate."""
    import keras

    from mp_hydra.float32_losses import float32_losses

    x = np.full((2, 1), 8.0, "float32") if kind == "wide" else np.ones((2, 3), "float32")
    y = np.full((2, 1), 3.0, "float32")
    with scoped_policy(policy, tf32=False):
        if policy != "float32":
            stock = compiled(extra_loss(kind), keras.optimizers.SGD(0.0))
            for task in (stock.fit, stock.evaluate):
                with pytest.raises(TypeError, match="to <dtype: 'float32'>"):
                    task(x, y, verbose=0)

        mode = "dynamic" if policy == "mixed_float16" else "none"
        model = with_ours(
            extra_loss(kind), scaled(keras.optimizers.SGD(0.0), mode=mode, scale=START if mode == "dynamic" else 1.0)
        )
        with float32_losses(model):
            trained = model.fit(x, y, verbose=0).history["loss"][0]
            evaluated = model.evaluate(x, y, verbose=0)
    assert trained == pytest.approx(EXTRA[kind], rel=0.005)
    assert evaluated == pytest.approx(EXTRA[kind], rel=0.005)
    assert model.optimizer.counters().skipped == 0


def test_wide_layers_sum_of_squares_would_overflow_float16() -> None:
    """Stock Keras forms it in the layer's own dtype: 2 * 4096 * 8^2 = 524288 is inf in float16."""
    import keras
    import tensorflow as tf

    assert float(keras.regularizers.L2(1.0)(tf.fill((2, 4096), tf.constant(8.0, "float16")))) == math.inf
    # Ours: the case "wide" above.


@pytest.mark.parametrize("policy", MIXED)
def test_metrics_see_float32_predictions(policy: str) -> None:
    """Stock Keras hands 16-bit predictions on: mse of targets around 1000 is inf in float16, and y_pred - y_true a TypeError."""
    from keras import ops

    from mp_hydra.probe import float32_head, probe

    def difference(y_true: Any, y_pred: Any) -> Any:
        return ops.mean(ops.abs(y_pred - y_true))

    x, y = np.ones((FEW, 1), "float32"), np.full((FEW, 1), 1000.0, "float32")
    with scoped_policy(policy, tf32=False):
        stock = compiled(linear(), "sgd", metrics=["mse"])
        _, mse = stock.evaluate(x, y, verbose=0)
        assert mse == (math.inf if policy == "mixed_float16" else pytest.approx(999.0**2, rel=0.01))
        assert str(stock.predict(x, verbose=0).dtype) == policy.removeprefix("mixed_")
        with pytest.raises(TypeError, match="does not match type"):
            compiled(linear(), "sgd", metrics=[difference]).evaluate(x, y, verbose=0)

        with pytest.raises(
            PrecisionError, match=r'layer .*dense.* \(Dense\), gives .*float16 outputs.*dtype="float32"'
        ):
            probe(linear(), x)
        cured = linear()
        float32_head(cured, x)
        probe(cured, x)
        compiled(cured, "sgd", metrics=["mse", difference])
        _, mse, mean = cured.evaluate(x, y, verbose=0)
        assert cured.predict(x, verbose=0).dtype == np.float32
    assert (mse, mean) == (999.0**2, 999.0)


# --- saving ----------------------------------------------------------------------------------------------------------


def trained_once(optimizer: Any = None) -> Any:
    """A mixed_float16 model after one step of Adam under ours; call it with that policy in force."""
    import keras

    model = with_ours(normalized(), optimizer or scaled(keras.optimizers.Adam(0.01), growth_interval=1))
    model.fit(np.ones((2, 2), "float32"), np.ones((2, 1), "float32"), verbose=0)
    return model


def test_model_resumed_under_another_global_policy_keeps_its_optimizer_state(tmp_path: Path) -> None:
    """Stock Keras drops the state with one warning, "Skipping variable loading", and scales no more."""
    import keras

    from mp_hydra.checkpoint import resume

    with scoped_policy("mixed_float16", tf32=False):
        stock = normalized()
        stock.compile("adam", "mse", jit_compile=False)
        stock.fit(np.ones((2, 2), "float32"), np.ones((2, 1), "float32"), verbose=0)
        stock.save(tmp_path / "stock.keras")
        ours = trained_once()
        ours.save(tmp_path / "ours.keras")
    with scoped_policy("float32", tf32=False):
        with pytest.warns(UserWarning, match="Skipping variable loading"):
            loaded = keras.saving.load_model(tmp_path / "stock.keras")
        assert (type(loaded.optimizer), int(loaded.optimizer.iterations)) == (keras.optimizers.Adam, 0)

        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed = resume(tmp_path / "ours.keras")
    assert float(resumed.optimizer.dynamic_scale) == 2 * START
    assert resumed.optimizer.counters() == ours.optimizer.counters()
    assert int(resumed.optimizer.iterations) == 1
    for mine, theirs in zip(resumed.optimizer.variables, ours.optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.path)


def test_state_that_does_not_fit_is_an_error(float16: None, tmp_path: Path) -> None:
    """Stock Keras passes over it with a warning and trains on without it."""
    import keras

    file = tmp_path / "adam.weights.h5"
    trained_once().save_weights(file)
    stock = compiled(normalized(), keras.optimizers.SGD(0.1, momentum=0.9))
    stock.optimizer.build(stock.trainable_variables)
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        stock.load_weights(file)

    model = with_ours(normalized(), scaled(keras.optimizers.SGD(0.1, momentum=0.9)))
    # Adam: iteration, rate and two moments of each of 6 variables; SGD with momentum: one moment of each.
    with pytest.raises(ValueError, match=r"the saved optimizer state has 14 variables and .* needs 8"):
        model.load_weights(file)


def test_weights_loaded_before_the_optimizer_is_built_are_an_error(float16: None, tmp_path: Path) -> None:
    """Stock Keras drops the optimizer's state then, and starts it anew."""
    import keras

    file = tmp_path / "adam.weights.h5"
    trained_once().save_weights(file)
    stock = compiled(normalized(), keras.optimizers.Adam(0.01))
    with pytest.warns(UserWarning, match="Skipping variable loading"):
        stock.load_weights(file)
    assert int(stock.optimizer.iterations) == 0

    model = compiled(normalized(), "adam")
    model.optimizer = scaled(keras.optimizers.Adam(0.01))
    with pytest.raises(ValueError, match=r"the saved optimizer state has 14 variables and .* needs 2"):
        model.load_weights(file)


def test_saved_file_names_no_class_of_ours_and_opens_with_its_state(tmp_path: Path) -> None:
    """Stock Keras stores the class of a scaler that was compiled, so that the file does not open where it is unknown."""
    import keras

    with scoped_policy("mixed_float16", tf32=False):
        theirs = normalized()
        compiled(theirs, scaled(keras.optimizers.Adam(0.01)))
        theirs.save(tmp_path / "theirs.keras")
        trained_once().save(tmp_path / "ours.keras")
    assert "ScaledOptimizer" in config_of(tmp_path / "theirs.keras")

    assert "mp_hydra" not in config_of(tmp_path / "ours.keras")
    with scoped_policy("float32", tf32=False), warnings.catch_warnings():
        warnings.simplefilter("error")
        loaded = keras.saving.load_model(tmp_path / "ours.keras")
    assert (type(loaded.optimizer), int(loaded.optimizer.iterations)) == (keras.optimizers.Adam, 1)


def config_of(file: Path) -> str:
    with zipfile.ZipFile(file) as archive:
        return json.dumps(json.loads(archive.read("config.json")))


def test_float32_file_under_a_mixed_policy_is_refused(tmp_path: Path) -> None:
    """Stock Keras keeps computing in float32 without a word: a file stores the policies of its layers."""
    import keras

    with scoped_policy("float32", tf32=False):
        linear().save(tmp_path / "float32.keras")
    with scoped_policy("mixed_float16", tf32=False) as scope:
        loaded = keras.saving.load_model(tmp_path / "float32.keras")
        assert loaded.layers[0].compute_dtype == "float32"

        with pytest.raises(PrecisionError, match="A model loaded from a file keeps the precision it was saved in"):
            require(census(loaded, scope), scope.policy)


def test_lists_of_a_config_reach_layers_as_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Stock Hydra hands layers OmegaConf's ListConfig, which Keras cannot save."""
    import keras
    from hydra.utils import instantiate

    from mp_hydra.models.build import DataSpec, build

    def scaled_by(factors: Any) -> Any:
        return keras.Sequential([keras.Input((2,)), keras.layers.Rescaling(factors)])

    monkeypatch.setitem(sys.modules, "a_users_models", types.SimpleNamespace(scaled_by=scaled_by))  # type: ignore[misc]
    node = {"_target_": "a_users_models.scaled_by", "factors": [1.0, 2.0]}
    with pytest.raises(TypeError, match="ListConfig"):
        instantiate(node).save(tmp_path / "theirs.keras")

    model = build(node, DataSpec((2,), "float32", outputs=2, classes=2, vocabulary=None))
    model.save(tmp_path / "ours.keras")
    assert keras.saving.load_model(tmp_path / "ours.keras").layers[0].scale == [1.0, 2.0]
