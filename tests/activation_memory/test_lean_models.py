"""`lean(model)` on whole models: what changes, what does not, and how it is undone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mp_hydra
from mp_hydra.activation_memory.install import is_lean, restore, stock_calls
from mp_hydra.errors import ModelError
from mp_hydra.precision import scoped_policy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

BATCH = 8


def functional() -> Any:
    inputs = keras.Input((8, 8, 3))
    x = keras.layers.Conv2D(8, 3, padding="same", use_bias=False)(inputs)
    x = keras.layers.BatchNormalization()(x)
    x = keras.layers.Activation("relu")(x)
    x = keras.layers.Reshape((64, 8))(x)
    x = x + keras.layers.MultiHeadAttention(2, 4)(keras.layers.LayerNormalization()(x), x)
    x = keras.layers.Dense(8, activation="gelu")(x)
    x = keras.layers.GlobalAveragePooling1D()(x)
    return keras.Model(inputs, keras.layers.Dense(3, dtype="float32")(x))


def sequential() -> Any:
    inner = keras.Sequential([keras.layers.Conv2D(8, 3), keras.layers.BatchNormalization()], name="inner")
    return keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            inner,
            keras.layers.Activation("gelu"),
            keras.layers.GroupNormalization(4),
            keras.layers.LayerNormalization(),
            keras.layers.RMSNormalization(),
            keras.layers.Flatten(),
            keras.layers.Dense(3, dtype="float32"),
        ]
    )


@keras.saving.register_keras_serializable("mp_hydra_tests")
class Block(keras.layers.Layer):
    """A user's own layer, with a function of Keras in its `call`."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.norm = keras.layers.BatchNormalization()
        self.dense = keras.layers.Dense(8)

    def build(self, shape: Any) -> None:
        self.norm.build(shape)
        self.dense.build(shape)

    def call(self, x: Any, training: bool | None = None) -> Any:
        return keras.ops.gelu(self.dense(self.norm(x, training=training)))


