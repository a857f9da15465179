"""The few things that a small chart needs: elements, scales, ticks and paths.

>>> print(element("text", "a < b", x=1.5, class_="label", data_figure="speed"))
<text x="1.5" class="label" data-figure="speed">a &lt; b</text>
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from markupsafe import Markup, escape

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy as np

Number = float | int


def element(name: str, *content: str, **attributes: str | Number | None) -> Markup:
    """An element. Text is escaped, unless it is markup; attributes that are None are left out.

    Underscores in the names of attributes become hyphens, and one at the end goes: `class_`.
    """
    given = Markup("").join(
        Markup(' {}="{}"').format(_name(key), _value(value)) for key, value in attributes.items() if value is not None
    )
    inner = Markup("").join(escape(part) for part in content)
    return Markup("<{0}{1}>{2}</{0}>").format(name, given, inner)


def _name(key: str) -> str:
    return key.rstrip("_").replace("_", "-") if key != "viewBox" else key


def _value(value: str | Number) -> str:
    return value if isinstance(value, str) else short(value)


def short(value: Number) -> str:
    """A coordinate in at most two decimals.

    >>> short(1.0), short(2.345)
    ('1', '2.35')
    """
    return f"{value:.2f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


@dataclass(frozen=True)
class Scale:
    """From values to coordinates, by a straight line, or by one through the logarithms of the values.

    Attributes:
        low: the value at `start`.
        high: the value at `end`; above `low`.
        start: a coordinate.
        end: a coordinate, on either side of `start`.
        log: whether the logarithms are what is linear; then the values are above 0.

    >>> Scale(1, 100, 0, 50, log=True)(10), Scale(0, 4, 100, 0)(1)
    (25.0, 75.0)
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The coordinate of a value."""
        low, high, at = (
            (math.log(self.low), math.log(self.high), math.log(value)) if self.log else (self.low, self.high, value)
        )
        return self.start + (self.end - self.start) * (at - low) / (high - low)


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers from low to high, two or more and about so many, in steps of 1, 2 or 5 times a power of ten.

    >>> ticks(0, 262), ticks(-0.14, 0.12, 4)
    ([0.0, 50.0, 100.0, 150.0, 200.0, 250.0], [-0.1, -0.05, 0.0, 0.05, 0.1])
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = min((factor * power for factor in (1, 2, 5, 10)), key=lambda size: abs(math.log(size / rough)))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    if last <= first:
        return ticks(low, high, count + 1)
    return [round(number * step, 12) + 0.0 for number in range(first, last + 1)]


def log_ticks(low: float, high: float, base: int, count: int = 6) -> list[float]:
    """Powers of a base from low to high, every one or every few.

    >>> log_ticks(1, 65536, 2), log_ticks(0.03, 4, 10)
    ([1.0, 8.0, 64.0, 512.0, 4096.0, 32768.0], [0.1, 1.0])
    """
    first, last = math.ceil(math.log(low, base) - 1e-9), math.floor(math.log(high, base) + 1e-9)
    stride = max(1, math.ceil((last - first) / count))
    return [float(base) ** power for power in range(first, last + 1, stride)]


def line(points: Iterable[tuple[float, float]]) -> str:
    """The path through some points; a point that is not finite breaks it.

    >>> line([(0, 1), (2, 3.456), (3, float("nan")), (4, 5)])
    'M0 1L2 3.46M4 5'
    """
    parts: list[str] = []
    drawing = False
    for x, y in points:
        finite = math.isfinite(x) and math.isfinite(y)
        if finite:
            parts.append(f"{'L' if drawing else 'M'}{short(x)} {short(y)}")
        drawing = finite
    return "".join(parts)


def thinned(steps: np.ndarray, values: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    """At most so many points of a series, evenly chosen; the first and the last stay."""
    import numpy as np

    if len(steps) <= most:
        return steps, values
    chosen = np.unique(np.linspace(0, len(steps) - 1, most).round().astype("int64"))
    return steps[chosen], values[chosen]


def typeset(text: str) -> str:
    """Signs as print has them: a minus, and a multiplication sign at the end, for which plain text has "-" and "x"."""
    signed = text.replace("-", "\N{MINUS SIGN}")
    return f"{signed[:-1]}\N{MULTIPLICATION SIGN}" if signed.endswith("x") else signed


def clipped(text: str, most: int) -> str:
    """The text, cut with an ellipsis where it is longer.

    >>> clipped("mixed_bfloat16", 8)
    'mixed_b…'
    """
    return text if len(text) <= most else f"{text[: most - 1]}…"
