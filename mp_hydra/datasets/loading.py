"""From a `dataset` config to checked `Data`: build, check, split."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.datasets import targets
from mp_hydra.datasets.building import build
from mp_hydra.datasets.data import Data, Samples, Split
from mp_hydra.datasets.forms import recognise
from mp_hydra.datasets.preparation import plan, unchanged
from mp_hydra.datasets.settings import Settings
from mp_hydra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    import numpy.typing as npt


def load(config: Mapping[str, Any], *, seed: int) -> Data:
    """Build and check the data set that a resolved `dataset` config describes.

    The common keys (`Settings`) are dealt with here; all others go to the function or class named in `_target_`, and so
    does a `classes` that is not null, where it has such a parameter. It returns one of

    - `((x_train, y_train), (x_test, y_test))`, or the same with a validation pair in the middle;
    - a mapping with x_train, y_train, x_test, y_test and optionally x_validation, y_validation (x_val, y_val);
    - tf.data sets of single samples, `(train, test)`, `(train, validation, test)` or a mapping with these keys.

    Mappings may also hold `classes`, `vocabulary` and `source`.

    Args:
        config: the `dataset` node as a plain mapping.
        seed: the run's seed; decides the validation split where `split_seed` is null.

    Raises:
        ConfigError: a value of the config that cannot be used.
        DataError: data that no model could be trained on.
    """
    settings = Settings.read(config, seed=seed)
    built = recognise(settings.name, build(config, settings))
    parts, name = built.parts, settings.name
    classes = settings.classes if settings.classes is not None else built.classes
    labels = targets.resolve(name, {part: samples.labels for part, samples in parts.items()}, classes)
    prepare, shape, dtype = _preparation(name, parts, settings)
    splits = {
        part: Split(samples, labels.arrays[part], np.arange(len(samples.labels), dtype=np.int64), prepare[part])
        for part, samples in parts.items()
    }
    if "validation" not in splits and settings.validation_fraction > 0:
        splits["train"], splits["validation"] = _divide(splits["train"], settings)
    tokens = dtype == "int32"
    return Data(
        name=name,
        train=splits["train"],
        validation=splits.get("validation"),
        test=splits["test"],
        input_shape=shape,
        input_dtype=dtype,
        classes=labels.classes,
        outputs=labels.outputs,
        vocabulary=_vocabulary(name, parts, built.vocabulary, tokens=tokens),
        digest=_digest(parts),
        source=built.source or str(config["_target_"]),
        peak_input=None if tokens else _peak(parts, getattr(prepare["train"], "scale", None)),
    )


def _preparation(
    name: str, parts: Mapping[str, Samples], settings: Settings
) -> tuple[dict[str, Callable[[Any], Any]], tuple[int, ...] | None, str]:
    """How x of each part is prepared, and the shape and dtype of one prepared sample."""
    train = parts["train"]
    for part, samples in parts.items():
        if samples.dtype != train.dtype:
            raise DataError(
                f"dataset {name}: x_{part} holds {samples.dtype} but x_train {train.dtype}; "
                "give all parts the same dtype"
            )
        if samples.structure != train.structure:
            raise DataError(
                f"dataset {name}: x_{part} has the structure {samples.structure or 'of one tensor'} but x_train "
                f"{train.structure or 'that of one tensor'}; give all parts the same structure"
            )
    if train.shape is None:
        for key, value in (("image_size", settings.image_size), ("scale", settings.scale)):
            if value is not None:
                raise ConfigError(
                    f"dataset.{key}", value, f"x of dataset {name} is a nested structure; do it in its map"
                )
        return dict.fromkeys(parts, unchanged), None, "float32"
    plans: dict[str, Callable[[Any], Any]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    dtype = "float32"
    for part, samples in parts.items():
        stored = samples.shape or ()
        plans[part] = prepare = plan(f"dataset {name}: x_{part}", samples.dtype, stored, settings)
        shapes[part] = tuple(side for side in prepare.output_shape(stored) if side is not None)
        dtype = prepare.dtype
        if shapes[part] != shapes["train"]:
            raise DataError(
                f"dataset {name}: samples of x_{part} have the shape {shapes[part]} but those of x_train "
                f"{shapes['train']}; give all parts the same sample shape, or set dataset.image_size for images"
            )
    if dtype == "int32":
        _check_ids(name, parts)
    return plans, shapes["train"], dtype


def _check_ids(name: str, parts: Mapping[str, Samples]) -> None:
    for part, samples in parts.items():
        lowest, highest = samples.lowest or 0, samples.highest or 0
        if lowest < 0:
            raise DataError(
                f"dataset {name}: x_{part} holds the token id {lowest:.0f}; ids start at 0 (for integers that are "
                "numbers, set dataset.scale)"
            )
        if highest >= np.iinfo(np.int32).max:
            raise DataError(f"dataset {name}: x_{part} holds the token id {highest:.0f}; ids must fit into 32 bits")


def _vocabulary(name: str, parts: Mapping[str, Samples], told: int | None, *, tokens: bool) -> int | None:
    if not tokens:
        if told is not None:
            raise DataError(f"dataset {name}: it has a vocabulary, but x_train holds no token ids; leave it out")
        return None
    found = 1 + max(int(samples.highest or 0) for samples in parts.values())
    if told is not None and told < found:
        raise DataError(
            f"dataset {name}: vocabulary is {told} but the largest token id {found - 1}; give at least {found}"
        )
    return found if told is None else told


def _peak(parts: Mapping[str, Samples], scale: float | None) -> float | None:
    """Resizing is bilinear and so never goes beyond the stored values."""
    ends = [abs(end) for samples in parts.values() for end in (samples.lowest, samples.highest) if end is not None]
    return max(ends) * abs(1.0 if scale is None else scale) if ends else None


def _digest(parts: Mapping[str, Samples]) -> str:
    return hashlib.sha256("".join(f"{part} {parts[part].digest} " for part in sorted(parts)).encode()).hexdigest()[:32]


def _divide(train: Split, settings: Settings) -> tuple[Split, Split]:
    """The training split without, and the validation split with, a random share of its samples."""
    count = max(1, round(train.size * settings.validation_fraction))
    if count >= train.size:
        raise ConfigError(
            "dataset.validation_fraction",
            settings.validation_fraction,
            f"of {train.size} training samples none would be left; lower it, or give more samples",
        )
    order: npt.NDArray[np.int64] = np.random.default_rng(settings.split_seed).permutation(train.size)
    kept, held_out = np.sort(order[count:]), np.sort(order[:count])
    return replace(train, index=kept), replace(train, index=held_out)
