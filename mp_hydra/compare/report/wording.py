"""How figures and endings are worded, the same in every form; in ASCII.

>>> from mp_hydra.compare.model import Figure
>>> say(Figure(0.5177, "x", interval=(0.5049, 0.5312)))
'0.52x (0.50 to 0.53)'
>>> say(Figure(None, "J", missing="there is no GPU"))
'not measured'
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra.compare.model import Accuracy, Compared, Figure

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from mp_hydra.compare.model import Comparison, Excluded, Group, Pair, Row, RunResult

NOT_MEASURED = "not measured"
NOT_COMPARED = "not compared"
NO_REASON = "no reason was recorded"
THROUGHPUTS = "Samples per second against the baseline, at equal batch size and at each one's best"
ENDINGS = "Runs that ended otherwise, or are not compared"


@dataclass(frozen=True)
class Quantity:
    """A column of the tables.

    Attributes:
        name: of the field of `Row`.
        title: the heading.
        compared: the absolute figures and their ratio; None for a figure without a baseline of its own.
        headline: what is compared first: the ratio, the difference or the figure itself.
    """

    name: str
    title: str
    compared: Callable[[Row], Compared | None]
    headline: Callable[[Row], Figure]

    def always(self) -> bool:
        """Whether the column is shown even where no run has the figure."""
        return self.name not in _OPTIONAL


def _ratio(name: str, title: str) -> Quantity:
    return Quantity(name, title, lambda row: getattr(row, name), lambda row: getattr(row, name).ratio)


_OPTIONAL = ("energy", "throughput")
TRAINING = _ratio("training_memory", "training memory")
PEAK = _ratio("peak_memory", "peak memory")
STATE = Quantity(
    "state_memory", "of it cannot shrink", lambda row: row.state_memory, lambda row: row.state_memory.mixed
)
ATTAINED = Quantity("attained", "saving attained", lambda _: None, lambda row: row.attained)
STEP_TIME = _ratio("step_time", "step time")
SPEED = Quantity("speed", "speed", lambda _: None, lambda row: row.speed)
THROUGHPUT = _ratio("throughput", "throughput")
ACCURACY = Quantity(
    "accuracy",
    "accuracy",
    lambda row: Compared(row.accuracy.baseline, row.accuracy.mixed, row.accuracy.difference),
    lambda row: row.accuracy.difference,
)
SKIPPED = Quantity("skipped", "skipped steps", lambda _: None, lambda row: row.skipped)
FIRST_STEP = _ratio("first_step", "first step")
ENERGY = _ratio("energy", "energy")
BATCH = Quantity("batch_size", "batch size", lambda row: row.batch_size, lambda row: row.batch_size.mixed)
QUANTITIES = (*(TRAINING, PEAK, STATE, ATTAINED, STEP_TIME, SPEED, ACCURACY, SKIPPED, FIRST_STEP, THROUGHPUT, ENERGY),)


def say(figure: Figure) -> str:
    """Value, unit and interval."""
    between = interval(figure)
    return f"{value(figure)} ({between})" if between else value(figure)


def value(figure: Figure) -> str:
    """Value and unit, or that it was not measured."""
    return NOT_MEASURED if figure.value is None else number(figure.value, figure.unit, decimals(figure))


def interval(figure: Figure) -> str:
    """The interval without its unit; empty where there is none."""
    return "" if figure.interval is None else " to ".join(ends(figure))


def ends(figure: Figure) -> tuple[str, str]:
    """The two ends of an interval, without unit, in the decimals of the value."""
    low, high = figure.interval or (0.0, 0.0)
    return number(low, figure.unit, decimals(figure), bare=True), number(high, figure.unit, decimals(figure), bare=True)


def decimals(figure: Figure) -> int:
    """How many decimals a ratio or a difference takes: one more where its interval would be too narrow to be seen."""
    around = (*(figure.interval or ()), figure.value or 0.0)
    if figure.unit == "points":
        return 2 if max(map(abs, around)) >= 0.1 else 3  # noqa: PLR2004 - a tenth of a point, two digits of it
    if figure.unit == "x":
        narrow = figure.interval is not None and 0 < figure.interval[1] - figure.interval[0] < 0.02  # noqa: PLR2004 - 2 digits
        return 3 if narrow else 2
    return 0


def number(figure: float, unit: str, places: int = 2, *, bare: bool = False) -> str:
    """A number in the unit of a `Figure`; `places` is for ratios and points, `bare` leaves the unit out.

    >>> number(0.5, "x"), number(-0.034, "points", 3), number(1234.5, "MiB"), number(0.97, "share"), number(8, "steps")
    ('0.50x', '-0.034 points', '1,234 MiB', '97 %', '8')
    """
    if unit == "x":
        text, unit = f"{figure:.{places}f}", "x"
    elif unit == "points":
        text, unit = f"{figure:+.{places}f}", " points"
    elif unit == "share":
        text, unit = f"{100 * figure:.{max(places - 2, 0)}f}", " %"
    elif unit in ("steps", "samples"):
        text, unit = f"{figure:,.0f}", ""
    elif unit == "":
        text = f"{figure:.4g}"
    else:
        text, unit = three_digits(figure), f" {unit}"
    return text if bare else f"{text}{unit}"


def three_digits(figure: float) -> str:
    """Three digits that count, without an exponent, and thousands with commas.

    >>> [three_digits(figure) for figure in (0.01234, 1.5, 14.2, 231.4, 12345.6)]
    ['0.0123', '1.50', '14.2', '231', '12,346']
    """
    size = abs(figure)
    places = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 1 or size == 0 else 3 if size >= 0.1 else 4  # noqa: PLR2004 - powers of ten
    return f"{figure:,.{places}f}"


def percent(figure: Figure) -> str:
    """A share of test samples, to a hundredth of a percent."""
    return NOT_MEASURED if figure.value is None else f"{100 * figure.value:.2f} %"


def absolute(quantity: Quantity, figure: Figure) -> str:
    """The figure of one side."""
    return percent(figure) if quantity is ACCURACY else value(figure)


def verdict(row: Row) -> str:
    """The verdict on accuracy in one word, or that there is none."""
    return row.accuracy.verdict or "no verdict"


def shown(quantities: Sequence[Quantity], group: Group) -> tuple[Quantity, ...]:
    """Those quantities that have a column: the optional ones where a run has them.

    Where batch sizes differ within pairs they are shown first, and throughput beside speed, whether asked for or not.
    """
    if any(row.batches_differ for row in group.rows):
        rest = [item for item in quantities if item is not THROUGHPUT]
        at = rest.index(SPEED) + 1 if SPEED in rest else len(rest)
        quantities = (BATCH, *rest[:at], THROUGHPUT, *rest[at:])
    return tuple(item for item in quantities if item.always() or any(item.headline(row) for row in group.rows))


def throughputs(comparison: Comparison) -> list[str]:
    """Throughput at equal batch sizes and at each precision's best, one line for each precision of a model."""
    lines = []
    for family in comparison.throughputs:
        for row in family.rows:
            equal = ", ".join(f"{value(ratio)} at batch {size:,}" for size, ratio in row.equal.items())
            both = [(row.label, row.best), *([] if family.best is None else [(family.baseline, family.best)])]
            bests = ", ".join(f"{name} {value(best.throughput)} at {best.batch_size:,}" for name, best in both)
            lines.append(
                f"{family.label}, {row.label}: {equal or 'not run at an equal batch'}; each at its best batch "
                f"{value(row.ratio)} ({bests})"
            )
    return lines


