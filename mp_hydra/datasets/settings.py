"""The keys that every data set config has, whatever its builder: their meaning and their checks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from mp_hydra.errors import ConfigError


@dataclass(frozen=True)
class Settings:
    """The common keys of a `dataset` config.

    Attributes:
        name: for messages, run names and records.
        image_size: (height, width) in pixels that images are resized to; None to leave them.
        scale: x is multiplied by it; None for 1/255 on unsigned 8-bit images and nothing elsewhere.
        validation_fraction: share of the training samples kept for validation, where the builder gives no such set.
        split_seed: seed of that choice.
        classes: number of classes; None to take it from the data.
    """

    name: str
    image_size: tuple[int, int] | None = None
    scale: float | None = None
    validation_fraction: float = 0.1
    split_seed: int = 0
    classes: int | None = None

    @classmethod
    def read(cls, config: Mapping[str, Any], *, seed: int) -> Settings:
        """The settings in a resolved `dataset` config; `seed` stands in for a `split_seed` of null.

        Raises:
            ConfigError: a value out of range or of the wrong type.
        """
        target = str(config.get("_target_", "dataset"))
        split_seed = config.get("split_seed")
        return cls(
            name=str(config.get("name") or target.rpartition(".")[2]),
            image_size=_image_size(config.get("image_size")),
            scale=_scale(config.get("scale")),
            validation_fraction=_fraction(config.get("validation_fraction", cls.validation_fraction)),
            split_seed=seed if split_seed is None else _integer("split_seed", split_seed, at_least=0),
            classes=None if config.get("classes") is None else _integer("classes", config["classes"], at_least=2),
        )


COMMON_KEYS = frozenset(field.name for field in fields(Settings))


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _integer(key: str, value: Any, *, at_least: int) -> int:
    if not _is_integer(value) or value < at_least:
        raise ConfigError(f"dataset.{key}", value, f"give an integer of at least {at_least}, or null")
    return int(value)


def _image_size(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    pair = [value, value] if _is_integer(value) else value
    if (
        isinstance(pair, str)
        or not isinstance(pair, Sequence)
        or len(pair) != 2  # noqa: PLR2004
        or not all(_is_integer(side) and side >= 1 for side in pair)
    ):
        raise ConfigError("dataset.image_size", value, "give one integer of at least 1, [height, width], or null")
    return (pair[0], pair[1])


def _scale(value: Any) -> float | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value == 0:
        raise ConfigError("dataset.scale", value, "give a finite number other than 0, or null for automatic")
    return float(value)


def _fraction(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 1:
        raise ConfigError("dataset.validation_fraction", value, "give a number from 0 up to, but not including, 1")
    return float(value)
