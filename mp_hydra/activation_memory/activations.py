"""Activations of Keras' TensorFlow backend that keep their input for backward, or what it was made of, and nothing else.

Each stands for the function of the same name in `keras.src.backend.tensorflow.nn` (mish: in `keras.activations`), whose
operations keep two to four tensors of the input's size. They compute in float32 and round once, forward and backward, and give
NotImplemented for an input that is not theirs: anything but a TensorFlow tensor of a `LEAN_DTYPES` dtype.
"""

from __future__ import annotations

import functools
import inspect
import math
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.first_order import first_order
from mp_hydra.activation_memory.kernels import kernel
from mp_hydra.activation_memory.ordering import after
from mp_hydra.activation_memory.origin import Affine, computed_again, origin_of

if TYPE_CHECKING:
    from collections.abc import Callable

LEAN_DTYPES = ("float16", "bfloat16", "float32")

_SQRT_HALF = math.sqrt(0.5)
_DENSITY_AT_0 = 1.0 / math.sqrt(2.0 * math.pi)
# Hendrycks & Gimpel 2016, section 2: gelu(x) = 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))).
_TANH_SCALE = math.sqrt(2.0 / math.pi)
_TANH_CUBIC = 0.044715
# Beyond these a float32 result is that of the limit; the formulas would overflow or give 0 * inf further out.
_TANH_LIMIT = 10.0
_SOFTPLUS_LIMIT = 20.0
_HARD_LIMIT = 3.0  # outside of +-3, hard silu is 0 or x


def is_lean_tensor(x: Any) -> bool:
    """Whether it is a TensorFlow tensor, eager or in a graph, of a dtype that lean functions compute in."""
    import tensorflow as tf

    return isinstance(x, tf.Tensor) and x.dtype.name in LEAN_DTYPES


def gelu(x: Any, approximate: bool = True) -> Any:
    """Gelu, x * Phi(x) with the standard normal distribution function Phi, or with its approximation by tanh."""
    if approximate:
        return _elementwise(x, _gelu_tanh, _gelu_tanh_gradient)
    return _elementwise(x, _gelu_erf, _gelu_erf_gradient)


def silu(x: Any) -> Any:
    """Silu, x * sigmoid(x). Keras' own keeps no more, but computes in the dtype of x, in several passes."""
    return _elementwise(x, _silu, _silu_gradient)


def hard_silu(x: Any) -> Any:
    """Hard silu, x * relu6(x + 3) / 6."""
    return _elementwise(x, _hard_silu, _hard_silu_gradient)


def mish(x: Any) -> Any:
    """Mish, x * tanh(softplus(x))."""
    return _elementwise(x, _mish, _mish_gradient)


def hard_tanh(x: Any) -> Any:
    """Hard tanh, x clipped to [-1, 1]; the gradient passes at the ends, as in Keras."""
    return _elementwise(x, _hard_tanh, _hard_tanh_gradient)


def celu(x: Any, alpha: float = 1.0) -> Any:
    """Celu, max(x, 0) + alpha * expm1(min(x, 0) / alpha). The gradient at 0 is 1 (stock Keras, counting both branches: 2)."""
    if not isinstance(alpha, (int, float)):
        return NotImplemented
    return _elementwise(x, _celu, _celu_gradient, alpha=float(alpha))


