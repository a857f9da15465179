"""The functions under the lean normalisation layers, on numbers worked out by hand and beside float64."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from mp_hydra.activation_memory.batch_normalization import fused, fused_problem, moved, normalize_batch, normalize_by
from mp_hydra.activation_memory.normalization import normalize
from mp_hydra.activation_memory.xla_context import being_compiled_by_xla


def test_rows_by_hand() -> None:
    """(1, 3): mean 2, variance 1. (0, 8): mean 4, variance 16, plus an epsilon of 9 makes a deviation of 5."""
    x = tf.constant([[1.0, 3.0], [0.0, 8.0]], tf.bfloat16)
    y, mean, variance = normalize(x, None, None, axes=[1], epsilon=9.0, dtype="float32")
    np.testing.assert_allclose(y, [[-1 / 10**0.5, 1 / 10**0.5], [-0.8, 0.8]], rtol=1e-6)
    np.testing.assert_array_equal(mean, [[2.0], [4.0]])
    np.testing.assert_array_equal(variance, [[1.0], [16.0]])


def test_root_mean_square_by_hand() -> None:
    """(1, 7): mean square 25."""
    x = tf.constant([[1.0, 7.0]], tf.float16)
    y, _, square = normalize(
        x, tf.constant([[10.0, 1.0]]), None, axes=[1], epsilon=0.0, dtype="float16", centered=False
    )
    np.testing.assert_allclose(np.asarray(y, np.float32), [[2.0, 1.4]], rtol=1e-3)
    assert float(square[0, 0]) == 25.0


def test_squares_of_large_float16_values_do_not_overflow() -> None:
    x = tf.constant([[65504.0, -65504.0]], tf.float16)
    y, _, variance = normalize(x, None, None, axes=[1], epsilon=0.0, dtype="float16")
    np.testing.assert_allclose(np.asarray(y, np.float32), [[1.0, -1.0]], rtol=1e-3)
    assert float(variance[0, 0]) == pytest.approx(65504.0**2)


def test_variance_beside_a_large_mean_is_that_of_float64() -> None:
    """E[x^2] - E[x]^2 in float32 would give anything between 0 and 128 here."""
    x = 30000.0 + np.random.default_rng(0).standard_normal((3, 4096)).astype("float32")
    _, mean, variance = normalize(tf.constant(x), None, None, axes=[1], epsilon=0.0, dtype="float32")
    np.testing.assert_allclose(np.ravel(variance), x.astype("float64").var(1), rtol=1e-6)
    np.testing.assert_allclose(np.ravel(mean), x.astype("float64").mean(1), rtol=1e-7)


def test_parameter_gradients_over_many_rows_are_exact_to_float32() -> None:
    """A running float32 sum of these 200 000 numbers near 1 would be off by some 1e-5."""
    dy = 1.0 + np.random.default_rng(0).random((200_000, 2)).astype("float32")
    x = tf.constant(np.random.default_rng(1).standard_normal(dy.shape).astype("float32"))
    beta = tf.zeros((1, 2))
    with tf.GradientTape() as tape:
        tape.watch(beta)
        y, *_ = normalize(x, None, beta, axes=[1], epsilon=1e-3, dtype="float32")
    np.testing.assert_allclose(
        tape.gradient(y, beta, output_gradients=tf.constant(dy))[0], dy.astype("float64").sum(0), rtol=1.5e-7
    )


def test_no_gradient_flows_through_the_statistics() -> None:
    x = tf.constant([[1.0, 3.0]])
    with tf.GradientTape(persistent=True) as tape:
        tape.watch(x)
        _, mean, variance = normalize(x, None, None, axes=[1], epsilon=0.0, dtype="float32")
    assert tape.gradient(mean, x) is None
    assert tape.gradient(variance, x) is None


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_fused_operation_takes_channels_first_as_it_takes_them_last(rank: int) -> None:
    """Chosen on a GPU, where cuDNN has both; TensorFlow's CPU operation has them too."""
    last = np.random.default_rng(0).standard_normal((*(2, 3, 4, 5)[: rank - 1], 6)).astype("float32")
    first = np.moveaxis(last, -1, 1)
    gamma, beta = tf.range(1.0, 7.0), tf.range(6.0)
    y_last, *statistics_last = fused(tf.constant(last), gamma, beta, axis=rank - 1, epsilon=1e-3)
    y_first, *statistics_first = fused(tf.constant(first), gamma, beta, axis=1, epsilon=1e-3)
    np.testing.assert_allclose(y_first, np.moveaxis(np.asarray(y_last), -1, 1), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(statistics_first, statistics_last, rtol=1e-5, atol=1e-6)


def test_fused_operation_and_ours_give_the_same_statistics() -> None:
    """By hand: 0, 2, 4, 6 have mean 3 and population variance 5 (the unbiased one is 20/3)."""
    x, one, zero = tf.constant([[0.0], [2.0], [4.0], [6.0]]), tf.ones(1), tf.zeros(1)
    compiled = tf.function(lambda x: normalize_batch(x, one, zero, axis=1, epsilon=1e-3), jit_compile=True)
    for _, mean, variance in (normalize_batch(x, one, zero, axis=1, epsilon=1e-3), compiled(x)):
        assert float(mean[0]) == pytest.approx(3.0)
        assert float(variance[0]) == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("case", "fits"),
    [
        ({}, True),
        ({"rank": 2, "axis": 1, "epsilon": 0.0}, True),
        ({"axis": 1}, False),
        ({"axis": 1, "on_gpu": True}, True),
        ({"axis": 2, "on_gpu": True}, False),
        ({"epsilon": 1e-5, "on_gpu": True}, False),
        ({"epsilon": 1.001e-5, "on_gpu": True}, True),
        ({"in_xla": True}, False),
    ],
)
def test_fused_operation_is_taken_where_it_is_exact(case: dict[str, Any], fits: bool) -> None:
    usual: dict[str, Any] = {"rank": 4, "axis": 3, "epsilon": 1e-3, "on_gpu": False, "in_xla": False}
    assert (fused_problem(**(usual | case)) is None) == fits


