"""`mp-hydra compare` as a user types it: what is compared, what is required, what is written, and what is wrong."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest

from mp_hydra import cli
from mp_hydra.sweep.resume import Manifest
from tests.compare.made_runs import ended, run
from tests.compare.stored_runs import EXPERIMENT, Made

TITLE = "sweep precision=fp32,mixed_bfloat16"


class Said(NamedTuple):
    """What a command answered."""

    code: int
    out: str
    err: str


class Swept(NamedTuple):
    """A sweep of two precisions and two seeds with half the memory and half the step time, and an older one."""

    made: Made
    parent: str
    children: list[str]
    older: str


@pytest.fixture
def capture(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Capture:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    return Capture(capsys)


class Capture:
    """Types commands."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self.capsys = capsys

    def __call__(self, made: Made, *words: str) -> Said:
        """`mp-hydra compare` on a store."""
        with (
            mock.patch.dict("os.environ", {"MP_HYDRA_HOME": str(made.home)}),
            mock.patch.object(sys, "argv", ["mp-hydra", "compare", *words]),
            pytest.raises(SystemExit) as leaving,
        ):
            cli.main()
        said = self.capsys.readouterr()
        assert "Traceback" not in said.out + said.err
        return Said(int(leaving.value.code or 0), said.out, said.err)

    def complaint(self, made: Made, *words: str) -> str:
        """The one line that is all a command says."""
        said = self(made, *words)
        assert (said.code, said.out) == (1, "")
        (line,) = said.err.splitlines()
        assert line.startswith("mp_hydra: ")
        return line.removeprefix("mp_hydra: ")


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Shared by tests that publish nothing."""
    made = Made.at(tmp_path_factory.mktemp("cli") / "home")
    older = made.parent("older", experiment="mnist")
    made.keep(run("fp32", params={"model.name": "mlp"}), older, experiment="mnist")
    parent = made.parent()
    directory = made.home / "sweep"
    directory.mkdir()
    Manifest(parent, "1", made.uri).save(directory)
    records = [run("fp32", 0), run("mixed_bfloat16", 0), run("fp32", 1), run("mixed_bfloat16", 1)]
    return Swept(made, parent, [made.keep(record, parent) for record in records], older)


# --- what is compared ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "title"),
    [
        ("nothing", TITLE),
        ("parent", TITLE),
        ("directory", TITLE),
        ("job", TITLE),
        ("experiment", f"experiment {EXPERIMENT}"),
        ("runs", "4 runs"),
        ("parents", "2 runs"),
    ],
)
def test_a_sweep_is_named_by_nothing_id_directory_experiment_or_runs(
    capture: Capture, swept: Swept, target: str, title: str
) -> None:
    directory = swept.made.home / "sweep"
    (directory / "0").mkdir(exist_ok=True)
    words = {
        "nothing": [],
        "parent": [swept.parent],
        "directory": [str(directory)],
        "job": [str(directory / "0")],
        "experiment": [EXPERIMENT],
        "runs": swept.children,
        "parents": [swept.older, swept.parent],
    }
    said = capture(swept.made, *words[target], "--no-publish")
    assert (said.code, said.err) == (0, "")
    assert said.out.splitlines()[0] == title
    assert "mixed_bfloat16: 0.55x training memory, 2x faster, accuracy equivalent within 0.1 points; use it" in said.out


def test_the_latest_sweep_is_looked_for_in_the_experiment_that_is_named(capture: Capture, swept: Swept) -> None:
    said = capture(swept.made, "--experiment", "mnist", "--no-publish")
    assert said.out.splitlines()[0] == "sweep older"
    line = capture.complaint(swept.made, "--experiment", "mnits")
    assert line.startswith("there is no experiment mnits in sqlite:////")
    assert "its experiments are mnist, " in line


def test_the_store_may_be_named(capture: Capture, swept: Swept, tmp_path: Path) -> None:
    elsewhere = Made(tmp_path / "elsewhere")
    assert capture(elsewhere, "--uri", swept.made.uri, "--no-publish").out.splitlines()[0] == TITLE
    assert not elsewhere.home.exists()


def test_another_baseline_turns_the_ratios_around(capture: Capture, swept: Swept) -> None:
    said = capture(swept.made, "--baseline", "mixed_bfloat16", "--no-publish")
    assert "fp32: 1.82x training memory, 2x slower" in said.out


def test_the_margin_decides_what_is_equivalent(capture: Capture, swept: Swept) -> None:
    said = capture(swept.made, "--margin", "0.01", "--no-publish")
    assert "accuracy undecided (+0.00 points, -0.03 to +0.03)" in said.out
    assert "Equivalent: the whole interval lies within 0.01 points." in " ".join(said.out.split())


# --- what is required ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "conditions",
    [
        "accuracy=equivalent,memory<=0.6,speed>=1.2",
        "accuracy=equivalent|better",
        "mixed_bfloat16:energy<0.6,skipped<=3",
    ],
)
def test_conditions_that_hold_end_with_0(capture: Capture, swept: Swept, conditions: str) -> None:
    said = capture(swept.made, "--require", conditions, "--no-publish")
    assert (said.code, said.err) == (0, "")


def test_conditions_that_fail_end_with_1_and_a_line_for_each(capture: Capture, swept: Swept) -> None:
    said = capture(swept.made, "--require", "memory<=0.5,speed>=1.2,skipped<1,tf32:speed>1", "--no-publish")
    assert said.code == 1
    assert said.err.splitlines() == [
        "mp_hydra: tf32: no such row; there is mixed_bfloat16",
        "mp_hydra: mixed_bfloat16: memory<=0.5 fails: 0.55",
        "mp_hydra: mixed_bfloat16: skipped<1 fails: 3",
    ]
    assert "use it" in said.out


@pytest.mark.parametrize(
    ("conditions", "problem"),
    [
        ("memory", "'memory' is no condition; write them as in accuracy=equivalent,memory<=0.6,speed>=1.2"),
        ("", "'' is no condition"),
        ("memory<=lots", "'memory<=lots' needs a number of at least 0 after <="),
        ("colour=red", "'colour' cannot be required; choose from accuracy, memory,"),
        ("accuracy=fine", "'accuracy=fine' is no verdict to require"),
    ],
)
def test_a_condition_that_cannot_be_read_is_one_line_and_the_store_is_not_opened(
    capture: Capture, swept: Swept, conditions: str, problem: str
) -> None:
    with mock.patch("mp_hydra.compare.store.Store.open", side_effect=AssertionError):
        assert problem in capture.complaint(swept.made, "--require", conditions)


# --- what is written -------------------------------------------------------------------------------------------------


def test_a_comparison_is_written_in_each_form_that_is_asked_for(capture: Capture, swept: Swept, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("a.html", "a.md", "a.csv", "a.json")]
    words = [word for path in files for word in ("-o", str(path))]
    said = capture(swept.made, *words, "--no-publish")
    assert said.out.splitlines()[-4:] == [f"wrote {path}" for path in files]
    assert "<!DOCTYPE html>" in files[0].read_text()
    assert "| mixed_bfloat16 (2 seeds) |" in files[1].read_text()
    assert len(files[2].read_text().splitlines()) == 2
    (group,) = json.loads(files[3].read_text())["groups"]
    assert group["rows"][0]["training_memory"]["ratio"]["value"] == pytest.approx(0.55)


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a.txt", "end the name with one of .html, .md, .csv, .json"), ("none/a.md", "cannot be written: No such file")],
)
def test_a_file_that_cannot_be_written_is_one_line(capture: Capture, swept: Swept, name: str, problem: str) -> None:
    said = capture(swept.made, "-o", name, "--no-publish")
    assert said.code == 1
    (line,) = said.err.splitlines()
    assert line.startswith("mp_hydra: ")
    assert problem in line


def test_no_publish_leaves_the_store_as_it_was(capture: Capture, swept: Swept) -> None:
    before = swept.made.contents()
    database = (swept.made.home / "mlflow.db").read_bytes()
    assert capture(swept.made, "--no-publish").code == 0
    assert swept.made.contents() == before
    assert (swept.made.home / "mlflow.db").read_bytes() == database


def test_publishing_is_the_rule_and_says_where_to_look(capture: Capture, tmp_path: Path) -> None:
    made = Made.at(tmp_path / "home")
    parent = made.parent()
    for name in ("fp32", "mixed_bfloat16"):
        made.keep(run(name), parent)
    said = capture(made, "--require", "speed>=3")
    assert said.code == 1  # a condition that fails keeps nothing from being published
    client = made.store.client
    assert "mixed_bfloat16" in client.get_run(parent).data.tags["mlflow.note.content"]
    pages = dict(line.split(maxsplit=1) for line in said.out.splitlines()[-4:])
    assert pages["compare"].startswith("http://127.0.0.1:5000/#/compare-runs?runs=")
    assert pages["runs"].endswith(f"viewStateShareKey=mp_hydra.{parent}")
    assert Path(pages["page"].removeprefix("file://")).is_file()


# --- what is wrong ---------------------------------------------------------------------------------------------------


def test_a_store_that_does_not_exist_is_one_line_and_is_not_created(capture: Capture, tmp_path: Path) -> None:
    made = Made(tmp_path / "nowhere")
    line = capture.complaint(made)
    assert line.startswith(f"there is no MLflow store {made.home}/mlflow.db; train first, or name the store")
    assert not made.home.exists()


def test_an_unknown_sweep_is_one_line_with_near_misses(capture: Capture, swept: Swept) -> None:
    line = capture.complaint(swept.made, "digitz")
    assert line.startswith("digitz is no run, no experiment and no directory of a sweep in sqlite:////")
    assert f"its latest sweeps are {swept.parent} (precision=fp32,mixed_bfloat16), {swept.older} (older)" in line
    assert "its experiments are digits, " in line


def test_an_unknown_baseline_or_a_margin_of_nothing_is_one_line(capture: Capture, swept: Swept) -> None:
    assert "has the precision fp61; there is fp32, mixed_bfloat16" in capture.complaint(
        swept.made, "--baseline", "fp61"
    )
    assert capture.complaint(swept.made, "--margin", "0").startswith("margin=0.0: give percentage points")


def test_a_broken_sweep_is_a_partial_table_with_a_line_for_what_is_missing(capture: Capture, tmp_path: Path) -> None:
    made = Made.at(tmp_path / "home")
    parent = made.parent()
    made.keep(run("fp32", 0, name="first baseline"), parent)
    made.keep(run("fp32", 0, name="second baseline"), parent)
    made.keep(run("mixed_bfloat16", 0), parent)
    made.keep(ended("running", "mixed_bfloat16", 1, name="still at it"), parent)
    made.keep(ended("out_of_memory", "mixed_float16", 0, reason="no 9 GiB left", name="too big"), parent)
    made.store.client.delete_run(made.keep(run("mixed_bfloat16", 2, name="thrown away"), parent))
    said = capture(made, "--require", "memory<=0.6", "--no-publish")
    text = " ".join(said.out.split())
    assert "1 of 2 seeds" in text
    assert "2 baselines with seed 0: the newest that finished counts, second baseline" in text
    assert "first baseline (seed 0): superseded" in text
    assert "still at it (seed 1): still running" in text
    assert "too big (seed 0): out_of_memory (no 9 GiB left)" in text
    assert "1 run was deleted in MLflow and left out: " in text
    assert "0.55x" in text
    assert said.code == 1
    assert "mp_hydra: mixed_bfloat16: still at it is still running" in said.err.splitlines()


def test_a_sweep_without_a_baseline_is_a_table_of_what_there_is(capture: Capture, tmp_path: Path) -> None:
    made = Made.at(tmp_path / "home")
    parent = made.parent()
    for name in ("mixed_bfloat16", "mixed_float16"):
        made.keep(run(name), parent)
    said = capture(made, "--require", "memory<=0.6", "--no-publish")
    text = " ".join(said.out.split())
    assert "no fp32 baseline" in text
    assert "220 MiB" in text
    assert "90.00 %" in text
    assert said.code == 1
    assert "memory<=0.6 cannot be judged: no fp32 baseline with seed 0" in said.err
