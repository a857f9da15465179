"""A comparison in the store: what publishing puts there, once and again, and where it is then to be found."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple
from unittest import mock
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from mp_hydra.compare import story
from mp_hydra.compare.pages import announced, latest_pages, sweep_pages
from mp_hydra.compare.recommend import Case, Measured, recommend
from mp_hydra.compare.which import Selection
from mp_hydra.errors import ConfigError, TrackingError, UserError
from mp_hydra.sweep.comparing import compare_sweep
from tests.compare.made_runs import run
from tests.compare.stored_runs import EXPERIMENT, Made

if TYPE_CHECKING:
    from mp_hydra.compare.model import Comparison

FILES = {f"comparison/comparison.{suffix}" for suffix in ("html", "md", "csv", "json")}
ANOTHER = {"memory/training_mib": 240.0, "memory/peak_mib": 340.0, "time/step_ms": 4.0, "test/accuracy": 0.897}


@pytest.fixture
def made(tmp_path: Path) -> Made:
    return Made.at(tmp_path / "home")


class Swept(NamedTuple):
    """A sweep of two precisions and two seeds, one run without a twin, and its comparison, published."""

    made: Made
    parent: str
    children: dict[str, str]
    comparison: Comparison
    selection: Selection


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Shared by tests that leave it as it is."""
    made = Made.at(tmp_path_factory.mktemp("story") / "home")
    parent = made.parent()
    records = {
        "fp32 0": run("fp32", 0),
        "bf16 0": run("mixed_bfloat16", 0),
        "fp32 1": run("fp32", 1, metrics={"memory/training_mib": 408.0, "time/step_ms": 12.5}),
        "bf16 1": run("mixed_bfloat16", 1, metrics=ANOTHER),
        "bf16 7": run("mixed_bfloat16", 7),
    }
    children = {name: made.keep(record, parent) for name, record in records.items()}
    comparison, selection = compared(made)
    story.publish(comparison, selection)
    return Swept(made, parent, children, comparison, selection)


def compared(made: Made, target: Any = None, **options: Any) -> tuple[Comparison, Selection]:
    return story.compare(target, made.store, cwd=made.home, **options)


def ratios(made: Made, run_id: str) -> dict[str, float]:
    metrics = made.store.client.get_run(run_id).data.metrics
    return {name: value for name, value in metrics.items() if name.startswith("compare/")}


# --- publish ---------------------------------------------------------------------------------------------------------


def test_the_parent_gets_every_form_as_an_artifact_and_the_table_as_its_description(
    swept: Swept,
) -> None:
    client = swept.made.store.client
    assert {info.path for info in client.list_artifacts(swept.parent, "comparison")} == FILES
    parent = client.get_run(swept.parent)
    directory = Path(parent.info.artifact_uri.removeprefix("file://"))
    for name in FILES:
        assert (directory / name).read_text(encoding="utf-8") == story.form(Path(name))(swept.comparison)
    description = parent.data.tags["mlflow.note.content"]
    assert description == (directory / "comparison/comparison.md").read_text(encoding="utf-8")
    assert "| mixed_bfloat16 (2 of 3 seeds) |" in description
    assert parent.info.status == "FINISHED"


def test_each_run_with_a_twin_carries_its_own_quotients_and_says_who_the_twin_is(swept: Swept) -> None:
    made, children = swept.made, swept.children
    assert ratios(made, children["bf16 0"]) == {
        "compare/training_memory_ratio": 220 / 400,
        "compare/peak_memory_ratio": 320 / 500,
        "compare/step_time_ratio": 5 / 10,
        "compare/throughput_ratio": 12800 / 6400,
        "compare/energy_ratio": 450 / 900,
        "compare/accuracy_difference_points": 0.0,
    }
    assert ratios(made, children["bf16 1"]) == {
        "compare/training_memory_ratio": 240 / 408,
        "compare/peak_memory_ratio": 340 / 500,
        "compare/step_time_ratio": 4 / 12.5,
        "compare/throughput_ratio": 12800 / 6400,
        "compare/energy_ratio": 450 / 900,
        "compare/accuracy_difference_points": pytest.approx(-0.3),
    }
    for alone in ("fp32 0", "fp32 1", "bf16 7"):
        assert ratios(made, children[alone]) == {}
    twins = {name: made.store.client.get_run(run_id).data.tags.get(story.TWIN_TAG) for name, run_id in children.items()}
    assert twins == {
        "fp32 0": None,
        "bf16 0": children["fp32 0"],
        "fp32 1": None,
        "bf16 1": children["fp32 1"],
        "bf16 7": None,
    }


