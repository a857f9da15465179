"""The scaled optimizer in `fit` and by itself: what it skips, counts, scales and hands on, and what a saved file holds."""

from __future__ import annotations

import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mp_hydra.loss_scale import Rule

WAYS: dict[str, dict[str, Any]] = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "jit": {"jit_compile": True},
    "spe": {"steps_per_execution": 4},
}
MODES = {"dynamic": 2.0**10, "fixed": 2.0**10, "none": 1.0}


def optimizer(inner: Any = None, *, mode: str = "dynamic", scale: float | None = None, **rule: Any) -> Any:
    import keras

    from mp_hydra.scaled_optimizer import ScaledOptimizer

    inner = inner or keras.optimizers.Adam(0.01)
    return ScaledOptimizer(inner, mode=mode, scale=MODES[mode] if scale is None else scale, rule=Rule(**rule))


def linear(inputs: int = 3) -> Any:
    import keras

    kernel = keras.initializers.Constant(1.0)
    return keras.Sequential([keras.Input((inputs,)), keras.layers.Dense(1, use_bias=False, kernel_initializer=kernel)])


def compiled(scaled: Any, **settings: Any) -> Any:
    import keras

    model = linear()
    model.compile("sgd", keras.losses.MeanSquaredError(), auto_scale_loss=False, **{"jit_compile": False, **settings})
    model.optimizer = scaled
    return model


def rows(*bad: int, steps: int = 12) -> Any:
    """`steps` batches of one sample; those in `bad` hold an inf."""
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(steps, 3)).astype("float32")
    x[list(bad), 1] = np.inf
    return tf.data.Dataset.from_tensor_slices((x, np.ones((steps, 1), "float32"))).batch(1)


def fitted(scaled: Any, data: Any, **settings: Any) -> Any:
    model = compiled(scaled, **settings)
    model.fit(data, verbose=0, shuffle=False)
    return model


# --- in fit ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("accumulation", [None, 3])
def test_dynamic_scale_grows_and_backs_off_exactly_in_every_way_to_run(way: str, accumulation: int | None) -> None:
    import keras

    # Finite steps 0 1 2 (grows after 3), 3 4, bad 5, 6 7 8 (grows), bad 9, 10 11: 1024 -> 2048 -> 1024 -> 2048 -> 1024.
    scaled = optimizer(keras.optimizers.SGD(1e-3, gradient_accumulation_steps=accumulation), growth_interval=3)
    fitted(scaled, rows(5, 9), **WAYS[way])
    counters = scaled.counters()
    assert (counters.steps, counters.applied, counters.skipped) == (12, 10, 2)
    assert float(scaled.dynamic_scale) == 1024.0
    assert int(scaled.step_counter) == 2
    assert counters.scale_used == 1024.0
    assert int(scaled.iterations) == 10 // (accumulation or 1)


def test_scale_used_is_that_of_the_last_step_and_not_the_next_ones() -> None:
    scaled = optimizer(growth_interval=4)
    fitted(scaled, rows(steps=4))
    assert float(scaled.dynamic_scale) == 2048.0
    assert scaled.counters().scale_used == 1024.0


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("mode", ["fixed", "none"])
def test_scale_stands_still_and_bad_steps_are_skipped_where_it_is_not_dynamic(mode: str, way: str) -> None:
    scaled = optimizer(mode=mode, growth_interval=1)
    model = fitted(scaled, rows(5, 9), **WAYS[way])
    counters = scaled.counters()
    assert (counters.steps, counters.applied, counters.scale_used) == (12, 10, MODES[mode])
    assert float(scaled.dynamic_scale) == MODES[mode]
    assert np.isfinite(model.get_weights()[0]).all()


@pytest.mark.parametrize("mode", MODES)
def test_scale_respects_floor_and_ceiling(mode: str) -> None:
    scaled = optimizer(mode=mode, growth_interval=1, minimum=512.0, maximum=2048.0)
    fitted(scaled, rows(0, 1, 2, 3, steps=4))
    assert float(scaled.dynamic_scale) == {"dynamic": 512.0, "fixed": 1024.0, "none": 1.0}[mode]
    scaled = optimizer(mode=mode, growth_interval=1, minimum=512.0, maximum=2048.0)
    fitted(scaled, rows(steps=4))
    assert float(scaled.dynamic_scale) == {"dynamic": 2048.0, "fixed": 1024.0, "none": 1.0}[mode]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("way", ["graph", "eager", "jit"])
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_bad_step_leaves_weights_and_slots_untouched_bit_for_bit(mode: str, way: str, value: float) -> None:
    scaled = optimizer(mode=mode)
    model = fitted(scaled, rows(steps=3), **WAYS[way])
    before = [v.numpy().copy() for v in [*model.weights, *scaled.inner_optimizer.variables]]
    x = np.array([[1.0, value, 1.0]], "float32")
    model.fit(x, np.ones((1, 1), "float32"), verbose=0)
    after = [v.numpy() for v in [*model.weights, *scaled.inner_optimizer.variables]]
    assert scaled.counters().skipped == 1
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)


