"""Conditions on a comparison, for continuous integration: `--require "accuracy=equivalent,memory<=0.6,speed>=1.2"`.

    conditions = parse("accuracy=equivalent|better,mixed_bfloat16:memory<=0.6")
    failures(comparison, conditions)                      # [] if all of them hold

A condition must hold for every row of every group, or for the rows of the precision before the colon. Ratios are judged by
their point value, not by the ends of their intervals. What was not measured does not hold; a run that did not end well or that
could not be compared fails, whatever the others show; and so does a group in which nothing was compared. Memory is not asked of
rows whose batch sizes differ (`batch_size=max`), where its ratio says nothing; there have to be others.
"""

from __future__ import annotations

import math
import operator
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mp_hydra.compare.model import Comparison, Figure, Group, Row

OPTION = "--require"
EXAMPLE = "accuracy=equivalent,memory<=0.6,speed>=1.2"
VERDICTS = ("equivalent", "better")
FIGURES: dict[str, Callable[[Row], Figure]] = {
    "memory": lambda row: row.training_memory.ratio,
    "peak": lambda row: row.peak_memory.ratio,
    "speed": lambda row: row.speed,
    "energy": lambda row: row.energy.ratio,
    "skipped": lambda row: row.skipped,
}
_AT_EQUAL_BATCH = ("memory", "peak")
_KEYS = ("accuracy", *FIGURES)
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "<": operator.lt,
    ">": operator.gt,
    "=": operator.eq,
}
_CONDITION = re.compile(
    r"(?:(?P<precision>[^:<>=]*):)?\s*(?P<key>[^:<>=]*?)\s*(?P<sign><=|>=|<|>|=)\s*(?P<bound>[^<>=]*)"
)


@dataclass(frozen=True)
class Condition:
    """One condition.

    Attributes:
        key: accuracy, memory, peak, speed, energy or skipped.
        sign: <=, >=, <, > or =.
        bound: what the figure is compared with; for accuracy the verdicts that will do.
        precision: the rows it is for; None for all.
    """

    key: str
    sign: str
    bound: float | tuple[str, ...]
    precision: str | None = None

    def __str__(self) -> str:
        """As it was typed."""
        bound = "|".join(self.bound) if isinstance(self.bound, tuple) else f"{self.bound:g}"
        return f"{self.key}{self.sign}{bound}"

    def failure(self, row: Row) -> str | None:
        """How the row breaks it; None if it holds."""
        if isinstance(self.bound, tuple):
            verdict = row.accuracy.verdict
            if verdict is None:
                return f"{self} cannot be judged: {row.accuracy.difference.missing}"
            return None if verdict in self.bound else f"{self} fails: {verdict}"
        figure = FIGURES[self.key](row)
        if figure.value is None:
            return f"{self} cannot be judged: {figure.missing}"
        value = float(f"{figure.value:.12g}")  # means of logarithms make 0.5 a 0.49999999999999994
        return None if _OPERATORS[self.sign](value, self.bound) else f"{self} fails: {value:.6g}"


def parse(text: str) -> tuple[Condition, ...]:
    """Read conditions, separated by commas.

    >>> [str(condition) for condition in parse("accuracy=equivalent|better, mixed_bfloat16:memory<=0.6")]
    ['accuracy=equivalent|better', 'memory<=0.6']

    Raises:
        ConfigError: for anything that is not a condition.
    """
    return tuple(_condition(part.strip(), text) for part in text.split(","))


def failures(comparison: Comparison, conditions: Sequence[Condition]) -> list[str]:
    """Every way in which the comparison breaks the conditions, one line each; empty if all hold."""
    if not comparison.groups:
        return ["nothing was compared: no runs"]
    there = list(dict.fromkeys(row.precision for _, row in comparison.rows()))
    wanted = dict.fromkeys(condition.precision for condition in conditions if condition.precision)
    lines = [f"{name}: no such row; there is {', '.join(there) or 'none'}" for name in wanted if name not in there]
    for condition in conditions:
        rows = [row for _, row in comparison.rows() if condition.precision in (None, row.precision)]
        if condition.key in _AT_EQUAL_BATCH and rows and all(row.batches_differ for row in rows):
            lines.append(f"{condition} cannot be judged: each run was at its own batch size")
    for group in comparison.groups:
        found = list(_group_failures(group, conditions))
        lines += found if len(comparison.groups) == 1 else [f"{group.label}, {line}" for line in found]
    return lines


def _group_failures(group: Group, conditions: Sequence[Condition]) -> Iterator[str]:
    def chosen(precision: str) -> list[Condition]:
        return [condition for condition in conditions if condition.precision in (None, precision)]

    strangers = [one for one in group.excluded if one.run.precision != group.baseline and chosen(one.run.precision)]
    for one in strangers:
        yield f"{one.run.precision}: {one.run.name} is {one.reason}"
    if not group.rows and not strangers and any(condition.precision is None for condition in conditions):
        yield f"nothing was compared: {group.problem}"
    for row in group.rows:
        if chosen(row.precision):
            yield from (f"{row.label}: {line}" for line in (*_bad_endings(row), *_broken(row, chosen(row.precision))))


def _bad_endings(row: Row) -> Iterator[str]:
    for pair in row.pairs:
        if not pair.mixed.finished or pair.mixed.outcome == "diverged":
            yield (
                f"{pair.mixed.name} ended as {pair.mixed.ending}"
                if pair.mixed.outcome != "running"
                else (f"{pair.mixed.name} is still running")
            )


def _broken(row: Row, conditions: Sequence[Condition]) -> Iterator[str]:
    for condition in conditions:
        failure = None if row.batches_differ and condition.key in _AT_EQUAL_BATCH else condition.failure(row)
        if failure:
            yield failure


def _condition(part: str, text: str) -> Condition:
    found = _CONDITION.fullmatch(part)
    if not found:
        raise ConfigError(OPTION, text, f"'{part}' is no condition; write them as in {EXAMPLE}")
    precision, key, sign, bound = (None if item is None else item.strip() for item in found.groups())
    if precision == "":
        raise ConfigError(
            OPTION, text, f"'{part}' names no precision before the colon, such as mixed_bfloat16:memory<=0.6"
        )
    if key not in _KEYS:
        raise ConfigError(OPTION, text, f"'{key}' cannot be required; choose from {', '.join(_KEYS)}")
    if key == "accuracy":
        verdicts = tuple(verdict.strip() for verdict in str(bound).split("|"))
        if sign != "=" or not set(verdicts) <= set(VERDICTS):
            right = "accuracy=equivalent, accuracy=better or accuracy=equivalent|better"
            raise ConfigError(OPTION, text, f"'{part}' is no verdict to require; write {right}")
        return Condition(key, "=", verdicts, precision)
    try:
        number = float(str(bound))
    except ValueError:
        number = math.nan
    if not 0 <= number < math.inf:
        raise ConfigError(OPTION, text, f"'{part}' needs a number of at least 0 after {sign}")
    return Condition(str(key), str(sign), number, precision)
