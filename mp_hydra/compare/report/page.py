"""The comparison as one HTML page that asks nothing of the network and needs no JavaScript.

Every number of the page stands in an element whose attribute `data-figure` names it, as `training_memory.ratio` or
`accuracy.difference.low`; `data-row` says of which group and row, counted from 0, and `data-value` holds it in full.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib import resources
from typing import TYPE_CHECKING, Any

from mp_hydra.compare.report import wording
from mp_hydra.compare.report.marks import LONGEST_LABEL, colour
from mp_hydra.compare.report.plots import BARS, draw
from mp_hydra.compare.report.svg import clipped, typeset
from mp_hydra.compare.report.wording import ACCURACY, QUANTITIES, SKIPPED

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_hydra.compare.model import Advice, Comparison, Figure, Group, Row
    from mp_hydra.compare.report.marks import Plot
    from mp_hydra.compare.report.wording import Quantity

TEMPLATE = "page.html.j2"
# What keeps the page of a large sweep below 2 MB.
ROWS_WITH_TABLE = 120
GROUPS_WITH_PLOTS = 12
MOST_LINES = 60
MOST_METHODS = 4


@dataclass(frozen=True)
class Shown:
    """A number as the page shows it.

    Attributes:
        name: of the figure.
        row: group and row, such as "0.1"; empty for what belongs to the whole.
        value: the number in full.
        text: as it is read.
    """

    name: str
    row: str
    value: str
    text: str

    @classmethod
    def of(cls, name: str, row: str, value: float, text: str) -> Shown:
        """With the typography of a page: a multiplication sign and a minus sign, which plain text does without."""
        return cls(name, row, repr(value), typeset(text))


@dataclass(frozen=True)
class Cell:
    """One cell of a group's table: the figure that counts, and those that explain it."""

    title: str
    kind: str
    main: Shown | None = None
    interval: tuple[Shown, Shown] | None = None
    absolute: Shown | None = None
    before: Shown | None = None
    total: Shown | None = None
    verdict: str = ""
    missing: str = ""
    said: str = wording.NOT_MEASURED
    mark: int = 0
    hint: str = ""


@dataclass(frozen=True)
class Line:
    """One row of a group's table."""

    label: str
    colour: str
    compared: Shown | None
    pairs: Shown
    cells: tuple[Cell, ...]


@dataclass(frozen=True)
class Verdict:
    """A recommendation."""

    label: str
    colour: str
    advice: str
    kind: str
    sentence: str


@dataclass(frozen=True)
class Section:
    """A group of runs, as the template draws it."""

    index: int
    group: Group
    best: Verdict
    verdicts: tuple[Verdict, ...]
    titles: tuple[str, ...] = ()
    lines: tuple[Line, ...] = ()
    reasons: tuple[str, ...] = ()
    tests: tuple[tuple[str, str, Mapping[str, Shown | str]], ...] = ()
    test_titles: tuple[str, ...] = ()
    plots: tuple[Plot, ...] = ()
    undrawn: int = 0
    endings: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()


def render(comparison: Comparison) -> str:
    """The page, as one HTML document."""
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    source = resources.files(__package__).joinpath(TEMPLATE).read_text(encoding="utf-8")
    return environment.from_string(source).render(_content(comparison))


def _content(comparison: Comparison) -> dict[str, Any]:
    groups = comparison.groups
    runs = {run.run_id for group in groups for run in group.baselines}
    runs |= {pair.mixed.run_id for _, row in comparison.rows() for pair in row.pairs}
    percent = (100 * comparison.ratio_level, 100 * comparison.accuracy_level)
    sections = []
    left = ROWS_WITH_TABLE
    for index, group in enumerate(groups):
        sections.append(_section(comparison, index, left))
        left = max(0, left - len(group.rows))
    return {
        "comparison": comparison,
        "sections": sections,
        "runs": Shown.of("runs", "", len(runs), f"{len(runs):,}"),
        "group_count": Shown.of("groups", "", len(groups), f"{len(groups):,}"),
        "margin": Shown.of("margin", "", comparison.margin, f"{comparison.margin:g}"),
        "ratio_level": Shown.of("ratio_level", "", comparison.ratio_level, f"{percent[0]:g} %"),
        "accuracy_level": Shown.of("accuracy_level", "", comparison.accuracy_level, f"{percent[1]:g} %"),
        "without_table": max(0, sum(len(group.rows) for group in groups) - ROWS_WITH_TABLE),
        "without_plots": max(0, len(groups) - GROUPS_WITH_PLOTS),
        "throughputs_title": wording.THROUGHPUTS,
        "throughputs": wording.capped(wording.throughputs(comparison), MOST_LINES),
        "methods": _methods(comparison),
        "scopes": _scopes(comparison),
        "machines": wording.capped(_machines(comparison), MOST_METHODS),
        "excluded": wording.capped(wording.exclusions(comparison), MOST_LINES),
        "remarks": wording.capped(comparison.remarks, MOST_LINES),
    }


