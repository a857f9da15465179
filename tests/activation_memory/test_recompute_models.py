"""Recomputation in whole models: one step's updates are those without it, and the step needs less memory."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from mp_hydra.activation_memory import recompute as module
from mp_hydra.activation_memory.recompute import recompute, restore
from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.scaled_optimizer import ScaledOptimizer

if TYPE_CHECKING:
    from collections.abc import Callable


def residual(size: int = 8, width: int = 8, blocks: int = 2) -> Any:
    x = inputs = keras.Input((size, size, 3))
    x = layers.Conv2D(width, 3, padding="same")(x)
    for _ in range(blocks):
        y = layers.ReLU()(layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(x)))
        y = layers.BatchNormalization()(layers.Conv2D(width, 3, padding="same")(y))
        x = layers.ReLU()(layers.Add()([x, y]))
    return keras.Model(inputs, layers.Dense(4, dtype="float32")(layers.GlobalAveragePooling2D()(x)))


def transformer(size: int = 8, width: int = 16, blocks: int = 2, dropout: float = 0.3) -> Any:
    x = inputs = keras.Input((size, size, 3))
    x = layers.Reshape((-1, width))(layers.Conv2D(width, 2, 2)(x))
    for _ in range(blocks):
        y = layers.LayerNormalization()(x)
        y = layers.Dropout(dropout)(layers.MultiHeadAttention(2, width // 2, dropout=dropout)(y, y))
        x = layers.Add()([x, y])
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(width)(y)])
    return keras.Model(inputs, layers.Dense(4, dtype="float32")(layers.GlobalAveragePooling1D()(x)))


def masked() -> Any:
    """Two inputs; masks from an embedding reach recurrent layers and an attention inside segments."""
    ids, others = keras.Input((6,), dtype="int32"), keras.Input((6, 4))
    x = layers.Embedding(10, 8, mask_zero=True)(ids)
    x = layers.LSTM(8, return_sequences=True, recurrent_dropout=0.2)(layers.Dropout(0.2)(x))
    y = layers.MultiHeadAttention(2, 4)(x, x)
    y = layers.Concatenate()([layers.LayerNormalization()(layers.Add()([x, y])), layers.Dense(8, "tanh")(others)])
    y = layers.Dense(8)(layers.Dense(64, "gelu")(y))
    y = layers.LSTM(8)(layers.Dense(8)(layers.Dense(64, "gelu")(y)))
    return keras.Model([ids, others], layers.Dense(4)(y))


def nested() -> Any:
    inputs = keras.Input((8, 8, 3))
    inner = residual()
    base = keras.Model(inner.input, inner.layers[-2].output, name="base")
    return keras.Model(inputs, layers.Dense(4)(layers.Dropout(0.2)(base(layers.Rescaling(2.0)(inputs)))))


def sequential() -> Any:
    parts = [layers.Dense(width, activation="gelu") for width in (32, 8, 32, 8, 32, 8)]
    noise = [layers.Dropout(0.2), layers.BatchNormalization()]
    return keras.Sequential([keras.Input((8, 8, 3)), *parts[:2], *noise, *parts[2:], layers.Flatten(), layers.Dense(4)])


@keras.saving.register_keras_serializable("recompute_tests")
class Block(layers.Layer):
    """Its `call` has no `training`: what it holds gets it from around."""

    def __init__(self, width: int, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.width = width
        self.norm, self.wide = layers.BatchNormalization(), layers.Dense(4 * width, activation="gelu")
        self.noise, self.narrow = layers.Dropout(0.3), layers.Dense(width)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.wide.build(shape)
        self.narrow.build((*shape[:-1], 4 * self.width))

    def call(self, x: Any) -> Any:
        y = self.narrow(self.noise(self.wide(self.norm(x))))
        self.add_loss(0.01 * keras.ops.mean(keras.ops.square(keras.ops.cast(y, "float32"))))
        return x + y

    def get_config(self) -> dict[str, Any]:
        return {**super().get_config(), "width": self.width}


@keras.saving.register_keras_serializable("recompute_tests")
class Subclassed(keras.Model):
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.first, self.head = layers.Dense(8), layers.Dense(4)
        self.blocks = [Block(8, name=f"block_{i}") for i in range(2)]
        self.pool = layers.GlobalAveragePooling2D()

    def call(self, x: Any, training: bool | None = None) -> Any:  # which `fit` gives only to who has it
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(self.pool(x))


def subclassed() -> Any:
    model = Subclassed()
    model(np.zeros((1, 8, 8, 3), "float32"))
    return model


def with_losses() -> Any:
    x = inputs = keras.Input((8, 8, 3))
    for _ in range(2):
        x = layers.Dense(32, activation="gelu", activity_regularizer="l2", kernel_regularizer="l2")(x)
        x = layers.ActivityRegularization(0.01)(layers.Dense(8)(x))
        x = layers.SpectralNormalization(layers.Dense(8))(Block(8)(x))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling2D()(x)))


def data(model: Any, samples: int = 8) -> tuple[Any, Any]:
    random = np.random.default_rng(3)
    shapes = model.input_shape if isinstance(model.input_shape, list) else [model.input_shape]
    whole = [
        random.integers(0, 10, (samples, 6)) if s[1:] == (6,) else random.normal(size=(samples, *s[1:])) for s in shapes
    ]
    inputs = [x.astype("int32" if x.dtype.kind == "i" else "float32") for x in whole]
    return inputs if len(inputs) > 1 else inputs[0], random.integers(0, 4, samples)


def trained(
    build: Callable[[], Any], install: Callable[[Any], Any], steps: int = 2, **compiling: Any
) -> tuple[Any, list[Any]]:
    """A model after some steps, and all its variables then: weights, statistics, seeds."""
    keras.utils.set_random_seed(5)
    model = build()
    install(model)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    chosen = {"optimizer": keras.optimizers.SGD(0.1), "jit_compile": False, "auto_scale_loss": False, **compiling}
    model.compile(loss=loss, **chosen)
    x, y = data(model) if hasattr(model, "input_shape") else (data(residual())[0], data(residual())[1])
    logs = model.fit(x, y, epochs=steps, batch_size=len(y), shuffle=False, verbose=0).history["loss"]
    return model, [np.array(logs), *(keras.ops.convert_to_numpy(v) for v in model.variables)]


@functools.cache
def plainly(build: Callable[[], Any]) -> tuple[Any, list[Any]]:
    return trained(build, lambda _: None)


def same(model: Any, plain: list[Any], found: list[Any]) -> None:
    """To float32 rounding: where a tensor is used three times, gradients are added in another order. Seeds are equal."""
    names = ["loss", *(v.path for v in model.variables)]
    for name, a, b in zip(names, plain, found, strict=True):
        scale = max(1.0, float(np.max(np.abs(a)))) if a.dtype.kind == "f" else 0
        np.testing.assert_allclose(b, a, rtol=0, atol=2e-6 * scale, err_msg=name)


MODELS = [transformer, masked, nested, sequential, subclassed, with_losses]


@pytest.mark.parametrize("build", MODELS)
def test_updates_statistics_seeds_and_losses_are_those_without_it(build: Callable[[], Any]) -> None:
    model, plain = plainly(build)
    _, found = trained(build, recompute)
    same(model, plain, found)


def test_updates_are_those_without_it_eagerly() -> None:
    model, plain = plainly(subclassed)
    _, found = trained(subclassed, recompute, run_eagerly=True)
    same(model, plain, found)


def test_updates_are_those_without_it_under_xla() -> None:
    model, plain = trained(residual, lambda _: None, steps=1, jit_compile=True)
    _, found = trained(residual, recompute, steps=1, jit_compile=True)
    same(model, plain, found)


def test_updates_are_those_without_it_for_a_residual_net_to_the_last_bit() -> None:
    _, plain = trained(residual, lambda _: None, steps=1)
    _, found = trained(residual, lambda model: recompute(model, 1), steps=1)
    for a, b in zip(plain, found, strict=True):
        np.testing.assert_array_equal(a, b)


def test_named_layers_of_a_model_are_recomputed_with_its_updates_the_same() -> None:
    reports = []
    model, plain = plainly(subclassed)
    _, found = trained(
        subclassed, lambda model: reports.append(recompute(model, ("block_.*", ".*/global_average.*|global.*")))
    )
    same(model, plain, found)
    names = [path.rpartition("/")[2].split("_")[0] for part in reports[0].segments for path in part.layers]
    assert names == ["block", "block", "global"]


@pytest.mark.process
def test_two_replicas_of_a_mirrored_strategy_train_a_lean_and_a_recomputing_model_as_a_stock_one() -> None:
    """In a process of its own: logical devices are set before TensorFlow starts."""
    script = """
