"""Texts for a terminal: figures and lengths of time, overrides in few columns, and what jobs have printed."""

from __future__ import annotations

import math
import os
import re
from typing import TYPE_CHECKING

from rich.cells import cell_len, set_cell_size

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

TAIL_LINES = 15
_TAIL_BYTES = 64 * 1024
_LONGEST_TAIL_LINE = 300
_MINUTE, _HOUR, _DAY = 60, 3600, 86400  # seconds

_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[()*+].|[@-Z\\^_=>78])")


def duration(seconds: float, *, tenths: bool = True) -> str:
    """A length of time in the two largest units that matter.

    >>> [duration(value) for value in (3.21, 59.96, 83.4, 7500, 90000)]
    ['3.2 s', '1 min 0 s', '1 min 23 s', '2 h 5 min', '1 d 1 h']
    """
    if tenths and round(seconds, 1) < _MINUTE:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < _MINUTE:
        return f"{whole} s"
    if whole < _HOUR:
        return f"{whole // _MINUTE} min {whole % _MINUTE} s"
    minutes = round(seconds / _MINUTE)
    if minutes * _MINUTE < _DAY:
        return f"{minutes // 60} h {minutes % 60} min"
    hours = round(seconds / _HOUR)
    return f"{hours // 24} d {hours % 24} h"


def number(value: float) -> str:
    """The value in four significant digits; whole ones, such as loss scales, in full up to seven digits.

    >>> [number(value) for value in (0.98123, 32768.0, 12345.6, float("nan"))]
    ['0.9812', '32768', '1.235e+04', 'nan']
    """
    return f"{value:.0f}" if abs(value) < 1e7 and value == math.floor(value) else f"{value:.4g}"  # noqa: PLR2004


def clean(text: str) -> str:
    """The text without terminal codes and other characters that do not print."""
    text = _ESCAPE.sub("", text).expandtabs(4)
    return text if text.isprintable() else "".join(character for character in text if character.isprintable())


def crop(text: str, width: int) -> str:
    """The text in at most `width` cells, cut in the middle: values stand at the end.

    >>> crop("learning_rate=0.001", 12)
    'learn..0.001'
    """
    if cell_len(text) <= width:
        return text
    head = max(0, (width - 2) // 2)
    tail = max(0, width - 2 - head)
    return set_cell_size(text[:head] + ".." + text[len(text) - tail :], width)


def split_overrides(jobs: Sequence[Sequence[str]]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """The overrides that all jobs share, and each job's others. A single job keeps all of its own.

    >>> split_overrides([["epochs=3", "seed=0"], ["epochs=3", "seed=1"]])
    (('epochs=3',), [('seed=0',), ('seed=1',)])
    """
    if len(jobs) < 2:  # noqa: PLR2004 - nothing to compare with
        return (), [tuple(job) for job in jobs]
    shared = set(jobs[0]).intersection(*jobs[1:])
    return (
        tuple(override for override in jobs[0] if override in shared),
        [tuple(override for override in job if override not in shared) for job in jobs],
    )


def fit_overrides(rows: Sequence[Sequence[str]], width: int) -> tuple[str, list[str]]:
    """Overrides in at most `width` cells, all rows in the same style.

    In full if all fit; else keys without their path, where that confuses none; else values alone; these cropped at last.

    Returns:
        A heading, which names the keys where values stand alone, and one text a row.

    >>> fit_overrides([["model.dense.units=16", "seed=1"]], 15)
    ('overrides', ['units=16 seed=1'])
    >>> fit_overrides([["model.dense.units=16", "seed=1"]], 10)
    ('units seed', ['16 1'])
    """
    keys = [[override.partition("=")[0] for override in row] for row in rows]
    distinct = {key for row in keys for key in row}
    styles: list[Callable[[str], str]] = [str]
    if len({_last_part(key) for key in distinct}) == len(distinct):
        styles.append(_without_path)
    for style in styles:
        texts = [" ".join(map(style, row)) for row in rows]
        if all(cell_len(text) <= width for text in texts):
            return "overrides", texts
    heading = " ".join(map(_last_part, keys[0])) if all(row == keys[0] for row in keys) else "overrides"
    return crop(heading, width), [crop(" ".join(map(_value, row)), width) for row in rows]


def _last_part(key: str) -> str:
    return re.split(r"[./]", key)[-1].lstrip("+~")


def _without_path(override: str) -> str:
    key, sign, value = override.partition("=")
    return _last_part(key) + sign + value


def _value(override: str) -> str:
    return override.partition("=")[2] or override


def tail(path: Path, lines: int = TAIL_LINES) -> list[str]:
    """The last lines of what a job printed, fit to be shown; blank ones at the end are left out.

    Of a line that was overwritten by carriage returns, what was left standing. Only the end of a large file is read.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - _TAIL_BYTES))
        text = file.read(_TAIL_BYTES).decode(errors="replace")
    shown = []
    for line in text.split("\n"):
        parts = [clean(part).rstrip() for part in line.split("\r")]
        shown.append(next((part for part in reversed(parts) if part), ""))
    if size > _TAIL_BYTES and len(shown) > 1:
        del shown[0]  # its beginning was not read
    while shown and not shown[-1]:
        shown.pop()
    return [line if len(line) <= _LONGEST_TAIL_LINE else line[:_LONGEST_TAIL_LINE] + ".." for line in shown[-lines:]]
