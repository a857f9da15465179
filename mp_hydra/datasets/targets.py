"""The labels of a data set: class indices or regression targets, checked over all parts at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import numpy.typing as npt

_PLAUSIBLE_CLASSES = 1000  # above it, more classes than samples are taken for numbers that mean something else
_TABLE = 2  # dimensions of labels with several columns


@dataclass(frozen=True)
class Targets:
    """Labels in their final form.

    Attributes:
        arrays: part -> int64 (n,) class indices, or float32 (n, outputs) targets.
        classes: None for regression.
        outputs: classes, or number of regression targets.
    """

    arrays: dict[str, npt.NDArray[Any]]
    classes: int | None
    outputs: int


def resolve(name: str, labels: Mapping[str, npt.NDArray[Any]], classes: int | None) -> Targets:
    """Decide between classification and regression and check every label.

    Integers (and booleans) are class indices, floats are regression targets. Without `classes` their number is the
    largest index over all parts, plus 1: a class may be missing from the training set.

    Args:
        name: of the data set.
        labels: part (train, test, perhaps validation) -> y as given.
        classes: as configured or told by the builder; None to find out.

    Raises:
        DataError: labels of the wrong kind or shape, out of range or not finite.
    """
    flat = {part: _flattened(f"dataset {name}: y_{part}", y) for part, y in labels.items()}
    train = flat["train"]
    for part, y in flat.items():
        if (y.dtype.kind == "f") != (train.dtype.kind == "f") or y.shape[1:] != train.shape[1:]:
            raise DataError(
                f"dataset {name}: y_{part} ({y.dtype}, shape {labels[part].shape}) does not match y_train "
                f"({train.dtype}, shape {labels['train'].shape}); give all parts the same kind of labels"
            )
    if train.dtype.kind != "f":
        return _classification(name, flat, classes)
    if classes is not None:
        raise DataError(
            f"dataset {name}: y_train holds {train.dtype} but there are {classes} classes; give integer class indices "
            "from 0, or leave dataset.classes null for regression"
        )
    return Targets(
        {part: _regression(f"dataset {name}: y_{part}", y) for part, y in flat.items()}, None, train.shape[1]
    )


def _flattened(where: str, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Labels as (n,) integers or (n, k) floats."""
    if y.dtype.kind not in "biuf":
        raise DataError(f"{where} holds {y.dtype}; give integer class indices or float targets")
    if y.ndim > _TABLE:
        raise DataError(f"{where} has the shape {y.shape}; give one class index or one row of targets a sample")
    if y.ndim == _TABLE and y.shape[1] > 1 and _is_one_hot(y):
        raise DataError(f"{where} is one-hot of shape {y.shape}; give class indices, as y.argmax(axis=1) makes them")
    if y.dtype.kind == "f":
        return y.reshape(len(y), -1)
    if y.ndim == _TABLE and y.shape[1] != 1:
        raise DataError(
            f"{where} holds {y.dtype} of shape {y.shape}; give one class index a sample, or floats for regression"
        )
    return y.reshape(len(y))


def _is_one_hot(y: npt.NDArray[Any]) -> bool:
    return bool(np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all())


def _classification(name: str, labels: Mapping[str, npt.NDArray[Any]], classes: int | None) -> Targets:
    for part, y in labels.items():
        if y.min() < 0:
            raise DataError(f"dataset {name}: y_{part} holds the label {y.min()}; class indices start at 0")
        if classes is not None and y.max() >= classes:
            raise DataError(
                f"dataset {name}: y_{part} holds the label {y.max()}; with {classes} classes "
                f"the largest is {classes - 1}"
            )
    only = int(labels["train"][0])
    if (labels["train"] == only).all():
        raise DataError(f"dataset {name}: y_train holds one class only ({only}); training needs at least two")
    largest = max(int(y.max()) for y in labels.values())
    samples = sum(len(y) for y in labels.values())
    if classes is None and largest >= max(samples, _PLAUSIBLE_CLASSES):
        raise DataError(
            f"dataset {name}: the largest label is {largest} but there are {samples} samples; number the "
            "classes from 0, give floats for regression, or set dataset.classes"
        )
    count = classes if classes is not None else 1 + largest
    return Targets({part: y.astype(np.int64) for part, y in labels.items()}, count, count)


def _regression(where: str, y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        values = y.astype(np.float32)
    if bad := values.size - int(np.isfinite(values).sum()):
        raise DataError(
            f"{where} has {bad} of {values.size} values that are not finite in float32; remove or mend them"
        )
    return values
