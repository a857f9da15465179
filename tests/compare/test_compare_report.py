"""The forms of a comparison: what each shows of the same figures, of failures, and of what is missing."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import re
from html.parser import HTMLParser
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from rich.console import Console

from mp_hydra.compare.model import Compared, Excluded, Figure
from mp_hydra.compare.records import Series
from mp_hydra.compare.report import markdown, page, plots, svg, tables, terminal, wording
from mp_hydra.compare.report.curves import LINES
from mp_hydra.compare.report.marks import WIDTH
from tests.compare import report_data as data

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_hydra.compare.model import Comparison, Row
    from mp_hydra.compare.records import RunRecord
    from mp_hydra.compare.report.marks import Plot

FORMS: dict[str, Callable[[Comparison], str]] = {
    "terminal": lambda comparison: printed(comparison, 160),
    "markdown": markdown.render,
    "page": lambda comparison: text_of(page.render(comparison)),
}
everything = pytest.mark.parametrize("make", data.ALL, ids=lambda make: make.__name__)
forms = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def printed(comparison: Comparison, width: int) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None, legacy_windows=False)
    terminal.show(comparison, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


class Reader(HTMLParser):
    """Reads a page: its text, its tags, and the elements that are figures."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.text: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.figures: list[list[str]] = []
        self._open = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        self.tags.append((tag, given))
        if "data-figure" in given:
            self.figures.append([str(given["data-figure"]), str(given["data-row"]), str(given["data-value"]), ""])
            self._open = tag

    def handle_endtag(self, tag: str) -> None:
        self._open = "" if tag == self._open else self._open

    def handle_data(self, data: str) -> None:
        self.text.append(data)
        if self._open:
            self.figures[-1][3] += data


def text_of(html: str) -> str:
    return " ".join(" ".join(Reader(html).text).split())


def figure_of(comparison: Comparison, name: str, where: str) -> float:
    """What the model has under a name of the page."""
    group, _, row = where.partition(".")
    if not row:
        runs = {run.run_id for one in comparison.groups for run in one.baselines}
        runs |= {pair.mixed.run_id for _, one in comparison.rows() for pair in one.pairs}
        whole = {"runs": len(runs), "groups": len(comparison.groups), "margin": comparison.margin}
        whole |= {"ratio_level": comparison.ratio_level, "accuracy_level": comparison.accuracy_level}
        return len(comparison.groups[int(group)].baselines) if name == "baselines" else whole[name]
    found = comparison.groups[int(group)].rows[int(row)]
    if name in ("pairs", "compared"):
        return len(getattr(found, name))
    item: object = found
    for part in name.split("."):
        if part in ("low", "high"):
            assert isinstance(item, Figure)
            assert item.interval is not None
            return item.interval[part == "high"]
        item = item[int(part)] if isinstance(item, tuple) else getattr(item, part)
    value = item.value if isinstance(item, Figure) else item
    assert isinstance(value, (int, float))
    return value


def read_number(text: str) -> tuple[float, float]:
    """The number that a text shows, and how far rounding may have moved it."""
    found = re.search(r"[-+]?[\d,]*\.?\d+(e[-+]\d+)?", text.replace("\N{MINUS SIGN}", "-"))
    assert found, text
    digits = found.group().replace(",", "")
    scale = 0.01 if "%" in text else 1.0
    places = len(digits.partition(".")[2])
    return float(digits) * scale, 0.501 * 10.0**-places * scale


# ---- every form -----------------------------------------------------------------------------------------------------


@forms
def test_every_form_shows_ratio_interval_absolute_figure_and_verdict_of_each_precision(
    form: Callable[[Comparison], str],
) -> None:
    comparison = data.ordinary()
    text = form(comparison).replace("\N{MULTIPLICATION SIGN}", "x").replace("\N{MINUS SIGN}", "-")
    for _, row in comparison.rows():
        assert row.label in text
        for figure in (row.training_memory.ratio, row.peak_memory.ratio, row.speed, row.accuracy.difference):
            assert wording.value(figure) in text
            assert wording.interval(figure) in text or form is FORMS["terminal"]  # where it may be broken into lines
        for figure in (row.training_memory.mixed, row.training_memory.baseline, row.state_memory.mixed):
            assert wording.value(figure) in text
        assert str(row.accuracy.verdict) in text
        assert row.recommendation.sentence in text


