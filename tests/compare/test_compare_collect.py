"""Which runs are meant, and what is read of them, on a real store whose runs are broken in every way a store knows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.compare import store as store_module
from mp_hydra.compare.collect import Selection, Store, find, read_records
from mp_hydra.errors import TrackingError, UserError
from mp_hydra.sweep.resume import Manifest
from mp_hydra.tracking import Outcome, Run, Settings, open_client, open_run
from mp_hydra.tracking.store import find_experiment, sqlite_uri

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_hydra.compare.records import RunRecord

NO_RUN = "0" * 32


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without runs; making one takes seconds, copying it none."""
    database = tmp_path_factory.mktemp("template") / "mlflow.db"
    open_client(sqlite_uri(database))
    return database


@pytest.fixture
def store(template: Path, tmp_path: Path) -> Store:
    """A store of the test's own."""
    (tmp_path / "home").mkdir()
    database = tmp_path / "home" / "mlflow.db"
    shutil.copy(template, database)
    return Store.open(sqlite_uri(database))


class Lab:
    """Makes runs in a store."""

    def __init__(self, store: Store, directory: Path) -> None:
        self.store = store
        self.directory = directory

    def open(self, name: str = "child", *, experiment: str = "digits", **tags: str) -> Run:
        settings = Settings(uri=self.store.uri, experiment=experiment)
        tags = {key.replace("__", "."): value for key, value in tags.items()}
        time.sleep(0.002)  # runs are ordered by milliseconds
        return open_run(
            settings, name=name, params={"seed": 3}, tags=tags, spool=self.directory / "spool", cwd=self.directory
        )

    def run(self, name: str = "child", *, experiment: str = "digits", **tags: str) -> str:
        run = self.open(name, experiment=experiment, **tags)
        run.close(Outcome.ok)
        assert run.run_id is not None
        return run.run_id

    def sweep(self, name: str = "sweep", count: int = 2, **tags: str) -> tuple[str, list[str]]:
        parent = self.run(name, mp_hydra__kind="sweep")
        return parent, [self.run(f"{name}-{i}", mlflow__parentRunId=parent, **tags) for i in range(count)]

    def find(self, target: Any) -> Selection:
        return find(target, self.store, cwd=self.directory)

    def complaint(self, target: Any) -> str:
        with pytest.raises(UserError) as caught:
            self.find(target)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    def record(self, run: Run, *series: str) -> RunRecord:
        stored = self.store.client.get_run(run.run_id)
        (record,) = read_records(self.store, [stored], series=series)
        return record


@pytest.fixture
def lab(store: Store, tmp_path: Path) -> Lab:
    return Lab(store, tmp_path)


def _ids(selection: Selection) -> list[str]:
    return [run.info.run_id for run in selection.runs]


# Which runs are meant


def test_the_id_of_a_parent_means_its_children_the_oldest_first_and_not_itself(lab: Lab) -> None:
    parent, children = lab.sweep("grid", 3)
    lab.sweep("another")
    selection = lab.find(parent)
    assert _ids(selection) == children
    assert (selection.title, selection.parent_run_id, selection.notes) == ("sweep grid", parent, ())


def test_a_parent_without_the_tag_of_a_sweep_is_known_by_its_children(lab: Lab) -> None:
    parent = lab.run("made by somebody else")
    child = lab.run(mlflow__parentRunId=parent)
    assert _ids(lab.find(parent)) == [child]


def test_a_single_run_may_be_named_and_the_sweep_around_it_is_pointed_out(lab: Lab) -> None:
    parent, children = lab.sweep()
    selection = lab.find(children[1])
    assert _ids(selection) == [children[1]]
    assert selection.parent_run_id is None
    assert selection.notes == (f"run {children[1]} is one of a sweep; for all of it give its parent run {parent}",)


@pytest.mark.parametrize("where", ["", "0", "0/.hydra", "sweep.json"])
def test_a_sweep_directory_and_everything_below_it_mean_the_run_in_its_sweep_json(lab: Lab, where: str) -> None:
    parent, children = lab.sweep()
    directory = lab.directory / "multirun" / "now"
    (directory / "0" / ".hydra").mkdir(parents=True)
    _write_sweep_json(directory, parent, lab.store.uri)
    selection = lab.find(str(Path("multirun/now") / where))
    assert (_ids(selection), selection.parent_run_id) == (children, parent)
    assert _ids(lab.find(str(directory / where))) == children


