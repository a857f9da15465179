"""Dropout that keeps one bit an element for backward.

Stock Keras keeps its mask as a byte an element. Here the mask is packed, eight elements to a byte. Drawing it again from the
seed would keep nothing, but takes more than ten times as long as packing and unpacking, and in a step that XLA compiles as a
whole the second draw could be merged with the first and its float tensor kept.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.activations import is_lean_tensor
from mp_hydra.activation_memory.first_order import first_order
from mp_hydra.activation_memory.kernels import kernel
from mp_hydra.activation_memory.ordering import after

if TYPE_CHECKING:
    from collections.abc import Callable


def dropout(inputs: Any, rate: Any, noise_shape: Any = None, seed: Any = None) -> Any:
    """As `keras.src.backend.tensorflow.random.dropout`, bit by bit: the same seeds drawn, the same elements dropped.

    NotImplemented for rates of 0 and 1 (nothing is kept), for rates that are tensors, and with a `noise_shape`, whose mask is
    small as a rule.
    """
    import tensorflow as tf

    if not is_lean_tensor(inputs) or not is_lean_rate(rate) or noise_shape is not None:
        return NotImplemented
    seed = drawn_seed(seed)

    def function(x: Any) -> tuple[Any, Callable[[Any], Any]]:
        y, bits = _drop(x, uniform(x, seed, x.dtype), rate=float(rate))
        return y, first_order(lambda dy: _drop_gradient(dy, bits, rate=float(rate)))

    return tf.custom_gradient(function)(inputs)


def is_lean_rate(rate: Any) -> bool:
    """Whether a dropout rate is a Python number between 0 and 1, both excluded."""
    return isinstance(rate, (int, float)) and 0.0 < rate < 1.0


def drawn_seed(seed: Any) -> Any:
    """The int32 seed that Keras' dropout would use; advances a SeedGenerator in the same way."""
    from keras.src.backend.tensorflow import random

    return random._cast_seed(random.draw_seed(seed))  # noqa: SLF001 - the seed must be the one that Keras uses


def uniform(like: Any, seed: Any, dtype: Any) -> Any:
    """The numbers in [0, 1), as many as in `like`, that TensorFlow's dropout compares with its rate; drawn after `like`."""
    import tensorflow as tf

    # Without the dependency the executor may draw all masks of a model at the start of a step, and hold them.
    with tf.control_dependencies([like]):
        return tf.random.stateless_uniform(tf.shape(like), seed=seed, dtype=dtype)


def packed(mask: Any) -> Any:
    """A boolean tensor as bits of uint8, of shape [ceil(size / 8)]; for use in a kernel."""
    import tensorflow as tf

    # Bit i holds the i-th of eight slabs, so that neighbours stay neighbours and the operations are vectors.
    flat = tf.reshape(mask, [-1])
    slabs = tf.reshape(tf.cast(tf.pad(flat, [[0, -tf.size(mask) % 8]]), tf.uint8), [8, -1])
    bits = slabs[0]
    for i in range(1, 8):
        bits = tf.bitwise.bitwise_or(bits, tf.bitwise.left_shift(slabs[i], tf.constant(i, tf.uint8)))
    return bits


def unpacked(bits: Any, like: Any) -> Any:
    """The boolean tensor of the shape of `like` that `packed` made the bits of; for use in a kernel."""
    import tensorflow as tf

    slabs = tf.bitwise.right_shift(bits[tf.newaxis, :], tf.constant([[i] for i in range(8)], tf.uint8))
    flat = tf.reshape(tf.bitwise.bitwise_and(slabs, tf.constant(1, tf.uint8)), [-1])
    return tf.reshape(flat[: tf.size(like)], tf.shape(like)) > 0


def scaled(x: Any, keep: Any, rate: float) -> Any:
    """What is kept of x, divided by 1 - rate, and 0 elsewhere, rounded as TensorFlow's dropout does; for use in a kernel."""
    import tensorflow as tf

    return tf.where(keep, x * tf.constant(1.0 / (1.0 - rate), x.dtype), tf.zeros((), x.dtype))


@kernel
def _drop(x: Any, numbers: Any, *, rate: float) -> tuple[Any, Any]:
    keep = numbers >= rate
    return scaled(x, keep, rate), packed(keep)


@kernel
def _drop_gradient(dy: Any, bits: Any, *, rate: float) -> Any:
    dy, bits = after(dy, bits)
    return scaled(dy, unpacked(bits, dy), rate)
