"""What a builder may return, recognised and taken apart into checked parts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mp_hydra.datasets import arrays, streams
from mp_hydra.datasets.data import Samples
from mp_hydra.errors import DataError

_PARTS = ("train", "validation", "test")
_FACTS = ("classes", "vocabulary", "source")
_FORMS = (
    "return ((x_train, y_train), (x_test, y_test)), a mapping with x_train, y_train, x_test, y_test, "
    "or tf.data sets of single samples as (train, test)"
)
_PAIR, _TRIPLE = 2, 3


@dataclass(frozen=True)
class Built:
    """A builder's result, recognised and checked part by part."""

    parts: dict[str, Samples]
    classes: int | None = None
    vocabulary: int | None = None
    source: str | None = None


@dataclass
class _Raw:
    """A builder's result in one form: part -> (x, y), tf.data set or Samples."""

    parts: dict[str, Any]
    facts: dict[str, Any] = field(default_factory=dict)


def recognise(name: str, result: Any) -> Built:
    """The parts of what a builder returned, each checked on its own.

    Args:
        name: of the data set.
        result: in one of the forms that `mp_hydra.datasets.loading.load` lists.

    Raises:
        DataError: another form, or a part that fails its checks.
    """
    raw = _from_mapping(name, result) if isinstance(result, Mapping) else _from_sequence(name, result)
    parts: dict[str, Samples] = {part: _samples(name, part, value) for part, value in raw.parts.items()}
    source = raw.facts.get("source")
    return Built(
        parts,
        classes=_count(name, "classes", raw.facts.get("classes"), at_least=2),
        vocabulary=_count(name, "vocabulary", raw.facts.get("vocabulary"), at_least=1),
        source=None if source is None else str(source),
    )


def _from_sequence(name: str, result: Any) -> _Raw:
    if not isinstance(result, (tuple, list)) or len(result) not in (_PAIR, _TRIPLE):
        raise DataError(f"dataset {name}: the builder returned a {type(result).__name__}; {_FORMS}")
    parts = ("train", "test") if len(result) == _PAIR else _PARTS
    return _Raw(dict(zip(parts, result, strict=True)))


def _from_mapping(name: str, result: Mapping[Any, Any]) -> _Raw:
    values = dict(result)
    facts = {key: values.pop(key) for key in _FACTS if key in values}
    if "train" in values or "test" in values:
        _check_names(name, values, needed=("train", "test"), optional=("validation",))
        return _Raw(values, facts)
    for kind in "xy":
        if f"{kind}_val" in values and f"{kind}_validation" not in values:
            values[f"{kind}_validation"] = values.pop(f"{kind}_val")
    validation = ("x_validation", "y_validation")
    needed = ("x_train", "y_train", "x_test", "y_test", *(validation if set(validation) & set(values) else ()))
    _check_names(name, values, needed=needed, optional=())
    found = [part for part in _PARTS if f"x_{part}" in values]
    return _Raw({part: (values[f"x_{part}"], values[f"y_{part}"]) for part in found}, facts)


def _check_names(name: str, values: Mapping[Any, Any], *, needed: tuple[str, ...], optional: tuple[str, ...]) -> None:
    there = ", ".join(map(str, values)) or "nothing"
    if missing := [key for key in needed if key not in values]:
        raise DataError(
            f"dataset {name}: {', '.join(missing)} missing from what the builder returned ({there}); {_FORMS}"
        )
    if unknown := [str(key) for key in values if key not in (*needed, *optional)]:
        raise DataError(
            f"dataset {name}: the builder returned {', '.join(unknown)}, which means nothing here; "
            f"leave it out, or name it one of {', '.join((*needed, *optional, *_FACTS))}"
        )


def _samples(name: str, part: str, value: Any) -> Samples:
    if isinstance(value, Samples):
        return value
    if isinstance(value, (tuple, list)) and len(value) == _PAIR:
        return arrays.check(name, part, *value)
    import tensorflow as tf

    if isinstance(value, tf.data.Dataset):
        return streams.check(name, part, value)
    raise DataError(f"dataset {name}: the builder returned a {type(value).__name__} as its {part} set; {_FORMS}")


def _count(name: str, key: str, value: Any, *, at_least: int) -> int | None:
    if value is None:
        return None
    number = np.asarray(value)
    if number.ndim or number.dtype.kind not in "iu" or number < at_least:
        raise DataError(f"dataset {name}: {key} is {value}; give an integer of at least {at_least}")
    return int(number)