def test_the_store_that_sweep_json_names_is_read_where_the_given_one_does_not_know_the_run(
    lab: Lab, template: Path, tmp_path: Path
) -> None:
    database = tmp_path / "elsewhere.db"
    shutil.copy(template, database)
    elsewhere = Lab(Store.open(sqlite_uri(database)), tmp_path)
    parent, children = elsewhere.sweep()
    _write_sweep_json(tmp_path, parent, elsewhere.store.uri)
    selection = lab.find(".")
    assert _ids(selection) == children
    assert selection.store.uri == elsewhere.store.uri
    assert selection.notes == (f"the runs are in {elsewhere.store.uri}, as {tmp_path / 'sweep.json'} says",)


def test_a_store_that_has_moved_since_the_sweep_is_read_where_it_is_now(lab: Lab) -> None:
    parent, children = lab.sweep()
    _write_sweep_json(lab.directory, parent, "sqlite:////gone/mlflow.db")
    selection = lab.find(".")
    assert (_ids(selection), selection.store, selection.notes) == (children, lab.store, ())


def test_a_sweep_json_whose_store_is_gone_is_one_line_with_both_stores(lab: Lab) -> None:
    _write_sweep_json(lab.directory, NO_RUN, "sqlite:////gone/mlflow.db")
    line = lab.complaint(".")
    assert line.startswith(
        f"the parent run {NO_RUN} of {lab.directory / 'sweep.json'} is not in {lab.store.uri}, and not"
    )
    assert "there is no MLflow store /gone/mlflow.db" in line
    assert not Path("/gone").exists()


@pytest.mark.parametrize("text", ["{", "[]", "null", '{"uri": "sqlite:///a"}', '"parent_run_id"'])
def test_a_damaged_sweep_json_is_one_line_with_its_path(lab: Lab, text: str) -> None:
    (lab.directory / "sweep.json").write_text(text, encoding="utf-8")
    assert lab.complaint(".").startswith(f"{lab.directory / 'sweep.json'} cannot be read")


@pytest.mark.parametrize("name", ["multirun/it's now", "{cwd}/multirun/it's now"])
def test_a_sweep_directory_without_sweep_json_is_found_by_the_tag_however_either_is_spelled(
    lab: Lab, name: str
) -> None:
    tag = name.format(cwd=lab.directory)
    children = [lab.run(mp_hydra__sweep=tag) for _ in range(2)]
    lab.run(mp_hydra__sweep="multirun/another")
    directory = lab.directory / "multirun" / "it's now"
    assert _ids(lab.find("multirun/it's now/")) == children  # it need not be on the disk any more
    (directory / "0").mkdir(parents=True)
    for spelling in ("multirun/it's now", str(directory), "multirun/../multirun/it's now", "multirun/it's now/0"):
        selection = lab.find(spelling)
        assert (_ids(selection), selection.parent_run_id) == (children, None)


@pytest.mark.parametrize("name", ["a;b", 'say "it\'s"', "100% -- _x", "(r\u00e4ume)", "a\\b", "precision=fp32,tf32"])
def test_a_sweep_directory_may_have_any_name(lab: Lab, name: str) -> None:
    run = lab.run(mp_hydra__sweep=str(lab.directory / name))
    lab.run(mp_hydra__sweep=str(lab.directory / ("z" * len(name))))
    assert _ids(lab.find(name)) == [run]


def test_a_name_too_long_for_a_file_is_no_directory(lab: Lab) -> None:
    assert "is no run, no experiment and no directory" in lab.complaint("x" * 400)


def test_a_sweep_over_experiments_is_one_sweep(lab: Lab) -> None:
    parent = lab.run(mp_hydra__kind="sweep")
    children = [lab.run(experiment=name, mlflow__parentRunId=parent) for name in ("digits", "mnist")]
    assert _ids(lab.find(None)) == children


def test_a_directory_that_was_swept_into_twice_means_the_later_sweep(lab: Lab) -> None:
    for name in ("first", "second"):
        parent = lab.run(name, mp_hydra__kind="sweep", mp_hydra__sweep="out")
        child = lab.run(mlflow__parentRunId=parent, mp_hydra__sweep="out")
    selection = lab.find("out")
    assert (selection.parent_run_id, _ids(selection)) == (parent, [child])


