"""What the plots are made of: sides of a comparison with their colours and dashes, axes, labels, marks, legends.

All plots are 360 units wide, which is about what a phone shows, so that their text is legible there. Colours come from classes,
which the page defines.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from mp_hydra.compare.report.svg import Scale, clipped, element, typeset

if TYPE_CHECKING:
    from markupsafe import Markup

    from mp_hydra.compare.model import Row, RunResult
    from mp_hydra.compare.records import RunRecord

Records = Mapping[str, "RunRecord"]

WIDTH = 360
LONGEST_LABEL = 42
SHORT_UNIT = 6
_COLOURS = ("fp32", "tf32", "mixed_bfloat16", "mixed_float16")
DASHES = (None, "9 3 2 3", "7 3", "2.5 2.5", "12 4", "1 3", "5 2 1 2 1 2", "14 3 4 3")


@dataclass(frozen=True)
class Key:
    """An entry of a legend: a swatch, drawn as SVG, and what it stands for."""

    swatch: Markup
    label: str


@dataclass(frozen=True)
class Plot:
    """A figure of the page.

    Attributes:
        name: for machines, such as "memory".
        title: the heading.
        picture: the SVG; None if there is nothing to draw.
        keys: the legend.
        note: how to read it, what was left out, or why there is nothing.
    """

    name: str
    title: str
    picture: Markup | None
    keys: tuple[Key, ...]
    note: str


class Named(NamedTuple):
    """A figure's value, its name, such as "training_memory.mixed", and its row, such as "0.1"."""

    name: str
    where: str
    value: float


class Side(NamedTuple):
    """The baseline (its row is None) or a row, as plots draw it; `order` counts them, `dash` is the pattern of its lines."""

    label: str
    precision: str
    order: int
    dash: str | None
    runs: tuple[RunResult, ...]
    row: Row | None

    @property
    def colour(self) -> str:
        """The class that sets the colour."""
        return colour(self.precision)


def colour(precision: str) -> str:
    """The class that sets the colour of a precision."""
    return f"c-{precision}" if precision in _COLOURS else "c-other"


def dash(precision: str, used: Collection[str | None]) -> str | None:
    """The pattern of lines: that of the precision, or for a further row of it one that is not used yet.

    >>> dash("mixed_bfloat16", []), dash("mixed_bfloat16", [None, "7 3"])
    ('7 3', '12 4')
    """
    free = [other for other in DASHES[len(_COLOURS) :] if other not in used]  # those that belong to no precision
    own = DASHES[_COLOURS.index(precision)] if precision in _COLOURS else DASHES[-1]
    return own if own not in used or not free else free[0]


def picture(title: str, height: float, parts: Sequence[Markup]) -> Markup:
    """The whole drawing of a plot."""
    return element("svg", *parts, viewBox=f"0 0 {WIDTH} {height:.0f}", role="img", aria_label=title, class_="plot")


def swatch(part: Markup, width: int = 16) -> Markup:
    """A small drawing for a legend."""
    return element("svg", part, viewBox=f"0 0 {width} 12", width=width, height=12, aria_hidden="true", class_="swatch")


def box(style: str, label: str) -> Key:
    """An entry of a legend for a filled area."""
    return Key(swatch(element("rect", x=0, y=0, width=16, height=12, class_=style)), label)


def x_axis(
    scale: Scale, marks: Sequence[float], top: float, bottom: float, unit: str, *, signed: bool = False
) -> Iterator[Markup]:
    """Vertical lines with numbers, and the unit: at the end of their line where it is short, else below them."""
    below = len(unit) > SHORT_UNIT
    for mark in marks:
        yield rule(scale(mark), top, bottom, "grid")
        if below or scale(mark) < WIDTH - 12 - 8 * len(unit):
            words = typeset(f"{mark:+,g}" if signed and mark else f"{mark:,g}")
            yield element("text", words, x=scale(mark), y=bottom + 13, class_="tick", text_anchor="middle")
    place = {"x": (scale.start + scale.end) / 2, "y": bottom + 27} if below else {"x": WIDTH - 6, "y": bottom + 13}
    yield element("text", unit, **place, class_="tick", text_anchor="middle" if below else "end")


def label(side: Side, y: float) -> Markup:
    """The name of a side above its mark; the whole of a long name shows when it is pointed at."""
    text = clipped(side.label, LONGEST_LABEL)
    return element("text", element("title", side.label), text, x=6, y=y, class_="label")


def text(words: str, x: float, y: float, style: str, *, anchor: str, named: Named) -> Markup:
    """A number that is a figure: tests and people's programs read it back by its name, row and value."""
    return element(
        "text",
        words,
        x=x,
        y=y,
        class_=style,
        text_anchor=anchor,
        data_figure=named.name,
        data_row=named.where,
        data_value=repr(float(named.value)),
    )


def rule(x: float, top: float, bottom: float, style: str) -> Markup:
    """A vertical line."""
    return element("line", x1=x, x2=x, y1=top, y2=bottom, class_=style)


def span(left: float, right: float, y: float, style: str, colour: str) -> Markup:
    """A horizontal line in the colour of a side."""
    return element("line", x1=left, x2=right, y1=y, y2=y, class_=f"{style} {colour}")


def dot(x: float, y: float, style: str, colour: str, title: str = "") -> Markup:
    """A point in the colour of a side."""
    inside = [element("title", title)] if title else []
    return element("circle", *inside, cx=x, cy=y, r=4.5 if style == "estimate" else 2.5, class_=f"{style} {colour}")