@pytest.mark.parametrize("mode", MODES)
def test_weights_equal_those_of_the_bare_optimizer_where_every_step_is_finite(mode: str) -> None:
    import keras

    model = fitted(optimizer(mode=mode), rows())  # 1024 and its inverse are exact in float32
    bare = compiled(keras.optimizers.Adam(0.01))
    bare.fit(rows(), verbose=0, shuffle=False)
    np.testing.assert_array_equal(model.get_weights()[0], bare.get_weights()[0])


# --- scaling ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("scale", [1024.0, 1000.0, 3.0])
@pytest.mark.parametrize("built", [True, False])
def test_fixed_scale_multiplies_the_loss_to_the_letter(scale: float, built: bool) -> None:
    import tensorflow as tf

    scaled = optimizer(mode="fixed", scale=scale)
    if built:
        scaled.build(linear().trainable_variables)
    loss = scaled.scale_loss(tf.constant(0.25))
    assert float(loss) == np.float32(0.25) * np.float32(scale)


def test_fixed_scale_is_what_the_gradients_of_a_fit_carry() -> None:
    class Spy:
        seen: list[float]

    import keras
    import tensorflow as tf

    spy = Spy()
    spy.seen = []

    class Model(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            x, y = data
            with tf.GradientTape() as tape:
                loss = self.compute_loss(x=x, y=y, y_pred=self(x, training=True))
                scaled = self.optimizer.scale_loss(loss)
            spy.seen.append(float(scaled) / float(loss))
            self.optimizer.apply(tape.gradient(scaled, self.trainable_variables), self.trainable_variables)
            return {"loss": loss}

    model = Model(linear().layers)
    model.compile("sgd", "mse", run_eagerly=True, auto_scale_loss=False)
    model.optimizer = optimizer(mode="fixed", scale=256.0)
    model.fit(rows(steps=3), verbose=0)
    assert spy.seen == [256.0] * 3


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_loss_is_scaled_in_float32(dtype: str) -> None:
    import tensorflow as tf

    loss = optimizer(scale=2.0**20).scale_loss(tf.constant(2.0, dtype))
    assert loss.dtype == tf.float32
    assert float(loss) == 2.0**21
    assert optimizer(mode="none").scale_loss(tf.constant(2.0, dtype)).dtype == tf.float32


# --- the norm --------------------------------------------------------------------------------------------------------


def applied(scaled: Any, gradients: list[Any], shapes: list[tuple[int, ...]]) -> Any:
    import keras
    import tensorflow as tf

    variables = [keras.Variable(np.zeros(shape, "float32")) for shape in shapes]
    scaled.build(variables)

    @tf.function
    def step() -> None:
        scaled.apply(gradients, variables)

    step()
    return variables


@pytest.mark.parametrize("mode", MODES)
def test_norm_is_that_of_the_unscaled_gradient_over_all_variables(mode: str) -> None:
    import tensorflow as tf

    scaled = optimizer(mode=mode)
    scale = MODES[mode]
    applied(scaled, [tf.constant([3.0, 0.0]) * scale, None, tf.constant([[4.0]]) * scale], [(2,), (5,), (1, 1)])
    assert scaled.counters().norm_sum == pytest.approx(5.0, rel=1e-6)
    assert scaled.counters().norm_max == pytest.approx(5.0, rel=1e-6)


def test_norm_adds_rows_of_repeated_ids_before_squaring_them() -> None:
    import tensorflow as tf

    # id 1: 3 + 1 - 1 = 3; id 4: 4; squared and summed over rows of two equal numbers: 2 (9 + 16) = 50.
    values = tf.constant([[3.0, 3.0], [4.0, 4.0], [1.0, 1.0], [-1.0, -1.0]]) * 1024.0
    slices = tf.IndexedSlices(values, tf.constant([1, 4, 1, 1]), tf.constant([6, 2]))
    scaled = optimizer()
    applied(scaled, [slices], [(6, 2)])
    assert scaled.counters().norm_sum == pytest.approx(math.sqrt(50.0), rel=1e-6)


@pytest.mark.parametrize("way", ["graph", "eager", "jit"])
def test_norm_of_repeated_embedding_ids_in_fit_equals_its_closed_form(way: str) -> None:
    import keras

    # loss = mean over the batch (1) of sum of the embedding rows: each occurrence adds a gradient of 1 in each of 2 columns.
    # ids 7 (three times) and 2 (once): sqrt(2 (9 + 1)) = sqrt 20.
    model = keras.Sequential(
        [
            keras.Input((4,), dtype="int32"),
            keras.layers.Embedding(9, 2),
            keras.layers.Lambda(lambda x: keras.ops.sum(x, (1, 2))),
        ]
    )
    model.compile("sgd", loss=lambda _, y: y, auto_scale_loss=False, **{"jit_compile": False, **WAYS[way]})
    model.optimizer = scaled = optimizer(keras.optimizers.SGD(0.1))
    model.fit(np.array([[7, 2, 7, 7]]), np.zeros((1,)), verbose=0)
    assert scaled.counters().norm_sum == pytest.approx(math.sqrt(20.0), rel=1e-6)


@pytest.mark.parametrize("clip", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.1}])
def test_clipping_acts_on_unscaled_gradients_and_the_norm_is_taken_before_it(clip: dict[str, float]) -> None:
    import keras
    import tensorflow as tf

    scaled = optimizer(keras.optimizers.SGD(1.0, **clip))
    (variable,) = applied(scaled, [tf.constant([3.0, 4.0]) * 1024.0], [(2,)])
    assert scaled.counters().norm_sum == pytest.approx(5.0, rel=1e-6)
    expected = [-0.1, -0.1] if "clipvalue" in clip else [-0.06, -0.08]
    np.testing.assert_allclose(variable.numpy(), expected, rtol=1e-5)