import keras, numpy as np, tensorflow as tf
cpu = tf.config.list_physical_devices("CPU")[0]
tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)
import mp_hydra, test_recompute_models as models
def lean(model): assert mp_hydra.lean(model).lean
def both(model): lean(model); mp_hydra.recompute(model)
keras.mixed_precision.set_global_policy("mixed_bfloat16")
strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
with strategy.scope():
    model, stock = models.trained(models.subclassed, lambda _: None, steps=1)
    kept, again = (models.trained(models.subclassed, install, steps=1)[1] for install in (lean, both))
assert strategy.num_replicas_in_sync == 2 and len(model.weights[0].value.values) == 2
for variable, a, b in zip([model.loss, *model.variables], stock, kept, strict=True):
    np.testing.assert_allclose(b, a, rtol=0.02, atol=0.002, err_msg=str(variable))
models.same(model, kept, again)
"""
    here = Path(__file__).parent
    environment = {**os.environ, "PYTHONPATH": f"{here.parents[1]}{os.pathsep}{here}"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False, timeout=200
    )
    assert done.returncode == 0, done.stderr


def test_float16_with_loss_scaling_gives_the_same_updates_and_skips_the_same_steps() -> None:
    found = []
    keras.mixed_precision.set_global_policy("mixed_float16")
    try:
        for install in (lambda _: None, recompute):
            optimizer = ScaledOptimizer(keras.optimizers.SGD(0.1), mode="dynamic", scale=2.0**19)
            _, values = trained(subclassed, install, steps=4, optimizer=optimizer)
            scale = float(optimizer.dynamic_scale)
            assert scale < 2.0**19  # steps were skipped
            assert values[0][-1] < values[0][0]  # and others were not
            found.append([*values, np.array(scale)])
    finally:
        keras.mixed_precision.set_global_policy("float32")
    for a, b in zip(*found, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-3, atol=2e-3)


def test_a_step_needs_less_memory() -> None:
    peaks = []
    for install in (lambda _: None, recompute):
        model = residual(size=64, width=16, blocks=6)
        install(model)
        model.compile(
            keras.optimizers.SGD(0.1), keras.losses.SparseCategoricalCrossentropy(from_logits=True), jit_compile=False
        )
        x, y = data(model, samples=16)
        model.train_on_batch(x, y)
        tf.config.experimental.reset_memory_stats("CPU:0")
        before = tf.config.experimental.get_memory_info("CPU:0")["current"]
        model.train_on_batch(x, y)
        peaks.append(tf.config.experimental.get_memory_info("CPU:0")["peak"] - before)
    assert peaks[1] < 0.6 * peaks[0]


@pytest.mark.parametrize("build", [residual, subclassed])
def test_a_saved_model_is_stock_keras(build: Callable[[], Any], tmp_path: Path) -> None:
    model = build()
    config = model.get_config()
    recompute(model)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    x, _ = data(residual())
    np.testing.assert_allclose(loaded(x), model(x), rtol=1e-5, atol=1e-6)
    assert model.get_config() == config
    for layer in [loaded, *loaded._flatten_layers()]:
        assert not {"call", "_run_through_graph"} & set(layer.__dict__)


def methods(model: Any) -> list[tuple[str, Any]]:
    names = ("call", "_run_through_graph")
    return [(layer.name, layer.__dict__[n]) for layer in model._flatten_layers() for n in names if n in layer.__dict__]


def test_restore_leaves_the_model_as_it_was() -> None:
    model = subclassed()
    recompute(model)
    assert len(methods(model)) == 2
    restore(model)
    restore(model)
    assert methods(model) == []


def test_a_second_call_replaces_the_first() -> None:
    model = subclassed()
    recompute(model)
    report = recompute(model, ("block_1",))
    assert [name for name, _ in methods(model)] == ["block_1"]
    assert len(report.segments) == 1


def test_inference_runs_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(module, "recomputed", fail)
    for build in (residual, subclassed):
        model = build()
        recompute(model)
        x, _ = data(residual())
        model(x)
        model(x, training=True)
        model.predict(x, verbose=0)
        with tf.GradientTape(), pytest.raises(AssertionError):
            model(x)


def test_the_report_says_what_is_recomputed_and_why_the_rest_is_not() -> None:
    report = recompute(nested())
    reasons = [part.reason for part in report.not_recomputed]
    assert (reasons[0], reasons[-1]) == (module._NO_GAIN, module._LAST)
    assert all(part.kept_bytes for part in report.segments)
    assert str(report).startswith(f"{len(report.segments)} segments recomputed, ")


def test_joined_segments_are_fewer() -> None:
    model = residual(blocks=4)
    assert len(recompute(model, 2).segments) < len(recompute(model, 1).segments)


@pytest.mark.parametrize("every", ["blocks", 0, -1, True, 1.5, None])
def test_another_granularity_is_an_error_that_says_what_is_right(every: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"^memory\.recompute=.*: give 'block', an integer of at least 1, or a list of patterns$"
    ):
        recompute(residual(), every)


def test_a_pattern_that_matches_no_layer_names_near_misses() -> None:
    with pytest.raises(ConfigError, match=r"^memory\.recompute=blok_1: matches no layer; did you mean .*block_1"):
        recompute(subclassed(), ("blok_1",))


def test_joining_needs_a_graph() -> None:
    with pytest.raises(ConfigError, match=r"memory\.recompute=2: a model without a graph has no segments to join"):
        recompute(subclassed(), 2)


def test_a_model_that_is_not_built_is_an_error() -> None:
    with pytest.raises(ModelError, match="build the model before"):
        recompute(keras.Sequential([layers.Dense(2)]))


def test_a_model_with_nothing_to_recompute_is_an_error_and_stays_as_it_was() -> None:
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(inputs))
    with pytest.raises(ModelError, match="nothing to recompute"):
        recompute(model)
    assert methods(model) == []
