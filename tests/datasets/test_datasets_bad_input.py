"""Bad data and bad config values: each is answered by one line that names the place and what would be right."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.datasets import load
from mp_hydra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from pathlib import Path

if TYPE_CHECKING:
    from pathlib import Path

Builder = Callable[..., dict[str, Any]]

X = np.zeros((6, 3), np.float32)
Y = np.array([0, 1, 2, 0, 1, 2])
IMAGES = np.zeros((6, 4, 4), np.uint8)


def mapping(**arrays: Any) -> dict[str, Any]:
    return {"x_train": X, "y_train": Y, "x_test": X, "y_test": Y, **arrays}


def with_value(array: np.ndarray, value: float) -> np.ndarray:
    changed = array.astype(float)
    changed.flat[:2] = value
    return changed


def tf_set(*arrays: Any) -> Any:
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices(arrays if len(arrays) > 1 else arrays[0])


def failing() -> Any:
    raise RuntimeError("no disk\nat all")


BAD_RESULTS: dict[str, tuple[Any, str]] = {
    "another form": (
        lambda: 5,
        "dataset own: the builder returned a int; return ((x_train, y_train), (x_test, y_test))",
    ),
    "a part of another form": (lambda: (X, X), "the builder returned a ndarray as its train set"),
    "missing arrays": (lambda: {"x_train": X, "y_train": Y}, "x_test, y_test missing from what the builder returned"),
    "half a validation set": (lambda: mapping(x_validation=X), "y_validation missing"),
    "unknown array": (lambda: mapping(x_dev=X), "the builder returned x_dev, which means nothing here"),
    "empty": (lambda: mapping(x_test=X[:0], y_test=Y[:0]), "x_test is empty (shape (0, 3))"),
    "empty samples": (lambda: mapping(x_train=X[:, :0]), "x_train is empty (shape (6, 0))"),
    "single number": (lambda: mapping(x_train=3.0), "x_train is a single number"),
    "scalar samples": (lambda: mapping(x_train=X[:, 0], x_test=X[:, 0]), "x_train holds one number a sample"),
    "lengths differ": (lambda: mapping(y_train=Y[:4]), "x_train has 6 samples but y_train has 4"),
    "sample shapes differ": (lambda: mapping(x_test=X[:, :2]), "x_test have the shape (2,) but those of x_train (3,)"),
    "dtypes differ": (lambda: mapping(x_train=IMAGES, x_test=IMAGES / 1.0), "x_test holds float32 but x_train uint8"),
    "nan": (lambda: mapping(x_test=with_value(X, np.nan)), "x_test has 2 of 18 values that are not finite"),
    "inf": (lambda: mapping(x_train=with_value(X, -np.inf)), "x_train has 2 of 18 values that are not finite"),
    "beyond float32": (lambda: mapping(x_train=with_value(X, 1e39)), "x_train has 2 of 18 values that are not finite"),
    "nan target": (
        lambda: mapping(y_train=with_value(Y, np.nan), y_test=Y / 2),
        "y_train has 2 of 6 values that are not finite",
    ),
    "objects": (lambda: mapping(x_train=np.array([{}] * 6)), "x_train holds object"),
    "ragged": (lambda: mapping(x_train=[[1, 2], [3]]), "x_train is no array"),
    "complex": (lambda: mapping(x_train=X + 1j), "x_train holds complex64"),
    "text": (lambda: mapping(x_train=np.array(["a"] * 6)), "x_train holds <U1"),
    "text labels": (lambda: mapping(y_train=np.array(["a"] * 6)), "y_train holds <U1"),
    "negative label": (lambda: mapping(y_test=Y - 1), "y_test holds the label -1; class indices start at 0"),
    "one-hot": (lambda: mapping(y_train=np.eye(3, dtype=int)[Y]), "one-hot of shape (6, 3); give class indices"),
    "one-hot floats": (lambda: mapping(y_train=np.eye(3)[Y]), "one-hot of shape (6, 3); give class indices"),
    "several integers a sample": (lambda: mapping(y_train=np.full((6, 2), 3)), "give one class index a sample"),
    "label maps": (lambda: mapping(y_train=np.zeros((6, 2, 2))), "y_train has the shape (6, 2, 2)"),
    "one class": (lambda: mapping(y_train=Y * 0 + 2), "y_train holds one class only (2)"),
    "label kinds differ": (lambda: mapping(y_test=Y / 2), "y_test (float64, shape (6,)) does not match y_train (int64"),
    "label widths differ": (
        lambda: mapping(y_train=np.full((6, 2), 0.3), y_test=np.full((6, 3), 0.3)),
        "y_test (float64, shape (6, 3)) does not match",
    ),
    "labels that are no class numbers": (
        lambda: mapping(y_train=Y * 10**9),
        "the largest label is 2000000000 but there",
    ),
    "float labels with classes": (
        lambda: mapping(y_train=Y / 2, y_test=Y / 2, classes=3),
        "y_train holds float64 but there are 3 classes",
    ),
    "label beyond the builder's classes": (
        lambda: mapping(classes=2),
        "holds the label 2; with 2 classes the largest is 1",
    ),
    "classes of another type": (lambda: mapping(classes="ten"), "classes is ten; give an integer of at least 2"),
    "negative token": (lambda: mapping(x_train=np.full((6, 3), -1), x_test=np.zeros((6, 3), int)), "the token id -1"),
    "vocabulary too small": (
        lambda: mapping(x_train=np.full((6, 3), 9), x_test=np.zeros((6, 3), int), vocabulary=5),
        "vocabulary is 5 but the largest token id 9; give at least 10",
    ),
    "vocabulary without tokens": (lambda: mapping(vocabulary=5), "has a vocabulary, but x_train holds no token ids"),
    "16-bit images without a scale": (
        lambda: mapping(x_train=IMAGES.astype(np.uint16), x_test=IMAGES.astype(np.uint16)),
        "x_train holds uint16 of 2 dimensions a sample",
    ),
    "failing builder": (failing, "dataset own: users_bad_data.build failed with RuntimeError: no disk at all"),
    "tf.data batches": (
        lambda: (tf_set(X, Y).batch(2), tf_set(X, Y)),
        "the train set holds batches; give single samples: drop",
    ),
    "tf.data full batches": (
        lambda: (tf_set(X, Y).batch(2, drop_remainder=True), tf_set(X, Y)),
        "the train set holds batches",
    ),
    "endless tf.data": (lambda: (tf_set(X, Y), tf_set(X, Y).repeat()), "the test set never ends; drop .repeat()"),
    "empty tf.data": (lambda: (tf_set(X, Y), tf_set(X, Y).take(0)), "the test set is empty"),
    "tf.data without labels": (lambda: (tf_set(X), tf_set(X)), "the train set does not hold pairs (x, y)"),
    "tf.data of text": (lambda: (tf_set(["a", "b"], [0, 1]), tf_set(X, Y)), "holds string tensors"),
    "tf.data with nan": (
        lambda: (tf_set(with_value(X, np.nan), Y), tf_set(X.astype(float), Y)),
        "x_train has 2 values that are not finite",
    ),
    "shuffled tf.data": (
        lambda: (tf_set(X, Y).repeat(20).shuffle(120), tf_set(X, Y)),
        "the train set gives other samples each time it is read; drop .shuffle",
    ),
    "tf.data of nested labels": (lambda: (tf_set(X, {"a": Y}), tf_set(X, {"a": Y})), "nested structure as labels"),
    "structures differ": (lambda: (tf_set({"a": X}, Y), tf_set({"b": X}, Y)), "give all parts the same structure"),
}


@pytest.fixture
def use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Builder:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "users_bad_data", raising=False)
    (tmp_path / "users_bad_data.py").write_text("make = None\nnumber = 3\n\n\ndef build(width=1):\n    return make()\n")
    import users_bad_data  # type: ignore[import-not-found]

    def config(make: Any, **keys: Any) -> dict[str, Any]:
        users_bad_data.make = make
        return {"_target_": "users_bad_data.build", "name": "own", **keys}

    return config


@pytest.mark.parametrize(("make", "line"), BAD_RESULTS.values(), ids=BAD_RESULTS)
def test_bad_data_get_one_line(use: Builder, make: Any, line: str) -> None:
    with pytest.raises(DataError) as caught:
        load(use(make), seed=0)
    message = str(caught.value)
    assert line in message
    assert message.startswith("dataset own: ")
    assert "\n" not in message


BAD_VALUES: dict[str, tuple[dict[str, Any], str]] = {
    "image_size zero": ({"image_size": 0}, "dataset.image_size=0: give one integer"),
    "image_size of three": ({"image_size": [1, 2, 3]}, "dataset.image_size=[1, 2, 3]: give one integer"),
    "image_size text": ({"image_size": "28x28"}, "dataset.image_size=28x28: give one integer"),
    "image_size for rows": ({"image_size": 8}, "only images (height, width, channels) can be resized"),
    "scale zero": ({"scale": 0}, "dataset.scale=0: give a finite number other than 0"),
    "scale nan": ({"scale": float("nan")}, "dataset.scale=nan: give a finite number"),
    "scale text": ({"scale": "1/255"}, "dataset.scale=1/255: give a finite number"),
    "fraction one": ({"validation_fraction": 1.0}, "dataset.validation_fraction=1.0: give a number from 0"),
    "fraction null": ({"validation_fraction": None}, "dataset.validation_fraction=null: give a number"),
    "fraction takes all": ({"validation_fraction": 0.95}, "of 6 training samples none would be left"),
    "split_seed negative": ({"split_seed": -1}, "dataset.split_seed=-1: give an integer of at least 0"),
    "classes one": ({"classes": 1}, "dataset.classes=1: give an integer of at least 2"),
    "unknown key": ({"widht": 3}, "dataset.widht=3: users_bad_data.build has no such parameter; did you mean width?"),
    "no target": ({"_target_": None}, "dataset._target_=null: give the dotted path of a function"),
    "missing target": (
        {"_target_": "users_bad_data.nope"},
        "dataset._target_=users_bad_data.nope: there is no such thing",
    ),
    "missing module": ({"_target_": "not_there.build"}, "dataset._target_=not_there.build: there is no such thing"),
    "target is a number": ({"_target_": "users_bad_data.number"}, "this is a int; give the dotted path"),
}


@pytest.mark.parametrize(("keys", "line"), BAD_VALUES.values(), ids=BAD_VALUES)
def test_bad_config_values_get_one_line_with_the_key(use: Builder, keys: Any, line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load({**use(mapping), **keys}, seed=0)
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


def test_classes_below_a_label_are_refused(use: Builder) -> None:
    with pytest.raises(DataError, match="holds the label 2; with 2 classes the largest is 1"):
        load(use(mapping, classes=2), seed=0)


def test_classes_with_float_labels_are_refused(use: Builder) -> None:
    with pytest.raises(DataError, match=r"y_train holds float64 but there are 5 classes"):
        load(use(lambda: mapping(y_train=Y / 2, y_test=Y / 2), classes=5), seed=0)


def test_nested_structures_cannot_be_scaled(use: Builder) -> None:
    with pytest.raises(ConfigError, match=r"dataset\.scale=2\.0: x of dataset own is a nested structure"):
        load(use(lambda: (tf_set({"a": X}, Y), tf_set({"a": X}, Y)), scale=2), seed=0)


def test_tf_data_of_different_shapes_are_refused(use: Builder) -> None:
    import tensorflow as tf

    def samples():
        yield np.zeros(3, np.float32), 0
        yield np.zeros(4, np.float32), 1

    spec = (tf.TensorSpec((None,), tf.float32), tf.TensorSpec((), tf.int64))
    with pytest.raises(DataError, match=r"x_train has samples of different shapes \(None,\); pad or crop them"):
        load(use(lambda: [tf.data.Dataset.from_generator(samples, output_signature=spec)] * 2), seed=0)


def test_a_failing_generator_is_one_line(use: Builder) -> None:
    import tensorflow as tf

    def samples():
        yield np.zeros(3, np.float32), 0
        raise ValueError("row 2 is broken")

    spec = (tf.TensorSpec((3,), tf.float32), tf.TensorSpec((), tf.int64))
    with pytest.raises(DataError, match=r"the train set cannot be read: .*row 2 is broken"):
        load(use(lambda: [tf.data.Dataset.from_generator(samples, output_signature=spec)] * 2), seed=0)


def test_a_module_that_fails_on_import_is_named_with_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "users_broken_module.py").write_text("import not_installed_anywhere\n")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'not_installed_anywhere'"):
        load({"_target_": "users_broken_module.build"}, seed=0)
