"""The comparison as tables in a terminal.

A wide terminal gets a line for each precision; a narrow one a column for each, as many side by side as fit.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.table import Table
from rich.text import Text

from mp_hydra.compare.model import Advice
from mp_hydra.compare.report import wording
from mp_hydra.compare.report.wording import ACCURACY, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from rich.console import Console

    from mp_hydra.compare.model import Comparison, Figure, Group
    from mp_hydra.compare.report.wording import Quantity

WIDE = 132
LABEL = 20
COLUMN = 19
MOST_LINES = 12
MOST_TABLES = 20
_ADVICE = {
    Advice.use: "bold green",
    Advice.trade: "bold green",
    Advice.avoid: "bold red",
    Advice.no_gain: "bold yellow",
    Advice.undecided: "bold yellow",
}
_VERDICT = {"equivalent": "green", "better": "green", "worse": "red", "undecided": "yellow"}


@dataclass
class _Notes:
    """Footnotes: why figures are missing."""

    reasons: dict[str, str]

    def mark(self, reason: str) -> str:
        return self.reasons.setdefault(reason or wording.NO_REASON, _letter(len(self.reasons)))


def show(comparison: Comparison, console: Console) -> None:
    """Print the tables, what ended badly, what was left out, and then the recommendations."""
    _say(console, comparison.title, "bold")
    for group in comparison.groups[:MOST_TABLES]:
        _show_group(group, console)
    more = len(comparison.groups) - MOST_TABLES
    if more > 0:
        console.print()
        _say(console, f"The tables of {more:,} more group{'' if more == 1 else 's'} are on the page.", "yellow")
    if not comparison.groups:
        _say(console, "Nothing to compare: there are no runs.", "yellow")
    _list(console, wording.THROUGHPUTS, wording.throughputs(comparison))
    _list(console, "Left out", wording.exclusions(comparison))
    _list(console, "Remarks", comparison.remarks)
    _say(console, wording.levels(comparison), "dim")
    console.print()
    for group in comparison.groups:
        _recommend(group, console, named=len(comparison.groups) > 1)


def _show_group(group: Group, console: Console) -> None:
    console.print()
    _say(console, group.label, "bold cyan")
    notes = _Notes({})
    if wording.measured(group):
        quantities = wording.shown(tuple(item for item in wording.QUANTITIES if item.always()), group)
        for table in _tables(group, quantities, notes, console.width):
            console.print(table)
    for reason, mark in notes.reasons.items():
        _say(console, f"({mark}) {reason}", "dim")
    _list(console, wording.ENDINGS, wording.endings(group), "red")
    _list(console, "Notes", wording.remarks(group))


def _tables(group: Group, quantities: Sequence[Quantity], notes: _Notes, width: int) -> Iterator[Table]:
    """One table of lines, or some of columns."""
    sides: list[int | None] = [None, *range(len(group.rows))]
    if width >= WIDE:
        yield _grid(
            [item.title for item in quantities],
            [(_head(group, side), [_cell(group, side, item, notes) for item in quantities]) for side in sides],
        )
        return
    fitting = max(1, (width - LABEL) // COLUMN)
    most = math.ceil(len(sides) / math.ceil(len(sides) / fitting))  # tables of about equal width
    for start in range(0, len(sides), most):
        some = sides[start : start + most]
        table = Table(box=None, padding=(0, 1), show_edge=False, pad_edge=False)
        table.add_column("", style="cyan", max_width=LABEL - 1)
        for side in some:
            table.add_column(_head(group, side), min_width=COLUMN - 3, max_width=COLUMN - 1, overflow="fold")
        for item in quantities:
            table.add_row(item.title, *(_cell(group, side, item, notes) for side in some))
        yield table


def _grid(titles: Sequence[str], lines: Sequence[tuple[Text, Sequence[Text]]]) -> Table:
    table = Table(box=None, padding=(0, 1), show_edge=False, pad_edge=False)
    table.add_column("", overflow="fold", max_width=24)
    for title in titles:
        table.add_column(title, header_style="cyan", overflow="fold")
    for head, cells in lines:
        table.add_row(head, *cells)
    return table


def _head(group: Group, side: int | None) -> Text:
    if side is None:
        runs = len(group.baselines)
        return _lines((f"{group.baseline}", "bold"), (f"baseline, {runs} run{'' if runs == 1 else 's'}", "dim"))
    row = group.rows[side]
    return _lines((row.label, "bold"), (wording.seeds(row), "dim"))


def _cell(group: Group, side: int | None, quantity: Quantity, notes: _Notes) -> Text:
    if side is None:
        found = wording.baseline_of(group, quantity)
        return Text("") if found is None else _lines(_figure(quantity, found[1], notes))
    row = group.rows[side]
    headline = quantity.headline(row)
    if headline.value is None:
        said, own = wording.absent(quantity, row)
        known = [] if own is None else [(wording.absolute(quantity, own), "")]
        return _lines(*known, (f"{said} ({notes.mark(headline.missing)})", "dim"))
    parts = [(wording.value(headline), "bold")]
    if headline.interval:
        parts.append((wording.interval(headline), ""))
    compared = quantity.compared(row)
    if compared is not None and headline is not compared.mixed:
        parts.append((wording.absolute(quantity, compared.mixed), "dim"))
        if own := wording.own_baseline(group, row, quantity):
            parts.append((f"of {wording.absolute(quantity, own)}", "dim"))
    if quantity is ACCURACY:
        parts.append((wording.verdict(row), _VERDICT.get(wording.verdict(row), "yellow")))
    if quantity is SKIPPED and row.steps:
        parts.append((f"of {wording.value(row.steps)}", "dim"))
    return _lines(*parts)


def _figure(quantity: Quantity, figure: Figure, notes: _Notes) -> tuple[str, str]:
    text = wording.absolute(quantity, figure)
    return (text, "") if figure else (f"{text} ({notes.mark(figure.missing)})", "dim")


def _recommend(group: Group, console: Console, *, named: bool) -> None:
    """The sentence of the group, and those of its rows that it does not repeat."""
    if named:
        _say(console, group.label, "bold cyan")
    sentences = {group.recommendation.sentence: group.recommendation.advice}
    sentences |= {row.recommendation.sentence: row.recommendation.advice for row in group.rows}
    for sentence, advice in sentences.items():
        _say(console, sentence, _ADVICE[advice] if sentence == group.recommendation.sentence else "")


def _list(console: Console, title: str, lines: Sequence[str], style: str = "") -> None:
    if not lines:
        return
    if title:
        _say(console, f"{title}:", style)
    for line in wording.capped(lines, MOST_LINES):
        _say(console, f"- {line}")


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(line, style=style), soft_wrap=not console.is_terminal)


def _lines(*parts: tuple[str, str]) -> Text:
    return Text("\n").join(Text(text, style=style) for text, style in parts)


def _letter(number: int) -> str:
    """a, b, ..., z, aa, ab, ..."""
    letter = chr(ord("a") + number % 26)
    return letter if number < 26 else _letter(number // 26 - 1) + letter  # noqa: PLR2004 - letters of the alphabet
