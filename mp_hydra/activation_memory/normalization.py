"""Normalisation of a tensor over axes, computed in float32, that keeps for its gradient the tensor itself and two numbers a row.

Layer, group, instance, RMS and batch normalisation are the same function: they differ in the axes that share statistics and
in the shape of the parameters.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.first_order import first_order
from mp_hydra.activation_memory.kernels import kernel
from mp_hydra.activation_memory.ordering import after
from mp_hydra.activation_memory.xla_context import must_order

if TYPE_CHECKING:
    from collections.abc import Sequence

_BLOCK = 64  # rows that are summed in float32 before float64 takes over


def normalize(
    x: Any, gamma: Any, beta: Any, *, axes: Sequence[int], epsilon: float, dtype: str, centered: bool = True
) -> tuple[Any, Any, Any]:
    """(x - mean) / sqrt(variance + epsilon) * gamma + beta, the statistics taken over `axes`; RMS normalisation if not centered.

    Args:
        x: float16, bfloat16 or float32, of static rank.
        gamma: float32, of x's rank; its size is 1, statically, on each axis along which it is the same for all elements.
            None stands for ones.
        beta: the same of the offset; None stands for zeros.
        axes: which share a mean and a variance, as numbers from 0.
        epsilon: added to the variance.
        dtype: of the result, whose values are rounded once.
        centered: take the mean off; without, the "variance" is the mean square.

    Returns:
        The result, and mean and variance (population) in float32, with size 1 along `axes`. No gradient flows through these
        two. A gradient of the gradient raises LookupError.
    """
    import tensorflow as tf

    static = {"axes": tuple(axes), "centered": centered}
    given = gamma if gamma is not None else beta
    shape = tuple(given.shape) if given is not None else (1,) * len(x.shape)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def normalized(x: Any, gamma: Any, beta: Any) -> Any:
        constants = (tf.stop_gradient(x), tf.stop_gradient(gamma), tf.stop_gradient(beta))
        y, mean, variance, scale = _forward(*constants, epsilon=float(epsilon), dtype=dtype, **static)

        @first_order
        def gradients(dy: Any, x: Any, gamma: Any) -> Any:
            ordered = must_order()
            dx = _input_gradient(dy, x, gamma, mean, scale, ordered=ordered, **static)
            with tf.control_dependencies([dx]):  # one after the other: together they would hold twice the temporaries
                return dx, *parameter_gradients(dy, x, mean, scale, shape=shape, ordered=ordered)

        def gradient(dy: Any, *_: Any) -> Any:
            return gradients(dy, x, gamma)

        return (y, mean, variance), gradient

    y, mean, variance = normalized(
        x, tf.ones(shape) if gamma is None else gamma, tf.zeros(shape) if beta is None else beta
    )
    return y, tf.stop_gradient(mean), tf.stop_gradient(variance)


@kernel
def _forward(
    x: Any, gamma: Any, beta: Any, *, axes: tuple[int, ...], centered: bool, epsilon: float, dtype: str
) -> Any:
    import tensorflow as tf

    x = tf.cast(x, tf.float32)
    if centered:
        mean, variance = _moments(x, axes)
    else:
        variance = _mean(tf.square(x), axes)
        mean = tf.zeros_like(variance)
    scale = tf.math.rsqrt(variance + epsilon)
    return tf.cast((x - mean) * (scale * gamma) + beta, dtype), mean, variance, scale


def _moments(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Mean and population variance in two passes; the second one also corrects the rounding error of the first one's mean."""
    import tensorflow as tf

    mean = _mean(x, axes)
    rest = x - mean
    error = _mean(rest, axes)
    return mean + error, tf.maximum(_mean(tf.square(rest), axes) - tf.square(error), 0.0)


def _mean(x: Any, axes: tuple[int, ...]) -> Any:
    """A mean of means, one axis after the other: shorter running sums lose fewer digits."""
    import tensorflow as tf

    for axis in sorted(axes, reverse=True):
        x = tf.reduce_mean(x, axis, keepdims=True)
    return x


@kernel
def _input_gradient(
    dy: Any, x: Any, gamma: Any, mean: Any, scale: Any, *, axes: tuple[int, ...], centered: bool, ordered: bool
) -> Any:
    import tensorflow as tf

    dy, x = after(dy, x) if ordered else (dy, x)
    normal = (tf.cast(x, tf.float32) - mean) * scale
    d = tf.cast(dy, tf.float32) * gamma
    dx = d - normal * _mean(d * normal, axes)
    if centered:
        dx -= _mean(d, axes)
    return tf.cast(dx * scale, x.dtype)


@kernel
def parameter_gradients(
    dy: Any, x: Any, mean: Any, scale: Any, *, shape: tuple[int, ...], ordered: bool
) -> tuple[Any, Any]:
    """The gradients of gamma and beta, float32 of `shape`, in y = (x - mean) * scale * gamma + beta."""
    import tensorflow as tf

    dy, x = after(dy, x) if ordered else (dy, x)
    d = tf.cast(dy, tf.float32)
    normal = (tf.cast(x, tf.float32) - mean) * scale
    return _sum_to(d * normal, shape), _sum_to(d, shape)


def _sum_to(x: Any, shape: tuple[int, ...]) -> Any:
    """Sum over the axes on which `shape` has size 1: over the leading ones in float32 by blocks of rows, then in float64.

    A running float32 sum over a whole batch would lose digits that TensorFlow's own tree of sums keeps.
    """
    import tensorflow as tf

    leading = next((axis for axis, size in enumerate(shape) if size != 1), len(shape))
    x = tf.reduce_sum(x, [axis for axis, size in enumerate(shape) if size == 1 and axis >= leading], keepdims=True)
    rows = tf.reshape(x, [tf.reduce_prod(tf.shape(x)[:leading]), math.prod(shape)])
    blocks = tf.pad(rows, [[0, -tf.shape(rows)[0] % _BLOCK], [0, 0]])
    blocks = tf.reduce_sum(tf.reshape(blocks, [-1, _BLOCK, math.prod(shape)]), axis=1)
    return tf.reshape(tf.cast(tf.reduce_sum(tf.cast(blocks, tf.float64), axis=0), tf.float32), shape)