def test_an_experiment_means_all_its_runs_without_the_parents(lab: Lab) -> None:
    _, children = lab.sweep()
    alone = lab.run("alone")
    lab.run("elsewhere", experiment="mnist")
    selection = lab.find("digits")
    assert _ids(selection) == [*children, alone]
    assert selection.title == "experiment digits"


def test_a_directory_that_is_no_sweep_does_not_hide_the_experiment_of_the_same_name(lab: Lab) -> None:
    run = lab.run()
    (lab.directory / "digits").mkdir()
    assert _ids(lab.find("digits")) == [run]


def test_a_name_that_is_both_an_experiment_and_a_sweep_directory_is_not_guessed(lab: Lab) -> None:
    parent, _ = lab.sweep()
    (lab.directory / "digits").mkdir()
    _write_sweep_json(lab.directory / "digits", parent, lab.store.uri)
    assert f"for the sweep give {parent}" in lab.complaint("digits")
    lab.run(experiment="mnist")
    lab.store.client.delete_experiment(find_experiment(lab.store.client, lab.store.uri, "mnist"))
    (lab.directory / "digits").rename(lab.directory / "mnist")
    assert lab.find("mnist").parent_run_id == parent  # a deleted experiment is not meant


def test_a_list_of_ids_means_those_runs_in_that_order_across_experiments(lab: Lab) -> None:
    runs = [lab.run(), lab.run(experiment="mnist"), lab.run(), lab.run(experiment="mnist")]
    wanted = [runs[3], runs[0], runs[2], runs[0]]
    selection = lab.find(wanted)
    assert _ids(selection) == [runs[3], runs[0], runs[2]]
    assert selection.parent_run_id is None


def test_parents_in_a_list_stand_for_their_children(lab: Lab) -> None:
    first, one = lab.sweep("one")
    second, two = lab.sweep("two")
    assert _ids(lab.find([first, second])) == [*one, *two]


def test_a_list_with_one_name_is_that_name(lab: Lab) -> None:
    parent, children = lab.sweep()
    assert _ids(lab.find([parent])) == children


def test_a_list_with_an_unknown_run_or_a_name_is_one_line(lab: Lab) -> None:
    run = lab.run()
    assert lab.complaint([run, NO_RUN]).startswith(f"there is no run {NO_RUN} in {lab.store.uri}; it has no sweeps;")
    assert lab.complaint([run, "digits"]).startswith("digits is no id of a run;")


def test_nothing_named_means_the_latest_sweep_even_if_runs_have_come_since(lab: Lab) -> None:
    lab.sweep("old")
    parent, children = lab.sweep("new")
    lab.run("later", mp_hydra__sweep="multirun/x")
    selection = lab.find(None)
    assert (_ids(selection), selection.parent_run_id) == (children, parent)


def test_nothing_named_without_any_parent_means_the_runs_of_the_newest_sweep_directory(lab: Lab) -> None:
    lab.run(mp_hydra__sweep="multirun/old")
    children = [lab.run(mp_hydra__sweep="multirun/new") for _ in range(2)]
    lab.run("alone")
    selection = lab.find(None)
    assert (_ids(selection), selection.title) == (children, "sweep multirun/new")


def test_nothing_named_without_any_sweep_means_all_runs_of_the_default_experiment(lab: Lab) -> None:
    run = lab.run(experiment="mp_hydra")
    lab.run(experiment="digits")
    assert _ids(lab.find(None)) == [run]


def test_an_empty_store_says_that_there_is_nothing(lab: Lab) -> None:
    assert lab.complaint(None) == (
        f"there is no sweep in {lab.store.uri}, and no experiment mp_hydra; it has no sweeps; its experiments are Default"
    )
    assert "the experiment Default" in lab.complaint("Default")


