"""Kinds of values in a config: each check gives what would be right, or None for a value that is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mp_hydra import sizes
from mp_hydra.errors import ConfigError

COMPUTE_DTYPES = ("float32", "float16", "bfloat16")

Check = Callable[[Any], "str | None"]


@dataclass(frozen=True)
class Integer:
    """An integer within limits, or null where that is allowed."""

    least: int
    most: int | None = None
    null: bool = False

    def __call__(self, value: Any) -> str | None:
        """What would be right, or None for a value that is."""
        if value is None and self.null:
            return None
        good = isinstance(value, int) and not isinstance(value, bool)
        if good and value >= self.least and (self.most is None or value <= self.most):
            return None
        limits = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return f"give an integer {limits}{' or null' if self.null else ''}{if_text(value)}"


@dataclass(frozen=True)
class Number:
    """A number within limits, or null where that is allowed."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    null: bool = False

    def __call__(self, value: Any) -> str | None:
        """What would be right, or None for a value that is."""
        if value is None and self.null:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = good and (self.above is None or value > self.above) and (self.least is None or value >= self.least)
        if good and (self.below is None or value < self.below):
            return None
        bounds = [f"above {self.above:g}"] if self.above is not None else []
        bounds += [f"of at least {self.least:g}"] if self.least is not None else []
        bounds += [f"below {self.below:g}"] if self.below is not None else []
        return f"give a number {' and '.join(bounds)}{' or null' if self.null else ''}{if_text(value)}"


@dataclass(frozen=True)
class Rate(Number):
    """A number, or a learning-rate schedule in its place."""

    def __call__(self, value: Any) -> str | None:
        """What would be right, or None for a value that is."""
        if isinstance(value, Mapping):
            return None if isinstance(value.get("_target_"), str) else "give a number, or a schedule with its _target_"
        return super().__call__(value)


def if_text(value: Any) -> str:
    """What to add to the advice where a number was given as text; else nothing."""
    return f"; write it as a plain number, not as the text {value!r}" if isinstance(value, str) else ""


def one_of(*options: Any) -> Check:
    """One of these words, booleans or null."""
    words = {True: "true", False: "false", None: "null"}
    shown = ", ".join(option if isinstance(option, str) else words[option] for option in options)

    def check(value: Any) -> str | None:
        if any(value is option or (isinstance(value, str) and value == option) for option in options):
            return None
        return f"choose one of {shown}"

    return check


BOOLEAN = one_of(True, False)


def size(value: Any) -> str | None:
    """A size in bytes, such as 12GB, or null."""
    if value is None:
        return None
    try:
        sizes.parse(value)
    except ConfigError as error:
        return error.problem
    return None


def text(value: Any) -> str | None:
    """A text that is not empty."""
    return None if isinstance(value, str) and value.strip() else "give a name"


def mapping(value: Any) -> str | None:
    """A mapping."""
    return None if isinstance(value, Mapping) else "give a mapping of names to values"


def patterns(value: Any) -> str | None:
    """A list of regular expressions."""
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return "give a list of regular expressions on layer paths, such as [head]"
    return next(filter(None, map(_pattern, value)), None)


def dtypes_by_pattern(value: Any) -> str | None:
    """A mapping of regular expressions to `COMPUTE_DTYPES`, or null."""
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "give a mapping of regular expressions on layer paths to dtypes, such as {encoder/.*: float32}"
    strange = [f"{key}: {dtype}" for key, dtype in value.items() if dtype not in COMPUTE_DTYPES]
    if strange:
        return f"choose one of {', '.join(COMPUTE_DTYPES)} in place of {strange[0]}"
    return next(filter(None, map(_pattern, map(str, value))), None)


def _pattern(text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        return f"{text!r} is not a regular expression: {error}"
    return None


def keras_objects(kind: str, example: str) -> Check:
    """One or several things of Keras, by name or `_target_`, or null."""

    def check(value: Any) -> str | None:
        strange = [leaf for leaf in _elements(value) if not isinstance(leaf, (str, Mapping, type(None)))]
        return f"name {kind}, such as {example}, or give its _target_" if strange else None

    return check


def _elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]