def _section(comparison: Comparison, index: int, most: int) -> Section:
    """One group, with at most so many rows in its tables."""
    group = comparison.groups[index]
    best = Verdict(group.label, "", group.recommendation.advice.value, *_advice(group.recommendation))
    verdicts = tuple(
        Verdict(row.label, colour(row.precision), row.recommendation.advice.value, *_advice(row.recommendation))
        for row in group.rows
    )
    if group.rows and not most:
        return Section(index, group, best, verdicts)
    rows = group.rows[:most]
    quantities = wording.shown(QUANTITIES, group) if wording.measured(group) else ()
    figures = [(item.title, item.headline(row)) for row in rows for item in quantities]
    marks = {reason: number + 1 for number, reason in enumerate(wording.reasons(figures))}
    lines = [_baseline(group, index, quantities, marks)] if quantities else []
    lines += [_line(group, index, at, quantities, marks) for at in range(len(rows) if quantities else 0)]
    tests = [(row.label, colour(row.precision), _test(row, f"{index}.{at}")) for at, row in enumerate(rows)]
    drawn = index < GROUPS_WITH_PLOTS and bool(group.rows or comparison.records)
    return Section(
        index,
        group,
        best,
        verdicts,
        titles=tuple(item.title for item in quantities),
        lines=tuple(lines),
        reasons=tuple(marks),
        tests=tuple(tests) if quantities else (),
        test_titles=tuple(dict.fromkeys(title for _, _, test in tests for title in test)),
        plots=draw(comparison, index) if drawn else (),
        undrawn=max(0, len(group.rows) - BARS + 1) if drawn else 0,
        endings=tuple(wording.capped(wording.endings(group), MOST_LINES)),
        remarks=tuple(wording.capped(wording.remarks(group), MOST_LINES)),
    )


def _advice(recommendation: Any) -> tuple[str, str]:
    advice: Advice = recommendation.advice
    return advice.name, recommendation.sentence


def _baseline(group: Group, index: int, quantities: Sequence[Quantity], marks: dict[str, int]) -> Line:
    cells = []
    for quantity in quantities:
        found = wording.baseline_of(group, quantity)
        if found is None:
            cells.append(Cell(quantity.title, quantity.name))
            continue
        row, figure = found
        if figure.value is None:
            cells.append(_missing(quantity, figure, marks))
        else:
            name = f"{quantity.name}.baseline"
            shown = Shown.of(name, f"{index}.{row}", figure.value, wording.absolute(quantity, figure))
            cells.append(Cell(quantity.title, quantity.name, absolute=shown, hint=_hint(figure)))
    runs = len(group.baselines)
    return Line(
        group.baseline, colour(group.baseline), None, Shown.of("baselines", f"{index}", runs, str(runs)), tuple(cells)
    )


def _line(group: Group, index: int, at: int, quantities: Sequence[Quantity], marks: dict[str, int]) -> Line:
    row, where = group.rows[at], f"{index}.{at}"
    compared, pairs = len(row.compared), len(row.pairs)
    return Line(
        clipped(row.label, 2 * LONGEST_LABEL),
        colour(row.precision),
        Shown.of("compared", where, compared, str(compared)) if compared != pairs else None,
        Shown.of("pairs", where, pairs, str(pairs)),
        tuple(_cell(group, row, where, quantity, marks) for quantity in quantities),
    )


def _cell(group: Group, row: Row, where: str, quantity: Quantity, marks: dict[str, int]) -> Cell:
    headline, compared = quantity.headline(row), quantity.compared(row)
    if headline.value is None:
        said, known = wording.absent(quantity, row)
        shown = None
        if known is not None and known.value is not None:
            shown = Shown.of(_name(row, known), where, known.value, wording.absolute(quantity, known))
        return replace(_missing(quantity, headline, marks), said=said, absolute=shown)
    name = _name(row, headline)
    absolute = before = None
    if compared is not None and headline is not compared.mixed and compared.mixed.value is not None:
        words = wording.absolute(quantity, compared.mixed)
        absolute = Shown.of(_name(row, compared.mixed), where, compared.mixed.value, words)
        own = wording.own_baseline(group, row, quantity)
        if own is not None and own.value is not None:
            before = Shown.of(_name(row, own), where, own.value, wording.absolute(quantity, own))
    return Cell(
        quantity.title,
        quantity.name,
        main=Shown.of(name, where, headline.value, wording.value(headline)),
        interval=_interval(name, where, headline),
        absolute=absolute,
        before=before,
        total=_shown("steps", where, row.steps) if quantity is SKIPPED else None,
        verdict=wording.verdict(row) if quantity is ACCURACY else "",
        hint=_hint(headline),
    )


