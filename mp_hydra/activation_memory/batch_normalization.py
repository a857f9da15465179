"""Batch normalisation of 16-bit tensors with float32 statistics, in training and with the moving statistics.

In training TensorFlow's fused operation does the work where it is exact: it reads and writes 16-bit tensors, keeps its input
for the gradient and has no float32 temporaries. Elsewhere `normalize` does.
"""

from __future__ import annotations

from typing import Any

from mp_hydra.activation_memory.first_order import first_order
from mp_hydra.activation_memory.kernels import kernel
from mp_hydra.activation_memory.normalization import normalize, parameter_gradients
from mp_hydra.activation_memory.origin import Affine, remember
from mp_hydra.activation_memory.xla_context import being_compiled_by_xla, must_order

_SMALLEST_CUDNN_EPSILON = 1.001e-5  # CUDNN_BN_MIN_EPSILON, with what TensorFlow adds for rounding
_IMAGE_RANK = 4


def normalize_batch(x: Any, gamma: Any, beta: Any, *, axis: int, epsilon: float) -> tuple[Any, Any, Any]:
    """Normalise each channel by its mean and variance over the batch.

    Args:
        x: float16, bfloat16 or float32, of static rank.
        gamma: float32, (channels,).
        beta: float32, (channels,).
        axis: of the channels, from 0.
        epsilon: added to the variance.

    Returns:
        The result in x's dtype, and mean and population variance in float32, (channels,), through which no gradient
        flows; not finite if there is no sample.
    """
    import tensorflow as tf

    rank = len(x.shape)
    on_gpu = bool(tf.config.list_logical_devices("GPU"))
    shape = _parameter_shape(gamma, axis, rank)
    if fused_problem(rank=rank, axis=axis, epsilon=epsilon, on_gpu=on_gpu, in_xla=being_compiled_by_xla()) is None:
        y, mean, variance = fused(x, gamma, beta, axis=axis, epsilon=epsilon)
    else:
        y, mean, variance = normalize(
            x,
            tf.reshape(gamma, shape),
            tf.reshape(beta, shape),
            axes=[a for a in range(rank) if a != axis],
            epsilon=epsilon,
            dtype=x.dtype.name,
        )
        mean, variance = tf.reshape(mean, gamma.shape), tf.reshape(variance, gamma.shape)
    slope = gamma * tf.math.rsqrt(variance + epsilon)
    remember(y, Affine(x, *(tf.reshape(vector, shape) for vector in (mean, slope, beta))))
    return y, mean, variance


def fused_problem(*, rank: int, axis: int, epsilon: float, on_gpu: bool, in_xla: bool) -> str | None:
    """Why TensorFlow's fused operation is not the one to take; None if it is.

    >>> fused_problem(rank=4, axis=3, epsilon=1e-3, on_gpu=True, in_xla=False)
    >>> fused_problem(rank=4, axis=3, epsilon=1e-6, on_gpu=True, in_xla=False)
    'cuDNN takes no epsilon below 1.001e-05'
    """
    if in_xla:
        return "XLA takes the variance as E[x^2] - E[x]^2, which is lost where the mean is large"
    if on_gpu and epsilon < _SMALLEST_CUDNN_EPSILON:
        return f"cuDNN takes no epsilon below {_SMALLEST_CUDNN_EPSILON:g}"
    if axis == rank - 1:
        return None
    if axis != 1:
        return "the channels are neither the first nor the last axis after the samples"
    return None if on_gpu else "on a CPU the operation transposes channels-first tensors in single steps"


