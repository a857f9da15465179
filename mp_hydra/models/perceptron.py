"""The multi-layer perceptron."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.models._parts import check_dropout, check_positive_list, dropped, logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras


def mlp(
    input_shape: Sequence[int],
    outputs: int,
    *,
    widths: Sequence[int] = (256, 128),
    dropout: float = 0.0,
    activation: str = "relu",
    vocabulary: int | None = None,
) -> keras.Model:
    """A multi-layer perceptron on feature vectors; inputs of more dimensions are flattened.

    Args:
        input_shape: shape of one sample.
        outputs: classes, or regression targets.
        widths: units of each hidden layer; an empty list gives a linear model.
        dropout: share of units dropped after each hidden layer.
        activation: name of the hidden layers' activation.
        vocabulary: set by data sets of token ids, which this model refuses: an id is a name, not a quantity.

    Returns:
        float32 (batch, *input_shape) -> float32 logits (batch, outputs).

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the inputs are token ids.
    """
    import keras

    check_positive_list(widths=widths)
    check_dropout(dropout)
    try:
        keras.activations.get(activation)
    except (TypeError, ValueError) as error:
        problem = "give the name of a function in keras.activations, such as relu or gelu"
        raise ConfigError("model.activation", activation, problem) from error
    if vocabulary is not None:
        raise ModelError(
            "model=mlp needs feature vectors or images, but the inputs are token ids: choose model=transformer, "
            "or another dataset"
        )
    inputs = x = keras.Input(tuple(input_shape), dtype="float32", name="inputs")
    if len(input_shape) != 1:
        x = keras.layers.Flatten(name="flatten")(x)
    for number, width in enumerate(widths, start=1):
        x = keras.layers.Dense(width, activation=activation, name=f"dense_{number}")(x)
        x = dropped(x, dropout, f"dropout_{number}")
    return keras.Model(inputs, logits(x, outputs), name="mlp")