def test_a_name_that_fits_nothing_is_one_line_with_the_store_the_latest_sweeps_and_near_misses(lab: Lab) -> None:
    parents = [lab.sweep(name, 1)[0] for name in ("a", "b", "c", "d")]
    lab.run(experiment="mnist")
    line = lab.complaint("digitz")
    assert line.startswith(f"digitz is no run, no experiment and no directory of a sweep in {lab.store.uri}; ")
    assert f"its latest sweeps are {parents[3]} (d), {parents[2]} (c), {parents[1]} (b); " in line
    assert "its experiments are digits, " in line


def test_a_directory_that_belongs_to_no_sweep_says_what_was_looked_for(lab: Lab) -> None:
    (lab.directory / "src").mkdir()
    line = lab.complaint("src")
    assert f"it has no sweep.json, and no run there has the tag mp_hydra.sweep={lab.directory / 'src'};" in line


def test_an_id_that_no_run_has_is_one_line(lab: Lab) -> None:
    assert lab.complaint(NO_RUN).startswith(f"there is no run {NO_RUN} in {lab.store.uri}; ")


def test_a_sweep_without_runs_is_one_line(lab: Lab) -> None:
    parent, _ = lab.sweep("empty", 0)
    assert lab.complaint(parent).startswith(f"sweep empty (run {parent} in {lab.store.uri}) has no runs;")


# Deleted things


def test_runs_deleted_in_the_ui_are_left_out_with_a_line(lab: Lab) -> None:
    parent, children = lab.sweep("grid", 3)
    lab.store.client.delete_run(children[1])
    for target in (parent, "digits", children):
        selection = lab.find(target)
        assert _ids(selection) == [children[0], children[2]]
        assert selection.notes == (f"1 run was deleted in MLflow and left out: {children[1]} (grid-1)",)


def test_a_deleted_parent_still_names_its_children(lab: Lab) -> None:
    parent, children = lab.sweep()
    lab.store.client.delete_run(parent)
    assert _ids(lab.find(parent)) == children


def test_a_sweep_all_of_whose_runs_are_deleted_is_one_line(lab: Lab) -> None:
    parent, children = lab.sweep("grid", 1)
    lab.store.client.delete_run(children[0])
    assert f"all of its runs have been deleted ({children[0]} (grid-0)); bring them back" in lab.complaint(parent)


def test_a_deleted_experiment_is_one_line_with_the_way_back(lab: Lab) -> None:
    lab.run(experiment="mnist")
    experiment_id = find_experiment(lab.store.client, lab.store.uri, "mnist")
    lab.store.client.delete_experiment(experiment_id)
    assert f"mlflow experiments restore --experiment-id {experiment_id}" in lab.complaint("mnist")


# Stores that cannot be read


def test_a_store_that_does_not_exist_is_one_line_and_is_not_created(tmp_path: Path) -> None:
    with pytest.raises(TrackingError) as caught:
        Store.open(sqlite_uri(tmp_path / "home" / "mlflow.db"))
    assert str(caught.value).startswith(f"there is no MLflow store {tmp_path / 'home' / 'mlflow.db'}; train first, or")
    assert not (tmp_path / "home").exists()


def test_a_database_of_somebody_else_is_one_line_and_is_not_changed(tmp_path: Path) -> None:
    database = tmp_path / "theirs.db"
    with sqlite3.connect(database) as connection:
        connection.execute("CREATE TABLE mine (a)")
    connection.close()
    before = database.read_bytes()
    with pytest.raises(TrackingError, match="is no MLflow store: it has no tables of runs"):
        Store.open(sqlite_uri(database))
    assert database.read_bytes() == before


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").write_text("hello " * 1000, encoding="utf-8")
    with pytest.raises(TrackingError, match="cannot be read: file is not a database"):
        Store.open(sqlite_uri(tmp_path / "mlflow.db"))


def test_a_server_that_does_not_answer_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    store = Store.open("http://127.0.0.1:9")
    with pytest.raises(TrackingError, match=r"the MLflow store http://127\.0\.0\.1:9 cannot be used: "):
        find(None, store, cwd=tmp_path)


# Records


def _files(lab: Lab, run: Run, **samples: Any) -> Path:
    """Let a run leave its files, and return their directory in the store."""
    source = lab.directory / "files"
    source.mkdir(exist_ok=True)
    np.savez_compressed(source / "predictions.npz", **samples)
    np.savez_compressed(source / "step_times.npz", milliseconds=np.array([4.0, 5.0, 4.5]))
    (source / "environment.json").write_text(json.dumps({"versions": {"keras": "3.15"}}), encoding="utf-8")
    for path in sorted(source.iterdir()):
        run.log_artifacts(path)
    return Path(lab.store.client.get_run(run.run_id).info.artifact_uri.removeprefix("file://"))