def _elementwise(x: Any, forward: Callable[..., Any], gradient: Callable[..., Any], **static: Any) -> Any:
    import tensorflow as tf

    if not is_lean_tensor(x):
        return NotImplemented

    origin = origin_of(x, Affine)

    def function(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        kept, backward = ((x,), gradient) if origin is None else (origin.tensors, _of_origin(gradient))
        return forward(x, **static), lambda dy: first_order(functools.partial(backward, **static))(dy, *kept)

    return tf.custom_gradient(function)(x)


@functools.cache
def _of_origin(gradient: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel of a gradient, from what its input was made of instead of the input."""
    inner = inspect.unwrap(gradient)

    @kernel
    def backward(dy: Any, *origin: Any, **static: Any) -> Any:
        dy, *ordered = after(dy, *origin)
        return inner(dy, computed_again(*ordered), **static)

    return backward


def _float32(*tensors: Any) -> tuple[Any, ...]:
    import tensorflow as tf

    return tuple(tf.cast(tensor, tf.float32) for tensor in tensors)


@kernel
def _gelu_erf(x: Any) -> Any:
    import tensorflow as tf

    (z,) = _float32(x)
    # erfc keeps the relative accuracy of the left tail, where 1 + erf cancels.
    return tf.cast(0.5 * z * tf.math.erfc(-z * _SQRT_HALF), x.dtype)


@kernel
def _gelu_erf_gradient(dy: Any, x: Any) -> Any:
    import tensorflow as tf

    dz, z = _float32(*after(dy, x))
    slope = 0.5 * tf.math.erfc(-z * _SQRT_HALF) + z * _DENSITY_AT_0 * tf.exp(-0.5 * z * z)
    return tf.cast(dz * slope, x.dtype)


@kernel
def _gelu_tanh(x: Any) -> Any:
    import tensorflow as tf

    (z,) = _float32(x)
    inner = _TANH_SCALE * (z + _TANH_CUBIC * z * z * z)
    # 0.5 (1 + tanh(u)) = 1 / (1 + exp(-2 u)), without the cancellation on the left.
    return tf.cast(z / (1.0 + tf.exp(-2.0 * inner)), x.dtype)


@kernel
def _gelu_tanh_gradient(dy: Any, x: Any) -> Any:
    import tensorflow as tf

    dz, z = _float32(*after(dy, x))
    z = tf.clip_by_value(z, -_TANH_LIMIT, _TANH_LIMIT)
    square = z * z
    part = 1.0 / (1.0 + tf.exp(-2.0 * _TANH_SCALE * z * (1.0 + _TANH_CUBIC * square)))
    slope = part + 2.0 * _TANH_SCALE * z * part * (1.0 - part) * (1.0 + 3.0 * _TANH_CUBIC * square)
    return tf.cast(dz * slope, x.dtype)


@kernel
def _silu(x: Any) -> Any:
    import tensorflow as tf

    (z,) = _float32(x)
    return tf.cast(z / (1.0 + tf.exp(-z)), x.dtype)


@kernel
def _silu_gradient(dy: Any, x: Any) -> Any:
    import tensorflow as tf

    dz, z = _float32(*after(dy, x))
    part = 1.0 / (1.0 + tf.exp(-z))
    return tf.cast(dz * (part * (1.0 + z * (1.0 - part))), x.dtype)


@kernel
def _hard_silu(x: Any) -> Any:
    import tensorflow as tf

    (z,) = _float32(x)
    return tf.cast(z * (tf.clip_by_value(z + 3.0, 0.0, 6.0) / 6.0), x.dtype)


@kernel
def _hard_silu_gradient(dy: Any, x: Any) -> Any:
    import tensorflow as tf

    dz, z = _float32(*after(dy, x))
    slope = tf.where(tf.abs(z) >= _HARD_LIMIT, tf.cast(z > 0.0, tf.float32), (2.0 * z + 3.0) / 6.0)
    return tf.cast(dz * slope, x.dtype)


@kernel
def _mish(x: Any) -> Any:
    import tensorflow as tf

    (z,) = _float32(x)
    power = tf.exp(tf.minimum(z, _SOFTPLUS_LIMIT))
    # With e = exp(x), tanh(log(1 + e)) = n / (n + 2) where n = e (e + 2).
    numerator = power * (power + 2.0)
    return tf.cast(z * (numerator / (numerator + 2.0)), x.dtype)


@kernel
def _mish_gradient(dy: Any, x: Any) -> Any:
    import tensorflow as tf

    dz, z = _float32(*after(dy, x))
    z = tf.minimum(z, _SOFTPLUS_LIMIT)
    power = tf.exp(z)
    numerator = power * (power + 2.0)
    root = 2.0 / (numerator + 2.0)
    slope = numerator / (numerator + 2.0) + z * (power * root) * ((1.0 + power) * root)
    return tf.cast(dz * slope, x.dtype)


@kernel
def _hard_tanh(x: Any) -> Any:
    import tensorflow as tf

    return tf.clip_by_value(x, -1.0, 1.0)


@kernel
def _hard_tanh_gradient(dy: Any, x: Any) -> Any:
    import tensorflow as tf

    dy, x = after(dy, x)
    return tf.where(tf.abs(x) > 1.0, tf.zeros((), dy.dtype), dy)


@kernel
def _celu(x: Any, *, alpha: float) -> Any:
    import tensorflow as tf

    (z,) = _float32(x)
    return tf.cast(tf.maximum(z, 0.0) + alpha * tf.math.expm1(tf.minimum(z, 0.0) / alpha), x.dtype)


@kernel
def _celu_gradient(dy: Any, x: Any, *, alpha: float) -> Any:
    import tensorflow as tf

    dz, z = _float32(*after(dy, x))
    return tf.cast(dz * tf.exp(tf.minimum(z, 0.0) / alpha), x.dtype)
