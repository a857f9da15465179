"""What the builders share: checks of their arguments, and the head."""

from __future__ import annotations

import math
import re
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeGuard

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_IMAGE_RANK = 3


def image_shape(input_shape: Sequence[int], model: str) -> tuple[int, int, int]:
    """`input_shape` as (height, width, channels).

    Raises:
        ModelError: these are not images of one known size.
    """
    shape = tuple(input_shape)
    if len(shape) != _IMAGE_RANK or not all(_is_positive(side) for side in shape):
        raise ModelError(
            f"model={model} needs images of shape (height, width, channels), but the inputs have shape {shape}: "
            "choose a dataset of images, or another model"
        )
    height, width, channels = shape
    return height, width, channels


def check_positive(**values: object) -> None:
    """Raise ConfigError unless every value is an integer of at least 1; the names are keys of the model's config."""
    for key, value in values.items():
        if not _is_positive(value):
            raise ConfigError(f"model.{key}", value, "give an integer of at least 1")


def check_positive_list(**values: object) -> None:
    """Raise ConfigError unless every value is a list of integers of at least 1."""
    for key, value in values.items():
        if not isinstance(value, (list, tuple)) or not all(_is_positive(item) for item in value):
            raise ConfigError(f"model.{key}", value, "give a list of integers of at least 1, such as [32,64]")


def check_dropout(rate: object) -> None:
    """Raise ConfigError unless `rate` is a share of the units, in [0, 1)."""
    if not _is_number(rate) or not 0 <= rate < 1:
        raise ConfigError("model.dropout", rate, "give a number of at least 0 and below 1")


def check_above_zero(**values: object) -> None:
    """Raise ConfigError unless every value is a finite number above 0."""
    for key, value in values.items():
        if not _is_number(value) or not 0 < value < math.inf:
            raise ConfigError(f"model.{key}", value, "give a finite number above 0")


def dropped(x: Any, rate: float, name: str) -> Any:
    """`x` after dropout; a rate of 0 adds no layer."""
    import keras

    return keras.layers.Dropout(rate, name=name)(x) if rate else x


def logits(x: Any, outputs: int) -> Any:
    """The head: (batch, features) to float32 (batch, outputs), without activation, in float32 under every policy."""
    import keras

    check_positive(outputs=outputs)
    return keras.layers.Dense(outputs, dtype="float32", name="logits")(x)


def one_line(error: BaseException) -> str:
    """What Keras says is wrong, without the colours and the dump of arguments that it puts around it."""
    message = _ANSI.sub("", str(error)).split("Arguments received by", maxsplit=1)[0]
    return " ".join(message.split()) or type(error).__name__


def _is_positive(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool)
