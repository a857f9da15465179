from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import erf

from mp_hydra.activation_memory.functions import lean_functions

DTYPES = ("float16", "bfloat16", "float32")
SIZE = 1024  # of every tensor: XLA compiles an activation and its gradient for each
TANH_SCALE = math.sqrt(2 / math.pi)


def _gelu_tanh(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    x = np.clip(x, -1e6, 1e6)
    tanh = np.tanh(TANH_SCALE * (x + 0.044715 * x**3))
    return 0.5 * x * (1 + tanh), 0.5 * (1 + tanh) + 0.5 * x * (1 - tanh**2) * TANH_SCALE * (1 + 3 * 0.044715 * x**2)


def _gelu_erf(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    part = 0.5 * (1 + erf(x / math.sqrt(2)))
    return x * part, part + x * np.exp(-(np.minimum(abs(x), 100.0) ** 2) / 2) / math.sqrt(2 * math.pi)


def _silu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    part = 1 / (1 + np.exp(-np.maximum(x, -700)))
    return x * part, part * (1 + x * (1 - part))


def _hard_silu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return x * np.clip(x + 3, 0, 6) / 6, np.where(abs(x) < 3, (2 * x + 3) / 6, x > 0)


def _mish(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    t = np.tanh(np.logaddexp(0, x))
    return x * t, t + x * (1 - t**2) / (1 + np.exp(-np.maximum(x, -700)))


def _celu(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.where(x > 0, x, 0.7 * np.expm1(np.minimum(x, 0) / 0.7)), np.exp(np.minimum(x, 0) / 0.7)


def _hard_tanh(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return np.clip(x, -1, 1), (abs(x) <= 1).astype(float)


REFERENCES = {
    "gelu": _gelu_erf,
    "gelu_tanh": _gelu_tanh,
    "silu": _silu,
    "hard_silu": _hard_silu,
    "mish": _mish,
    "celu": _celu,
    "hard_tanh": _hard_tanh,
}


def _function(name: str) -> Any:
    import keras

    if name == "gelu_tanh":
        return lambda x: keras.activations.gelu(x, approximate=True)
    if name == "celu":
        return lambda x: keras.activations.celu(x, alpha=0.7)
    return getattr(keras.activations, name)


def _run(name: str, x: Any, dy: Any, *, lean: bool) -> tuple[np.ndarray, np.ndarray]:
    """y and dx for vectors of up to SIZE elements, which are repeated up to there."""
    import tensorflow as tf

    whole, gradient = (tf.constant(np.resize(tensor.numpy(), SIZE)) for tensor in (x, dy))
    with lean_functions(lean), tf.GradientTape() as tape:
        tape.watch(whole)
        y = _function(name)(whole)
        assert y.dtype == x.dtype
        assert y.shape == whole.shape
    dx = tape.gradient(y, whole, gradient)
    return tuple(tf.cast(tensor[: len(x)], tf.float64).numpy() for tensor in (y, dx))  # type: ignore[return-value]


def _error(got: np.ndarray, right: np.ndarray) -> float:
    return float(np.linalg.norm(got - right) / (np.linalg.norm(right) + 1e-30))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", REFERENCES)
def test_it_is_as_accurate_as_stock_keras_forward_and_backward(name: str, dtype: str) -> None:
    import tensorflow as tf

    rng = np.random.default_rng(7)
    # Without ties: where a derivative jumps there is no right one.
    numbers = rng.normal(size=2 * SIZE) * rng.choice([0.1, 1.0, 4.0], size=2 * SIZE)
    x = tf.cast(numbers[abs(abs(numbers) - 1) > 0.02][:SIZE], dtype)
    dy = tf.cast(rng.normal(size=x.shape), dtype)
    y, slope = REFERENCES[name](tf.cast(x, tf.float64).numpy())
    right = (y, tf.cast(dy, tf.float64).numpy() * slope)
    rounding = {"float16": 2.0**-11, "bfloat16": 2.0**-8, "float32": 2.0**-24}[dtype]
    for part, stock, lean in zip(right, _run(name, x, dy, lean=False), _run(name, x, dy, lean=True), strict=True):
        assert _error(lean, part) <= max(_error(stock, part) * 1.02, 4 * rounding if dtype == "float32" else 0.0)
        assert _error(lean, part) <= rounding * (8 if dtype == "float32" else 1)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(sorted(REFERENCES)),
    st.sampled_from(DTYPES),
    st.lists(st.floats(-65504, 65504, width=16), min_size=16, max_size=16),
)
def test_numbers_to_the_edge_of_float16_are_within_rounding_of_the_true_value(
    name: str, dtype: str, numbers: list[float]
) -> None:
    import tensorflow as tf

    x = tf.cast(np.array(numbers), dtype)
    exact = tf.cast(x, tf.float64).numpy()
    y, slope = REFERENCES[name](exact)
    got_y, got_slope = _run(name, x, tf.ones_like(x), lean=True)
    relative, smallest = {"float16": (2e-3, 1e-7), "bfloat16": (1e-2, 1e-30), "float32": (1e-5, 1e-30)}[dtype]
    np.testing.assert_allclose(got_y, y, rtol=relative, atol=max(smallest, 1e-6))
    # At the corners of the piecewise ones both slopes are right.
    smooth = np.ones_like(exact, bool) if name not in {"hard_silu", "hard_tanh"} else abs(abs(exact) - 2) > 1.01
    np.testing.assert_allclose(got_slope[smooth], slope[smooth], rtol=relative, atol=max(smallest, 1e-5))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("name", REFERENCES)
def test_the_largest_numbers_of_a_dtype_are_finite_there_and_back(name: str, dtype: str) -> None:
    import tensorflow as tf

    x = tf.constant([-3e38, -1e30, -1e19, -1e10, 0.0, 1e10, 1e19, 1e30, 3e38], dtype)
    y, dx = _run(name, x, tf.ones_like(x), lean=True)
    assert np.isfinite(y).all()
    np.testing.assert_allclose(dx[x.numpy().astype(float) < 0], 0.0, atol=1e-6)
    np.testing.assert_allclose(dx[x.numpy().astype(float) > 0], 0.0 if name == "hard_tanh" else 1.0, rtol=1e-6)


def test_a_derivative_of_gelu_by_tanh_is_a_number_where_stock_gives_none() -> None:
    import tensorflow as tf

    x = tf.constant([-300.0, 300.0], "float16")
    assert np.isnan(_run("gelu_tanh", x, tf.ones_like(x), lean=False)[1]).all()
    np.testing.assert_array_equal(_run("gelu_tanh", x, tf.ones_like(x), lean=True)[1], [0.0, 1.0])


def test_celu_has_slope_1_at_0() -> None:
    import tensorflow as tf

    x = tf.zeros((3,), "bfloat16")
    np.testing.assert_array_equal(_run("celu", x, tf.ones_like(x), lean=True)[1], 1.0)


@pytest.mark.parametrize("name", REFERENCES)
def test_what_is_not_a_number_stays_so(name: str) -> None:
    import tensorflow as tf

    x = tf.constant([np.nan], "bfloat16")
    y, dx = _run(name, x, tf.ones_like(x), lean=True)
    assert np.isnan(y).all()
    assert np.isnan(dx).all() or (name == "hard_tanh" and (dx == 1).all())  # as stock Keras has it


def test_float64_and_integers_are_left_to_keras() -> None:
    import tensorflow as tf

    x = tf.constant([0.3, -1.7], "float64")
    for stock, lean in zip(
        _run("gelu", x, tf.ones_like(x), lean=False), _run("gelu", x, tf.ones_like(x), lean=True), strict=True
    ):
        np.testing.assert_array_equal(stock, lean)


def test_a_second_derivative_is_refused_rather_than_wrong() -> None:
    import tensorflow as tf

    x = tf.fill((SIZE,), 0.3)
    with lean_functions(), tf.GradientTape() as outer:
        outer.watch(x)
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = _function("gelu")(x)
        dx = inner.gradient(y, x)
    with pytest.raises(LookupError):
        outer.gradient(dx, x)