def test_publishing_again_changes_nothing_and_doubles_no_value(swept: Swept) -> None:
    first = swept.made.contents()
    story.publish(swept.comparison, swept.selection)
    story.publish(*compared(swept.made, swept.parent))
    assert swept.made.contents() == first
    assert len(first[swept.children["bf16 0"]]["metrics"]["compare/step_time_ratio"]) == 1


@pytest.mark.parametrize("order", [("fp32", "tf32"), ("tf32", "fp32")], ids=" then ".join)
def test_of_two_comparisons_the_last_one_shows_whether_its_ratio_is_greater_or_less(
    made: Made, order: tuple[str, str]
) -> None:
    parent = made.parent()
    memory = {"fp32": 400.0, "tf32": 200.0}
    for precision, mib in memory.items():
        made.keep(run(precision, metrics={"memory/training_mib": mib}), parent)
    child = made.keep(run("mixed_bfloat16"), parent)
    for baseline in order:
        story.publish(*compared(made, parent, baseline=baseline))
    assert ratios(made, child)["compare/training_memory_ratio"] == 220 / memory[order[-1]]


def test_a_ratio_of_figures_that_were_measured_in_different_ways_is_left_out(made: Made) -> None:
    parent = made.parent()
    made.keep(run("fp32"), parent)
    child = made.keep(run("mixed_bfloat16", tags={"mp_hydra.memory_source": "VmHWM"}), parent)
    comparison, selection = compared(made)
    story.publish(comparison, selection)
    assert comparison.groups[0].rows[0].training_memory.ratio.value is None
    assert ratios(made, child).keys() == {
        "compare/step_time_ratio",
        "compare/throughput_ratio",
        "compare/energy_ratio",
        "compare/accuracy_difference_points",
    }


@pytest.mark.parametrize("target", [EXPERIMENT, "ids"])
def test_what_is_no_sweep_has_no_parent_and_nothing_is_published(swept: Swept, target: str) -> None:
    before = swept.made.contents()
    ids = list(swept.children.values())
    comparison, selection = compared(swept.made, ids if target == "ids" else target, margin=5.0)
    assert comparison.groups[0].rows[0].training_memory.ratio.runs == 2
    story.publish(comparison, selection)
    assert swept.made.contents() == before


def test_a_store_that_takes_nothing_is_one_line(made: Made) -> None:
    parent = made.parent()
    made.keep(run("fp32"), parent)
    comparison, selection = compared(made)
    made.store.client.delete_run(parent)  # MLflow writes to no deleted run
    with pytest.raises(TrackingError) as caught:
        story.publish(comparison, selection)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("broken", ["children", "store"])
def test_a_store_that_fails_at_the_end_of_a_sweep_is_a_warning_and_no_error(
    broken: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    runs = [SimpleNamespace(data=SimpleNamespace(tags={"mp_hydra.precision": name})) for name in ("fp32", "tf32")]
    session = mock.Mock(parent_run_id="p", **{"children.return_value": runs})
    getattr(session, broken).side_effect = TrackingError("the store is away")
    assert compare_sweep(session, tmp_path, {}) is None
    (record,) = caplog.records
    assert record.message == "the runs are recorded, but could not be compared: the store is away"


# --- compare ---------------------------------------------------------------------------------------------------------


def test_a_baseline_that_nobody_knows_is_one_line_and_a_known_one_that_is_missing_is_a_table(swept: Swept) -> None:
    with pytest.raises(UserError, match="has the precision fp61; there is fp32, mixed_bfloat16"):
        compared(swept.made, baseline="fp61")
    comparison, _ = compared(swept.made, baseline="tf32")
    assert comparison.groups[0].problem.startswith("no tf32 baseline")
    assert [len(row.pairs) for _, row in comparison.rows()] == [2, 3]


@pytest.mark.parametrize("margin", [0, -0.1, float("nan"), float("inf")])
def test_a_margin_that_means_nothing_is_refused_before_anything_is_read(made: Made, margin: float) -> None:
    with pytest.raises(ConfigError, match="give percentage points of accuracy above 0"):
        compared(made, margin=margin)


def test_the_latest_sweep_of_one_experiment_is_not_that_of_the_store(made: Made) -> None:
    here = made.parent("here", experiment="mnist")
    made.keep(run("fp32"), here, experiment="mnist")
    later = made.parent("later")
    made.keep(run("fp32"), later)
    assert compared(made)[1].parent_run_id == later
    assert compared(made, experiment="mnist")[1].parent_run_id == here
    with pytest.raises(UserError, match=r"no experiment mnits in .*; its experiments are mnist"):
        compared(made, experiment="mnits")


# --- forms -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "start"),
    [("a.html", "<!DOCTYPE html>"), ("a.HTML", "<!DOCTYPE html>"), ("a.md", "## "), ("a.csv", "group,"), ("a.json", "{")],
)  # fmt: skip
def test_the_suffix_of_a_file_decides_the_form(swept: Swept, name: str, start: str) -> None:
    assert story.form(Path(name))(swept.comparison).startswith(start)


