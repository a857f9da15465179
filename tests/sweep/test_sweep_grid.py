"""The sweeper `grid` in a Hydra app of its own: order, checks before the first job, failures named, what is done left out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from hydra._internal.callbacks import Callbacks
from hydra.errors import ConfigCompositionException
from omegaconf import OmegaConf

from mp_hydra import tracking
from mp_hydra.config import InvalidConfigError
from mp_hydra.errors import ConfigError, SweepFailedError, UserError
from mp_hydra.sweep import membership
from mp_hydra.sweep.callback import active
from mp_hydra.tracking import Outcome

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from omegaconf import DictConfig

CONFIG = """
defaults:
  - precision: a
  - _self_
  - override hydra/sweeper: grid
  - override hydra/launcher: basic
seed: 0
size: 1
sweep:
  resume: null
  interleave: null
"""
CALLBACK = "+hydra.callbacks.sweep._target_=mp_hydra.sweep.callback.SweepCallback"


@dataclass
class App:
    """A Hydra app whose jobs note what they are given, and fail where they are told to."""

    directory: Path
    runner: Callable[..., Any]
    ran: list[str] = field(default_factory=list)
    fails: Callable[[DictConfig], None] = lambda _: None

    def task(self, config: DictConfig) -> float:
        self.ran.append(f"{config.precision.name}{config.seed}{config.size}")
        belongs, settings = membership.current(), self.settings
        if belongs is None:
            self.fails(config)
            return 0.0
        run = tracking.open_run(
            settings,
            name="job",
            params={"objective": "score"},
            tags=belongs.tags(tracking.store_uri(settings)),
            spool=self.directory,
            cwd=self.directory,
        )
        try:
            self.fails(config)
        except BaseException:
            run.close(Outcome.error)
            raise
        run.log_metrics({"score": float(config.size)}, step=0)
        run.close(Outcome.ok)
        return float(config.size)

    @property
    def settings(self) -> tracking.Settings:
        return tracking.Settings(uri=f"sqlite:///{self.directory}/store.db")

    def sweep(self, *overrides: str, tracked: bool = False) -> list[Any]:
        callback = [CALLBACK, f"+hydra.callbacks.sweep.tracking={{uri: '{self.settings.uri}'}}"] if tracked else []
        runner = self.runner(
            calling_file=str(self.directory / "app.py"),
            calling_module=None,
            task_function=self.task,
            config_path="conf",
            config_name="config",
            overrides=["hydra.job.chdir=false", *overrides, *callback],
            temp_dir=self.directory / "sweep",
        )
        try:
            runner.__enter__()  # leaving it would delete what it wrote
            return list(runner.returns)
        finally:
            if (callback_ := active()) is not None:
                callback_.close()


@pytest.fixture
def app(tmp_path: Path, hydra_sweep_runner: Callable[..., Any], hydra_restore_singletons: None) -> App:
    (tmp_path / "conf" / "precision").mkdir(parents=True)
    for name in "ab":
        (tmp_path / "conf" / "precision" / f"{name}.yaml").write_text(f"name: {name}\n", encoding="utf-8")
    (tmp_path / "conf" / "config.yaml").write_text(CONFIG, encoding="utf-8")
    return App(tmp_path, hydra_sweep_runner)


def values(returns: Sequence[Sequence[Any]]) -> list[Any]:
    return [job.return_value for batch in returns for job in batch]


def test_precisions_take_turns_where_there_are_several_seeds(app: App) -> None:
    app.sweep("precision=a,b", "seed=0,1")
    assert app.ran == ["a01", "b01", "b11", "a11"]


def test_with_one_seed_hydras_own_order_is_kept(app: App) -> None:
    app.sweep("precision=a,b", "size=1,2")
    assert app.ran == ["a01", "a02", "b01", "b02"]


@pytest.mark.parametrize(
    ("interleave", "order"), [("true", ["a01", "b01", "a02", "b02"]), ("false", ["a01", "a02", "b01", "b02"])]
)
def test_interleave_can_be_asked_for_or_refused(app: App, interleave: str, order: list[str]) -> None:
    app.sweep("precision=a,b", "size=1,2", f"sweep.interleave={interleave}")
    assert app.ran == order


def test_interleave_refused_keeps_hydras_order_with_several_seeds(app: App) -> None:
    app.sweep("precision=a,b", "seed=0,1", "sweep.interleave=false")
    assert app.ran == ["a01", "a11", "b01", "b11"]


def test_jobs_run_in_batches_numbered_through(app: App) -> None:
    returns = app.sweep("size=1,2,3", "hydra.sweeper.max_batch_size=2")
    assert [len(batch) for batch in returns] == [2, 1]
    assert [job.hydra_cfg.hydra.job.num for batch in returns for job in batch] == [0, 1, 2]


def test_params_of_the_sweeper_are_swept_too(app: App) -> None:
    app.sweep("seed=5", "+hydra.sweeper.params={size: '1,2'}")
    assert app.ran == ["a51", "a52"]


def test_every_failed_job_is_named_and_the_others_run(app: App) -> None:
    def fails(config: DictConfig) -> None:
        if config.size == 2:
            raise UserError("there is no room")
        if config.size == 3:
            raise ZeroDivisionError("by zero\nmore lines")

    app.fails = fails
    with pytest.raises(SweepFailedError) as caught:
        app.sweep("size=1,2,3,4")
    assert app.ran == ["a01", "a02", "a03", "a04"]
    assert str(caught.value).splitlines() == [
        "2 of 4 jobs failed",
        "job 1 (size=2): there is no room",
        "job 2 (size=3): ZeroDivisionError: by zero",
    ]


def test_a_key_that_does_not_exist_is_found_before_any_job_runs(app: App) -> None:
    with pytest.raises(ConfigCompositionException):
        app.sweep("size=1,2", "sise=3")
    assert app.ran == []


def refuse_big(config: DictConfig) -> None:
    """A check as an application gives it."""
    if config.size > 2:
        raise InvalidConfigError([ConfigError("size", config.size, "give 1 or 2")])


def test_values_that_the_application_refuses_are_found_before_any_job_runs_and_no_parent_is_opened(app: App) -> None:
    check = "+hydra.callbacks.sweep.check={_target_: tests.sweep.test_sweep_grid.refuse_big, _partial_: true}"
    with pytest.raises(InvalidConfigError) as caught:
        app.sweep("size=1,3,4", "seed=0,1", check, tracked=True)
    assert str(caught.value).splitlines() == ["size=3: give 1 or 2", "size=4: give 1 or 2"]
    assert app.ran == []
    assert not (app.directory / "store.db").exists()


def test_a_baseline_that_no_job_has_is_found_before_any_job_runs(app: App) -> None:
    with pytest.raises(ConfigError, match=r"sweep\.baseline=c: no job has this precision; there is a, b"):
        app.sweep("precision=a,b", "+sweep.baseline=c", tracked=True)
    assert app.ran == []
    assert not (app.directory / "store.db").exists()


@pytest.mark.parametrize("baseline", ["b", "fp32"])
def test_a_baseline_may_be_missing_if_it_is_a_known_precision(app: App, baseline: str) -> None:
    app.sweep("precision=a,b", f"+sweep.baseline={baseline}")
    assert app.ran == ["a01", "b01"]


def test_resumed_sweep_runs_what_is_not_finished_under_new_numbers_into_the_same_parent(app: App) -> None:
    def fails(config: DictConfig) -> None:
        if config.size == 2:
            raise UserError("not today")

    app.fails = fails
    with pytest.raises(SweepFailedError):
        app.sweep("size=1,2,3", tracked=True)
    client = tracking.open_client(app.settings.uri or "")
    before = {run.info.run_id: run for run in client.search_runs(["1"])}
    (parent,) = [key for key, run in before.items() if run.data.tags.get("mp_hydra.kind") == "sweep"]
    assert before[parent].info.status == "FAILED"
    app.ran.clear()
    app.fails = lambda _: None
    returns = app.sweep("size=3,2,1,4", "sweep.resume=last", tracked=True)
    assert app.ran == ["a02", "a04"]
    assert values(returns) == [2.0, 4.0]
    assert sorted(int(item.name) for item in (app.directory / "sweep").iterdir() if item.name.isdecimal()) == [
        0,
        1,
        2,
        3,
        4,
    ]
    after = {run.info.run_id: run for run in client.search_runs(["1"])}
    assert after[parent].info.status == "FINISHED"
    new = [run for key, run in after.items() if key not in before]
    assert len(new) == 2
    assert {run.data.tags["mlflow.parentRunId"] for run in new} == {parent}


def test_resumed_sweep_of_which_all_is_finished_runs_nothing(app: App) -> None:
    app.sweep("size=1,2", tracked=True)
    app.ran.clear()
    assert app.sweep("size=1,2", "sweep.resume=last", tracked=True) == []
    assert app.ran == []


def test_resume_without_tracking_is_refused(app: App) -> None:
    with pytest.raises(ConfigError, match=r"sweep.resume=last: .*tracking=off"):
        app.sweep("size=1,2", "sweep.resume=last", CALLBACK, "+hydra.callbacks.sweep.tracking={kind: 'off'}")
    assert app.ran == []


def test_with_another_sweeper_the_parent_is_opened_before_the_first_job_and_finished_jobs_are_known(app: App) -> None:
    app.sweep("size=1,2", "hydra/sweeper=basic", tracked=True)
    client = tracking.open_client(app.settings.uri or "")
    runs = client.search_runs(["1"])
    (parent,) = [run for run in runs if run.data.tags.get("mp_hydra.kind") == "sweep"]
    assert parent.info.status == "FINISHED"
    assert [run.data.tags.get("mlflow.parentRunId") for run in runs].count(parent.info.run_id) == 2


def test_with_another_sweeper_a_store_that_cannot_be_used_ends_the_process_with_one_line(
    app: App, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = f"{CALLBACK}", "+hydra.callbacks.sweep.tracking={uri: 'file:///tmp/runs'}"
    with pytest.raises(SystemExit) as caught:
        app.sweep("size=1,2", "hydra/sweeper=basic", *bad)
    assert caught.value.code == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mp_hydra: tracking.uri=file:///tmp/runs: runs cannot be kept there")
    assert app.ran == []


def test_callback_can_be_chosen_by_name_in_any_app(app: App) -> None:
    config = OmegaConf.create({"hydra": {"callbacks": {"a": {"_target_": CALLBACK.partition("=")[2]}}}})
    (made,) = Callbacks(config).callbacks
    assert type(made).__name__ == "SweepCallback"
