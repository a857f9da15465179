"""Throughput over batch sizes: at equal ones, and of each precision at the one where it has the most samples per second.

Groups that differ in batch size alone are seen together; runs whose batch size was found (`batch_size=max`) count at what it came
to. A throughput is the median over the runs of one precision, recipe and batch size.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from mp_hydra.compare.figures import THROUGHPUT, mean_of, value_range
from mp_hydra.compare.identity import (
    batch_size_of,
    circumstances_of,
    config_of,
    conflicts,
    precision_of,
    recipe_of,
    titled,
)
from mp_hydra.compare.model import BestBatch, Figure, RowThroughput, Throughputs

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from mp_hydra.compare.model import Group, Row, RunResult
    from mp_hydra.compare.records import RunRecord

_BATCH = ("batch_size", "memory.limit")  # a limit decides what the largest batch is
_Key = tuple[str, frozenset[tuple[str, str]]]


@dataclass
class _Family:
    """Groups that differ in batch size alone."""

    config: dict[str, str]
    circumstances: dict[str, str]
    groups: list[int] = field(default_factory=list)


def best_batches(groups: Sequence[Group], records: Mapping[str, RunRecord]) -> tuple[Throughputs, ...]:
    """For each model, data set ... that was run at more than one batch size, the throughput of each precision.

    Args:
        groups: judged ones.
        records: their runs, by id.
    """
    found = []
    for family in _families(groups, records):
        baselines = [run for index in family.groups for run in groups[index].baselines]
        places: dict[_Key, list[tuple[int, int]]] = defaultdict(list)
        for index in family.groups:
            for at, row in enumerate(groups[index].rows):
                if row.pairs:
                    record = records[row.pairs[0].mixed.run_id]
                    places[precision_of(record), frozenset(recipe_of(record.params).items())].append((index, at))
        base = _throughputs(baselines, records)
        rows = {key: [groups[index].rows[at] for index, at in of] for key, of in places.items()}
        arms = {
            key: _throughputs((pair.mixed for row in of for pair in row.pairs), records) for key, of in rows.items()
        }
        if len({size for arm in (base, *arms.values()) for size in arm}) < 2:  # noqa: PLR2004 - several
            continue
        best = _best(base)
        found.append(
            Throughputs(
                label=titled(
                    {key: value for key, value in groups[family.groups[0]].settings.items() if key not in _BATCH}
                ),
                baseline=groups[family.groups[0]].baseline,
                best=best,
                rows=tuple(
                    _row(rows[key], tuple(places[key]), own, best) for key, arm in arms.items() if (own := _best(arm))
                ),
            )
        )
    return tuple(found)


def _families(groups: Sequence[Group], records: Mapping[str, RunRecord]) -> list[_Family]:
    families: list[_Family] = []
    for index, group in enumerate(groups):
        runs = [*group.baselines, *(pair.mixed for row in group.rows for pair in row.pairs)]
        if not runs:
            continue
        known = [records[run.run_id] for run in runs]
        config = config_of(known[0].params, known[0].tags)
        config = {key: value for key, value in config.items() if key not in _BATCH}
        circumstances = {key: value for record in known for key, value in circumstances_of(record).items()}
        for family in families:
            if family.config == config and not conflicts(family.circumstances, circumstances):
                break
        else:
            family = _Family(config, {})
            families.append(family)
        family.circumstances |= circumstances
        family.groups.append(index)
    return families


def _throughputs(runs: Iterable[RunResult], records: Mapping[str, RunRecord]) -> dict[int, Figure]:
    """Median samples per second by batch size, of the runs that finished."""
    values: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        record = records[run.run_id]
        size, value = batch_size_of(record), THROUGHPUT.value(record)
        if run.finished and size is not None and value is not None:
            values[size].append(value)
    return {
        size: Figure(
            value=statistics.median(some),
            unit=THROUGHPUT.unit,
            range=value_range(np.array(some)),
            runs=len(some),
            source=THROUGHPUT.source,
            method=mean_of("median", len(some)),
        )
        for size, some in sorted(values.items())
    }


def _best(arm: Mapping[int, Figure]) -> BestBatch | None:
    if not arm:
        return None
    size = max(arm, key=lambda size: arm[size].value or 0.0)
    return BestBatch(size, arm[size])


def _row(
    rows: Sequence[Row], places: tuple[tuple[int, int], ...], best: BestBatch, baseline: BestBatch | None
) -> RowThroughput:
    equal: dict[int, Figure] = {}
    for row in rows:
        size = row.batch_size.mixed.value
        if size is not None and row.batch_size.ratio.value == 1 and row.throughput.ratio:
            equal.setdefault(int(size), row.throughput.ratio)
    ratio = Figure(None, "x", missing="no baseline has finished")
    if baseline is not None and baseline.throughput.value and best.throughput.value:
        ratio = Figure(
            value=best.throughput.value / baseline.throughput.value,
            unit="x",
            runs=min(best.throughput.runs, baseline.throughput.runs),
            source=THROUGHPUT.source,
            method="ratio of the medians at each one's best batch size",
        )
    label = max((row.label for row in rows), key=len)  # in some groups fewer settings tell the rows apart
    return RowThroughput(label, rows[0].precision, places, dict(sorted(equal.items())), best, ratio)