@forms
def test_runs_that_failed_are_results_with_their_reason(form: Callable[[Comparison], str]) -> None:
    text = " ".join(form(data.mixed_fates()).split())
    assert "diverged (test/loss is nan)" in text
    assert "out\\_of\\_memory" not in text
    assert "out_of_memory (12 GiB were asked for)" in text
    assert "2 of 3 seeds" in text


@forms
def test_runs_that_are_left_out_are_listed_with_their_reason(form: Callable[[Comparison], str]) -> None:
    text = " ".join(form(data.mixed_fates()).split())
    assert "elsewhere (seed 1): not comparable: device GPU instead of CPU" in text
    assert "parent (seed 0): it names no precision" in text
    assert "1 run was deleted in the UI and is left out." in text


@forms
def test_a_missing_figure_is_not_measured_with_the_reason_and_never_0(form: Callable[[Comparison], str]) -> None:
    text = " ".join(form(data.mixed_fates()).split())
    assert "not measured" in text
    assert "loss_scale/skipped_steps was not recorded" in text


@forms
def test_without_a_baseline_the_form_says_what_to_add(form: Callable[[Comparison], str]) -> None:
    assert "no fp32 baseline; add precision=fp32 to the sweep" in " ".join(form(data.no_baseline()).split())


@forms
def test_where_all_runs_failed_each_is_shown_with_its_end(form: Callable[[Comparison], str]) -> None:
    text = " ".join(form(data.all_failed()).split())
    for words in ("ran out of memory: 12.4 GiB were asked for", "error (ValueError: no such layer)", "killed"):
        assert words in text


@forms
def test_nothing_at_all_is_said_to_be_nothing(form: Callable[[Comparison], str]) -> None:
    assert "Nothing to compare: there are no runs." in form(data.comparison())


@forms
def test_a_row_with_fewer_pairs_shows_the_baseline_of_its_own_pairs(form: Callable[[Comparison], str]) -> None:
    whole = data.ordinary()
    group = whole.groups[0]
    fewer = data.compared(222.0, 111.0, "MiB", runs=2, source="x")
    rows = (dataclasses.replace(group.rows[0], training_memory=fewer), group.rows[1])
    changed = dataclasses.replace(whole, groups=(dataclasses.replace(group, rows=rows),))
    text = form(changed)
    assert "231 MiB" in text
    assert "111 MiB" in text
    assert "of 222 MiB" in text


@forms
def test_a_figure_without_a_baseline_is_shown_by_itself_as_not_compared(form: Callable[[Comparison], str]) -> None:
    whole = data.ordinary()
    alone = dataclasses.replace(data.not_compared("MiB", "no baseline"), mixed=data.figure(117.0, "MiB"))
    row = dataclasses.replace(whole.groups[0].rows[0], training_memory=alone)
    group = dataclasses.replace(whole.groups[0], rows=(row,))
    text = form(dataclasses.replace(whole, groups=(group,)))
    assert "117 MiB" in text
    assert "not compared" in text
    assert "no baseline" in text


# ---- the terminal ---------------------------------------------------------------------------------------------------


@everything
@pytest.mark.parametrize("width", [60, 80, 160])
def test_no_line_of_the_terminal_is_longer_than_the_terminal(make: Callable[[], Comparison], width: int) -> None:
    assert max(map(len, printed(make(), width).splitlines())) <= width


@pytest.mark.parametrize("width", [80, 160])
def test_the_terminal_shows_every_headline_figure_whole_at_every_width(width: int) -> None:
    comparison = data.three_groups()
    text = printed(comparison, width)
    assert "…" not in text
    for _, row in comparison.rows():
        for quantity in wording.QUANTITIES:
            if quantity.always() and quantity.headline(row):
                assert wording.value(quantity.headline(row)) in text, quantity.title