def test_norms_of_skipped_steps_do_not_count_and_a_period_can_begin_anew() -> None:
    scaled = optimizer()
    fitted(scaled, rows(1, steps=2))
    first = scaled.counters()
    assert first.applied == 1
    assert 0 < first.norm_max == first.norm_sum < np.inf
    scaled.reset_norms()
    assert (scaled.counters().norm_sum, scaled.counters().norm_max) == (0.0, 0.0)
    assert scaled.counters().steps == 2


def test_norm_beyond_float32_counts_as_not_finite() -> None:
    import tensorflow as tf

    scaled = optimizer(mode="none")
    applied(scaled, [tf.constant([1e20])], [(1,)])
    assert scaled.counters().skipped == 1


def test_gradient_list_without_any_gradient_is_refused_as_keras_does() -> None:
    with pytest.raises(ValueError, match="No gradients provided"):
        applied(optimizer(), [None], [(1,)])


# --- what stays with the inner optimizer -----------------------------------------------------------------------------


def test_schedule_average_and_weight_decay_do_not_move_on_a_skipped_step() -> None:
    import keras

    def adam() -> Any:
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5)
        return keras.optimizers.AdamW(rate, weight_decay=0.1, use_ema=True, ema_momentum=0.5)

    results: list[Any] = []
    for bad in ((), (2,)):
        scaled = optimizer(adam())
        data = (
            rows(*bad, steps=5) if bad else rows(2, steps=5).enumerate().filter(lambda i, _: i != 2).map(lambda _, b: b)
        )
        model = fitted(scaled, data)
        results.append((model.get_weights()[0], float(scaled.learning_rate), int(scaled.iterations)))
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1:] == results[1][1:] == (pytest.approx(0.1 * 0.5**4), 4)


def test_learning_rate_callbacks_reach_the_inner_optimizer() -> None:
    import keras

    scaled = optimizer(keras.optimizers.SGD(0.5))
    model = compiled(scaled)
    model.fit(rows(), verbose=0, callbacks=[keras.callbacks.LearningRateScheduler(lambda _: 0.125)])
    assert float(scaled.inner_optimizer.learning_rate) == 0.125
    assert float(scaled.learning_rate) == 0.125


# --- construction ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_config_roundtrip_keeps_everything(mode: str) -> None:
    import keras

    scaled = optimizer(keras.optimizers.SGD(0.25, momentum=0.5), mode=mode, growth_interval=7, minimum=0.5)
    config = keras.saving.serialize_keras_object(scaled)
    again = keras.saving.deserialize_keras_object(config)
    assert type(again) is type(scaled)
    assert again.get_config() == scaled.get_config()
    assert (again.mode, again.initial_scale, again.rule) == (mode, MODES[mode], Rule(growth_interval=7, minimum=0.5))
    assert keras.saving.serialize_keras_object(scaled) == config  # from_config has not eaten the dict


