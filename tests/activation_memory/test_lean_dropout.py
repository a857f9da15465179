from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_hydra.activation_memory.dropout import packed, unpacked
from mp_hydra.activation_memory.functions import lean_functions


def _twice(x: Any, rate: float, *, lean: bool, jit: bool | None = None, **options: Any) -> list[np.ndarray]:
    """Two draws of one generator and their gradients, so that the state of the generator counts."""
    import keras
    import tensorflow as tf

    generator = keras.random.SeedGenerator(11)
    dy = tf.cast(tf.random.stateless_normal(x.shape, [3, 4]), x.dtype)

    def steps(x: Any) -> list[Any]:
        results = []
        for _ in range(2):
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = keras.random.dropout(x, rate, seed=generator, **options)
            results += [y, tape.gradient(y, x, dy)]
        return results

    with lean_functions(lean):
        function = steps if jit is None else tf.function(steps, jit_compile=jit)
        return [tf.cast(t, tf.float64).numpy() for t in function(x)]


@pytest.mark.parametrize(
    ("dtype", "jit"),
    [("float16", None), ("bfloat16", None), ("float32", None), ("bfloat16", False), ("bfloat16", True)],
    ids=["eager-float16", "eager-bfloat16", "eager-float32", "graph", "xla"],
)
def test_values_gradients_and_seeds_are_those_of_keras_to_the_bit(dtype: str, jit: bool | None) -> None:
    import tensorflow as tf

    x = tf.cast(tf.random.stateless_normal((5, 3, 7), [1, 2]), dtype)
    stock, lean = (_twice(x, 0.3, lean=on, jit=jit) for on in (False, True))
    for one, other in zip(stock, lean, strict=True):
        np.testing.assert_array_equal(one, other)
    assert (lean[0] != lean[2]).any()


@pytest.mark.parametrize(("shape", "rate"), [((1,), 0.01), ((8,), 0.99), ((3, 0, 2), 0.5), ((2, 3, 4, 5), 0.7)])
def test_any_shape_and_rate_gives_what_keras_gives(shape: tuple[int, ...], rate: float) -> None:
    import tensorflow as tf

    x = tf.ones(shape, "bfloat16")
    for one, other in zip(_twice(x, rate, lean=False), _twice(x, rate, lean=True), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("rate", "options"), [(0.0, {}), (0.4, {"noise_shape": (5, 1, 7)})])
def test_no_rate_and_a_noise_shape_are_left_to_keras(rate: float, options: dict[str, Any]) -> None:
    import tensorflow as tf

    x = tf.ones((5, 3, 7))
    for one, other in zip(_twice(x, rate, lean=False, **options), _twice(x, rate, lean=True, **options), strict=True):
        np.testing.assert_array_equal(one, other)


@given(st.integers(0, 40), st.integers(0, 2**32 - 1))
@settings(max_examples=30, deadline=None)
def test_eight_elements_take_a_byte_and_come_back(size: int, seed: int) -> None:
    import tensorflow as tf

    mask = np.random.default_rng(seed).random(size) < 0.5
    bits = packed(tf.constant(mask, tf.bool))
    assert bits.dtype == tf.uint8
    assert bits.shape == (-(-size // 8),)
    np.testing.assert_array_equal(unpacked(bits, tf.zeros((size,))), mask)


def test_a_dropped_element_of_0_has_no_gradient_and_a_kept_one_has() -> None:
    import tensorflow as tf

    _, dx, *_ = _twice(tf.zeros((50,), "bfloat16"), 0.5, lean=True)
    dropped = _twice(tf.ones((50,), "bfloat16"), 0.5, lean=True)[0] == 0
    assert (dx[dropped] == 0).all()
    assert (dx[~dropped] != 0).all()


def test_the_layer_drops_in_training_alone() -> None:
    import keras
    import tensorflow as tf

    x = tf.ones((4, 100))
    with lean_functions():
        layer = keras.layers.Dropout(0.5, seed=1)
        np.testing.assert_array_equal(layer(x, training=False), x)
        assert set(np.unique(layer(x, training=True))) == {0.0, 2.0}