def test_the_terminal_needs_nothing_but_ascii() -> None:
    assert printed(data.three_groups(), 80).isascii()


def test_the_recommendation_comes_last_in_the_terminal() -> None:
    comparison = data.ordinary()
    assert printed(comparison, 160).rstrip().endswith(comparison.groups[0].rows[-1].recommendation.sentence)


def test_the_terminal_shows_tables_of_some_groups_and_the_sentences_of_all() -> None:
    comparison = data.many(terminal.MOST_TABLES + 5)
    text = printed(comparison, 80)
    assert "The tables of 5 more groups are on the page." in text
    last = comparison.groups[-1]
    assert text.count(last.label) == 1
    assert text.rstrip().endswith(last.rows[-1].recommendation.sentence)


def test_names_are_no_markup_for_the_terminal() -> None:
    assert data.HOSTILE in printed(data.hostile(), 200)


# ---- Markdown -------------------------------------------------------------------------------------------------------


def test_the_description_of_a_usual_sweep_stays_below_5000_characters() -> None:
    assert len(markdown.render(data.three_groups())) < 5_000


def test_groups_beyond_the_limit_of_markdown_are_counted() -> None:
    text = markdown.render(data.many(40))
    shown = text.count("### ")
    assert len(text) <= 5_000
    assert 1 <= shown < 40
    assert f"{40 - shown} more groups of runs" in text


def test_a_group_that_is_too_long_by_itself_is_cut_between_lines_and_says_so() -> None:
    text = markdown.render(data.ordinary(), limit=600)
    assert len(text) <= 600
    assert text.endswith("... cut at 600 characters: see the page.\n")


def test_a_long_list_of_runs_is_cut_with_a_count() -> None:
    strays = tuple(Excluded(data.run(f"stray-{n}"), "no run of mp_hydra") for n in range(300))
    text = markdown.render(dataclasses.replace(data.ordinary(), excluded=strays))
    assert "- and 293 more" in text
    assert len(text) < 5_000


def test_every_line_of_a_markdown_table_has_the_same_cells_whatever_the_names() -> None:
    lines = [line for line in markdown.render(data.hostile()).splitlines() if line.startswith("|")]
    cells = {len(re.findall(r"(?<!\\)\|", line)) for line in lines}
    assert len(lines) == 5
    assert len(cells) == 1


def test_markdown_holds_no_html_of_a_name() -> None:
    assert "<" not in markdown.render(data.hostile())


# ---- CSV and JSON ---------------------------------------------------------------------------------------------------


def test_csv_has_a_line_for_each_row_with_the_figures_in_full() -> None:
    comparison = data.three_groups()
    lines = list(csv.DictReader(io.StringIO(tables.to_csv(comparison))))
    assert len(lines) == 9
    for line, (group, row) in zip(lines, comparison.rows(), strict=True):
        assert (line["group"], line["precision"]) == (group.label, row.precision)
        assert float(line["training_memory_mixed_mib"]) == row.training_memory.mixed.value
        assert float(line["step_time_ratio"]) == row.step_time.ratio.value
        assert float(line["speed_low"]) == (row.speed.interval or (math.nan,))[0]
        assert float(line["accuracy_difference_points"]) == row.accuracy.difference.value
        assert line["accuracy_verdict"] == row.accuracy.verdict


def test_a_missing_figure_is_empty_in_csv_and_the_last_column_says_why() -> None:
    line = next(csv.DictReader(io.StringIO(tables.to_csv(data.mixed_fates()))))
    assert line["skipped"] == line["energy_mixed_joules"] == ""
    assert "skipped: loss_scale/skipped_steps was not recorded" in line["missing"]
    assert data.NOT_ON_CPU in line["missing"]


