"""The application around a run: what it hands over, how it ends, and what passes through it unchanged."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hydra.errors import ConfigCompositionException, HydraException, InstantiationException

from mp_hydra import app, paths, training
from mp_hydra.errors import DataError
from mp_hydra.explain import explain, is_about_composing
from mp_hydra.outcome import MemoryExhaustedError, Terminated

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SWEEP = ("-m", "hydra/launcher=basic", "hydra.sweep.dir=all")
Calls = list[tuple[dict[str, Any], dict[str, Any]]]


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Runs `main` on arguments in a directory of its own; puts the root logger and sys.path back afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level

    def run(*arguments: str) -> None:
        monkeypatch.setattr(sys, "argv", ["train.py", *arguments])
        app.main()

    yield run
    for handler in set(root.handlers) - set(handlers):
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """The calls of `train`, which does nothing."""
    calls: Calls = []

    def train(config: dict[str, Any], **where: Any) -> float:
        calls.append((config, where))
        return 0.5

    monkeypatch.setattr(training, "train", train)
    return calls


def fail(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def train(*_: Any, **__: Any) -> float:
        raise error

    monkeypatch.setattr(training, "train", train)


def test_a_run_gets_plain_values_and_the_directories_it_was_typed_and_writes_in(
    typed: Callable[..., None], trained: Calls, tmp_path: Path
) -> None:
    typed("precision=mixed_float16", "optimizer.learning_rate=1", "hydra.run.dir=here")
    (config, where), *others = trained
    assert not others
    assert type(config["optimizer"]) is dict
    assert (config["precision"]["policy"], config["optimizer"]["learning_rate"]) == ("mixed_float16", 1.0)
    assert where == {"output_dir": tmp_path / "here", "working_dir": tmp_path, "tags": {}}


def test_the_jobs_of_a_sweep_know_their_sweep(typed: Callable[..., None], trained: Calls, tmp_path: Path) -> None:
    typed(*SWEEP, "seed=1,2")
    assert [config["seed"] for config, _ in trained] == [1, 2]
    tags = [where["tags"] for _, where in trained]
    assert {tag["mp_hydra.sweep"] for tag in tags} == {str(tmp_path / "all")}
    assert len({tag["mp_hydra.job_key"] for tag in tags}) == 2
    assert len({tag["mlflow.parentRunId"] for tag in tags}) == 1
    assert [where["output_dir"].name for _, where in trained] == ["0", "1"]


def test_an_untracked_sweep_has_no_parent_run(typed: Callable[..., None], trained: Calls) -> None:
    typed(*SWEEP, "seed=1,2", "tracking=off")
    assert all("mlflow.parentRunId" not in where["tags"] for _, where in trained)


def test_a_value_that_cannot_be_used_is_found_before_any_job_of_a_sweep_runs(
    typed: Callable[..., None], trained: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        typed(*SWEEP, "batch_size=0,32,-1", "seed=0,1")
    assert ended.value.code == 1
    assert not trained
    assert capfd.readouterr().err.splitlines() == [
        "mp_hydra: batch_size=0: give an integer of at least 1, or max",
        "mp_hydra: batch_size=-1: give an integer of at least 1, or max",
    ]


def test_a_job_that_fails_is_named_and_the_rest_of_the_sweep_runs(
    typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    seeds = []

    def train(config: dict[str, Any], **_: Any) -> float:
        seeds.append(config["seed"])
        if config["seed"] == 1:
            raise DataError("the file is gone")
        return 0.5

    monkeypatch.setattr(training, "train", train)
    with pytest.raises(SystemExit) as ended:
        typed(*SWEEP, "seed=0,1,2")
    assert ended.value.code == 1
    assert seeds == [0, 1, 2]
    shown = capfd.readouterr()
    assert "ERROR the file is gone\n" in shown.out
    assert shown.err.splitlines()[-2:] == ["mp_hydra: 1 of 3 jobs failed", "mp_hydra: job 1 (seed=1): the file is gone"]
    assert "Traceback" not in shown.out + shown.err


def test_a_job_that_runs_out_of_memory_is_a_result_of_a_sweep_and_an_error_of_a_run(
    typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    fail(monkeypatch, MemoryExhaustedError("out of memory: 2 GiB; try a smaller batch_size"))
    typed(*SWEEP, "seed=0,1")
    assert capfd.readouterr().out.count("ERROR out of memory: 2 GiB") == 2
    with pytest.raises(SystemExit) as ended:
        typed()
    assert ended.value.code == 1


def test_a_single_run_cannot_go_on_with_a_sweep(
    typed: Callable[..., None], trained: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        typed("sweep.resume=last")
    assert ended.value.code == 1
    assert capfd.readouterr().err == "mp_hydra: sweep.resume=last: only a sweep can go on: add --multirun (-m)\n"
    assert not trained


def test_every_problem_of_a_config_gets_a_line_of_its_own(
    typed: Callable[..., None], trained: Calls, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        typed("batch_size=0", "epochs=0")
    assert ended.value.code == 1
    assert capfd.readouterr().err.splitlines() == [
        "mp_hydra: epochs=0: give an integer of at least 1",
        "mp_hydra: batch_size=0: give an integer of at least 1, or max",
    ]
    assert not trained


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (DataError("the file\nis gone"), (1, "mp_hydra: the file is gone\n")),
        (KeyboardInterrupt(), (130, "mp_hydra: interrupted\n")),
        (Terminated(), (143, "mp_hydra: terminated\n")),
    ],
    ids=["user error", "Ctrl-C", "SIGTERM"],
)
def test_a_run_that_ends_early_gives_one_line_and_its_exit_code(
    error: BaseException,
    answer: tuple[int, str],
    typed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    fail(monkeypatch, error)
    with pytest.raises(SystemExit) as ended:
        typed()
    assert (ended.value.code, capfd.readouterr().err) == answer


@pytest.mark.parametrize("error", [ValueError("x"), OSError(2, "x"), RuntimeError("x"), InstantiationException("x")])
def test_what_a_users_own_code_raises_passes_unchanged(
    error: Exception, typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    fail(monkeypatch, error)
    with pytest.raises(type(error)) as caught:
        typed()
    assert caught.value is error


def test_what_a_users_own_code_raises_in_a_sweep_is_logged_with_its_traceback_and_named_at_the_end(
    typed: Callable[..., None], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    fail(monkeypatch, ZeroDivisionError("by zero"))
    with pytest.raises(SystemExit) as ended:
        typed(*SWEEP, "seed=0")
    assert ended.value.code == 1
    assert "Traceback" in (tmp_path / "all" / "0" / "train.log").read_text(encoding="utf-8")
    assert capfd.readouterr().err.splitlines()[-1] == "mp_hydra: job 0 (seed=0): ZeroDivisionError: by zero"


@pytest.mark.parametrize("setting", [None, "0", "1"])
def test_the_users_setting_of_full_errors_is_in_force_again_afterwards(
    setting: str | None, typed: Callable[..., None], trained: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    if setting is None:
        monkeypatch.delenv(app.FULL_ERROR, raising=False)
    else:
        monkeypatch.setenv(app.FULL_ERROR, setting)
    typed()
    assert os.environ.get(app.FULL_ERROR) == setting
    with pytest.raises(SystemExit):
        typed("batch_size=0")
    assert os.environ.get(app.FULL_ERROR) == setting


def test_modules_beside_which_the_command_is_typed_can_be_imported(
    typed: Callable[..., None], trained: Calls, tmp_path: Path
) -> None:
    typed()
    assert sys.path[0] == str(tmp_path)


SCHEDULE = "{_target_:keras.optimizers.schedules.ExponentialDecay,initial_learning_rate:1,decay_steps:5,decay_rate:0.5}"


@pytest.mark.parametrize(
    "arguments",
    [
        ["optimizer.learning_rate=1"],
        ["optimizer=sgd", "optimizer.learning_rate=1", "schedule=cosine", "schedule.warmup_steps=5"],
        [f"optimizer.learning_rate={SCHEDULE}"],
        ["callbacks=[]"],
        ["callbacks=[csv,early_stopping]"],
        ["compile.metrics=accuracy"],
        ["compile.metrics={logits:[accuracy]}"],
        ["compile.loss={_target_:keras.losses.SparseCategoricalCrossentropy,from_logits:true}"],
    ],
    ids=" ".join,
)
def test_unusual_settings_that_are_right_train(arguments: list[str], typed: Callable[..., None]) -> None:
    typed("model=mlp", "model.widths=[8]", "epochs=1", "tracking=off", "hydra.run.dir=here", *arguments)
    assert (Path.cwd() / "here/predictions.npz").is_file()


def test_an_explanation_is_one_line_even_where_nothing_is_known_of_the_error() -> None:
    assert explain(HydraException("one\n  two\n")) == "one two"
    assert explain(ValueError("one\ntwo")) == "one two"
    assert explain(OSError(13, "Permission denied", "/x")) == "/x: Permission denied"


def test_hydras_errors_are_about_composing_and_those_of_other_code_are_not() -> None:
    assert is_about_composing(ConfigCompositionException("x"))
    assert not is_about_composing(InstantiationException("x"))
    assert not is_about_composing(ValueError("x"))


def test_conf_is_taken_from_the_package_then_from_beside_it_and_missed_with_both_places(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "mp_hydra"
    monkeypatch.setattr(paths, "__file__", str(package / "paths.py"))
    with pytest.raises(FileNotFoundError, match=str(package)):
        paths.conf_dir()
    for place in (tmp_path / "conf", package / "conf"):
        place.mkdir(parents=True)
        (place / "config.yaml").touch()
        assert paths.conf_dir() == place
