"""Going on from a saved model: scale, counters and moments as they were.

A `.keras` file of a model whose optimizer is a `ScaledOptimizer` is stock Keras (it names the inner optimizer, and opens without
mp_hydra) and carries the scaler's state beside it. `resume` reads both.
"""

from __future__ import annotations

import json
import re
import zipfile
import zlib
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

_ASSET = "assets/optimizer/loss_scale.json"
_CONFIG = "config.json"
_PARTS = ("mode", "scale", "rule", "state", "seeds")
# What Keras, h5py and zipfile raise for files that are damaged, or that need a class which is not there.
_UNREADABLE = (ValueError, TypeError, KeyError, OSError, zipfile.BadZipFile, zlib.error)


def resume(path: Path, custom_objects: Mapping[str, Any] | None = None) -> Any:
    """A compiled model that goes on training bit for bit where the saved one stopped.

    Call it with the policy in force that the model was trained under: a model that computes something in its own `call` takes
    its dtype from there, while its layers keep the policies that they were saved with.

    Args:
        path: a `.keras` file saved from a model whose optimizer is a `ScaledOptimizer`.
        custom_objects: as for `keras.saving.load_model`.

    Raises:
        ModelError: for a file that cannot be read, or that lacks the state.
    """
    import keras

    from mp_hydra.scaled_optimizer import ScaledOptimizer

    saved = saved_scaling(path)
    try:
        # Compiled by hand below: under a mixed policy Keras would put its own loss scaling around the optimizer, and then
        # drop the saved state, which no longer fits.
        model = keras.saving.load_model(path, custom_objects=custom_objects, compile=False)
        with keras.saving.custom_object_scope(dict(custom_objects or {})):
            settings = keras.saving.deserialize_keras_object(_archived(path, _CONFIG)["compile_config"])
        model.compile(**{**settings, "auto_scale_loss": False})
        model.optimizer = ScaledOptimizer(model.optimizer, mode=saved["mode"], scale=saved["scale"], rule=saved["rule"])
    except _UNREADABLE as error:
        raise ModelError(f"checkpoint {path} cannot be opened: {_reason(error)}") from error
    model.optimizer.build(model.trainable_variables)
    model.optimizer.remember_seeds(model)
    try:
        model.load_weights(path)
        model.optimizer.restore(saved)
    except _UNREADABLE as error:
        raise ModelError(f"checkpoint {path} does not fit: {_reason(error)}") from error
    return model


def _reason(error: Exception) -> str:
    """The message, without the list of Python objects that Keras packs it into."""
    return re.sub(
        r"^A total of \d+ objects .*? for object <.*?>:\s+|\s*List of objects that could .*",
        "",
        str(error),
        flags=re.DOTALL,
    )


def saved_scaling(path: Path) -> dict[str, Any]:
    """What a checkpoint says of its loss scaling: "mode", "scale", "rule", "state" and "seeds".

    Raises:
        ModelError: for a file that cannot be read, or that was not saved from a model with a `ScaledOptimizer`.
    """
    try:
        saved = _archived(path, _ASSET)
    except KeyError as error:
        raise ModelError(
            f"checkpoint {path} has no loss-scaling state: it was not saved by a run of mp_hydra"
        ) from error
    if missing := [part for part in _PARTS if part not in saved]:
        raise ModelError(f"checkpoint {path} has a loss-scaling state without {', '.join(missing)}: it is damaged")
    return saved


def _archived(path: Path, member: str) -> dict[str, Any]:
    try:
        with zipfile.ZipFile(path) as archive:
            return dict(json.loads(archive.read(member)))
    except FileNotFoundError as error:
        raise ModelError(f"there is no checkpoint {path}") from error
    except (OSError, ValueError, TypeError, zipfile.BadZipFile, zlib.error) as error:
        raise ModelError(f"checkpoint {path} is no .keras file: {error}") from error