def _classified() -> dict[str, np.ndarray]:
    label = np.array([1, 0, 2])
    return {"label": label, "predicted": np.array([1, 0, 0]), "correct": np.array([True, True, False])}


def test_a_complete_run_is_a_record_with_everything_and_nothing_missing(lab: Lab) -> None:
    run = lab.open("fp32", mp_hydra__precision="fp32")
    run.log_dataset(name="test data", digest="ff", source="here", schema=None, profile=None, context="testing")
    run.log_dataset(name="digits", digest="abc", source="here", schema=None, profile=None)
    for step, loss in ((20, 0.5), (10, 1.0), (30, 0.25)):
        run.log_metrics({"train/loss": loss, "val/loss": 2 * loss, "test/accuracy": 0.5}, step=step)
    _files(lab, run, **_classified())
    run.close(Outcome.ok)
    record = lab.record(run, "train/loss", "val/loss", "loss_scale/value")
    assert record.missing == ()
    assert (record.run_id, record.experiment_id) == (run.run_id, run.experiment_id)
    assert (record.name, record.status, record.outcome) == ("fp32", "FINISHED", "ok")
    assert record.params == {"seed": "3"}
    assert record.tags["mp_hydra.precision"] == "fp32"
    assert record.metrics == {"train/loss": 0.25, "val/loss": 0.5, "test/accuracy": 0.5}
    assert record.dataset == ("digits", "abc")
    assert record.environment == {"versions": {"keras": "3.15"}}
    assert record.started > 1_600_000_000_000
    assert record.series.keys() == {"train/loss", "val/loss"}
    assert record.series["train/loss"].steps.tolist() == [10, 20, 30]
    assert record.series["train/loss"].values.tolist() == [1.0, 0.5, 0.25]
    assert record.series["val/loss"].values.dtype == np.float64
    assert record.correct is not None
    assert record.correct.tolist() == [True, True, False]
    assert record.labels is not None
    assert record.labels.tolist() == [1, 0, 2]
    assert record.step_ms is not None
    assert record.step_ms.tolist() == [4.0, 5.0, 4.5]


def test_values_of_one_step_stay_in_the_order_of_their_times(lab: Lab) -> None:
    run = lab.open()
    run.close(Outcome.ok)
    for value, timestamp in ((1.0, 30), (3.0, 10), (2.0, 20)):
        lab.store.client.log_metric(run.run_id, "val/loss", value, timestamp=timestamp, step=5)
    assert lab.record(run, "val/loss").series["val/loss"].values.tolist() == [3.0, 2.0, 1.0]


def test_only_the_series_asked_for_are_read(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"train/loss": 1.0, "val/loss": 1.0}, step=1)
    run.close(Outcome.ok)
    assert lab.record(run).series == {}
    assert lab.record(run, "val/loss").series.keys() == {"val/loss"}


def test_a_run_that_is_still_running_is_a_record_that_says_so(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"train/loss": 1.0}, step=1)
    run.flush()
    record = lab.record(run, "train/loss")
    assert (record.status, record.outcome) == ("RUNNING", "running")
    assert record.series["train/loss"].values.tolist() == [1.0]
    assert record.missing == (f"artifacts: there is no directory {_artifact_directory(lab, run)}",)
    run.close(Outcome.ok)


def test_a_run_without_metrics_says_so(lab: Lab) -> None:
    run = lab.open()
    run.close(Outcome.out_of_memory)
    record = lab.record(run, "train/loss")
    assert (record.outcome, record.metrics, record.series) == ("out_of_memory", {}, {})
    assert record.missing[0] == "metrics: the run has logged none"


def test_an_artifact_directory_that_was_removed_leaves_the_rest_of_the_record(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"test/accuracy": 0.5}, step=1)
    directory = _files(lab, run, **_classified())
    run.close(Outcome.ok)
    shutil.rmtree(directory)
    record = lab.record(run)
    assert record.missing == (f"artifacts: there is no directory {directory}",)
    assert (record.correct, record.labels, record.step_ms, record.environment) == (None, None, None, {})
    assert record.metrics == {"test/accuracy": 0.5}