def fused(x: Any, gamma: Any, beta: Any, *, axis: int, epsilon: float) -> tuple[Any, Any, Any]:
    """`normalize_batch` by TensorFlow's fused operation, for channels on the last axis or on axis 1."""
    import tensorflow as tf

    shape, last = tf.shape(x), axis == len(x.shape) - 1
    image = x
    if len(x.shape) != _IMAGE_RANK:
        channels = gamma.shape[0]
        image = tf.reshape(x, [shape[0], -1, 1, channels] if last else [shape[0], channels, -1, 1])
    y, mean, variance, *_ = tf.raw_ops.FusedBatchNormV3(
        x=image,
        scale=gamma,
        offset=beta,
        mean=tf.zeros([0]),
        variance=tf.zeros([0]),
        epsilon=epsilon,
        data_format="NHWC" if last else "NCHW",
        is_training=True,
    )
    # The operation's variance is the unbiased one, except of a single value; the statistics of no value at all are left open.
    count = tf.cast(tf.size(x) // gamma.shape[0], tf.float32)
    variance = tf.where(tf.equal(count, 1.0), 0.0, variance * ((count - 1.0) / count))
    mean = tf.where(count > 0.0, mean, float("nan"))
    # Without an operation in between, TensorFlow would fuse this one with a ReLU that follows, into a kernel which keeps half
    # a byte an element for its gradient. A reshape to the shape that it has would be optimised away.
    y = tf.ensure_shape(y, image.shape)
    return tf.reshape(y, shape), tf.stop_gradient(mean), tf.stop_gradient(variance)


def moved(average: Any, value: Any, momentum: float) -> Any:
    """The moving average after one more value; where that is not finite, the average as it was.

    A batch that holds an inf or nan (a float16 overflow, whose step loss scaling skips) or no sample at all (the share of a
    replica) says nothing about the statistics, and would never leave them.
    """
    import tensorflow as tf

    new = average * momentum + value * (1.0 - momentum)
    return tf.where(tf.math.is_finite(new), new, average)


def normalize_by(
    x: Any, gamma: Any, beta: Any, mean: Any, variance: Any, *, axis: int, epsilon: float, trainable: bool
) -> Any:
    """Normalise each channel by a given mean and variance, through which no gradient flows.

    Keeps nothing of x's size for a gradient that reaches x alone; that of gamma needs x.

    Args:
        x: float16, bfloat16 or float32, of static rank.
        gamma: float32, (channels,); so are the next three.
        beta: see gamma.
        mean: see gamma.
        variance: see gamma.
        axis: of the channels, from 0.
        epsilon: added to the variance.
        trainable: whether gamma and beta have gradients.

    Returns:
        The result, in x's dtype. A gradient of the gradient raises LookupError.
    """
    import tensorflow as tf

    shape, dtype = _parameter_shape(gamma, axis, len(x.shape)), x.dtype.name
    gamma, beta, mean, variance = (tf.reshape(t, shape) for t in (gamma, beta, mean, variance))
    mean, scale = tf.stop_gradient(mean), tf.stop_gradient(tf.math.rsqrt(variance + epsilon))

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def normalized(x: Any, gamma: Any, beta: Any) -> Any:
        kept = x if trainable else None

        @first_order
        def input_gradient(dy: Any, gamma: Any) -> Any:
            return _scaled(dy, scale * gamma, dtype=dtype)

        @first_order
        def gradients(dy: Any, x: Any) -> Any:
            return parameter_gradients(dy, x, mean, scale, shape=shape, ordered=must_order())

        def gradient(dy: Any) -> Any:
            return input_gradient(dy, gamma), *((None, None) if kept is None else gradients(dy, kept))

        return _affine(tf.stop_gradient(x), mean, tf.stop_gradient(scale * gamma), tf.stop_gradient(beta)), gradient

    return normalized(x, gamma, beta)


def _parameter_shape(parameter: Any, axis: int, rank: int) -> tuple[int, ...]:
    return tuple(parameter.shape[0] if a == axis else 1 for a in range(rank))


@kernel
def _affine(x: Any, mean: Any, slope: Any, offset: Any) -> Any:
    import tensorflow as tf

    return tf.cast((tf.cast(x, tf.float32) - mean) * slope + offset, x.dtype)


@kernel
def _scaled(dy: Any, slope: Any, *, dtype: str) -> Any:
    import tensorflow as tf

    return tf.cast(tf.cast(dy, tf.float32) * slope, dtype)
