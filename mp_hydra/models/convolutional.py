"""The small convolutional net of the classic Keras example."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mp_hydra.errors import ModelError
from mp_hydra.models._parts import check_dropout, check_positive, check_positive_list, dropped, image_shape, logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras


def cnn(
    input_shape: Sequence[int],
    outputs: int,
    *,
    filters: Sequence[int] = (32, 64),
    dense: int = 128,
    dropout: float = 0.0,
) -> keras.Model:
    """Convolution 3x3 (relu) and max-pooling 2x2, once for each of `filters`, then one hidden dense layer.

    The net of https://keras.io/examples/vision/mnist_convnet, with padded convolutions, so that small images do.

    Args:
        input_shape: (height, width, channels).
        outputs: classes, or regression targets.
        filters: channels of each convolution.
        dense: units of the hidden dense layer.
        dropout: share of units dropped before the head.

    Returns:
        float32 (batch, height, width, channels) -> float32 logits (batch, outputs).

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the inputs are not images, or too small for that many poolings.
    """
    import keras

    check_positive_list(filters=filters)
    check_positive(dense=dense)
    check_dropout(dropout)
    height, width, channels = image_shape(input_shape, "cnn")
    if min(height, width) < 2 ** len(filters):
        raise ModelError(
            f"model=cnn: an image of {height}x{width} is too small for {len(filters)} poolings, which need at least "
            f"{2 ** len(filters)} pixels a side: give fewer model.filters, or larger images"
        )
    inputs = x = keras.Input((height, width, channels), dtype="float32", name="images")
    for number, count in enumerate(filters, start=1):
        x = keras.layers.Conv2D(count, 3, padding="same", activation="relu", name=f"conv_{number}")(x)
        x = keras.layers.MaxPooling2D(2, name=f"pool_{number}")(x)
    x = keras.layers.Flatten(name="flatten")(x)
    x = keras.layers.Dense(dense, activation="relu", name="dense")(x)
    x = dropped(x, dropout, "dropout")
    return keras.Model(inputs, logits(x, outputs), name="cnn")
