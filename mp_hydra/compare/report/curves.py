"""The plots over training: losses and the loss scale, a line for each run."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from mp_hydra.compare.report.marks import LONGEST_LABEL, WIDTH, Key, Plot, Side, dot, picture, swatch, x_axis
from mp_hydra.compare.report.svg import Scale, clipped, element, line, log_ticks, thinned, ticks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mp_hydra.compare.report.marks import Records

    _Path = Callable[[list[tuple[float, float]]], str]

LINES = 5
POINTS = 80
LOG_FROM = 30  # ratio of the greatest to the least value
LARGEST = 1e300  # MLflow stores infinity as the greatest double
SERIES = ("train/loss", "val/loss", "loss_scale/value")
_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class _Curve(NamedTuple):
    side: Side
    name: str
    steps: np.ndarray
    values: np.ndarray


class _Axis(NamedTuple):
    low: float
    high: float
    log: bool
    marks: Sequence[tuple[float, str]]


def losses(key: str, title: str, sides: Sequence[Side], records: Records) -> Plot:
    """A loss over training, on a logarithmic axis where it spans more than a factor of thirty."""
    curves, left_out = _curves(key, sides, records)
    name = key.replace("/", "_")
    if not curves:
        return Plot(name, title, None, (), f"not drawn: no run has a history of {key}.")
    values = np.concatenate([curve.values[np.isfinite(curve.values)] for curve in curves])
    low, high = float(values.min()), float(values.max())
    log = low > 0 and high > LOG_FROM * low
    if log:
        marks = log_ticks(low, high, 10) if high > 100 * low else _decades(low, high)
    else:
        spread = max(0.05 * (high - low), 0.1 * max(abs(low), abs(high))) or 1.0  # noise is not blown up to a landscape
        low, high = low - spread, high + spread
        marks = ticks(low, high, 4)
    axis = _Axis(low, high, log, [(mark, f"{mark:g}") for mark in marks])
    note = f"Each line is a run{', on a logarithmic axis' if log else ''}.{left_out}"
    return _chart(Plot(name, title, None, _line_keys(curves), note), curves, axis, line)


def _decades(low: float, high: float) -> list[float]:
    """1, 2, 5, 10, ... between two values that are less than two decades apart."""
    found = [factor * 10.0**power for power in range(-12, 13) for factor in (1, 2, 5)]
    return [mark for mark in found if low <= mark <= high]


def loss_scale(sides: Sequence[Side], records: Records) -> Plot:
    """The loss scale that each step used, of those runs that have one."""
    title = "Loss scale"
    curves, left_out = _curves("loss_scale/value", sides, records)
    if not curves:
        return Plot("loss_scale", title, None, (), "not drawn: no run has a history of loss_scale/value.")
    curves = [curve for curve in curves if (curve.values[np.isfinite(curve.values)] != 1).any()]
    curves = [curve._replace(values=np.where(curve.values > 0, curve.values, np.nan)) for curve in curves]
    values = np.concatenate([np.empty(0), *(curve.values[np.isfinite(curve.values)] for curve in curves)])
    if not values.size:
        return Plot("loss_scale", title, None, (), "not drawn: no run scales its loss.")
    low, high = float(values.min()) / 2, float(values.max()) * 2
    marks = [(mark, f"2{str(round(math.log2(mark))).translate(_SUPERSCRIPT)}") for mark in log_ticks(low, high, 2)]
    note = f"Powers of two on a logarithmic axis. Runs that scale nothing are not drawn.{left_out}"
    plot = Plot("loss_scale", title, None, _line_keys(curves), note)
    return _chart(plot, curves, _Axis(low, high, log=True, marks=marks), _stepped)


def _curves(key: str, sides: Sequence[Side], records: Records) -> tuple[list[_Curve], str]:
    """The curves that are drawn, and a sentence on those that are not."""
    curves, total = [], 0
    for side in sides:
        drawn = 0
        for run in side.runs:
            series = records[run.run_id].series.get(key) if run.run_id in records else None
            if series is None or not (usable := np.abs(series.values) < LARGEST).any():
                continue
            total += 1
            if drawn < LINES:
                steps, values = thinned(series.steps, np.where(usable, series.values, np.nan), POINTS)
                curves.append(_Curve(side, run.name, steps, values))
                drawn += 1
    left_out = f" {len(curves)} of {total} runs are drawn." if len(curves) < total else ""
    return [curve for curve in curves if np.isfinite(curve.values).any()], left_out


def _chart(plot: Plot, curves: Sequence[_Curve], axis: _Axis, path: _Path) -> Plot:
    """The plot with its picture."""
    top, bottom, left = 8, 188, 40
    first, last = min(float(curve.steps.min()) for curve in curves), max(float(curve.steps.max()) for curve in curves)
    across = Scale(min(first, 0), last if last > min(first, 0) else first + 1, left, WIDTH - 12)
    up = Scale(axis.low, axis.high if axis.high > axis.low else axis.low * 2, bottom, top, axis.log)
    parts = [*x_axis(across, ticks(across.low, across.high, 4), top, bottom, "training step")]
    for mark, text in axis.marks:
        parts += [
            element("line", x1=left, x2=WIDTH - 12, y1=up(mark), y2=up(mark), class_="grid"),
            element("text", text, x=left - 5, y=up(mark) + 3.5, class_="tick", text_anchor="end"),
        ]
    for curve in curves:
        points = [
            (across(float(step)), up(float(value)) if math.isfinite(value) else math.nan)
            for step, value in zip(curve.steps, curve.values, strict=True)
        ]
        tip = element("title", f"{curve.side.label}: {curve.name}")
        parts.append(
            element("path", tip, d=path(points), class_=f"line {curve.side.colour}", stroke_dasharray=curve.side.dash)
        )
        alone = [point for point in points if math.isfinite(point[1])]
        if len(alone) == 1:
            parts.append(dot(*alone[0], "seed", curve.side.colour))
    return replace(plot, picture=picture(plot.title, bottom + 32, parts))


def _stepped(points: list[tuple[float, float]]) -> str:
    """Each value holds until the next."""
    corners = [(points[at + 1][0], points[at][1]) for at in range(len(points) - 1)]
    woven = [point for pair in zip(points, corners, strict=False) for point in pair]
    return line([*woven, points[-1]])


def _line_keys(curves: Sequence[_Curve]) -> tuple[Key, ...]:
    sides = {curve.side.order: curve.side for curve in curves}
    return tuple(
        Key(
            swatch(element("path", d="M0 6L28 6", class_=f"line {side.colour}", stroke_dasharray=side.dash), 28),
            clipped(side.label, LONGEST_LABEL),
        )
        for side in sides.values()
    )
