"""Errors that a user can act on: one line that names the key, the value and what would be right."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NoReturn


class UserError(Exception):
    """Something a user can put right; shown as one line, without a traceback."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class ConfigError(UserError):
    """A config value that cannot be used.

    Args:
        key: the full key, as typed on the command line.
        value: what was found there; shown as YAML would show it.
        problem: what is wrong and what would be right.

    >>> str(ConfigError("batch_size", 0, "give an integer of at least 1"))
    'batch_size=0: give an integer of at least 1'
    """

    def __init__(self, key: str, value: object, problem: str) -> None:
        self.key, self.value, self.problem = key, value, problem
        super().__init__(f"{key}={_as_yaml(value)}: {problem}")

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        # Launchers send errors from process to process, and pickle would call the class with the message alone.
        return type(self), (self.key, self.value, self.problem)


class DataError(UserError):
    """Data that cannot be read, or that no model could be trained on."""


class ModelError(UserError):
    """A model that cannot be built for this data, or whose outputs cannot be trained on."""


class PrecisionError(UserError):
    """A model that does not compute in the precision that was asked for."""


class NoUpdatesError(UserError):
    """A training in which steps are never applied, so that nothing is learnt."""


class TrackingError(UserError):
    """A tracking store that cannot be reached or used."""


class SweepFailedError(Exception):
    """A sweep in which jobs failed; `str` gives one line for the sweep and one for each of them."""


def quit_with(message: str, *, code: int = 1) -> NoReturn:
    """End the process with one line on stderr for each line of `message`."""
    for line in message.splitlines():
        print(f"mp_hydra: {line}", file=sys.stderr)  # noqa: T201 - logging may not be set up yet
    sys.exit(code)


def _as_yaml(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_as_yaml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_as_yaml(item) for item in value)}]"
    if value == "":
        return "''"
    return str(value).lower() if isinstance(value, bool) else str(value)
