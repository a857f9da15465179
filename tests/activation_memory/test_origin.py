"""An activation after batch normalisation keeps nothing of its own: it computes its input again from the other one's."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import mp_hydra
from mp_hydra.activation_memory.functions import lean_functions
from mp_hydra.activation_memory.layers import replacement
from mp_hydra.activation_memory.origin import Affine, Padded, origin_of

SHAPE = (16, 8, 8, 16)
KEEPING = ("silu", "gelu", "mish", "hard_silu")


def pair(activation: str, **settings: Any) -> Any:
    """BatchNormalization, then an activation."""
    inputs = keras.Input(SHAPE[1:])
    x = keras.layers.BatchNormalization(dtype="mixed_bfloat16", **settings)(inputs)
    return keras.Model(inputs, keras.layers.Activation(activation, dtype="mixed_bfloat16")(x))


def kept(model: Any) -> int:
    """Bytes of tensors of the input's size that the backward pass of a traced step reads of the forward pass."""
    graph = tf.__internal__.FuncGraph("step")
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.bfloat16, SHAPE)
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = model(x, training=True)
        made = set(graph.get_operations())
        upstream = tf.compat.v1.placeholder(y.dtype, SHAPE)
        tape.gradient(y, [x, *(v.value for v in model.trainable_variables)], output_gradients=upstream)
    views = {"Reshape", "Identity", "IdentityN", "StopGradient", "EnsureShape"}
    roots = {}
    for op in graph.get_operations():
        for tensor in () if op in made else op.inputs:
            root = tensor
            while root.op in made and root.op.type in views:
                root = root.op.inputs[root.value_index if root.op.type == "IdentityN" else 0]
            if root.op in made and root.shape.num_elements() == np.prod(SHAPE):
                roots[root.name] = root.shape.num_elements() * root.dtype.size
    return sum(roots.values())


@pytest.mark.parametrize("activation", KEEPING)
def test_both_together_keep_one_16_bit_tensor(activation: str) -> None:
    model = pair(activation)
    stock = kept(model)
    mp_hydra.lean(model)
    assert kept(model) == 2 * np.prod(SHAPE)
    assert stock >= 6 * np.prod(SHAPE)


@pytest.mark.parametrize("activation", KEEPING)
def test_gradients_are_as_near_to_those_in_float64_as_stock_keras_gets(activation: str) -> None:
    random = np.random.default_rng(0)
    x = random.normal(2.0, 3.0, SHAPE).astype("float32")
    upstream = random.normal(size=SHAPE).astype("float32")
    errors = {}
    exact = None
    for which in ("float64", "stock", "lean"):
        keras.utils.set_random_seed(1)
        policy = "float64" if which == "float64" else "mixed_bfloat16"
        inputs = keras.Input(SHAPE[1:], dtype="float64" if which == "float64" else "float32")
        norm = keras.layers.BatchNormalization(dtype=policy)
        model = keras.Model(inputs, keras.layers.Activation(activation, dtype=policy)(norm(inputs)))
        norm.gamma.assign(np.linspace(0.5, 2.0, SHAPE[-1]))
        norm.beta.assign(np.linspace(-1.0, 1.0, SHAPE[-1]))
        if which == "lean":
            mp_hydra.lean(model)
        given = tf.cast(tf.cast(x, tf.bfloat16), inputs.dtype)
        with tf.GradientTape() as tape:
            tape.watch(given)
            y = model(given, training=True)
        sources = [given, norm.gamma.value, norm.beta.value]
        found = tape.gradient(y, sources, output_gradients=tf.cast(tf.cast(upstream, tf.bfloat16), y.dtype))
        values = [np.asarray(tf.cast(part, tf.float64)) for part in (y, *found)]
        if exact is None:
            exact = values
        else:
            errors[which] = [np.linalg.norm(a - b) / np.linalg.norm(b) for a, b in zip(values, exact, strict=True)]
    for lean, stock in zip(errors["lean"], errors["stock"], strict=True):
        assert lean <= 1.1 * stock + 5e-7


def test_nothing_is_noted_where_the_normalisation_does_not_keep_its_input() -> None:
    layer = keras.layers.BatchNormalization(dtype="mixed_bfloat16")
    layer.build(SHAPE)
    found = replacement(layer)
    assert found is not None
    assert found.call is not None
    x = tf.ones(SHAPE, tf.bfloat16)
    with lean_functions():
        assert origin_of(found.call(x, training=True), Affine) is not None
        assert origin_of(found.call(x, training=False), Affine) is None
        layer.trainable = False
        assert origin_of(found.call(x, training=True), Affine) is None


def test_depthwise_convolution_of_a_padded_tensor_keeps_it_without_its_margins() -> None:
    """The gradients are those of stock Keras' accuracy, and what is kept is the activation's own result."""
    x = tf.cast(np.random.default_rng(0).normal(size=(4, 6, 6, 16)), tf.bfloat16)
    upstream = tf.cast(np.random.default_rng(1).normal(size=(4, 4, 4, 16)), tf.bfloat16)
    layer = keras.layers.DepthwiseConv2D(3, strides=2, use_bias=False, dtype="mixed_bfloat16")
    layer.build((4, 9, 9, 16))

    def step(z: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor, tf.Tensor]:
        with tf.GradientTape() as tape:
            tape.watch(z)
            y = layer(keras.ops.pad(tf.nn.relu6(z), ((0, 0), (1, 2), (2, 1), (0, 0))))
        return (y, *tape.gradient(y, [z, layer.kernel.value], output_gradients=upstream))

    exact = [tf.cast(part, tf.float64).numpy() for part in step(x)]
    with lean_functions():
        found = [tf.cast(part, tf.float64).numpy() for part in step(x)]
        graph = tf.function(step).get_concrete_function(tf.TensorSpec(x.shape, x.dtype)).graph
        padded = keras.ops.pad(x, ((0, 0), (1, 2), (2, 1), (0, 0)))
        assert origin_of(padded, Padded) == Padded(x, ((0, 0), (1, 2), (2, 1), (0, 0)))
        assert origin_of(keras.ops.pad(x, ((0, 0), (1, 2), (2, 1), (0, 0)), constant_values=1.0), Padded) is None
        assert origin_of(keras.ops.pad(x, ((0, 0), (1, 2), (2, 1), (0, 0)), mode="reflect"), Padded) is None
    for mine, theirs in zip(found, exact, strict=True):
        assert np.linalg.norm(mine - theirs) <= 6e-3 * np.linalg.norm(theirs)
    margins = [op for op in graph.get_operations() if op.type == "Pad" and tuple(op.inputs[0].shape) == x.shape]
    assert len(margins) == 2
    assert _readers(margins[0].outputs[0]) == {"DepthwiseConv2dNative"}


def _readers(tensor: Any) -> set[str]:
    """Types of the operations that read a tensor, behind identities."""
    found: set[str] = set()
    for op in tensor.consumers():
        if op.type in {"Identity", "IdentityN"}:
            place = [i for i, given in enumerate(op.inputs) if given is tensor]
            found |= {kind for i in place for kind in _readers(op.outputs[i])}
        else:
            found.add(op.type)
    return found
