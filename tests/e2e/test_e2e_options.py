"""What a config can ask of a run, each in a run of one epoch that a user could have typed."""

from __future__ import annotations

import csv
import sqlite3
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest

from mp_hydra import datasets
from tests.e2e.app_driver import BRIEF, Tracked, all_finite, small_images, tracked, train, type_command

IMAGES = ("dataset=synthetic", "dataset.size=96", "dataset.test_size=32", "batch_size=32")
TINY = ("model=mlp", "model.widths=[8]")


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("model=mlp", "dataset.kind=vector", "dataset.shape=[16]"), id="mlp on vectors"),
        pytest.param(("model=mlp", "dataset.shape=[8,8,1]"), id="mlp on images"),
        pytest.param(("model=cnn", "dataset.shape=[8,8,3]"), id="cnn"),
        pytest.param(("model=resnet", "model.depth=8", "model.width=4", "dataset.shape=[8,8,3]"), id="resnet"),
        pytest.param(("model=vit", "model.depth=1", "model.width=16", "dataset.shape=[8,8,3]"), id="vit"),
        pytest.param(
            ("model=transformer", "model.depth=1", "model.width=16", "dataset.kind=tokens", "dataset.shape=[12]"),
            id="transformer",
        ),
        pytest.param(
            ("model=application", "model.architecture=VGG16", "dataset.image_size=32", "dataset.shape=[8,8,3]"),
            id="application",
        ),
    ],
)
def test_every_model_trains_on_data_that_fit_it_in_bfloat16(overrides: tuple[str, ...], tmp_path: Path) -> None:
    run = train(*IMAGES, *overrides, "precision=mixed_bfloat16", cwd=tmp_path)
    assert (run.status, run.outcome) == ("FINISHED", "ok")
    assert run.metrics["loss_scale/applied_steps"] == 3
    assert all_finite(run.metrics)


def test_a_relative_dataset_path_starts_where_the_command_was_typed_although_the_job_changes_directory(
    tmp_path: Path,
) -> None:
    small_images(tmp_path / "images.npz")
    run = train("dataset=npz", "dataset.path=images.npz", "hydra.job.chdir=true", *TINY, cwd=tmp_path)
    assert run.status == "FINISHED"
    assert run.metrics["test/accuracy"] >= 0.5
    assert Path.cwd() != tmp_path / "out"


def test_the_store_does_not_follow_the_working_directory(tmp_path: Path) -> None:
    train("hydra.job.chdir=true", *TINY, cwd=tmp_path)
    assert not [path for path in tmp_path.rglob("*") if path.name in ("mlflow.db", "mlruns", "mlartifacts")]


def test_tracking_off_leaves_no_store_and_the_files_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MP_HYDRA_HOME", str(tmp_path / "home"))
    assert type_command(*BRIEF, *TINY, "tracking=off", cwd=tmp_path / "work") == 0
    assert not (tmp_path / "home").exists()
    files = {path.name for path in (tmp_path / "work" / "out").iterdir()}
    assert {"config.yaml", "audit.json", "environment.json", "predictions.npz"} <= files
    assert {path.name for path in (tmp_path / "work").iterdir()} == {"out"}


def test_a_store_named_on_the_command_line_is_made_beside_the_user(tmp_path: Path) -> None:
    assert type_command(*BRIEF, *TINY, "tracking.uri=sqlite:///my.db", "hydra.job.chdir=true", cwd=tmp_path) == 0
    with sqlite3.connect(tmp_path / "my.db") as store:
        assert store.execute("select status from runs").fetchall() == [("FINISHED",)]


@pytest.fixture(scope="module")
def logged(tmp_path_factory: pytest.TempPathFactory) -> Tracked:
    """A float16 run whose model was logged."""
    words = ("tracking.log_model=true", "precision=mixed_float16", "tracking.run_name=kept", "+tracking.tags.owner=me")
    return train(*words, *TINY, cwd=tmp_path_factory.mktemp("logged"))


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """The test set as the run saw it: batches of prepared images, and their labels."""
    config = {"_target_": "mp_hydra.datasets.digits", "name": "digits", "scale": 0.0625}
    test = datasets.load(config, seed=0).test
    return np.concatenate([x.numpy() for x, _ in test.batches(64)]), test.labels()


def test_a_logged_model_opens_in_plain_keras_and_predicts_what_the_run_recorded(logged: Tracked) -> None:
    import mlflow.keras

    images, labels = _digits()
    recorded = logged.arrays("predictions.npz")
    assert np.array_equal(recorded["label"], labels)
    model = mlflow.keras.load_model(str(logged.artifacts / "model"))
    assert isinstance(model, keras.Model)
    assert np.array_equal(model.predict(images, batch_size=64, verbose=0).argmax(axis=-1), recorded["predicted"])


