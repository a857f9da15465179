"""Going on from a saved model: bit for bit in a fresh process, and one line for every file from which that cannot be done."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
from keras import layers

from mp_hydra.checkpoint import resume, saved_scaling
from mp_hydra.errors import ModelError
from mp_hydra.loss_scale import Rule
from mp_hydra.scaled_optimizer import ScaledOptimizer
from tests.apps.resuming.resume_app import CASES

APP = Path(__file__).parent / "apps" / "resuming" / "resume_app.py"
ASSET = "assets/optimizer/loss_scale.json"


# --- a fresh process -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one process left half-way, and another one made of it."""
    directory = tmp_path_factory.mktemp("trainings")
    for what in ("train", "resume"):
        done = subprocess.run([sys.executable, APP, what, directory], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-3000:]
        assert "Skipping variable loading" not in done.stderr.partition("resume")[2]
    return directory


def ended_with(path: Path) -> dict[str, Any]:
    with np.load(path) as file:
        return {key: file[key] for key in file.files}


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_two_and_two_epochs_equal_four_bit_for_bit(case: str, trainings: Path) -> None:
    whole, resumed = (ended_with(trainings / f"{case} {which}.npz") for which in ("whole", "resumed"))
    assert list(whole) == list(resumed)
    for name in whole:
        np.testing.assert_array_equal(whole[name], resumed[name], err_msg=name)
    counts = next(value for name, value in resumed.items() if name.endswith(" counts"))
    assert counts.tolist() == [20, 16, 0, 19]  # steps, applied, skipped in a row, the last skipped one


@pytest.mark.process
@pytest.mark.parametrize("case", CASES)
def test_file_opens_in_plain_keras_with_the_optimizers_iterations(case: str, trainings: Path) -> None:
    stock = json.loads((trainings / "stock.json").read_text())
    assert stock["mp_hydra imported"] is False
    # Ten batches, of which two are skipped; under accumulation each update takes three.
    assert stock[case] == ["Adam", 8 // CASES[case][3].get("gradient_accumulation_steps", 1)]


# --- this process ----------------------------------------------------------------------------------------------------


class Freezable(layers.Dense):
    """A layer whose class decides whether it learns."""

    learns = True

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.trainable = self.learns


def trained(model: Any = None, **settings: Any) -> Any:
    if model is None:
        model = keras.Sequential([keras.Input((2,)), layers.Dropout(0.5), Freezable(1)])
    model.compile(keras.optimizers.Adam(), "mse", jit_compile=False, auto_scale_loss=False, **settings)
    rule = Rule(growth_interval=1, maximum=64.0)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="dynamic", scale=8.0, rule=rule)
    model.optimizer.build(model.trainable_variables)
    model.optimizer.remember_seeds(model)
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=3, verbose=0)
    return model


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("saved") / "model.keras"
    trained(metrics=["mae"]).save(path)
    return path


CLASSES = {"Freezable": Freezable}


def rewritten(saved: Path, path: Path, **members: bytes | None) -> Path:
    """The file with some members exchanged, or left out where they are None."""
    names = {"asset": ASSET, "config": "config.json", "weights": "model.weights.h5"}
    changes = {names[key]: content for key, content in members.items()}
    with zipfile.ZipFile(saved) as source, zipfile.ZipFile(path, "w") as target:
        for name in source.namelist():
            content = changes.get(name, source.read(name))
            if content is not None:
                target.writestr(name, content)
    return path


def refusal(path: Path, custom_objects: Any = CLASSES) -> str:
    """The one line that answers the attempt."""
    with pytest.raises(ModelError) as raised:
        resume(path, custom_objects)
    assert "\n" not in str(raised.value)
    assert str(path) in str(raised.value)
    return str(raised.value)


def test_settings_state_loss_and_metrics_are_the_saved_ones(saved: Path) -> None:
    model = resume(saved, CLASSES)
    optimizer = model.optimizer
    assert (optimizer.mode, optimizer.initial_scale, optimizer.rule) == (
        "dynamic",
        8.0,
        Rule(growth_interval=1, maximum=64.0),
    )
    assert float(optimizer.dynamic_scale) == 32.0  # doubled twice
    counters = optimizer.counters()
    assert (counters.steps, counters.applied, counters.scale_used) == (2, 2, 16.0)
    assert int(optimizer.iterations) == 2
    assert model.loss == "mse"
    history = model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=3, verbose=0).history
    assert set(history) == {"loss", "mae"}


def test_what_is_saved_after_a_resume_can_be_resumed_again(saved: Path, tmp_path: Path) -> None:
    model = resume(saved, CLASSES)
    model.fit(np.ones((6, 2)), np.ones((6, 1)), batch_size=3, verbose=0)
    model.save(tmp_path / "again.keras")
    again = resume(tmp_path / "again.keras", CLASSES)
    assert again.optimizer.counters() == model.optimizer.counters()
    assert again.optimizer.counters().steps == 4
    for one, other in zip(model.optimizer.variables, again.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())


