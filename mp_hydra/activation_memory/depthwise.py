"""Depthwise convolution of bfloat16 tensors with a backward pass by kernels that a CPU has fast ones of.

oneDNN, with which TensorFlow runs these operations on CPUs, has no fast bfloat16 kernel for the gradient of the input where there
are strides, nor for that of the kernel where this is larger than 3 x 3: they take 3 to 25 times as long as in float32. Here the
first is the forward convolution of the gradient, spread out by the strides, with the kernel turned round; the second is taken in
float32, some channels at a time. Both are rounded once. What is kept is what stock Keras keeps, but for the margins of an input
that was padded before: the tensor without them is padded again.
"""

from __future__ import annotations

import inspect
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.activations import is_lean_tensor
from mp_hydra.activation_memory.first_order import first_order
from mp_hydra.activation_memory.origin import Padded, origin_of
from mp_hydra.activation_memory.xla_context import being_compiled_by_xla

if TYPE_CHECKING:
    from collections.abc import Callable

_RANK = 4
_SHARES = 4  # of the channels, of which one at a time is held in float32
_LANES = 16  # channels that oneDNN computes together


def depthwise_conv_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The lean form of `nn.depthwise_conv`, on a CPU.

    NotImplemented for other dtypes than bfloat16, other than channels-last images of static height and width, unequal strides,
    dilation, a depth multiplier, on a machine with a GPU, and in a function that XLA compiles: these have kernels of their own.
    """
    signature = inspect.signature(original)

    def depthwise_conv(*args: Any, **kwargs: Any) -> Any:
        import keras
        import tensorflow as tf

        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        x, strides, padding = given["inputs"], given["strides"], given["padding"].upper()
        kernel = tf.convert_to_tensor(given["kernel"])  # a layer gives its variable
        last = (given["data_format"] or keras.config.image_data_format()) == "channels_last"
        strides, dilation = ({s} if isinstance(s, int) else set(s) for s in (strides, given["dilation_rate"]))
        if not last or len(strides) != 1 or dilation != {1} or not _fits(x, kernel):
            return NotImplemented
        (stride,) = strides

        padded = origin_of(x, Padded)

        def function(x: Any, kernel: Any) -> tuple[Any, Callable[[Any], Any]]:
            @first_order
            def gradient(dy: Any, kept: Any, kernel: Any) -> tuple[Any, Any]:
                with tf.control_dependencies([dy]):
                    x = kept if padded is None else tf.pad(kept, padded.paddings)
                of_kernel = _kernel_gradient(dy, x, kernel, stride, padding)
                with tf.control_dependencies([of_kernel]):  # the last use of x, before the pass goes on
                    return _input_gradient(dy, x, kernel, stride, padding), of_kernel

            again = signature.bind(*args, **kwargs)
            again.arguments.update(inputs=x, kernel=kernel)
            return original(*again.args, **again.kwargs), lambda dy: gradient(
                dy, x if padded is None else padded.x, kernel
            )

        return tf.custom_gradient(function)(x, kernel)

    return depthwise_conv


def _fits(x: Any, kernel: Any) -> bool:
    import tensorflow as tf

    if not (is_lean_tensor(x) and is_lean_tensor(kernel) and x.dtype == kernel.dtype == tf.bfloat16):
        return False
    static = x.shape.rank == _RANK and None not in x.shape[1:] and kernel.shape.is_fully_defined()
    one_each = static and kernel.shape.rank == _RANK and kernel.shape[2] == x.shape[3] and kernel.shape[3] == 1
    return one_each and not tf.config.list_logical_devices("GPU") and not being_compiled_by_xla()


def _kernel_gradient(dy: Any, x: Any, kernel: Any, stride: int, padding: str) -> Any:
    import tensorflow as tf

    rows, columns, channels, _ = kernel.shape
    share = -(-channels // (_SHARES * _LANES)) * _LANES
    found: list[Any] = []
    for first, end in pairwise([*range(0, channels, share), channels]):
        with tf.control_dependencies([dy, *found[-1:]]):
            some_x, some_dy = (tf.cast(t[..., first:end], tf.float32) for t in (x, dy))
        of_some = tf.raw_ops.DepthwiseConv2dNativeBackpropFilter(
            input=some_x,
            filter_sizes=[rows, columns, end - first, 1],
            out_backprop=some_dy,
            strides=[1, stride, stride, 1],
            padding=padding,
        )
        found.append(tf.cast(of_some, kernel.dtype))
    return tf.concat(found, axis=2)


def _input_gradient(dy: Any, x: Any, kernel: Any, stride: int, padding: str) -> Any:
    import tensorflow as tf

    if stride == 1:
        return tf.raw_ops.DepthwiseConv2dNativeBackpropInput(
            input_sizes=tf.shape(x), filter=kernel, out_backprop=dy, strides=[1, 1, 1, 1], padding=padding
        )
    batch, (height, width, channels) = tf.shape(dy)[0], dy.shape[1:]
    apart = tf.reshape(dy, [batch, height, 1, width, 1, channels])
    apart = tf.pad(apart, [[0, 0], [0, 0], [0, stride - 1], [0, 0], [0, stride - 1], [0, 0]])
    apart = tf.reshape(apart, [batch, height * stride, width * stride, channels])
    # Of the elements added to the last one some may be too many.
    margins = [_margins(x.shape[a], dy.shape[a], kernel.shape[a - 1], stride, padding) for a in (1, 2)]
    apart = apart[:, : height * stride + min(margins[0][1], 0), : width * stride + min(margins[1][1], 0)]
    apart = tf.pad(apart, [[0, 0], *([before, max(after, 0)] for before, after in margins), [0, 0]])
    return tf.nn.depthwise_conv2d(apart, tf.reverse(kernel, [0, 1]), [1, 1, 1, 1], "VALID")


def _margins(size: int, windows: int, width: int, stride: int, padding: str) -> tuple[int, int]:
    """Zeros before and after an axis of `windows` x `stride` elements, so that each of `size` elements gets a window of `width`.

    >>> _margins(size=5, windows=2, width=3, stride=2, padding="VALID")
    (2, 1)
    >>> _margins(size=6, windows=3, width=3, stride=2, padding="SAME")
    (2, 0)
    """
    cut_off = max((windows - 1) * stride + width - size, 0) // 2 if padding == "SAME" else 0
    before = width - 1 - cut_off
    return before, size + width - 1 - before - windows * stride
