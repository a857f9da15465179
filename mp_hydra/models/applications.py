"""Any architecture of keras.applications, made to take images in [0, 1] and to give float32 logits."""

from __future__ import annotations

import difflib
import logging
import re
import sys
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.models._parts import check_dropout, dropped, image_shape, logits, one_line

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import keras

log = logging.getLogger(__name__)

_MINIMUM = re.compile(r"Input size must be at least (\d+)x(\d+)")
_BRIGHTEST = 255.0
_GREY, _RGB = 1, 3


def application(
    input_shape: Sequence[int],
    outputs: int,
    *,
    architecture: str = "MobileNetV2",
    weights: str | None = None,
    trainable: bool = True,
    dropout: float = 0.0,
) -> keras.Model:
    """An architecture of keras.applications with a new head.

    The images are multiplied by 255 and go through the architecture's own `preprocess_input`, in float32, whatever the
    weights. Grey images are repeated to three channels, because that preprocessing is defined on RGB. Images below the
    architecture's minimum size are resized to it (bilinear, in float32), which is logged. Architectures that rescale
    or normalise inside (EfficientNet, MobileNetV3, ConvNeXt) do that part in the global policy.

    Args:
        input_shape: (height, width, channels), with 1 or 3 channels.
        outputs: classes, or regression targets.
        architecture: name of the function in keras.applications.
        weights: None for random weights, "imagenet", or the path of a weights file.
        trainable: False trains the head alone and runs batch normalisation in inference mode.
        dropout: share of features dropped before the head.

    Returns:
        float32 (batch, height, width, channels) in [0, 1] -> float32 logits (batch, outputs).

    Raises:
        ConfigError: unknown architecture, or an argument is out of range.
        ModelError: the inputs are not grey or RGB images, or Keras cannot build the architecture for them.
    """
    import keras

    constructor = _constructor(architecture)
    check_dropout(dropout)
    if not isinstance(trainable, bool):
        raise ConfigError("model.trainable", trainable, "give true or false")
    height, width, channels = image_shape(input_shape, "application")
    if channels not in (_GREY, _RGB):
        raise ModelError(f"model=application needs images of 1 or 3 channels, but the inputs have {channels}")
    backbone = _backbone(constructor, (height, width), architecture=architecture, weights=weights)
    backbone.trainable = trainable

    inputs = x = keras.Input((height, width, channels), dtype="float32", name="images")
    if channels == _GREY:
        x = keras.layers.Concatenate(dtype="float32", name="grey_to_rgb")([x] * _RGB)
    size = backbone.input_shape[1:3]
    if size != (height, width):
        log.info(
            "model.architecture=%s: images of %dx%d are resized to %dx%d, its minimum",
            architecture,
            height,
            width,
            *size,
        )
        x = keras.layers.Resizing(*size, dtype="float32", name="resize")(x)
    x = backbone(preprocessed(x, constructor))
    return keras.Model(inputs, logits(dropped(x, dropout, "dropout"), outputs), name="application")


def preprocessed(x: Any, constructor: Callable[..., Any]) -> Any:
    """Float32 images in [0, 1], symbolic, as the architecture that `constructor` builds expects them."""
    import keras

    x = keras.layers.Rescaling(_BRIGHTEST, dtype="float32", name="to_255")(x)
    # The module that defines an architecture has its preprocessing; no public submodule has both for MobileNetV3.
    return sys.modules[constructor.__module__].preprocess_input(x)


def _constructor(architecture: object) -> Callable[..., Any]:
    import keras

    names = [name for name, value in vars(keras.applications).items() if name[0].isupper() and callable(value)]
    if architecture in names:
        found: Callable[..., Any] = getattr(keras.applications, str(architecture))
        return found
    folded = {name.lower(): name for name in names}
    close = [folded[name] for name in difflib.get_close_matches(str(architecture).lower(), folded)]
    hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(sorted(names))}"
    raise ConfigError("model.architecture", architecture, f"keras.applications has no such architecture; {hint}")


def _backbone(constructor: Callable[..., Any], size: tuple[int, int], *, architecture: str, weights: str | None) -> Any:
    """The architecture without its head, for images of `size`, or of its minimum size where that is larger."""
    import tensorflow as tf

    try:
        try:
            return _headless(constructor, size, weights)
        except ValueError as error:
            minimum = _MINIMUM.search(str(error))
            if minimum is None:
                raise
            least_height, least_width = map(int, minimum.groups())
            return _headless(constructor, (max(size[0], least_height), max(size[1], least_width)), weights)
    except tf.errors.OpError:
        raise  # the device's failure, such as no memory, not the config's
    except Exception as error:
        shown = "null" if weights is None else weights
        raise ModelError(f"model.architecture={architecture} model.weights={shown}: {one_line(error)}") from error


def _headless(constructor: Callable[..., Any], size: tuple[int, int], weights: str | None) -> Any:
    return constructor(include_top=False, weights=weights, input_shape=(*size, _RGB), pooling="avg")
