"""What reports have in common: Markdown tables, and a file of each form."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]], *, left: int = 1) -> list[str]:
    """The lines of a Markdown table, its columns from the `left`-th on aligned to the right.

    >>> markdown_table(["layer", "kept"], [["conv", "8 B"]])
    ['| layer | kept |', '| --- | ---: |', '| conv | 8 B |']
    """
    marks = ["---" if index < left else "---:" for index in range(len(columns))]
    return [f"| {' | '.join(cells)} |" for cells in (columns, marks, *rows)]


def save(directory: Path, name: str, *, json: str, markdown: str) -> list[Path]:
    """Write `name`.json and `name`.md into `directory`, which is made where it is missing."""
    directory.mkdir(parents=True, exist_ok=True)
    paths = [directory / f"{name}.json", directory / f"{name}.md"]
    for path, content in zip(paths, (json, markdown), strict=True):
        path.write_text(content, encoding="utf-8")
    return paths
