"""Models that float16 breaks, each in one place."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers, ops


class ExpOfLogits(layers.Layer):
    """A softmax by hand, without taking the maximum off: exp of more than 11 is inf in float16."""

    def call(self, inputs: Any) -> Any:
        powers = ops.exp(inputs)
        return powers / ops.sum(powers, axis=-1, keepdims=True)


class L2Normalised(layers.Layer):
    """Vectors over their length: squares below 6e-8 are 0 in float16, and so is the length."""

    def call(self, inputs: Any) -> Any:
        return inputs / ops.sqrt(ops.sum(ops.square(inputs), axis=-1, keepdims=True))


class Masked(layers.Layer):
    """A mask of -1e9, which is -inf in float16, and -inf times 0 is nan."""

    def call(self, inputs: Any) -> Any:
        allowed = ops.cast(inputs > 0, inputs.dtype)
        return ops.softmax(inputs + (1 - allowed) * ops.cast(-1e9, inputs.dtype))


class Block(layers.Layer):
    """A layer that holds another one."""

    def __init__(self, inner: layers.Layer, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.dense = layers.Dense(24, activation="relu", name="widen")
        self.inner = inner

    def call(self, inputs: Any) -> Any:
        return self.inner(self.dense(inputs))


def _model(input_shape: tuple[int, ...], classes: int, middle: list[layers.Layer]) -> keras.Model:
    stack = [layers.Flatten(), *(layers.Dense(24, activation="relu", name=f"before_{n}") for n in range(3)), *middle]
    stack += [*(layers.Dense(24, activation="relu", name=f"after_{n}") for n in range(3))]
    return keras.Sequential([keras.Input(input_shape), *stack, layers.Dense(classes, dtype="float32", name="head")])


def exp_of_logits(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    logits = [layers.Dense(24, name="logits"), layers.Rescaling(0.1, offset=15.0, name="large")]
    return _model(input_shape, classes, [*logits, ExpOfLogits(name="exp")])


def l2_normalised(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    small = layers.Rescaling(1e-5, name="small")
    return _model(input_shape, classes, [small, L2Normalised(name="length")])


def masked(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    return _model(input_shape, classes, [Block(Masked(name="mask"), name="block")])


def sound(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    return _model(input_shape, classes, [])


def broken_everywhere(input_shape: tuple[int, ...], classes: int) -> keras.Model:
    far = keras.initializers.Constant(1e30)
    return _model(input_shape, classes, [layers.Dense(24, kernel_initializer=far, name=f"far_{n}") for n in range(2)])