def test_a_logged_model_has_a_signature_and_serves_as_a_python_function(logged: Tracked) -> None:
    import mlflow.pyfunc

    images, _ = _digits()
    model = mlflow.pyfunc.load_model(str(logged.artifacts / "model"))
    assert model.metadata.signature.inputs.to_dict()[0]["tensor-spec"]["shape"] == (-1, 8, 8, 1)
    outputs = np.asarray(model.predict(images[:64]))
    assert outputs.dtype == np.float32
    assert np.array_equal(outputs.argmax(axis=-1), logged.arrays("predictions.npz")["predicted"][:64])


def test_the_users_name_and_tags_are_on_the_run(logged: Tracked) -> None:
    assert logged.run.info.run_name == "kept"
    assert logged.tags["owner"] == "me"


def test_keras_callbacks_of_the_config_do_their_work(tmp_path: Path) -> None:
    words = ("callbacks=[tensorboard,csv,early_stopping]", "callbacks.early_stopping.patience=0", "epochs=30")
    stuck = ("+callbacks.early_stopping.min_delta=1000",)  # no epoch is that much better, so the second is the last
    run = train(*words, *stuck, *TINY, cwd=tmp_path)
    with (run.artifacts / "epochs.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 1 + 1
    assert float(rows[-1]["loss"]) == pytest.approx(run.metrics["train/loss"], rel=1e-6)
    assert list((run.artifacts / "tensorboard").rglob("events.out.tfevents.*"))
    assert run.metrics["loss_scale/applied_steps"] == 2 * 21


def test_gradient_accumulation_counts_batches_and_updates_once_in_so_many(tmp_path: Path) -> None:
    words = ("optimizer.gradient_accumulation_steps=4", "schedule=cosine", "schedule.warmup_steps=1")
    run = train(*words, *TINY, cwd=tmp_path)
    assert run.metrics["loss_scale/applied_steps"] == 21
    # Beside weights and Adam's two moments there is one accumulated gradient.
    parameters = (64 * 8 + 8) + (8 * 10 + 10)
    assert 0 <= run.metrics["memory/state_mib"] * 2**20 - parameters * 4 * 4 <= 1024


@pytest.mark.parametrize("precision", ["fp32", "mixed_float16"])
def test_clipping_acts_on_unscaled_gradients_and_the_logged_norm_is_that_before_it(
    precision: str, tmp_path: Path
) -> None:
    words = ("optimizer=sgd", "optimizer.momentum=0.0", "optimizer.learning_rate=1.0", "optimizer.global_clipnorm=1e-6")
    run = train(f"precision={precision}", *words, *TINY, cwd=tmp_path)
    assert run.metrics["gradients/global_norm"] > 0.01
    # 21 steps of at most 1e-6 leave the loss where it was; a clip of scaled gradients would leave it there as well,
    # a clip that never happened would not.
    assert run.metrics["val/loss"] == pytest.approx(run.metrics["test/loss"], rel=0.1)
    assert run.metrics["train/loss"] > 2.0


@pytest.mark.parametrize("option", ["compile.steps_per_execution=4", "compile.jit_compile=true"])
def test_the_same_weights_come_out_however_steps_are_executed(option: str, tmp_path: Path) -> None:
    plain = train(*TINY, f"hydra.run.dir={tmp_path}/plain", cwd=tmp_path)
    other = train(*TINY, option, f"hydra.run.dir={tmp_path}/other", cwd=tmp_path)
    for key in ("train/loss", "test/loss", "test/accuracy"):
        assert other.metrics[key] == pytest.approx(plain.metrics[key], rel=1e-4)
    for key in ("loss_scale/applied_steps", "memory/state_mib"):
        assert other.metrics[key] == plain.metrics[key]
    assert other.metrics.keys() == plain.metrics.keys()


def test_a_cosine_schedule_ends_at_zero_with_the_last_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    fit = keras.Model.fit

    def watched(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        history = fit(self, *args, **kwargs)
        optimizer = self.optimizer.inner_optimizer
        rates.append(float(optimizer.learning_rate))
        return history

    monkeypatch.setattr(keras.Model, "fit", watched)
    train("schedule=cosine", *TINY, cwd=tmp_path)
    assert rates == [pytest.approx(0.0, abs=1e-7)]


def test_an_objective_that_the_run_does_not_have_is_one_line_before_training(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert type_command(*BRIEF, *TINY, "objective=test/acuracy", cwd=tmp_path) == 1
    said = capfd.readouterr().err
    assert "mp_hydra: objective=test/acuracy" in said
    assert "test/accuracy" in said
    assert "Traceback" not in said
    assert tracked()[-1].status == "FAILED"