def measured(group: Group) -> bool:
    """Whether any figure of a group has a value."""
    return any(figure for row in group.rows for _, figure in named_figures(row))


def baseline_of(group: Group, quantity: Quantity) -> tuple[int, Figure] | None:
    """The baseline's figure, and the row it is taken from: the one with the most pairs. None if the quantity has none.

    Rows with fewer pairs may have another baseline figure, since figures are paired.
    """
    found = [
        (index, compared.baseline)
        for index, row in enumerate(group.rows)
        if (compared := quantity.compared(row)) is not None
    ]
    return max(found, key=lambda item: (bool(item[1]), item[1].runs, -item[0])) if found else None


def absent(quantity: Quantity, row: Row) -> tuple[str, Figure | None]:
    """What to say where the headline is missing, and the row's own figure, if that is all there is."""
    compared = quantity.compared(row)
    own = compared.mixed if compared is not None and compared.mixed else None
    return (NOT_MEASURED if own is None else NOT_COMPARED), own


def own_baseline(group: Group, row: Row, quantity: Quantity) -> Figure | None:
    """The baseline's figure of a row, where it is another than the one shown for the group."""
    compared, whole = quantity.compared(row), baseline_of(group, quantity)
    if compared is None or whole is None or not compared.baseline or compared.baseline.value == whole[1].value:
        return None
    return compared.baseline