def test_each_file_that_is_not_there_is_a_line(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"test/accuracy": 0.5}, step=1)
    directory = _files(lab, run, **_classified())
    run.close(Outcome.ok)
    (directory / "predictions.npz").unlink()
    (directory / "environment.json").unlink()
    record = lab.record(run)
    assert record.missing == ("environment.json: the run has left none", "predictions.npz: the run has left none")
    assert record.step_ms is not None


@pytest.mark.parametrize("keep", [0, 1, 40, 200, -1, -30])
def test_an_npz_file_torn_at_any_place_is_a_line(lab: Lab, keep: int) -> None:
    run = lab.open()
    run.log_metrics({"test/accuracy": 0.5}, step=1)
    torn = _files(lab, run, **_classified()) / "predictions.npz"
    run.close(Outcome.ok)
    torn.write_bytes(torn.read_bytes()[:keep])
    record = lab.record(run)
    assert len(record.missing) == 1
    assert record.missing[0].startswith("predictions.npz: damaged or not readable (")
    assert record.correct is None
    assert record.step_ms is not None


def test_every_flipped_byte_of_an_npz_file_gives_a_record(lab: Lab, tmp_path: Path) -> None:
    run = lab.open()
    path = _files(lab, run, **_classified()) / "predictions.npz"
    run.close(Outcome.ok)
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        lab.record(run)


@pytest.mark.parametrize(
    ("samples", "line"),
    [
        ({"target": [0.5], "prediction": [0.4]}, "it does not say which samples were predicted correctly"),
        ({}, "it does not say which samples were predicted correctly"),
        ({"label": [1, 2], "correct": [True]}, "it has 2 labels for 1 samples"),
        ({"label": [1], "correct": [1]}, "`correct` is int64 of shape (1,), and not one bool a sample"),
        ({"label": [[1]], "correct": [[True]]}, "`correct` is bool of shape (1, 1), and not one bool a sample"),
        ({"correct": np.array([print], dtype=object)}, "damaged or not readable (Object arrays cannot be loaded"),
    ],
)
def test_predictions_that_cannot_be_paired_are_a_line(lab: Lab, samples: dict[str, Any], line: str) -> None:
    run = lab.open()
    run.log_metrics({"test/accuracy": 0.5}, step=1)
    _files(lab, run, **samples)
    run.close(Outcome.ok)
    record = lab.record(run)
    assert [entry.startswith(f"predictions.npz: {line}") for entry in record.missing] == [True]
    assert record.correct is None


@pytest.mark.parametrize(
    ("name", "content", "line"),
    [
        ("environment.json", b"{", "environment.json: damaged or not readable ("),
        ("environment.json", b"\xff", "environment.json: damaged or not readable ("),
        ("environment.json", b"[1]", "environment.json: it holds no JSON object"),
        ("step_times.npz", b"not a zip file", "step_times.npz: damaged or not readable ("),
    ],
)
def test_other_damaged_files_are_a_line(lab: Lab, name: str, content: bytes, line: str) -> None:
    run = lab.open()
    run.log_metrics({"test/accuracy": 0.5}, step=1)
    (_files(lab, run, **_classified()) / name).write_bytes(content)
    run.close(Outcome.ok)
    record = lab.record(run)
    assert [entry.startswith(line) for entry in record.missing] == [True]
    assert record.correct is not None


def test_a_run_without_steady_steps_says_so_and_an_npy_file_is_no_npz_file(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"test/accuracy": 0.5}, step=1)
    directory = _files(lab, run, **_classified())
    run.close(Outcome.ok)
    np.savez_compressed(directory / "step_times.npz", milliseconds=np.array([]))
    with (directory / "predictions.npz").open("wb") as file:
        np.save(file, np.ones(3))
    assert lab.record(run).missing == (
        "predictions.npz: it is no npz file",
        "step_times.npz: it holds no steady step",
    )


