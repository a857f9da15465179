"""A run that goes on from the checkpoint of another one: as if it had never stopped, and in one line where it cannot."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

import absl.logging
import numpy as np
import pytest

from tests.e2e.app_driver import BRIEF, EXPERIMENT, Tracked, client, tracked, train, type_command

if TYPE_CHECKING:
    from pathlib import Path

PER_EPOCH = 3  # 104 images, less a tenth for validation, in batches of 32
WORDS = (
    f"tracking.experiment={EXPERIMENT}",
    *("dataset=npz", "dataset.path=images.npz", "batch_size=32", "log_every_batches=0"),
    *("model=mlp", "model.widths=[8]", "model.dropout=0.5"),
    *("precision=mixed_float16", "loss_scale.initial=524288", "loss_scale.growth_interval=5"),
)


@dataclass(frozen=True)
class Runs:
    """A run in one go, and the two halves of another one."""

    directory: Path
    whole: Tracked
    first: Tracked
    second: Tracked


def data(path: Path) -> None:
    """Two classes of vectors, of small and of large numbers."""
    generator = np.random.default_rng(0)
    y = np.arange(136) % 2
    x = (generator.uniform(0, 1, (136, 4)) + y[:, None]).astype("float32")
    np.savez(path, x_train=x[:104], y_train=y[:104], x_test=x[104:], y_test=y[104:])


def typed(directory: Path, *words: str, out: str) -> Tracked:
    before = {entry.run.info.run_id for entry in tracked()}
    assert type_command(*WORDS, *words, f"hydra.run.dir={directory / out}", cwd=directory) == 0
    (new,) = [entry for entry in tracked() if entry.run.info.run_id not in before]
    return new


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__  # Hydra closes it, and pytest's with it
    directory = tmp_path_factory.mktemp("resume")
    data(directory / "images.npz")
    whole = typed(directory, "epochs=4", out="whole")
    first = typed(directory, "epochs=2", "callbacks=checkpoint", out="first")
    second = typed(directory, "epochs=4", "resume=first/checkpoint.keras", "hydra.job.chdir=true", out="second")
    return Runs(directory, whole, first, second)


def series(run: Tracked, metric: str) -> dict[int, float]:
    return {value.step: value.value for value in client().get_metric_history(run.run.info.run_id, metric)}


@pytest.mark.parametrize(
    "metric", ["train/loss", "train/accuracy", "val/loss", "gradients/global_norm", "loss_scale/value"]
)
def test_later_epochs_equal_those_of_a_run_in_one_go(metric: str, runs: Runs) -> None:
    whole, first, second = (series(run, metric) for run in (runs.whole, runs.first, runs.second))
    assert list(whole) == [PER_EPOCH * epoch for epoch in (1, 2, 3, 4)]
    assert [*first, *second] == list(whole)  # the axis goes on
    for step, value in {**first, **second}.items():
        assert value == pytest.approx(whole[step], rel=1e-6)


def test_scale_is_that_of_a_run_in_one_go_although_it_moved_in_both_halves(runs: Runs) -> None:
    scales = series(runs.whole, "loss_scale/value")
    assert scales[6] < 2.0**24  # the first scale overflows
    assert scales[12] == 2 * scales[6]


@pytest.mark.parametrize("metric", ["loss_scale/applied_steps", "loss_scale/skipped_steps"])
def test_steps_are_counted_within_each_run(metric: str, runs: Runs) -> None:
    whole, first, second = (series(run, metric) for run in (runs.whole, runs.first, runs.second))
    assert first == {step: whole[step] for step in (3, 6)}
    assert second == {step: whole[step] - whole[6] for step in (9, 12)}
    assert whole[6] > 0


def test_summary_does_not_blame_the_second_half_for_what_the_first_one_skipped(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(runs.directory, "epochs=3", "resume=first/checkpoint.keras", out="summary")
    assert "0 of 3 steps skipped" in (said := " ".join(capsys.readouterr().err.split()))
    assert "all in the first" not in said


def test_evaluation_equals_that_of_a_run_in_one_go(runs: Runs) -> None:
    for name in ("test/loss", "test/accuracy"):
        assert runs.second.metrics[name] == pytest.approx(runs.whole.metrics[name], rel=1e-6)
    assert runs.second.steps("test/loss") == [12]


def test_the_run_records_from_where_it_went_on(runs: Runs) -> None:
    assert runs.second.params["resume"] == "first/checkpoint.keras"
    assert (runs.second.status, runs.second.outcome) == ("FINISHED", "ok")


def refused(runs: Runs, capsys: pytest.CaptureFixture[str], *words: str) -> str:
    capsys.readouterr()
    where = f"hydra.run.dir={runs.directory}/refused"
    assert type_command(*WORDS, "epochs=4", *words, where, cwd=runs.directory) == 1
    said = capsys.readouterr()
    assert "Traceback" not in said.err + said.out
    (line,) = [line for line in said.err.splitlines() if line.startswith("mp_hydra: ")]
    return line


@pytest.mark.parametrize("epochs", [1, 2])
def test_no_more_epochs_than_were_seen_is_one_line(epochs: int, runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    line = refused(runs, capsys, "resume=first/checkpoint.keras", f"epochs={epochs}")
    assert line == f"mp_hydra: epochs={epochs}: the checkpoint has seen 2 epochs already; give more"


def test_checkpoint_that_is_not_there_is_one_line_with_its_whole_path(
    runs: Runs, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(runs, capsys, "resume=third/checkpoint.keras")
    assert line == f"mp_hydra: there is no checkpoint {runs.directory}/third/checkpoint.keras"
    assert (tracked()[-1].status, tracked()[-1].outcome) == ("FAILED", "error")


def test_file_that_is_no_checkpoint_is_one_line(runs: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    assert "images.npz has no loss-scaling state" in refused(runs, capsys, "resume=images.npz")


def test_saved_model_optimizer_and_scaling_are_kept_where_the_config_names_others(runs: Runs) -> None:
    others = ("model.widths=[64,64]", "optimizer=sgd", "loss_scale=fixed", "loss_scale.value=2")
    run = typed(runs.directory, "epochs=3", f"resume={runs.directory}/first/checkpoint.keras", *others, out="others")
    assert sum(layer["parameters"] for layer in run.json("audit.json")["layers"]) == (4 * 8 + 8) + (8 * 2 + 2)
    assert run.metrics["loss_scale/value"] == series(runs.whole, "loss_scale/value")[9]
    assert series(run, "train/loss")[9] == pytest.approx(series(runs.whole, "train/loss")[9], rel=1e-6)
    said = (runs.directory / "others" / "train.log").read_text()
    assert "its model, loss, metrics, optimizer and loss scaling are kept" in said


def test_a_checkpoint_is_resumed_only_in_the_precision_that_it_was_saved_in(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    train(*BRIEF, "precision=mixed_bfloat16", "callbacks=checkpoint", f"hydra.run.dir={tmp_path}/first", cwd=tmp_path)
    saved = f"{tmp_path}/first/checkpoint.keras"
    words = (*BRIEF, "epochs=2", f"resume={saved}", f"hydra.run.dir={tmp_path}/second")
    capfd.readouterr()
    assert type_command(*words, "precision=fp32", cwd=tmp_path) == 1
    line = capfd.readouterr().err.strip()
    cure = "its layers compute in bfloat16: resume it with the precision whose policy is mixed_bfloat16"
    assert line.endswith(f"mp_hydra: resume={saved}: {cure}")