@pytest.mark.parametrize("jit", [False, True])
def test_compilation_by_xla_is_seen_from_functions_inside(jit: bool) -> None:
    seen = []

    def inner(x: tf.Tensor) -> tf.Tensor:
        seen.append(being_compiled_by_xla())
        return x + 1.0

    tf.function(tf.function(inner, autograph=False), jit_compile=jit, autograph=False)(tf.zeros(2))
    assert seen
    assert set(seen) == {jit}
    assert not being_compiled_by_xla()


def test_moving_average_by_hand_and_where_the_value_is_not_finite() -> None:
    average = tf.constant([1.0, 1.0, 1.0, 3e38])
    value = tf.constant([3.0, np.nan, np.inf, 3e38])
    np.testing.assert_allclose(moved(average, value, 0.75), [1.5, 1.0, 1.0, 3e38], rtol=1e-6)


def test_given_statistics_by_hand() -> None:
    """(5 - 1) / sqrt(4) * 3 + 10 = 16; the gradient of x is 3 / 2, that of gamma (5 - 1) / 2."""
    x, gamma, beta = tf.constant([[5.0]], tf.float16), tf.constant([3.0]), tf.constant([10.0])
    with tf.GradientTape() as tape:
        tape.watch([x, gamma, beta])
        y = normalize_by(x, gamma, beta, tf.constant([1.0]), tf.constant([4.0]), axis=1, epsilon=0.0, trainable=True)
    dx, dgamma, dbeta = tape.gradient(y, [x, gamma, beta])
    assert [float(t[0]) for t in (y[0], dx[0], dgamma, dbeta)] == [16.0, 1.5, 2.0, 1.0]