@keras.saving.register_keras_serializable("mp_hydra_tests")
class Subclassed(keras.Model):
    """A user's own model."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.blocks = [Block() for _ in range(2)]
        self.head = keras.layers.Dense(3, dtype="float32")

    def call(self, x: Any, training: bool | None = None) -> Any:
        x = keras.ops.reshape(x, (-1, 192))[:, :8]
        for block in self.blocks:
            x = block(x, training=training)
        return self.head(x)


def subclassed() -> Any:
    model = Subclassed()
    model(np.zeros((1, 8, 8, 3), "float32"))
    return model


MODELS: dict[str, tuple[Callable[[], Any], int]] = {
    "functional": (functional, 2),  # BatchNormalization and LayerNormalization
    "sequential": (sequential, 4),
    "subclassed": (subclassed, 2),
}


@pytest.fixture(autouse=True, scope="module")
def mixed() -> Iterator[None]:
    with scoped_policy("mixed_bfloat16", tf32=True):
        yield


def batch() -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(BATCH, 8, 8, 3)).astype("float32"), random.integers(0, 3, BATCH)


def gradients(model: Any) -> list[np.ndarray]:
    x, y = batch()
    with tf.GradientTape() as tape:
        logits = model(x, training=True)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(y, logits)
    return [
        np.asarray(tf.convert_to_tensor(g)) for g in tape.gradient(loss, [v.value for v in model.trainable_variables])
    ]


def twins(which: str) -> tuple[Any, Any]:
    """The same model twice, with the same weights."""
    keras.utils.set_random_seed(0)
    first = MODELS[which][0]()
    keras.utils.set_random_seed(0)
    second = MODELS[which][0]()
    second.set_weights(first.get_weights())
    return first, second


@pytest.mark.parametrize("which", MODELS)
def test_gradients_and_moving_statistics_are_those_of_stock_keras_to_bfloat16s_rounding(which: str) -> None:
    stock, lean = twins(which)
    report = mp_hydra.lean(lean)
    assert len(report.lean) == MODELS[which][1]
    assert report.lines() == []
    expected = gradients(stock)
    largest = max(np.abs(g).max() for g in expected)
    for variable, mine, theirs in zip(lean.trainable_variables, gradients(lean), expected, strict=True):
        assert np.abs(mine - theirs).max() <= 0.03 * largest, variable.path
    for mine, theirs in zip(lean.non_trainable_variables, stock.non_trainable_variables, strict=True):
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=2e-2, atol=2e-3, err_msg=mine.path)


@pytest.mark.parametrize("which", MODELS)
def test_what_is_saved_is_the_stock_model_with_the_same_outputs(which: str, tmp_path: Path) -> None:
    _, lean = twins(which)
    mp_hydra.lean(lean)
    lean.save(tmp_path / "model.keras")
    opened = keras.saving.load_model(tmp_path / "model.keras")
    x, _ = batch()
    assert not any(is_lean(layer) for layer in opened._flatten_layers())
    with stock_calls():
        expected = np.asarray(lean(x), "float32")
    np.testing.assert_array_equal(np.asarray(opened(x), "float32"), expected)


@pytest.mark.parametrize(("which", "jit_compile"), [("sequential", False), ("functional", True)])
def test_a_lean_model_learns_as_the_stock_one_does(which: str, jit_compile: bool) -> None:
    stock, lean = twins(which)
    mp_hydra.lean(lean)
    x, y = batch()
    losses = []
    for model in (stock, lean):
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile(keras.optimizers.SGD(0.05), loss, jit_compile=jit_compile and model is lean)
        losses.append(model.fit(x, y, epochs=4, batch_size=BATCH, shuffle=False, verbose=0).history["loss"])
    assert losses[0][-1] < losses[0][0]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0.03)


def test_restored_model_computes_bit_for_bit_as_before_and_lean_twice_is_lean_once() -> None:
    model = functional()
    x, _ = batch()
    before = np.asarray(model(x, training=True), "float32")
    first, second = mp_hydra.lean(model), mp_hydra.lean(model)
    assert first == second
    assert is_lean(model)
    restore(model)
    assert not any("call" in layer.__dict__ for layer in model._flatten_layers())
    np.testing.assert_array_equal(np.asarray(model(x, training=True), "float32"), before)


def test_an_own_call_on_the_instance_is_kept_inside_and_comes_back() -> None:
    model = functional()
    own = model.call
    calls = []

    def counting(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(*args, **kwargs)

    object.__setattr__(model, "call", counting)
    mp_hydra.lean(model)
    model(batch()[0])
    restore(model)
    assert len(calls) == 1
    assert model.call is counting


def test_a_training_function_that_was_traced_before_is_traced_again() -> None:
    model = functional()
    model.compile("sgd", "mse")
    model.make_train_function()
    assert model.train_function is not None
    mp_hydra.lean(model)
    assert model.train_function is None


def test_layers_that_cannot_be_lean_are_named_with_the_reason() -> None:
    inputs = keras.Input((4, 4, 8))
    odd = keras.layers.BatchNormalization(synchronized=True, name="odd")(inputs)
    even = keras.layers.BatchNormalization(name="even")(odd)
    report = mp_hydra.lean(keras.Model(inputs, even))
    assert report.lean == ("even",)
    assert list(report.stock) == ["odd"]
    assert "synchronized=True" in report.stock["odd"]
    assert report.lines()[0].startswith("layer odd stays as Keras has it: ")


def test_recompute_goes_on_top_of_lean_and_both_are_undone_together() -> None:
    model = functional()
    mp_hydra.lean(model)
    mp_hydra.recompute(model)
    with pytest.raises(ModelError, match=r"^lean\(\) comes before recompute\(\), and functional.* recomputes already$"):
        mp_hydra.lean(model)
    restore(model)
    assert not any("call" in layer.__dict__ for layer in model._flatten_layers())
    assert mp_hydra.lean(model).lean


@pytest.mark.parametrize("what", ["a name", 3, None])
def test_what_is_no_keras_layer_is_refused_in_one_line(what: Any) -> None:
    with pytest.raises(ModelError, match=rf"^lean\(\) takes a Keras model or layer, not {type(what).__name__}$"):
        mp_hydra.lean(what)