def named_figures(row: Row) -> Iterator[tuple[str, Figure]]:
    """Every figure of a row with its name, such as "training_memory.ratio"."""
    for field in dataclasses.fields(row):
        item = getattr(row, field.name)
        if isinstance(item, Figure):
            yield field.name, item
        elif isinstance(item, (Compared, Accuracy)):
            for part in dataclasses.fields(item):
                figure = getattr(item, part.name)
                if isinstance(figure, Figure):
                    yield f"{field.name}.{part.name}", figure


def seeds(row: Row) -> str:
    """How many of the pairs are compared.

    >>> from types import SimpleNamespace as Some
    >>> seeds(Some(pairs=(1, 2, 3), compared=(1, 2)))
    '2 of 3 seeds'
    """
    total, compared = len(row.pairs), len(row.compared)
    words = f"{total} seed{'' if total == 1 else 's'}"
    return words if compared == total else f"{compared} of {words}"


def endings(group: Group) -> list[str]:
    """The runs that did not end well or are not compared, one line each: failures are results."""
    lines = [
        f"{group.baseline}, {_called(baseline)}: {_said(baseline)}"
        for baseline in group.baselines
        if baseline.outcome != "ok"
    ]
    for row in group.rows:
        lines += [
            f"{row.label}, {_called(pair.mixed)}: {_told(pair)}"
            for pair in row.pairs
            if pair.problem or pair.mixed.outcome != "ok"
        ]
    return lines


def exclusions(comparison: Comparison) -> list[str]:
    """The runs that are in no pair, one line each."""
    found: list[Excluded] = [*comparison.excluded]
    for group in comparison.groups:
        found += group.excluded
        for row in group.rows:
            found += row.excluded
    return [f"{_called(item.run)}: {item.reason}" for item in found]


def remarks(group: Group) -> list[str]:
    """What a reader should know of a group: its problem, its remarks, and those of its rows with their names."""
    told = group.problem in group.recommendation.sentence
    lines = [group.problem] if group.problem and not told else []
    labels: dict[str, list[str]] = {}
    for row in group.rows:
        test = row.accuracy.comparison
        for line in dict.fromkeys((*row.remarks, *(test.remarks if test else ()))):
            labels.setdefault(line, []).append(row.label)
    # What is true of every row is said once.
    common = [line for line, of in labels.items() if len(of) == len(group.rows)]
    own = [f"{', '.join(of)}: {line}" for line, of in labels.items() if len(of) < len(group.rows)]
    return [*lines, *group.remarks, *common, *own]


def reasons(figures: Sequence[tuple[str, Figure]]) -> dict[str, list[str]]:
    """Why figures are missing: for each reason what is missing for it."""
    found: dict[str, list[str]] = {}
    for title, figure in figures:
        if figure.value is None:
            found.setdefault(figure.missing or NO_REASON, []).append(title)
    return {reason: list(dict.fromkeys(titles)) for reason, titles in found.items()}


def capped(lines: Sequence[str], most: int) -> list[str]:
    """At most so many lines, the last of which counts those left out.

    >>> capped(["a", "b", "c"], 2)
    ['a', 'and 2 more']
    """
    return list(lines) if len(lines) <= most else [*lines[: most - 1], f"and {len(lines) - most + 1:,} more"]


def levels(comparison: Comparison) -> str:
    """What the intervals and verdicts mean."""
    return (
        f"Brackets: {100 * comparison.ratio_level:g} % intervals of ratios, {100 * comparison.accuracy_level:g} % of accuracy. "
        f"Equivalent: the whole interval lies within {comparison.margin:g} points."
    )


def _called(run: RunResult) -> str:
    return f"{run.name} (seed {run.seed})" if run.seed else run.name


def _said(run: RunResult) -> str:
    return "still running" if run.outcome == "running" else run.ending


def _told(pair: Pair) -> str:
    ending = _said(pair.mixed) if pair.mixed.outcome != "ok" else ""
    return "; ".join(dict.fromkeys(part for part in (ending, pair.problem) if part))
