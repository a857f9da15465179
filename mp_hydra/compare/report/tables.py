"""The comparison for programs: CSV with a line for each row, and JSON with everything."""

from __future__ import annotations

import csv
import io
import json
import math
from typing import TYPE_CHECKING

from mp_hydra.compare.report import wording

if TYPE_CHECKING:
    from mp_hydra.compare.model import Comparison, Figure, Group, Row, RowThroughput, Throughputs

# Unit by field of `Row`, as it ends the name of a column. Ratios, shares and counts have none.
_UNITS = {
    "training_memory": "mib",
    "peak_memory": "mib",
    "state_memory": "mib",
    "step_time": "ms",
    "throughput": "samples_per_second",
    "first_step": "seconds",
    "energy": "joules",
}


def to_csv(comparison: Comparison) -> str:
    """A header, and a line for each row of each group; what is missing is empty, and the last column says why."""
    best = {place: (family, row) for family in comparison.throughputs for row in family.rows for place in row.rows}
    lines = [
        _line(comparison, group, row) | _best(best.get((index, at)))
        for index, group in enumerate(comparison.groups)
        for at, row in enumerate(group.rows)
    ]
    columns = list(dict.fromkeys(name for line in lines for name in line))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns or ["group"], lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return text.getvalue()


def to_json(comparison: Comparison) -> str:
    """`Comparison.to_json` as text; a number that is not finite is null."""
    return json.dumps(comparison.to_json(), indent=2, allow_nan=False, ensure_ascii=False) + "\n"


def column(name: str) -> str:
    """The column of a figure.

    >>> column("training_memory.mixed"), column("training_memory.ratio"), column("accuracy.difference")
    ('training_memory_mixed_mib', 'training_memory_ratio', 'accuracy_difference_points')
    """
    field, _, part = name.partition(".")
    whole = name.replace(".", "_")
    if name == "accuracy.difference":
        return f"{whole}_points"
    return f"{whole}_{_UNITS[field]}" if field in _UNITS and part != "ratio" else whole


def _line(comparison: Comparison, group: Group, row: Row) -> dict[str, str]:
    line = {
        "group": group.label,
        "baseline": group.baseline,
        "precision": row.precision,
        "label": row.label,
        "pairs": str(len(row.pairs)),
        "pairs_compared": str(len(row.compared)),
    }
    missing = []
    for name, figure in wording.named_figures(row):
        title = column(name)
        line[title] = _text(figure.value)
        if name.endswith((".ratio", ".difference")) or name == "speed":
            low, high = figure.interval or (None, None)
            line |= {f"{title}_low": _text(low), f"{title}_high": _text(high)}
        if not figure:
            missing.append((title, figure))
    test = row.accuracy.comparison
    line |= {
        "accuracy_margin_points": _text(comparison.margin),
        "accuracy_verdict": row.accuracy.verdict or "",
        "accuracy_test_samples": "" if test is None else str(test.samples),
        "accuracy_detectable_points": "" if test is None else _text(test.detectable),
        "advice": row.recommendation.advice.value,
        "recommendation": row.recommendation.sentence,
        "endings": "; ".join(
            f"{pair.mixed.name}: {pair.mixed.ending}" for pair in row.pairs if pair.mixed.outcome != "ok"
        ),
        "missing": _why(missing),
    }
    return line


def _best(found: tuple[Throughputs, RowThroughput] | None) -> dict[str, str]:
    """Throughput at each one's best batch size; nothing where only one was run."""
    if found is None:
        return {}
    family, row = found
    columns = {"best_batch_ratio": _text(row.ratio.value)}
    for side, best in (("mixed", row.best), ("baseline", family.best)):
        if best is not None:
            columns[f"best_batch_size_{side}"] = str(best.batch_size)
            columns[f"best_batch_throughput_{side}_samples_per_second"] = _text(best.throughput.value)
    return columns


def _why(missing: list[tuple[str, Figure]]) -> str:
    return "; ".join(f"{', '.join(titles)}: {reason}" for reason, titles in wording.reasons(missing).items())


def _text(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else repr(float(value))
