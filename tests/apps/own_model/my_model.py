"""A user's own models: a function, a subclassed model and one that comes compiled."""

from __future__ import annotations

from typing import Any

import keras
from keras import layers


def functional(input_shape: tuple[int, ...], num_classes: int, hidden: int = 32) -> keras.Model:
    """A functional model; input shape and number of classes come from the dataset."""
    inputs = keras.Input(input_shape)
    x = layers.Flatten()(inputs)
    x = layers.Dense(hidden, activation="relu")(x)
    outputs = layers.Dense(num_classes, dtype="float32")(x)
    return keras.Model(inputs, outputs)


class Subclassed(keras.Model):
    """A subclassed model that builds its weights at its first call."""

    def __init__(self, classes: int, hidden: int = 32) -> None:
        super().__init__()
        self.flatten = layers.Flatten()
        self.hidden = layers.Dense(hidden, activation="relu")
        self.head = layers.Dense(classes, dtype="float32")

    def call(self, inputs: Any) -> Any:
        """Logits."""
        return self.head(self.hidden(self.flatten(inputs)))


def compiled(num_classes: int) -> keras.Model:
    """A Sequential model with an optimizer, a loss and a metric of its own."""
    model = keras.Sequential([layers.Flatten(), layers.Dense(32, activation="relu")])
    model.add(layers.Dense(num_classes, activation="softmax", dtype="float32"))
    model.compile(keras.optimizers.SGD(0.2), "sparse_categorical_crossentropy", metrics=["accuracy"])
    return model


def broken(num_classes: int) -> keras.Model:
    """A model with a bug."""
    return keras.Sequential([layers.Dense(num_classes + undefined_name)])  # type: ignore[name-defined]  # noqa: F821


class Stumbling(Subclassed):
    """A subclassed model with a bug that raises what Keras raises for a wrong shape."""

    def call(self, inputs: Any) -> Any:
        """Never gets as far as logits."""
        return super().call(inputs) * int("two")
