"""Tables that benchmarks print, from rows of cells whose first one is the head."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mp_hydra.report_files import markdown_table

if TYPE_CHECKING:
    from collections.abc import Sequence


def text(rows: Sequence[Sequence[str]]) -> str:
    """Columns of equal width, all but the first to the right."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if index else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    )


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    head, *body = rows
    return "\n".join(markdown_table(head, body))