def test_seeds_of_random_layers_are_restored(tmp_path: Path) -> None:
    model = trained()
    model.save(tmp_path / "model.keras")
    again = resume(tmp_path / "model.keras", CLASSES)
    x = np.ones((50, 2), "float32")
    np.testing.assert_array_equal(again(x, training=True).numpy(), model(x, training=True).numpy())


def test_state_of_the_scaling_can_be_read_without_opening_the_model(saved: Path) -> None:
    state = saved_scaling(saved)
    assert (state["mode"], state["scale"], state["rule"]["maximum"]) == ("dynamic", 8.0, 64.0)
    assert state["state"]["counts"] == [2, 2, 0, 0]
    assert len(state["seeds"]) == 1


def test_file_that_is_not_there_is_one_line(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.keras").startswith("there is no checkpoint ")


def test_directory_is_one_line(tmp_path: Path) -> None:
    assert "is no .keras file: " in refusal(tmp_path)


@pytest.mark.parametrize("share", [0.0, 0.5, 0.99])
def test_truncated_file_is_one_line(share: float, saved: Path, tmp_path: Path) -> None:
    content = saved.read_bytes()
    (tmp_path / "cut.keras").write_bytes(content[: int(len(content) * share)])
    assert "is no .keras file: " in refusal(tmp_path / "cut.keras")


def test_damage_in_the_middle_of_the_weights_is_one_line(saved: Path, tmp_path: Path) -> None:
    content = bytearray(saved.read_bytes())
    content[content.index(b"\x89HDF") + 100] ^= 255
    (tmp_path / "damaged.keras").write_bytes(content)
    assert "cannot be opened: Bad CRC-32" in refusal(tmp_path / "damaged.keras")


def test_file_of_stock_keras_is_named_as_such(tmp_path: Path) -> None:
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("adam", "mse")
    model.save(tmp_path / "stock.keras")
    assert refusal(tmp_path / "stock.keras").endswith(
        "has no loss-scaling state: it was not saved by a run of mp_hydra"
    )


def test_class_that_is_not_there_is_one_line(saved: Path) -> None:
    line = refusal(saved, None)
    assert "cannot be opened: " in line
    assert "Freezable" in line


def changed(saved: Path, **values: Any) -> bytes:
    with zipfile.ZipFile(saved) as archive:
        return json.dumps({**json.loads(archive.read(ASSET)), **values}).encode()


@pytest.mark.parametrize(
    ("member", "content", "line"),
    [
        ("asset", b"{", "is no .keras file: Expecting property name"),
        ("asset", b"\xff\xfe", "is no .keras file: "),
        ("asset", b"[1]", "is no .keras file: "),
        ("asset", b"{}", "loss-scaling state without mode, scale, rule, state, seeds: it is damaged"),
        ("config", None, "cannot be opened: "),
        ("config", b"{}", "cannot be opened: "),
        ("weights", None, "cannot be opened: "),
        ("weights", b"nothing", "cannot be opened: "),
    ],
)
def test_member_that_is_damaged_is_one_line(
    member: str, content: bytes | None, line: str, saved: Path, tmp_path: Path
) -> None:
    assert line in refusal(rewritten(saved, tmp_path / "odd.keras", **{member: content}))


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ({"mode": "odd"}, "cannot be opened: mode='odd': give dynamic, fixed or none"),
        ({"scale": 1e9}, "cannot be opened: scale=1000000000.0: give a number from minimum=1 to maximum=64"),
        ({"seeds": []}, "does not fit: the saved model has 0 random layers, this one 1"),
        ({"state": {"counts": [1]}}, "does not fit: The shape of the target variable"),
    ],
)
def test_state_that_does_not_fit_is_one_line(values: dict[str, Any], line: str, saved: Path, tmp_path: Path) -> None:
    assert line in refusal(rewritten(saved, tmp_path / "odd.keras", asset=changed(saved, **values)))


def test_optimizer_state_that_does_not_fit_is_an_error_where_stock_keras_trains_on_without_it(
    saved: Path, tmp_path: Path
) -> None:
    import h5py  # type: ignore[import-untyped]

    with zipfile.ZipFile(saved) as archive:
        (tmp_path / "weights.h5").write_bytes(archive.read("model.weights.h5"))
    with h5py.File(tmp_path / "weights.h5", "a") as file:
        slots = file["optimizer/vars"]
        del slots[max(slots, key=int)]
    path = rewritten(saved, tmp_path / "short.keras", weights=(tmp_path / "weights.h5").read_bytes())
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        keras.saving.load_model(path, custom_objects=CLASSES)
    assert "does not fit: " in (line := refusal(path))
    assert "the saved optimizer state has 5 variables and adam needs 6" in line
