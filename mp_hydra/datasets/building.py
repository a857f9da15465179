"""Calling the function or class that a `dataset` config names in `_target_`."""

from __future__ import annotations

import difflib
import inspect
import pydoc
from typing import TYPE_CHECKING, Any

from mp_hydra.datasets.settings import COMMON_KEYS, Settings
from mp_hydra.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


def build(config: Mapping[str, Any], settings: Settings) -> Any:
    """What the builder returns for the keys of the config that are its own.

    A `classes` that is not null is passed on where the builder has such a parameter.

    Raises:
        ConfigError: a target that cannot be found, or a key that it does not take.
        DataError: the builder failed; its own `UserError`s pass as they are.
    """
    from hydra.utils import instantiate

    target = config.get("_target_")
    known = _parameters(_locate(target))
    own = {key: value for key, value in config.items() if key not in COMMON_KEYS}
    if known is not None:
        _check_keys(str(target), own, known)
        if "classes" in known and settings.classes is not None:
            own["classes"] = settings.classes
    try:
        return instantiate(own, _convert_="all")
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, UserError):
            cause = cause.__cause__
        if cause is not None:
            raise cause from error
        first = error.__cause__ or error
        raise DataError(f"dataset {settings.name}: {target} failed with {type(first).__name__}: {first}") from error


def _locate(target: Any) -> Callable[..., Any]:
    advice = "give the dotted path of a function that can be imported, like mp_hydra.datasets.digits"
    if not isinstance(target, str) or target in ("", "???"):
        raise ConfigError("dataset._target_", target, advice)
    try:
        builder = pydoc.locate(target)
    except pydoc.ErrorDuringImport as error:
        raise ConfigError(
            "dataset._target_", target, f"importing it failed with {type(error.value).__name__}: {error.value}"
        ) from error
    if builder is None:
        raise ConfigError("dataset._target_", target, f"there is no such thing; {advice}")
    if not callable(builder):
        raise ConfigError("dataset._target_", target, f"this is a {type(builder).__name__}; {advice}")
    return builder


def _parameters(builder: Callable[..., Any]) -> frozenset[str] | None:
    """The names of a builder's parameters; None where it takes any or does not tell."""
    try:
        parameters = inspect.signature(builder).parameters
    except (TypeError, ValueError):
        return None
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return frozenset(parameters)


def _check_keys(target: str, own: Mapping[str, Any], known: frozenset[str]) -> None:
    for key, value in own.items():
        if key in known or key.startswith("_"):
            continue
        close = difflib.get_close_matches(key, sorted(known | COMMON_KEYS), n=1)
        advice = f"did you mean {close[0]}?" if close else f"it takes {', '.join(sorted(known)) or 'none'}"
        raise ConfigError(f"dataset.{key}", value, f"{target} has no such parameter; {advice}")