def test_units_in_the_names_of_columns_are_those_of_the_figures() -> None:
    units = {
        "MiB": "mib",
        "ms": "ms",
        "s": "seconds",
        "J": "joules",
        "samples/s": "samples_per_second",
        "points": "points",
    }
    (_, row), *_ = data.ordinary().rows()
    for name, figure in wording.named_figures(row):
        if figure.unit in units:
            assert tables.column(name).endswith("_" + units[figure.unit])


def test_csv_of_nothing_is_a_header() -> None:
    assert tables.to_csv(data.comparison()) == "group\n"


def test_json_is_the_comparison_and_has_null_for_what_is_not_finite() -> None:
    comparison = data.mixed_fates()
    row = dataclasses.replace(comparison.groups[0].rows[0], speed=Figure(math.inf, "x"))
    group = dataclasses.replace(comparison.groups[0], rows=(row, comparison.groups[0].rows[1]))
    plain = json.loads(tables.to_json(dataclasses.replace(comparison, groups=(group,))))
    assert plain["groups"][0]["rows"][0]["speed"]["value"] is None
    assert plain["groups"][0]["rows"][0]["accuracy"]["verdict"] == "equivalent"
    assert "records" not in plain


# ---- the page -------------------------------------------------------------------------------------------------------


@everything
def test_every_figure_of_the_page_is_that_of_the_model_and_its_text_is_that_figure_rounded(
    make: Callable[[], Comparison],
) -> None:
    comparison = make()
    figures = Reader(page.render(comparison)).figures
    assert figures
    for name, where, value, text in figures:
        assert float(value) == figure_of(comparison, name, where), (name, where)
        shown, rounding = read_number(text)
        assert shown == pytest.approx(float(value), abs=rounding + 1e-12, rel=1e-3), (name, text)


def test_every_figure_of_a_row_that_has_a_value_is_on_the_page() -> None:
    comparison = data.three_groups()
    shown = {(name, where) for name, where, *_ in Reader(page.render(comparison)).figures}
    for g, group in enumerate(comparison.groups):
        for r, row in enumerate(group.rows):
            for quantity in wording.QUANTITIES:
                if quantity.headline(row):
                    name = page._name(row, quantity.headline(row))
                    assert (name, f"{g}.{r}") in shown
                    assert quantity.headline(row).interval is None or (f"{name}.low", f"{g}.{r}") in shown


@everything
def test_the_page_runs_no_script_and_asks_for_nothing(make: Callable[[], Comparison]) -> None:
    html = page.render(make())
    for tag, attributes in Reader(html).tags:
        assert tag not in {"script", "iframe", "img", "object", "embed", "base", "form"}
        assert not [name for name in attributes if name.startswith("on") or name in ("src", "srcset", "xlink:href")]
        if "href" in attributes:
            assert str(attributes["href"]).startswith(("#", "data:"))
    assert set(re.findall(r"url\([^)]*\)", html)) <= {"url(#hatch)"}
    assert "@import" not in html
    assert "default-src 'none'" in html


def test_names_are_text_on_the_page_whatever_they_contain() -> None:
    html = page.render(data.hostile())
    assert "<script" not in html
    assert text_of(html).count(data.HOSTILE) > 8
    assert {given.get("title") for tag, given in Reader(html).tags if tag == "tr"} == {None}


def test_the_reason_of_a_missing_figure_is_a_footnote_and_a_tooltip() -> None:
    reader = Reader(page.render(data.mixed_fates()))
    titles = [given.get("title") for tag, given in reader.tags if tag == "span" and given.get("class") == "missing"]
    assert "time/first_step_seconds was not recorded" in titles
    assert "time/first_step_seconds was not recorded" in reader.text


def test_one_seed_has_no_interval_of_ratios_and_says_what_the_verdict_speaks_of() -> None:
    html = page.render(data.one_seed())
    assert "training_memory.ratio.low" not in html
    assert "these two models only" in text_of(html)