def test_stored_values_that_are_no_finite_numbers_are_lines_and_no_metrics(lab: Lab) -> None:
    run = lab.open()
    run.close(Outcome.ok)
    for key, value in (("nan", float("nan")), ("inf", float("inf")), ("fine", 1.0)):
        lab.store.client.log_metric(run.run_id, key, value, step=1)
    record = lab.record(run, "nan", "fine")
    assert record.metrics == {"fine": 1.0}
    assert [line.partition(":")[0] for line in record.missing[:2]] == ["inf", "nan"]
    assert np.isnan(record.series["nan"].values).tolist() == [True]


def test_a_run_without_a_data_set_has_none(lab: Lab) -> None:
    run = lab.open()
    run.close(Outcome.ok)
    assert lab.record(run).dataset is None


def test_a_store_that_is_lost_between_finding_and_reading_gives_partial_records(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"train/loss": 1.0}, step=1)
    run.close(Outcome.ok)
    stored = [lab.store.client.get_run(run.run_id)]
    lost = Store(lab.store.client, sqlite_uri(lab.directory / "lost.db"))
    (record,) = read_records(lost, stored, series=["train/loss"])
    assert record.metrics == {"train/loss": 1.0}
    assert record.missing[0].startswith(f"series train/loss: it cannot be read from {lab.directory / 'lost.db'} (")
    assert not (lab.directory / "lost.db").exists()


def test_a_series_whose_points_are_gone_is_a_line(lab: Lab) -> None:
    run = lab.open()
    run.log_metrics({"train/loss": 1.0, "val/loss": 2.0}, step=1)
    run.close(Outcome.ok)
    with sqlite3.connect(lab.directory / "home" / "mlflow.db") as connection:
        connection.execute("DELETE FROM metrics WHERE key = 'train/loss'")
    connection.close()
    record = lab.record(run, "train/loss", "val/loss")
    assert record.series.keys() == {"val/loss"}
    assert record.missing[0] == "series train/loss: the store has its last value and none of its points"


def test_runs_on_one_test_set_hold_its_labels_once(lab: Lab) -> None:
    runs = []
    for _ in range(2):
        run = lab.open()
        _files(lab, run, **_classified())
        run.close(Outcome.ok)
        runs.append(lab.store.client.get_run(run.run_id))
    first, second = read_records(lab.store, runs)
    assert first.labels is second.labels
    assert first.correct is not second.correct


def _artifact_directory(lab: Lab, run: Run) -> str:
    return str(lab.store.client.get_run(run.run_id).info.artifact_uri).removeprefix("file://")


def _write_sweep_json(directory: Path, parent: str, uri: str) -> None:
    Manifest(parent, "1", uri).save(directory)


# Servers


class FakePages(list[Any]):
    """A page as MLflow's clients give it."""

    token: str | None = None


class FakeServer:
    """A fake of MlflowClient on a server: `count` children of one parent, in pages; it notes what it is asked."""

    def __init__(self, count: int, failure: Exception | None = None) -> None:
        self.count = count
        self.failure = failure
        self.sizes: list[int] = []
        self.histories = 0

    def search_experiments(self, *, page_token: str | None, **_: Any) -> FakePages:
        number = int(page_token or 0)
        page = FakePages([SimpleNamespace(name=f"e{number}", experiment_id=str(number), lifecycle_stage="active")])
        page.token = None if number else "1"
        return page

    def get_run(self, run_id: str) -> Any:
        return _fake_run(run_id, {"mp_hydra.kind": "sweep"})

    def search_runs(self, _ids: Any, *, max_results: int, page_token: str | None, **_: Any) -> FakePages:
        start = int(page_token or 0)
        end = min(start + max_results, self.count)
        self.sizes.append(end - start)
        page = FakePages(_fake_run(f"{number:032x}") for number in range(start, end))
        page.token = str(end) if end < self.count else None
        return page

    def list_artifacts(self, _run_id: str) -> Any:
        raise self.failure or FileNotFoundError("no artifacts here")

    def get_metric_history(self, _run_id: str, _key: str) -> list[Any]:
        self.histories += 1
        if self.failure:
            raise self.failure
        return [SimpleNamespace(step=step, timestamp=step, value=float(step)) for step in (2, 1)]