@pytest.mark.parametrize("name", ["table", "table.txt", "page.htm", ".json"])
def test_a_name_that_tells_no_form_is_one_line_with_those_there_are(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        story.form(Path(name))
    assert str(caught.value) == f"--output={name}: end the name with one of .html, .md, .csv, .json"


def test_a_file_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"none/a\.md cannot be written: No such file or directory"):
        story.write(tmp_path / "none" / "a.md", "")


# --- pages -----------------------------------------------------------------------------------------------------------


def test_the_pages_of_a_sweep_are_its_runs_side_by_side_their_table_and_the_file(tmp_path: Path) -> None:
    made = Made.at(tmp_path / "a home with 100%")
    parent = made.parent()
    children = [made.keep(run(name), parent) for name in ("fp32", "mixed_bfloat16")]
    comparison, selection = compared(made)
    before = sweep_pages(selection)
    assert before.keys() == {"compare", "runs"}
    asked = parse_qs(urlsplit(before["compare"]).fragment.partition("?")[2])
    assert json.loads(asked["runs"][0]) == children
    table = parse_qs(urlsplit(before["runs"]).fragment.partition("?")[2])
    assert table["searchFilter"] == [f"tags.`mlflow.parentRunId` = '{parent}'"]
    assert "viewStateShareKey" not in table

    story.publish(comparison, selection)
    after = sweep_pages(selection, "http://127.0.0.1:7")
    page = Path(unquote(urlsplit(after["page"]).path))
    assert "data-figure" in page.read_text(encoding="utf-8")
    key = parse_qs(urlsplit(after["runs"]).fragment.partition("?")[2])["viewStateShareKey"][0]
    tags = made.store.client.get_experiment(selection.runs[0].info.experiment_id).tags
    view = json.loads(tags[f"mlflow.sharedViewState.{key}"])
    assert view["searchFilter"] == f"tags.`mlflow.parentRunId` = '{parent}'"
    assert {"metrics.`compare/training_memory_ratio`", "metrics.`test/accuracy`"} <= set(view["selectedColumns"])
    assert all(address.startswith("http://127.0.0.1:7/#/") for name, address in after.items() if name != "page")
    lines = announced(after, made.uri)
    assert lines[0] == f"compare  {after['compare']}"
    assert lines[-1].strip() == "(mp-hydra ui serves these pages)"


@pytest.mark.parametrize("note", [{}, {"mlflow.note.content": "## it"}])
def test_the_page_of_a_sweep_on_a_server_is_shown_by_the_server_once_it_is_there(note: dict[str, str]) -> None:
    info = SimpleNamespace(run_id="p", experiment_id="3", artifact_uri="mlflow-artifacts:/3/p/artifacts")
    parent = SimpleNamespace(info=info, data=SimpleNamespace(tags=note))
    store: Any = SimpleNamespace(
        uri="https://me:secret@host", name="https://host", experiments=list, run=lambda _: parent
    )
    pages = sweep_pages(Selection("sweep", "p", (parent, parent), store))
    there = "https://host/#/experiments/3/runs/p/artifacts/comparison/comparison.html"
    assert pages.get("page") == (there if note else None)
    assert "secret" not in str(pages)


def test_a_store_without_runs_has_the_ui_alone_and_a_wrong_experiment_is_one_line(made: Made) -> None:
    assert latest_pages(made.store, None, "http://here") == {"ui": "http://here"}
    with pytest.raises(UserError, match="there is no experiment nowhere"):
        latest_pages(made.store, "nowhere", "http://here")


# --- what a wide interval means for the sentence ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speed", "end"),
    [
        (Measured(1.02, 0.99, 1.04), "about as fast, accuracy equivalent within 0.1 points; no gain"),
        (Measured(1.02, 0.8, 1.04), "1.02x the speed (0.80x to 1.04x: unclear), accuracy equivalent within 0.1 points; no gain"),
        (Measured(1.02, 0.09, 11.1), "0.1 points; undecided: run more seeds to settle whether there is a gain"),
    ],
)  # fmt: skip
def test_no_gain_is_said_only_where_no_interval_holds_one(speed: Measured, end: str) -> None:
    same = (0.0, -0.05, 0.05)
    case = Case("a", "fp32", 3, 3, 3, saving=Measured(1.0), speed=speed, accuracy="equivalent", difference=same)
    assert recommend(case).sentence.startswith("a: 1.00x training memory, ")
    assert recommend(case).sentence.endswith(end)
