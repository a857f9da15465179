"""The mechanism: a part of a model that runs again in the backward pass, with the same surroundings and values."""

from __future__ import annotations

from contextvars import ContextVar
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from mp_hydra.activation_memory.recomputation import recomputed, wanted
from mp_hydra.errors import ModelError

X = np.linspace(-1, 1, 12, dtype="float32").reshape(3, 4)


def both(function: Any, held: list[Any], x: Any = X, *, graph: bool = False) -> list[tuple[Any, Any]]:
    """Result and gradients (of x, then of trainable variables), plainly and recomputed; each from the same state."""
    trainable = [v for layer in held for v in layer.trainable_variables]
    start = [keras.ops.convert_to_numpy(v) for layer in held for v in layer.variables]

    def run(*, again: bool) -> tuple[Any, Any]:
        def step(x: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = recomputed(function, held, [x], {}, where="part") if again else function(x)
                loss = tf.reduce_sum(y * y) + sum(loss for layer in held for loss in layer.losses)
            return y, tape.gradient(loss, [x, *(v.value for v in trainable)])

        for v, value in zip((v for layer in held for v in layer.variables), start, strict=True):
            v.assign(value)
        return (tf.function(step, autograph=False) if graph else step)(tf.constant(x))  # type: ignore[no-any-return]

    return [run(again=False), run(again=True)]


def assert_same(results: list[tuple[Any, Any]]) -> None:
    (y, grads), (z, others) = results
    np.testing.assert_array_equal(y, z)
    assert all(g is not None for g in (*grads, *others))
    for a, b in zip(grads, others, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("graph", [False, True])
def test_gradients_of_inputs_and_variables_are_those_of_a_plain_run(graph: bool) -> None:
    dense = layers.Dense(3, activation="tanh")
    dense.build((None, 4))
    assert_same(both(dense, [dense], graph=graph))


@pytest.mark.parametrize("graph", [False, True])
def test_seeds_are_drawn_again_as_they_were_and_advance_once(graph: bool) -> None:
    noise = layers.Dropout(0.5, seed=1)
    results = both(lambda x: noise(x, training=True), [noise], graph=graph)
    assert_same(results)
    np.testing.assert_array_equal(noise.seed_generator.state, [1, 1])


@pytest.mark.parametrize("graph", [False, True])
def test_a_seed_generator_that_no_layer_holds_is_replayed_and_advances_once(graph: bool) -> None:
    seeds = keras.random.SeedGenerator(3)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = recomputed(lambda x: keras.random.dropout(x, 0.5, seed=seeds), [], [x], {}, where="part")
        return y, tape.gradient(y, x)

    y, gradient = (tf.function(step, autograph=False) if graph else step)(tf.ones((4, 8)))
    np.testing.assert_array_equal(y, gradient)  # of inputs that are 1
    np.testing.assert_array_equal(seeds.state, [3, 1])


@pytest.mark.parametrize("graph", [False, True])
def test_a_trainable_variable_that_no_layer_holds_has_its_gradient(graph: bool) -> None:
    factor = keras.Variable(2.0)

    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            y = recomputed(lambda x: x * factor.value, [], [x], {}, where="part")
        return tape.gradient(y, factor.value)

    found = (tf.function(step, autograph=False) if graph else step)(tf.constant(X + 1))
    np.testing.assert_allclose(found, np.sum(X + 1))


def test_moving_statistics_are_assigned_once() -> None:
    norm = layers.BatchNormalization(momentum=0.5)
    norm.build((None, 4))
    assert_same(both(lambda x: norm(x, training=True), [norm], X + 4))
    np.testing.assert_allclose(norm.moving_mean, 0.5 * np.mean(X + 4, axis=0), rtol=1e-6)


def test_a_variable_that_is_assigned_to_and_then_read_has_its_gradient() -> None:
    class Halving(layers.Layer):
        def build(self, _: Any) -> None:
            self.scale = self.add_weight(shape=(), initializer="ones")

        def call(self, x: Any) -> Any:
            y = x * self.scale
            self.scale.assign(self.scale * 0.5)
            return y + x * self.scale

    layer = Halving()
    layer.build((None, 4))
    assert_same(both(layer, [layer]))
    np.testing.assert_allclose(layer.scale, 0.5)


def test_losses_that_layers_add_are_there_once_and_gradients_pass_through_them() -> None:
    dense = layers.Dense(3, activity_regularizer="l2")
    dense.build((None, 4))
    assert_same(both(dense, [dense]))
    assert len(dense.losses) == 1


def test_masks_go_in_and_come_out() -> None:
    seen = []

    class Masked(layers.Layer):
        supports_masking = True

        def call(self, x: Any, mask: Any = None) -> Any:
            seen.append(mask is not None)
            return x * keras.ops.cast(mask[..., None], x.dtype)

    layer, x = Masked(), tf.ones((2, 3, 4))
    mask = tf.constant([[True, False, True]] * 2)
    with tf.GradientTape() as tape:
        tape.watch(x)
        x._keras_mask = mask
        y = recomputed(layer, [layer], [x], {}, where="part")
    gradient = tape.gradient(y, x)
    np.testing.assert_array_equal(y._keras_mask, mask)
    np.testing.assert_array_equal(gradient[0, :, 0], [1, 0, 1])
    assert seen == [True, True]


def test_what_surrounds_the_first_run_surrounds_the_second() -> None:
    lean: ContextVar[bool] = ContextVar("lean", default=False)
    seen = []
    inner = layers.Dropout(0.5)

    class Outer(layers.Layer):
        def call(self, x: Any) -> Any:
            def function(x: Any) -> Any:
                autocast = keras.src.backend.get_autocast_scope()
                seen.append((lean.get(), autocast and autocast.dtype))
                return inner(x)

            return recomputed(function, [inner], [x], {}, where="part")

    outer, x = Outer(dtype="mixed_bfloat16"), tf.ones((8, 8))
    with tf.GradientTape() as tape:
        tape.watch(x)
        token = lean.set(True)
        y = outer(x, training=True)
        lean.reset(token)
    gradient = tape.gradient(y, x)
    assert seen == [(True, "bfloat16")] * 2
    np.testing.assert_array_equal(tf.cast(y, tf.float32), gradient)  # inputs are 1; dropout is on in both


def test_a_part_in_a_part() -> None:
    dense = layers.Dense(4, activation="tanh")
    dense.build((None, 4))
    noise = layers.Dropout(0.3, seed=1)

    def inner(x: Any) -> Any:
        return noise(dense(x), training=True)

    results = both(lambda x: recomputed(inner, [dense, noise], [x], {}, where="inner"), [dense, noise], graph=True)
    assert_same(results)
    np.testing.assert_array_equal(noise.seed_generator.state, [1, 1])


def test_several_arguments_the_same_one_twice_and_others_that_are_no_tensors() -> None:
    def function(pair: Any, *, factor: int, extra: Any) -> Any:
        return {"y": pair[0] * pair[1] * float(factor), "nothing": extra, "ids": tf.constant([1, 2])}

    x = tf.constant(X)
    with tf.GradientTape() as tape:
        tape.watch(x)
        found = recomputed(function, [], [[x, x]], {"factor": 3, "extra": None}, where="part")
    np.testing.assert_allclose(tape.gradient(found["y"], x), 6 * X, rtol=1e-6)
    assert found["nothing"] is None


def test_random_operations_with_a_state_of_tensorflows_own_are_an_error() -> None:
    def step(x: Any) -> Any:
        return recomputed(lambda x: x * tf.random.uniform(x.shape), [], [x], {}, where="layer noise")

    with pytest.raises(ModelError, match=r"layer noise cannot be computed again: .*RandomUniform.* memory\.recompute"):
        tf.function(step, autograph=False)(X)


def test_a_variable_assigned_to_in_a_loop_is_an_error() -> None:
    count = keras.Variable(0.0, trainable=False, name="count")

    def body(row: Any) -> Any:
        count.assign(count + 1.0)
        return row

    def step(x: Any) -> Any:
        return recomputed(lambda x: tf.map_fn(body, x), [], [x], {}, where="layer counter")

    with pytest.raises(ModelError, match=r"layer counter cannot be computed again: variable count .* loop or branch"):
        tf.function(step, autograph=False)(X)


def test_it_is_wanted_where_a_gradient_may_be_taken() -> None:
    traced = []
    tf.function(lambda: traced.append((wanted(training=True), wanted(training=False))))()
    with tf.GradientTape():
        assert wanted(training=False)
    assert not wanted(training=True)
    assert traced == [(True, False)]
