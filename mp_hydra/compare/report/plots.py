"""The plots of a group of runs, as SVG that takes its colours from the page.

A precision has the same colour in every plot, and lines differ by their dashes too. Numbers that stand for a figure of the
comparison carry its name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mp_hydra.compare.report import wording
from mp_hydra.compare.report.curves import loss_scale, losses
from mp_hydra.compare.report.marks import (
    WIDTH,
    Key,
    Named,
    Plot,
    Side,
    box,
    dash,
    dot,
    label,
    picture,
    rule,
    span,
    swatch,
    text,
    x_axis,
)
from mp_hydra.compare.report.svg import Scale, element, line, ticks

if TYPE_CHECKING:
    from collections.abc import Sequence

    from markupsafe import Markup

    from mp_hydra.compare.model import Comparison, Figure, Group, Row
    from mp_hydra.compare.report.marks import Records
    from mp_hydra.compare.report.wording import Quantity

BARS = 12
BINS = 64


def draw(comparison: Comparison, index: int) -> tuple[Plot, ...]:
    """The plots of one group."""
    group = comparison.groups[index]
    sides = _sides(group)
    records = comparison.records
    return (
        _memory(group, index, sides),
        _step_times(group, index, sides, records),
        _accuracy(sides, records, comparison.margin),
        losses("train/loss", "Training loss", sides, records),
        losses("val/loss", "Validation loss", sides, records),
        loss_scale(sides, records),
    )


def _sides(group: Group) -> list[Side]:
    sides = [Side(group.baseline, group.baseline, 0, dash(group.baseline, ()), group.baselines, None)]
    for order, row in enumerate(group.rows[: BARS - 1], start=1):
        pattern = dash(row.precision, [side.dash for side in sides])
        runs = tuple(pair.mixed for pair in row.pairs)
        sides.append(Side(row.label, row.precision, order, pattern, runs, row))
    return sides


def _named(group: Group, index: int, side: Side, quantity: Quantity) -> Named | None:
    """The absolute figure of a side; None if it is missing."""
    row, figure = 0, None
    if side.row is None:
        found = wording.baseline_of(group, quantity)
        row, figure = found or (0, None)
    elif compared := quantity.compared(side.row):
        row, figure = side.order - 1, compared.mixed
    if figure is None or figure.value is None:
        return None
    part = "baseline" if side.row is None else "mixed"
    return Named(f"{quantity.name}.{part}", f"{index}.{row}", figure.value)


# ---- bars of memory -------------------------------------------------------------------------------------------------

_SEGMENTS = {
    "state": "variables and optimizer state, cannot shrink",
    "other": "data and whatever else is there before the first step",
    "training": "training: gradients, activations, temporaries",
}


class _Bar(NamedTuple):
    side: Side
    state: Named | None
    training: Named
    peak: Named
    attainable: float | None

    def segments(self) -> list[tuple[str, float, Named | None]]:
        """Kind, size, and the figure behind it; they add up to the peak."""
        held = max(self.peak.value - self.training.value, 0.0)
        state = min(self.state.value, held) if self.state else 0.0
        return [
            ("state", state, self.state),
            ("other", held - state, None),
            ("training", min(self.training.value, self.peak.value), self.training),
        ]


def _memory(group: Group, index: int, sides: Sequence[Side]) -> Plot:
    title = "Memory at the peak of training"
    bars = [bar for side in sides if (bar := _bar(group, index, side)) is not None]
    if not bars:
        return Plot("memory", title, None, (), _absent(group, wording.TRAINING))
    top, pitch = 4, 42
    bottom = top + pitch * len(bars)
    ends = [max(bar.peak.value, bar.attainable or 0.0) for bar in bars]
    scale = Scale(0, max(ends) or 1.0, 6, WIDTH - 70)
    parts = [*x_axis(scale, ticks(0, scale.high, 4), top, bottom, "MiB")]
    for number, bar in enumerate(bars):
        parts += _bar_marks(bar, scale, top + pitch * number)
    keys = [box("seg-state", _SEGMENTS["state"]), box("seg-other", _SEGMENTS["other"])]
    keys.append(box("seg-training c-fp32", f"{_SEGMENTS['training']}; in the colour of the precision"))
    if any(bar.attainable is not None for bar in bars):
        keys.append(Key(swatch(rule(8, 0, 12, "attainable")), "the peak if all of the training memory were halved"))
    return Plot("memory", title, picture(title, bottom + 20, parts), tuple(keys), "The number at the end is the peak.")


def _bar_marks(bar: _Bar, scale: Scale, y: float) -> list[Markup]:
    parts = [label(bar.side, y + 11)]
    left = scale(0)
    for kind, size, named in bar.segments():
        wide = scale(size) - scale(0)
        if wide < 0.3:  # noqa: PLR2004 - less than can be seen
            continue
        tip = element("title", f"{bar.side.label}, {_SEGMENTS[kind]}: {wording.number(size, 'MiB')}")
        colour = bar.side.colour if kind == "training" else ""
        parts.append(element("rect", tip, x=left, y=y + 17, width=wide, height=16, class_=f"seg-{kind} {colour}"))
        words = wording.number(size, "MiB", bare=True)
        if kind == "training" and named and wide > 7 * len(words):
            parts.append(text(words, left + wide / 2, y + 29, f"inside {colour}", anchor="middle", named=named))
        left += wide
    if bar.attainable is not None:
        parts.append(rule(scale(bar.attainable), y + 13, y + 37, "attainable"))
    end = max(left, scale(bar.attainable or 0.0)) + 5
    peak = wording.number(bar.peak.value, "MiB")
    return [*parts, text(peak, end, y + 29, "value", anchor="start", named=bar.peak)]


def _bar(group: Group, index: int, side: Side) -> _Bar | None:
    state, training, peak = (
        _named(group, index, side, quantity) for quantity in (wording.STATE, wording.TRAINING, wording.PEAK)
    )
    if training is None or peak is None:
        return None
    return _Bar(side, state, training, peak, _attainable(side.row))


def _attainable(row: Row | None) -> float | None:
    if row is None or row.attainable_peak.value is None or row.peak_memory.baseline.value is None:
        return None
    return row.attainable_peak.value * row.peak_memory.baseline.value


# ---- distributions of step times ------------------------------------------------------------------------------------

_QUANTILES = (0.005, 0.05, 0.25, 0.5, 0.75, 0.95, 0.995)


def _step_times(group: Group, index: int, sides: Sequence[Side], records: Records) -> Plot:
    title = "Step times"
    pooled = [(side, times) for side in sides if (times := _times(side, records)).size]
    if not pooled:
        return Plot("step_time", title, None, (), _absent(group, wording.STEP_TIME, "no run has left its step times"))
    quantiles = [[float(at) for at in np.quantile(times, _QUANTILES)] for _, times in pooled]
    low, high = min(one[0] for one in quantiles), max(one[-1] for one in quantiles)
    from_zero = low < 0.6 * high
    margin = 0.04 * (high - low) or 0.05 * high
    scale = Scale(0 if from_zero else low - margin, high + margin, 6, WIDTH - 8)
    top, pitch = 4, 52
    bottom = top + pitch * len(pooled)
    parts = [*x_axis(scale, ticks(scale.low, scale.high, 5), top, bottom, "ms")]
    for number, ((side, times), marks) in enumerate(zip(pooled, quantiles, strict=True)):
        y = top + pitch * number
        parts += [label(side, y + 11), *_density(side, times, marks, scale, y + 42)]
        named = _named(group, index, side, wording.STEP_TIME)
        if named is not None:
            words = wording.number(named.value, "ms")
            parts.append(text(words, WIDTH - 8, y + 11, "value", anchor="end", named=named))
    note = (
        "Steady steps of all runs: their density, median (line), half of them (thick bar), 90 % of them (thin bar). "
        f"The outermost 1 % are not drawn.{'' if from_zero else ' The axis does not begin at 0.'}"
        f"{' The batch sizes differ.' if any(row.batches_differ for row in group.rows) else ''}"
    )
    return Plot("step_time", title, picture(title, bottom + 20, parts), (), note)


def _density(side: Side, times: np.ndarray, marks: Sequence[float], scale: Scale, floor: float) -> list[Markup]:
    least, p5, p25, median, p75, p95, most = marks
    height = 26
    counts, edges = np.histogram(times, bins=BINS, range=(least, max(most, least * (1 + 1e-6))))
    smooth = np.convolve(counts, (0.25, 0.5, 0.25), mode="same")
    centres = (edges[:-1] + edges[1:]) / 2
    outline = [(scale(at), floor - height * up / smooth.max()) for at, up in zip(centres, smooth, strict=True)]
    path = line([(scale(edges[0]), floor), *outline, (scale(edges[-1]), floor)])
    said = f"median {median:.4g} ms, half of the steps {p25:.4g} to {p75:.4g} ms, {times.size:,} steps"
    return [
        element("path", element("title", f"{side.label}: {said}"), d=f"{path}Z", class_=f"density {side.colour}"),
        span(scale(p5), scale(p95), floor + 3, "whisker", side.colour),
        span(scale(p25), scale(p75), floor + 3, "half", side.colour),
        rule(scale(median), floor - height, floor + 6, f"median {side.colour}"),
    ]


def _times(side: Side, records: Records) -> np.ndarray:
    found = [record.step_ms for run in side.runs if (record := records.get(run.run_id)) is not None]
    times: np.ndarray = np.concatenate([np.empty(0), *(array for array in found if array is not None)])
    return np.asarray(times[np.isfinite(times) & (times > 0)])


# ---- differences of accuracy ----------------------------------------------------------------------------------------


def _accuracy(sides: Sequence[Side], records: Records, margin: float) -> Plot:
    title = "Accuracy difference"
    rows = [(side, side.row) for side in sides if side.row is not None and side.row.accuracy.difference]
    if not rows:
        reasons = [side.row.accuracy.difference.missing for side in sides if side.row is not None]
        return Plot("accuracy", title, None, (), _not_drawn(reasons))
    seeds = [_seed_differences(row, records) for _, row in rows]
    values = [
        end for _, row in rows for end in (*(row.accuracy.difference.interval or ()), row.accuracy.difference.value)
    ]
    reach = max(
        1.6 * margin, *(1.08 * abs(value or 0.0) for value in (*values, *(dot for dots in seeds for dot in dots)))
    )
    scale = Scale(-reach, reach, 8, WIDTH - 8)
    top, pitch = 4, 50
    bottom = top + pitch * len(rows)
    left, right = scale(-margin), scale(margin)
    parts = [
        element("rect", x=left, y=top, width=right - left, height=bottom - top, class_="band"),
        *x_axis(scale, ticks(-reach, reach, 5), top, bottom, "points", signed=True),
        rule(scale(0), top, bottom, "zero"),
        *(rule(end, top, bottom, "margin") for end in (left, right)),
    ]
    for number, ((side, row), dots) in enumerate(zip(rows, seeds, strict=True)):
        parts += _difference(side, row, dots if len(dots) > 1 else [], scale, top + pitch * number)
    keys = [box("band", f"the margin: {margin:g} points")]
    if any(len(dots) > 1 for dots in seeds):
        keys.append(Key(swatch(dot(8, 6, "seed", "c-fp32")), "single seeds"))
    note = "Left of 0: less accurate than the baseline."
    return Plot("accuracy", title, picture(title, bottom + 20, parts), tuple(keys), note)


def _difference(side: Side, row: Row, seeds: Sequence[float], scale: Scale, y: float) -> list[Markup]:
    difference, middle = row.accuracy.difference, y + 30
    parts = [
        label(side, y + 13),
        element("text", wording.verdict(row), x=WIDTH - 8, y=y + 13, class_="value", text_anchor="end"),
        *(dot(scale(value), middle + 10, "seed", side.colour) for value in seeds),
    ]
    if difference.interval:
        low, high = map(scale, difference.interval)
        parts.append(span(low, high, middle, "interval", side.colour))
        parts += [rule(end, middle - 5, middle + 5, f"cap {side.colour}") for end in (low, high)]
    said = f"{side.label}: {wording.say(difference)}"
    return [*parts, dot(scale(difference.value or 0.0), middle, "estimate", side.colour, said)]


def _seed_differences(row: Row, records: Records) -> list[float]:
    """Of each pair of runs, in points."""
    found = []
    for pair in row.compared:
        runs = [records.get(run.run_id) for run in (pair.mixed, pair.baseline) if run is not None]
        mixed, baseline = (
            (None if record is None else record.correct for record in runs) if len(runs) > 1 else (None, None)
        )
        if mixed is not None and baseline is not None and mixed.size and mixed.shape == baseline.shape:
            found.append(100 * (float(mixed.mean()) - float(baseline.mean())))
    return found


def _absent(group: Group, quantity: Quantity, otherwise: str = "") -> str:
    figures: list[Figure] = [quantity.headline(row) for row in group.rows]
    return _not_drawn([figure.missing for figure in figures], otherwise)


def _not_drawn(reasons: Sequence[str], otherwise: str = "") -> str:
    found = "; ".join(dict.fromkeys(reason for reason in reasons if reason)) or otherwise or "nothing was recorded"
    return f"not drawn: {found}."
