from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mp_hydra.activation_memory.functions import lean_functions

CHANNELS = 40  # more than one share, the last one smaller
CASES = [
    # size, kernel, stride, padding; the gradient's windows end before, at and after the end of the image
    ((9, 9), 3, 2, "valid"),
    ((8, 8), 3, 2, "same"),
    ((7, 7), 3, 2, "same"),
    ((10, 13), 5, 2, "valid"),
    ((9, 8), 5, 2, "same"),
    ((7, 7), 2, 2, "same"),
    ((7, 8), 1, 2, "valid"),
    ((11, 11), 2, 3, "valid"),
    ((8, 9), 5, 1, "same"),
    ((6, 6), 3, 1, "valid"),
]


def _gradients(samples: list[Any], dtype: str, *, lean: bool, graph: bool = False, **arguments: Any) -> list[Any]:
    import keras
    import tensorflow as tf

    def step(x: Any, kernel: Any, dy: Any) -> Any:
        with lean_functions(on=lean), tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = keras.ops.depthwise_conv(x, kernel, **arguments)
        return [y, *tape.gradient(y, [x, kernel], dy)]

    tensors = [tf.cast(t, dtype) for t in samples]
    results = (tf.function(step, autograph=False) if graph else step)(*tensors)
    return [tf.cast(t, tf.float64).numpy() for t in results]


def _samples(size: tuple[int, int], kernel: int, stride: int, padding: str) -> list[Any]:
    import tensorflow as tf

    random = np.random.default_rng(sum(size) + kernel + stride)
    windows = [-(-s // stride) if padding == "same" else (s - kernel) // stride + 1 for s in size]
    shapes = [(3, *size, CHANNELS), (kernel, kernel, CHANNELS, 1), (3, *windows, CHANNELS)]
    return [tf.cast(random.normal(0.5, 1.0, shape), tf.bfloat16) for shape in shapes]


def _error(got: Any, right: Any) -> float:
    return float(np.linalg.norm(got - right) / np.linalg.norm(right))


@pytest.mark.parametrize(("size", "kernel", "stride", "padding"), CASES)
def test_gradients_are_at_least_as_accurate_as_stock_keras_against_float64(
    size: tuple[int, int], kernel: int, stride: int, padding: str
) -> None:
    samples = _samples(size, kernel, stride, padding)
    arguments: dict[str, Any] = {"strides": stride, "padding": padding}
    right = _gradients(samples, "float64", lean=False, **arguments)
    stock = _gradients(samples, "bfloat16", lean=False, graph=True, **arguments)
    for graph in (False, True):
        lean = _gradients(samples, "bfloat16", lean=True, graph=graph, **arguments)
        for got, keras_own, expected in zip(lean, stock, right, strict=True):
            assert got.shape == expected.shape
            assert _error(got, expected) <= 1.02 * _error(keras_own, expected) + 1e-5


def _operations(dtype: str = "bfloat16", channels: int = 8, multiplier: int = 1, **arguments: Any) -> set[str]:
    import keras
    import tensorflow as tf

    def step(x: Any, kernel: Any) -> Any:
        with lean_functions(), tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = keras.ops.depthwise_conv(x, kernel, strides=2, **arguments)
        return tape.gradient(y, [x, kernel])

    specs = [tf.TensorSpec((None, 9, 9, channels), dtype), tf.TensorSpec((3, 3, channels, multiplier), dtype)]
    graph = tf.function(step, autograph=False).get_concrete_function(*specs).graph
    return {op.type for op in graph.get_operations()}


def test_strided_gradient_of_the_input_is_a_forward_convolution_for_a_batch_of_any_size() -> None:
    assert "DepthwiseConv2dNativeBackpropInput" not in _operations()


def test_gradient_of_a_layer_reaches_its_float32_variable() -> None:
    import keras
    import tensorflow as tf

    x, kernel, dy = _samples((9, 9), 3, 2, "valid")
    layer = keras.layers.DepthwiseConv2D(3, strides=2, use_bias=False, dtype="mixed_bfloat16")
    layer.build(x.shape)
    layer.kernel.assign(kernel)

    def step(x: Any, dy: Any) -> Any:
        with lean_functions(), tf.GradientTape() as tape:
            y = layer(x)
        return tape.gradient(y, layer.kernel.value, dy)

    function = tf.function(step, autograph=False)
    assert function(x, dy).dtype == tf.float32
    *_, right = _gradients([x, kernel, dy], "float64", lean=False, strides=2)
    assert _error(tf.cast(function(x, dy), tf.float64).numpy(), right) < 0.003
    types = [op.type for op in function.get_concrete_function(x, dy).graph.get_operations()]
    assert types.count("DepthwiseConv2dNativeBackpropFilter") > 1


@pytest.mark.parametrize("other", [{"dtype": "float32"}, {"dtype": "float16"}, {"multiplier": 2}])
def test_what_it_is_not_made_for_is_left_to_keras(other: dict[str, Any]) -> None:
    assert "DepthwiseConv2dNativeBackpropInput" in _operations(**other)


def test_what_xla_compiles_is_left_to_keras() -> None:
    samples = _samples((9, 9), 3, 2, "valid")
    import keras
    import tensorflow as tf

    @tf.function(jit_compile=True, autograph=False)
    def step(x: Any, kernel: Any, dy: Any) -> Any:
        with lean_functions(), tf.GradientTape() as tape:
            tape.watch([x, kernel])
            y = keras.ops.depthwise_conv(x, kernel, strides=2)
        return tape.gradient(y, [x, kernel], dy)

    right = _gradients(samples, "float64", lean=False, strides=2)[1:]
    for got, expected in zip(step(*samples), right, strict=True):
        assert _error(tf.cast(got, tf.float64).numpy(), expected) < 0.01
    types = {op.type for op in step.get_concrete_function(*samples).graph.get_operations()}
    assert "DepthwiseConv2dNativeBackpropInput" in types


def test_second_derivative_raises_instead_of_being_wrong() -> None:
    import keras
    import tensorflow as tf

    x, kernel, _ = _samples((9, 9), 3, 2, "valid")
    with tf.GradientTape() as outer:
        outer.watch(x)
        with lean_functions(), tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.square(keras.ops.depthwise_conv(x, kernel, strides=2)))
        dx = inner.gradient(y, x)
    with pytest.raises(LookupError, match="first derivatives only"):
        outer.gradient(dx, x)