def _missing(quantity: Quantity, figure: Figure, marks: dict[str, int]) -> Cell:
    reason = figure.missing or wording.NO_REASON
    return Cell(quantity.title, quantity.name, missing=reason, mark=marks.get(reason, 0))


def _name(row: Row, figure: Figure) -> str:
    return next(name for name, item in wording.named_figures(row) if item is figure)


def _shown(name: str, where: str, figure: Figure) -> Shown | None:
    return None if figure.value is None else Shown.of(name, where, figure.value, wording.value(figure))


def _interval(name: str, where: str, figure: Figure) -> tuple[Shown, Shown] | None:
    if figure.interval is None:
        return None
    low, high = (
        Shown.of(f"{name}.{end}", where, value, text)
        for end, value, text in zip(("low", "high"), figure.interval, wording.ends(figure), strict=True)
    )
    return low, high


def _hint(figure: Figure) -> str:
    """What shows when a cell is pointed at."""
    parts = [figure.source, figure.method]
    if figure.runs:
        parts.append(f"from {figure.runs} run{'' if figure.runs == 1 else 's'}")
    if figure.range is not None:
        least, most = (wording.number(end, figure.unit, wording.decimals(figure)) for end in figure.range)
        parts.append(f"least {least}, greatest {most}")
    return "; ".join(part for part in parts if part)


def _test(row: Row, where: str) -> dict[str, Shown | str]:
    """The equivalence test in numbers by heading, or why there is none."""
    test = row.accuracy.comparison
    if test is None:
        return {"verdict": f"none: {row.accuracy.difference.missing or wording.NO_REASON}"}

    def count(name: str, value: int | None) -> Shown | str:
        if value is None:
            return "unknown" if name == "more_seeds" and test.seeds == 1 else "no number is enough"
        return Shown.of(f"accuracy.comparison.{name}", where, value, f"{value:,}")

    detectable = f"{wording.three_digits(test.detectable)} points"
    shown = {
        "verdict": test.verdict.value,
        "speaks of": test.scope,
        "seeds": count("seeds", test.seeds),
        "test samples": count("samples", test.samples),
        "right here alone": count("discordant.0", test.discordant[0]),
        "right in the baseline alone": count("discordant.1", test.discordant[1]),
        "smallest difference it can show": Shown.of(
            "accuracy.comparison.detectable", where, test.detectable, detectable
        ),
    }
    if test.verdict.value == "undecided":
        shown["more seeds to decide"] = count("more_seeds", test.more_seeds)
        shown["or more test samples"] = count("more_samples", test.more_samples)
    loss = row.accuracy.loss
    if loss.value is not None:
        shown["difference of test loss"] = Shown.of("accuracy.loss", where, loss.value, f"{loss.value:+.4g}")
    return shown


def _machines(comparison: Comparison) -> list[str]:
    """Libraries and devices of the runs, as far as they were recorded."""
    found: dict[str, None] = {}
    for record in comparison.records.values():
        versions, devices = record.environment.get("versions"), record.environment.get("devices")
        parts = []
        if isinstance(versions, dict):
            parts += [f"{name} {versions[name]}" for name in ("tensorflow", "keras", "mp_hydra") if versions.get(name)]
        if isinstance(devices, list):
            named = [device for device in devices if isinstance(device, dict) and device.get("name")]
            chosen = [device for device in named if device.get("kind") != "CPU"] or named
            parts += dict.fromkeys(str(device["name"]) for device in chosen)
        if parts:
            found[", ".join(parts)] = None
    return list(found)


def _methods(comparison: Comparison) -> list[tuple[str, list[str]]]:
    """For each quantity where its figures come from and how they were worked out."""
    found: dict[str, dict[str, None]] = {}
    for _, row in comparison.rows():
        for quantity in QUANTITIES:
            figure = quantity.headline(row)
            words = ": ".join(part for part in (figure.source, figure.method) if part)
            if figure and words:
                found.setdefault(quantity.title, {})[words] = None
    return [(title, wording.capped(list(words), MOST_METHODS)) for title, words in found.items()]


def _scopes(comparison: Comparison) -> list[str]:
    tests = [row.accuracy.comparison for _, row in comparison.rows()]
    return list(dict.fromkeys(test.scope for test in tests if test is not None))
