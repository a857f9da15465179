"""The residual network for small images."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError
from mp_hydra.models._parts import check_positive, image_shape, logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras

_STAGES = 3
_LAYERS_OUTSIDE_BLOCKS = 2
_LAYERS_PER_DEPTH_STEP = 6  # three stages of one more block each, two convolutions a block


def resnet(
    input_shape: Sequence[int], outputs: int, *, depth: int = 20, width: int = 16, momentum: float = 0.9
) -> keras.Model:
    """The residual network for CIFAR of He et al. 2016 (arXiv:1512.03385, section 4.2), with batch normalisation.

    One 3x3 convolution, then three stages of n = (depth - 2) / 6 blocks of two 3x3 convolutions each, with `width`,
    2 `width` and 4 `width` channels; the second and third stage halve the image. Where a block changes the shape, its
    shortcut is a 1x1 convolution with batch normalisation (the paper's option B), which `depth` does not count.

    Args:
        input_shape: (height, width, channels), of any size.
        outputs: classes, or regression targets.
        depth: weighted layers, 6n + 2: 8, 14, 20, 32, 44, 56, 110 ...
        width: channels of the first stage.
        momentum: of the moving statistics. Keras' default of 0.99 needs some 500 steps before evaluation means anything.

    Returns:
        float32 (batch, height, width, channels) -> float32 logits (batch, outputs).

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the inputs are not images.
    """
    import keras

    check_positive(depth=depth, width=width)
    blocks, rest = divmod(depth - _LAYERS_OUTSIDE_BLOCKS, _LAYERS_PER_DEPTH_STEP)
    if rest or blocks < 1:
        raise ConfigError("model.depth", depth, "give 6n + 2 layers, such as 8, 14, 20, 32, 44, 56 or 110")
    inputs = keras.Input(image_shape(input_shape, "resnet"), dtype="float32", name="images")
    x = keras.layers.Activation("relu", name="stem_relu")(_convolution(inputs, width, momentum=momentum, name="stem"))
    for stage in range(_STAGES):
        for block in range(blocks):
            halve = stage > 0 and block == 0
            x = _block(
                x,
                width * 2**stage,
                strides=2 if halve else 1,
                momentum=momentum,
                name=f"stage_{stage + 1}_block_{block + 1}",
            )
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, logits(x, outputs), name=f"resnet_{depth}")


def _block(x: Any, channels: int, *, strides: int, momentum: float, name: str) -> Any:
    import keras

    shortcut = x
    if strides > 1:
        shortcut = _convolution(x, channels, size=1, strides=strides, momentum=momentum, name=f"{name}_shortcut")
    y = _convolution(x, channels, strides=strides, momentum=momentum, name=f"{name}_1")
    y = keras.layers.Activation("relu", name=f"{name}_1_relu")(y)
    y = _convolution(y, channels, momentum=momentum, name=f"{name}_2")
    y = keras.layers.Add(name=f"{name}_add")([y, shortcut])
    return keras.layers.Activation("relu", name=f"{name}_relu")(y)


def _convolution(x: Any, channels: int, *, momentum: float, name: str, size: int = 3, strides: int = 1) -> Any:
    """Convolution without bias, which the batch normalisation after it would cancel."""
    import keras

    convolution = keras.layers.Conv2D(
        channels,
        size,
        strides=strides,
        padding="same",
        use_bias=False,
        kernel_initializer="he_normal",
        name=f"{name}_conv",
    )
    return keras.layers.BatchNormalization(momentum=momentum, name=f"{name}_norm")(convolution(x))