def test_the_page_of_a_large_sweep_stays_below_2_mb_and_says_what_it_leaves_out() -> None:
    comparison = data.many(340)
    html = page.render(comparison)
    assert len(html.encode()) < 2_000_000
    text = text_of(html)
    assert f"Of the last {680 - page.ROWS_WITH_TABLE} rows only the sentences are shown" in text
    assert f"The last {340 - page.GROUPS_WITH_PLOTS} groups are not drawn." in text
    assert all(row.recommendation.sentence in text for _, row in comparison.rows())


def test_a_group_with_many_rows_is_cut_in_its_tables_and_the_page_stays_below_2_mb() -> None:
    records: dict[str, RunRecord] = {}
    group = data.group("model=cnn", records, seeds=1)
    rows = tuple(dataclasses.replace(group.rows[1], label=f"mixed_float16 value={n}") for n in range(500))
    html = page.render(data.comparison(dataclasses.replace(group, rows=rows), records=records))
    assert len(html.encode()) < 2_000_000
    assert f"Of the last {500 - page.ROWS_WITH_TABLE} rows only the sentences are shown" in text_of(html)


# ---- the plots ------------------------------------------------------------------------------------------------------


def drawn(comparison: Comparison, name: str) -> Plot:
    return next(plot for plot in plots.draw(comparison, 0) if plot.name == name)


def marks(plot: Plot, tag: str, kind: str) -> list[dict[str, str | None]]:
    return [given for name, given in Reader(str(plot.picture)).tags if name == tag and kind in str(given.get("class"))]


def test_the_segments_of_a_memory_bar_add_up_to_its_peak() -> None:
    plot = drawn(data.ordinary(), "memory")
    bars = [marks(plot, "rect", f"seg-{kind}") for kind in ("state", "other", "training")]
    widths = [sum(float(str(mark["width"])) for mark in parts) for parts in zip(*bars, strict=True)]
    assert widths[1] / widths[0] == pytest.approx(150.5 / 262.1, abs=1e-3)
    assert widths[2] / widths[0] == pytest.approx(151.7 / 262.1, abs=1e-3)


def test_state_takes_no_more_of_a_bar_than_was_there_before_the_first_step() -> None:
    whole = data.ordinary()
    row = dataclasses.replace(whole.groups[0].rows[0], state_memory=data.compared(500.0, 500.0, "MiB", source="x"))
    group = dataclasses.replace(whole.groups[0], rows=(row,))
    plot = drawn(dataclasses.replace(whole, groups=(group,)), "memory")
    assert max(float(str(mark["width"])) for mark in marks(plot, "rect", "seg-state")) < WIDTH / 4


def test_the_dots_of_accuracy_are_the_differences_of_the_seeds() -> None:
    comparison = data.ordinary()
    row = comparison.groups[0].rows[1]
    plot = drawn(comparison, "accuracy")
    dots = [float(str(mark["cx"])) for mark in marks(plot, "circle", "seed")][3:]
    (estimate,) = [float(str(mark["cx"])) for mark in marks(plot, "circle", "estimate")][1:]
    assert len(dots) == len(row.pairs) == 3
    assert sum(dots) / 3 == pytest.approx(estimate, abs=0.02)


def test_the_interval_of_accuracy_lies_within_the_picture_and_the_margin_is_a_band() -> None:
    plot = drawn(data.ordinary(), "accuracy")
    (band,) = marks(plot, "rect", "band")
    assert float(str(band["width"])) > 0
    for mark in marks(plot, "line", "interval"):
        assert 0 <= float(str(mark["x1"])) < float(str(mark["x2"])) <= WIDTH


def test_plots_that_cannot_be_drawn_say_why() -> None:
    comparison = dataclasses.replace(data.ordinary(), records={})
    for name, words in (
        ("step_time", "no run has left its step times"),
        ("train_loss", "no run has a history of train/loss"),
        ("loss_scale", "no run has a history of loss_scale/value"),
    ):
        assert drawn(comparison, name).picture is None
        assert words in drawn(comparison, name).note


def test_runs_that_scale_nothing_have_no_line_among_the_loss_scales() -> None:
    plot = drawn(data.ordinary(), "loss_scale")
    assert [key.label for key in plot.keys] == ["mixed_float16"]
    assert len(marks(plot, "path", "line")) == 3