def _fake_run(run_id: str, tags: dict[str, str] | None = None) -> Any:
    info = SimpleNamespace(
        run_id=run_id,
        experiment_id="0",
        run_name="a run",
        status="FINISHED",
        lifecycle_stage="active",
        artifact_uri=f"mlflow-artifacts:/0/{run_id}/artifacts",
        start_time=1,
    )
    data = SimpleNamespace(params={}, tags=tags or {}, metrics={"train/loss": 0.5})
    return SimpleNamespace(info=info, data=data, inputs=SimpleNamespace(dataset_inputs=[]))


def test_a_server_is_read_in_pages_until_there_are_no_more(tmp_path: Path) -> None:
    server = FakeServer(2 * store_module.PAGE + 1)
    store = Store(server, "http://fake.example")
    selection = find("f" * 32, store, cwd=tmp_path)
    assert server.sizes == [store_module.PAGE, store_module.PAGE, 1]
    assert _ids(selection) == [f"{number:032x}" for number in range(2 * store_module.PAGE + 1)]
    assert [experiment.name for experiment in store.experiments()] == ["e0", "e1"]
    records = read_records(store, selection.runs, series=["train/loss", "val/loss"])
    assert server.histories == len(records)  # none for a metric that no run has
    assert records[-1].series["train/loss"].steps.tolist() == [1, 2]
    assert records[-1].missing[0].startswith("artifacts: they cannot be fetched from mlflow-artifacts:/0/")


def test_a_server_that_goes_away_is_asked_a_few_times_more_and_not_once_for_each_run() -> None:
    from requests.exceptions import ConnectionError as NoConnection

    server = FakeServer(300, NoConnection("connection refused"))
    runs = server.search_runs([], max_results=300, page_token=None)
    records = read_records(Store(server, "http://fake.example"), runs, series=["train/loss"])
    assert server.histories <= 2 * store_module.CONNECTIONS
    assert {record.missing[0] for record in records} == {
        "series train/loss: it cannot be read from http://fake.example (connection refused)"
    }
    assert all("cannot be fetched" in record.missing[1] for record in records)
    assert records[0].metrics == {"train/loss": 0.5}


@pytest.fixture
def server(lab: Lab, free_port: int) -> Iterator[str]:
    """A real MLflow server on the store of the test."""
    command = [sys.executable, "-m", "mlflow", "server", "--workers", "1", "--port", str(free_port)]
    command += ["--backend-store-uri", lab.store.uri, "--artifacts-destination", str(lab.directory / "served")]
    with subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        address = f"http://127.0.0.1:{free_port}"
        try:
            _wait_for(f"{address}/health", process)
            yield address
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # a session of its own; asked politely, it takes 5 s to end


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_for(address: str, process: subprocess.Popen[bytes]) -> None:
    for _ in range(600):
        assert process.poll() is None, "the server has ended"
        try:
            with urllib.request.urlopen(address, timeout=5):  # noqa: S310 - http, to this machine
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)
    raise AssertionError(f"no answer from {address}")


@pytest.mark.process
def test_a_real_server_gives_the_same_records_with_its_own_artifacts(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PAGE", 2)
    settings = Settings(kind="server", uri=server, experiment="served")
    parent = open_run(settings, name="p", params={}, tags={"mp_hydra.kind": "sweep"}, spool=tmp_path, cwd=tmp_path)
    parent.close(Outcome.ok)
    for number in range(3):
        tags = {"mlflow.parentRunId": str(parent.run_id)}
        run = open_run(settings, name=f"r{number}", params={}, tags=tags, spool=tmp_path, cwd=tmp_path)
        run.log_metrics({"train/loss": 1.0}, step=2)
        run.log_metrics({"train/loss": 2.0}, step=1)
        if number == 0:
            _files(Lab(Store.open(server), tmp_path), run, **_classified())
        run.close(Outcome.ok)
    selection = find(None, Store.open(server), cwd=tmp_path)
    assert (selection.parent_run_id, len(selection.runs)) == (parent.run_id, 3)
    assert selection.runs[0].info.artifact_uri.startswith("mlflow-artifacts:")
    records = read_records(selection.store, selection.runs, series=["train/loss"])
    assert [record.series["train/loss"].values.tolist() for record in records] == [[2.0, 1.0]] * 3
    assert records[0].missing == ()
    assert records[0].correct is not None
    assert records[0].correct.tolist() == [True, True, False]
    assert [len(record.missing) for record in records[1:]] == [3, 3]
