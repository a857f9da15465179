"""The comparison as Markdown: the description of a sweep in MLflow, or a part of an issue."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from mp_hydra.compare.report import wording
from mp_hydra.compare.report.wording import ACCURACY, ATTAINED, ENERGY, PEAK, SKIPPED, SPEED, STATE, STEP_TIME, TRAINING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_hydra.compare.model import Comparison, Group, Row
    from mp_hydra.compare.report.wording import Quantity

COLUMNS = (TRAINING, PEAK, STATE, ATTAINED, STEP_TIME, SPEED, ACCURACY, SKIPPED, ENERGY)
MOST_LINES = 8
LONGEST_LINE = 240
USUAL_LENGTH = 5_000
_SPECIAL = re.compile(r"[\\`*\[\]|~]|(?<!\w)_|_(?!\w)")


def render(comparison: Comparison, *, limit: int = USUAL_LENGTH) -> str:
    """The whole as Markdown with tables (GitHub, MLflow).

    Args:
        comparison: what is shown.
        limit: characters; groups that would go beyond it are counted, not shown. MLflow stores up to 8,000.
    """
    head = f"## {escape(comparison.title)}\n"
    tail = _tail(comparison)
    parts: list[str] = []
    for index, group in enumerate(comparison.groups):
        part = _group(group)
        left = len(comparison.groups) - index
        if parts and len(head) + sum(map(len, parts)) + len(part) + len(tail) > limit:
            parts.append(f"{left:,} more group{'' if left == 1 else 's'} of runs: see the page.\n")
            break
        parts.append(part)
    return _cut("\n".join([head, *(parts or ["Nothing to compare: there are no runs.\n"]), tail]), limit)


def escape(text: str) -> str:
    r"""Text in which nothing is taken for Markdown or HTML, on one line.

    >>> escape("a|b <i> mixed_float16 _x_")
    'a\\|b &lt;i&gt; mixed_float16 \\_x\\_'
    """
    plain = " ".join(text.split()).replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
    return _SPECIAL.sub(lambda found: "\\" + found.group(), plain)


def _group(group: Group) -> str:
    lines = [f"### {escape(group.label)}", f"**{escape(group.recommendation.sentence)}**", ""]
    if wording.measured(group):
        columns = wording.shown(COLUMNS, group)
        lines += [
            "|  | " + " | ".join(item.title for item in columns) + " |",
            "|---|" + "---|" * len(columns),
            _line(f"{escape(group.baseline)} (baseline)", [_baseline(group, item) for item in columns]),
        ]
        lines += [
            _line(f"{escape(row.label)} ({wording.seeds(row)})", [_cell(group, row, item) for item in columns])
            for row in group.rows
        ]
        lines.append("")
        figures = [(item.title, item.headline(row)) for row in group.rows for item in columns]
        for reason, titles in wording.reasons(figures).items():
            lines.append(f"- Missing: {', '.join(titles)}: {escape(reason)}")
    lines += [f"- {escape(text)}" for text in _others(group)]
    lines += _bullets(wording.ENDINGS, wording.endings(group))
    lines += _bullets("Notes", wording.remarks(group))
    return "\n".join(lines).rstrip() + "\n"


def _others(group: Group) -> list[str]:
    """The sentences of rows that the group's does not repeat."""
    sentences = dict.fromkeys(row.recommendation.sentence for row in group.rows)
    return [sentence for sentence in sentences if sentence != group.recommendation.sentence]


def _tail(comparison: Comparison) -> str:
    lines = _bullets(wording.THROUGHPUTS, wording.throughputs(comparison))
    lines += _bullets("Left out", wording.exclusions(comparison))
    lines += _bullets("Remarks", comparison.remarks)
    return "\n".join([*lines, "", wording.levels(comparison), ""]).lstrip("\n")


def _bullets(title: str, lines: Sequence[str]) -> list[str]:
    if not lines:
        return []
    return ["", f"{title}:", "", *(f"- {escape(_short(line))}" for line in wording.capped(lines, MOST_LINES))]


def _short(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 3]}..."


def _cut(text: str, limit: int) -> str:
    """Whole lines of at most so many characters."""
    if len(text) <= limit:
        return text
    end = f"\n... cut at {limit:,} characters: see the page.\n"
    return text[: limit - len(end)].rpartition("\n")[0] + end


def _line(head: str, cells: Sequence[str]) -> str:
    return f"| {head} | " + " | ".join(cells) + " |"


def _baseline(group: Group, quantity: Quantity) -> str:
    found = wording.baseline_of(group, quantity)
    return "" if found is None else wording.absolute(quantity, found[1])


def _cell(group: Group, row: Row, quantity: Quantity) -> str:
    headline, compared = quantity.headline(row), quantity.compared(row)
    if not headline:
        said, own = wording.absent(quantity, row)
        return said if own is None else f"{wording.absolute(quantity, own)}, {said}"
    text = wording.say(headline)
    if compared is not None and headline is not compared.mixed:
        text += f", {wording.absolute(quantity, compared.mixed)}"
        if own := wording.own_baseline(group, row, quantity):
            text += f" of {wording.absolute(quantity, own)}"
    if quantity is ACCURACY:
        text += f", {wording.verdict(row)}"
    if quantity is SKIPPED and row.steps:
        text += f" of {wording.value(row.steps)}"
    return text