def test_optimizer_that_scales_already_is_refused() -> None:
    import keras

    for inner in (
        keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()),
        keras.optimizers.SGD(loss_scale_factor=128.0),
        optimizer(),
    ):
        with pytest.raises(ValueError, match="scales the loss already"):
            optimizer(inner)


@pytest.mark.parametrize(
    ("mode", "scale", "line"),
    [
        ("off", 1.0, "mode='off': give dynamic, fixed or none"),
        ("", 1.0, "mode='': give dynamic, fixed or none"),
        ("none", 2.0, "scale=2.0: the scale of mode none is 1"),
        ("fixed", 0.0, "scale=0.0: give a positive, finite number"),
        ("fixed", -1.0, "scale=-1.0: give a positive, finite number"),
        ("fixed", math.inf, "scale=inf: give a positive, finite number"),
        ("dynamic", math.nan, "scale=nan: give a positive, finite number"),
        ("dynamic", 0.5, "scale=0.5: give a number from minimum=1"),
    ],
)
def test_mode_and_scale_that_do_not_fit_are_refused(mode: str, scale: float, line: str) -> None:
    with pytest.raises(ValueError, match=re.escape(line)):
        optimizer(mode=mode, scale=scale)


# --- saving ----------------------------------------------------------------------------------------------------------


@pytest.mark.process
@pytest.mark.parametrize("accumulation", [None, 2])
def test_files_saved_during_and_after_fit_open_in_plain_keras_with_the_optimizers_state(
    accumulation: int | None, tmp_path: Path
) -> None:
    import keras

    inner = keras.optimizers.AdamW(0.01, weight_decay=0.1, use_ema=True, gradient_accumulation_steps=accumulation)
    model = linear()
    model.compile(inner, keras.losses.MeanSquaredError(), metrics=["mae"], auto_scale_loss=False)
    model.optimizer = scaled = optimizer(inner)
    model.fit(rows(5), verbose=0, callbacks=[keras.callbacks.ModelCheckpoint(str(tmp_path / "during.keras"))])
    model.save(tmp_path / "after.keras")
    np.savez(tmp_path / "state.npz", *[v.numpy() for v in scaled.inner_optimizer.variables])
    code = textwrap.dedent(
        """
        import sys, warnings
        import numpy as np
        warnings.simplefilter("error")
        import keras
        state = np.load("state.npz")
        for name in ("during.keras", "after.keras"):
            model = keras.saving.load_model(name)
            assert type(model.optimizer) is keras.optimizers.AdamW, type(model.optimizer)
            assert not any(m.startswith("mp_hydra") for m in sys.modules)
            assert len(model.optimizer.variables) == len(state.files)
            if name == "after.keras":
                for variable, value in zip(model.optimizer.variables, state.values(), strict=True):
                    np.testing.assert_array_equal(variable.numpy(), value)
            model.fit(np.ones((4, 3)), np.ones((4, 1)), verbose=0)
        print("opened")
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.stdout.endswith("opened\n"), done.stderr
    assert b"mp_hydra" not in Path(tmp_path / "after.keras").read_bytes()


def test_weights_file_roundtrip_restores_the_inner_state(tmp_path: Path) -> None:
    scaled = optimizer()
    model = fitted(scaled, rows())
    model.save_weights(tmp_path / "m.weights.h5")
    other = optimizer()
    restored = compiled(other)
    other.build(restored.trainable_variables)
    restored.load_weights(tmp_path / "m.weights.h5")
    for mine, theirs in zip(other.inner_optimizer.variables, scaled.inner_optimizer.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())
    assert other.counters().steps == 0


def test_a_loop_of_ones_own_steps_as_the_bare_optimizer_would_and_is_counted() -> None:
    import keras
    import tensorflow as tf

    from mp_hydra.scaled_optimizer import ScaledOptimizer

    weight = keras.Variable(1.0)
    scaled = ScaledOptimizer(keras.optimizers.SGD(0.25), mode="fixed", scale=1024.0)
    for factor in (1.0, np.inf, 1.0):
        with tf.GradientTape() as tape:
            loss = scaled.scale_loss(factor * weight.value**2)
        scaled.apply([tape.gradient(loss, weight.value)], [weight])
    # The gradient is 2w: 1 - 0.25 * 2 = 0.5, then a skipped step, then 0.5 - 0.25 * 1 = 0.25.
    assert float(weight.numpy()) == 0.25
    counters = scaled.counters()
    assert (counters.steps, counters.applied, counters.last_skipped) == (3, 2, 2)
    assert (counters.norm_sum, counters.norm_max) == (3.0, 2.0)
