"""From stored x to what a model receives: the rule that decides, and the computation, done per batch on the CPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from mp_hydra.datasets.settings import Settings

_MATRIX, _IMAGE = 2, 3  # dimensions of one sample


@dataclass(frozen=True)
class Preparation:
    """Cast, scale and resize; works on one sample and on a batch alike.

    Attributes:
        dtype: what the model receives: "float32", or "int32" for token ids.
        scale: factor in float32; None to leave the values alone.
        image_size: (height, width) after bilinear resizing; None to leave images alone.
        add_channel: append an axis of size 1, for images of one channel stored without it.
    """

    dtype: str = "float32"
    scale: float | None = None
    image_size: tuple[int, int] | None = None
    add_channel: bool = False

    def __call__(self, x: Any) -> Any:
        """A tensor of stored samples as the model receives it."""
        import tensorflow as tf

        if self.add_channel:
            x = x[..., tf.newaxis]
        x = tf.cast(x, self.dtype)
        if self.scale is not None:
            x = x * self.scale
        if self.image_size is not None:
            x = tf.image.resize(x, self.image_size)
        return x

    def output_shape(self, shape: tuple[int | None, ...]) -> tuple[int | None, ...]:
        """The shape of one prepared sample.

        >>> Preparation(add_channel=True, image_size=(32, 32)).output_shape((28, 28))
        (32, 32, 1)
        """
        shape = (*shape, 1) if self.add_channel else shape
        return shape if self.image_size is None else (*self.image_size, *shape[2:])


def unchanged(x: Any) -> Any:
    """The preparation of nested structures: none."""
    return x


def plan(where: str, dtype: np.dtype[Any], shape: tuple[int | None, ...], settings: Settings) -> Preparation:
    """How samples of this dtype and shape become model input.

    Floats and booleans are numbers. Unsigned 8-bit integers of two or more dimensions are images (a third axis is added
    to two) and are multiplied by 1/255 where no scale is set. Integers of one dimension are token ids, unless a scale
    says that they are numbers. Other integers need a scale.

    Args:
        where: the data set and array, to begin a message with.
        dtype: as stored.
        shape: of one stored sample; None for a size that differs between samples.
        settings: the common config keys.

    Raises:
        DataError: samples that cannot be given to a model.
        ConfigError: `image_size` for what is not an image.
    """
    if not shape:
        raise DataError(f"{where} holds one number a sample; give it the shape (samples, features)")
    integer = dtype.kind in "iu"
    scale = settings.scale
    if integer and len(shape) == 1 and scale is None:
        preparation = Preparation(dtype="int32")
    elif integer:
        if scale is None and dtype != np.uint8:
            raise DataError(
                f"{where} holds {dtype} of {len(shape)} dimensions a sample; give images as uint8, token ids with one "
                "dimension a sample, other numbers as floats, or set dataset.scale"
            )
        preparation = Preparation(scale=1 / 255 if scale is None else scale, add_channel=len(shape) == _MATRIX)
    else:
        preparation = Preparation(scale=scale)
    return _with_size(where, preparation, shape, settings.image_size)


def _with_size(
    where: str, preparation: Preparation, shape: tuple[int | None, ...], image_size: tuple[int, int] | None
) -> Preparation:
    received = preparation.output_shape(shape)
    image = len(received) == _IMAGE and preparation.dtype == "float32"
    if image_size is not None and not image:
        raise ConfigError(
            "dataset.image_size",
            list(image_size),
            f"only images (height, width, channels) can be resized, but samples of {where} have the shape {received}",
        )
    sized = Preparation(preparation.dtype, preparation.scale, image_size, preparation.add_channel)
    if None in sized.output_shape(shape):
        advice = "set dataset.image_size" if image and received[-1] is not None else "pad or crop them to one shape"
        raise DataError(f"{where} has samples of different shapes {received}; {advice}")
    return sized