def with_series(comparison: Comparison, name: str, values: np.ndarray) -> Comparison:
    series = {name: Series(np.arange(len(values), dtype="int64"), values)}
    records = {key: dataclasses.replace(record, series=series) for key, record in comparison.records.items()}
    return dataclasses.replace(comparison, records=records)


@pytest.mark.parametrize("bad", [math.nan, math.inf, 1.7976931348623157e308])
def test_a_loss_that_is_not_finite_breaks_the_line_and_not_the_axis(bad: float) -> None:
    plot = drawn(with_series(data.one_seed(), "train/loss", np.array([2.0, 1.5, bad, 1.2, 1.0])), "train_loss")
    for mark in marks(plot, "path", "line"):
        assert str(mark["d"]).count("M") == 2
        assert "nan" not in str(mark["d"])
    assert "e+" not in str(plot.picture)


@pytest.mark.parametrize("values", [[1.0], [0.0, 0.0], [2.5, 2.5, 2.5], [-1.0, 1.0], [1e-9, 1e9], [5.0, 1.0]])
@pytest.mark.parametrize("name", ["train/loss", "loss_scale/value"])
def test_any_history_can_be_drawn(name: str, values: list[float]) -> None:
    comparison = with_series(data.one_seed(), name, np.array(values))
    plot = drawn(comparison, name.removesuffix("/value").replace("/", "_"))
    assert plot.picture is None or "nan" not in str(plot.picture)


def test_at_most_some_runs_of_a_precision_are_drawn_and_the_note_counts_them() -> None:
    records: dict[str, RunRecord] = {}
    comparison = data.comparison(data.group("model=cnn", records, seeds=9), records=records)
    plot = drawn(comparison, "val_loss")
    assert len(marks(plot, "path", "line")) == 3 * LINES
    assert f"{3 * LINES} of 27 runs are drawn." in plot.note


def test_lines_of_precisions_differ_by_dash_as_well_as_by_colour() -> None:
    lines = marks(drawn(data.three_groups(), "train_loss"), "path", "line")
    looks = {(str(mark["class"]), mark.get("stroke-dasharray")) for mark in lines}
    assert len(looks) == len({colour for colour, _ in looks}) == len({dash for _, dash in looks}) == 4


# ---- parts ----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e6, 1e6), st.floats(1e-3, 1e6), st.integers(3, 8))
@example(1.0, 948684.0, 3)
def test_ticks_are_even_and_lie_on_the_axis(low: float, length: float, count: int) -> None:
    found = svg.ticks(low, low + length, count)
    assert 2 <= len(found) <= 2 * count + 1
    assert low - 1e-6 * length <= found[0]
    assert found[-1] <= low + length * (1 + 1e-6)
    steps = np.diff(found)
    assert steps == pytest.approx(steps[0], rel=1e-3)


def test_thinning_keeps_the_first_and_the_last_point() -> None:
    steps, values = svg.thinned(np.arange(1000), np.arange(1000) / 2, 80)
    assert len(steps) == 80
    assert (steps[0], steps[-1], values[-1]) == (0, 999, 499.5)


def test_an_interval_that_is_narrow_gets_one_decimal_more() -> None:
    assert wording.say(Figure(0.5177, "x", interval=(0.5141, 0.5202))) == "0.518x (0.514 to 0.520)"


def test_a_share_of_the_saving_may_be_negative() -> None:
    assert wording.value(Figure(-0.126, "share")) == "-13 %"


def first(comparison: Comparison) -> Row:
    return comparison.groups[0].rows[0]


def test_named_figures_are_all_figures_of_a_row() -> None:
    row = first(data.ordinary())
    names = [name for name, _ in wording.named_figures(row)]
    compared = [field.name for field in dataclasses.fields(row) if isinstance(getattr(row, field.name), Compared)]
    assert len(names) == len(set(names)) >= 3 * len(compared) + 4 + 4
