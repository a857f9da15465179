"""The keras.applications builder: preprocessing, resizing, head, weights, and answers to bad input."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.models import application
from mp_hydra.models.applications import preprocessed

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

RGB = (32, 32, 3)
SIZE = (2, 4, 3)


@pytest.fixture
def bfloat16() -> Iterator[None]:
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    yield
    keras.config.set_dtype_policy(before)


@pytest.fixture(scope="module")
def mobilenet() -> Any:
    """One MobileNetV2 on grey images below its minimum size, in mixed_bfloat16, for the tests that only look at it."""
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("mixed_bfloat16")
    model = application((8, 12, 1), 5, dropout=0.5)
    keras.config.set_dtype_policy(before)
    return model


def array(tensor: Any) -> Any:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(tensor), dtype=np.float32)


def images(*shape: int) -> Any:
    return np.random.default_rng(0).random(shape, dtype=np.float32)


@pytest.mark.parametrize(
    ("module", "architecture"),
    [
        ("vgg16", "VGG16"),  # BGR, minus the mean colour
        ("densenet", "DenseNet121"),  # [0, 1], minus mean, by deviation
        ("mobilenet_v2", "MobileNetV2"),  # [-1, 1]
        ("mobilenet_v3", "MobileNetV3Small"),  # unchanged: the model does it
    ],
)
def test_preprocessing_is_the_architectures_own_in_float32(module: str, architecture: str, bfloat16: None) -> None:
    import keras

    x = images(*SIZE)[None]
    inputs = keras.Input(SIZE, dtype="float32")
    outputs = preprocessed(inputs, getattr(keras.applications, architecture))
    expected = getattr(keras.applications, module).preprocess_input(x * np.float32(255))
    found = keras.Model(inputs, outputs)(x)
    assert found.dtype.name == "float32"
    np.testing.assert_allclose(array(found), expected, rtol=1e-6, atol=1e-4)


def test_every_architecture_has_a_preprocessing() -> None:
    import sys

    import keras

    for name, constructor in vars(keras.applications).items():
        if name[0].isupper():
            assert callable(sys.modules[constructor.__module__].preprocess_input), name


def test_layers_before_the_backbone_and_the_head_compute_in_float32_the_backbone_in_the_policy(mobilenet: Any) -> None:
    dtypes = {layer.name: layer.compute_dtype for layer in mobilenet.layers}
    backbone = mobilenet.layers[-3]
    assert {name: dtypes[name] for name in ("grey_to_rgb", "resize", "to_255", "logits")} == dict.fromkeys(
        ("grey_to_rgb", "resize", "to_255", "logits"), "float32"
    )
    assert backbone.name.startswith("mobilenetv2")
    assert {layer.compute_dtype for layer in backbone.layers if layer.weights} == {"bfloat16"}
    (entering,) = backbone._inbound_nodes[-1].input_tensors
    assert entering.dtype == "float32"
    assert mobilenet.outputs[0].dtype == "float32"
    assert mobilenet(images(1, 8, 12, 1)).dtype.name == "float32"


def test_small_grey_images_are_repeated_resized_and_preprocessed(mobilenet: Any) -> None:
    import keras

    x = images(2, 8, 12, 1)
    (entering,) = mobilenet.layers[-3]._inbound_nodes[-1].input_tensors
    found = array(keras.Model(mobilenet.inputs[0], entering)(x))
    rgb = np.repeat(x, 3, axis=-1)
    expected = array(keras.ops.image.resize(rgb, (32, 32), interpolation="bilinear")) * 2 - 1
    np.testing.assert_allclose(found, expected, atol=1e-5)


def test_resizing_to_the_minimum_is_logged_and_absent_for_images_large_enough(caplog: pytest.LogCaptureFixture) -> None:
    import keras

    with caplog.at_level(logging.INFO, logger="mp_hydra.models.applications"):
        small = application((20, 100, 3), 2)
        large = application(RGB, 2)
    assert [record.getMessage() for record in caplog.records] == [
        "model.architecture=MobileNetV2: images of 20x100 are resized to 32x100, its minimum"
    ]
    assert small.get_layer("resize").output.shape == (None, 32, 100, 3)
    assert not any(isinstance(layer, keras.layers.Resizing) for layer in large.layers)


def test_the_minimum_is_the_architectures_own() -> None:
    assert application(RGB, 2, architecture="Xception").get_layer("resize").output.shape == (None, 71, 71, 3)


def test_parameters_are_the_architectures_without_its_top_plus_the_head(mobilenet: Any) -> None:
    import keras

    bare = keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=RGB)
    assert mobilenet.count_params() == bare.count_params() + 1280 * 5 + 5


def test_one_step_in_bfloat16_has_a_finite_loss(mobilenet: Any, bfloat16: None) -> None:
    import keras

    mobilenet.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    assert math.isfinite(float(mobilenet.train_on_batch(images(2, 8, 12, 1), np.array([0, 4]))))


@pytest.mark.parametrize("architecture", ["MobileNetV2", "VGG16"])
def test_saved_model_opens_in_plain_keras_and_predicts_the_same(
    architecture: str, bfloat16: None, tmp_path: Path
) -> None:
    import keras

    model = application((32, 32, 1), 2, architecture=architecture)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = images(2, 32, 32, 1)
    np.testing.assert_array_equal(array(model(x)), array(loaded(x)))


def test_trainable_false_leaves_the_head_alone_to_train() -> None:
    model = application(RGB, 2, trainable=False)
    assert [variable.path for variable in model.trainable_variables] == ["logits/kernel", "logits/bias"]


def test_weights_of_a_file_are_loaded_and_grey_images_fit_them(tmp_path: Path) -> None:
    import keras

    source = keras.applications.MobileNetV2(include_top=False, weights=None, input_shape=RGB, pooling="avg")
    path = tmp_path / "mobilenet.weights.h5"
    source.save_weights(path)
    model = application((32, 32, 1), 2, weights=str(path))
    for ours, theirs in zip(model.layers[-2].weights, source.weights, strict=True):
        np.testing.assert_array_equal(array(ours), array(theirs))


@pytest.mark.parametrize(
    ("architecture", "hint"),
    [
        ("mobilenetv2", "did you mean MobileNetV2"),
        ("ResNet5O", "did you mean ResNet50"),
        ("EficientNetB0", "did you mean EfficientNetB0"),
        ("zzz", "known: ConvNeXtBase, ConvNeXtLarge"),
        ("vgg", "VGG"),
        (None, "known: "),
        ("imagenet_utils", "has no such architecture"),
    ],
)
def test_an_unknown_architecture_is_one_line_with_close_names(architecture: Any, hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        application(RGB, 2, architecture=architecture)
    assert caught.value.key == "model.architecture"
    assert hint in str(caught.value)


def test_a_failure_of_keras_is_one_line_with_what_was_asked() -> None:
    with pytest.raises(ModelError) as caught:
        application(RGB, 2, weights="imagenett")
    message = str(caught.value)
    assert message.startswith(
        "model.architecture=MobileNetV2 model.weights=imagenett: The `weights` argument should be"
    )
    assert "\n" not in message


def test_failures_of_other_kinds_are_one_line_too(tmp_path: Path) -> None:
    broken = tmp_path / "broken.weights.h5"
    broken.write_bytes(b"no HDF5")
    with pytest.raises(ModelError, match=r"^model\.architecture=MobileNetV2 model\.weights="):
        application(RGB, 2, weights=str(broken))


@pytest.mark.parametrize(
    ("shape", "line"),
    [((20,), "model=application needs images of shape"), ((32, 32, 4), "needs images of 1 or 3 channels")],
)
def test_inputs_that_are_no_grey_or_rgb_images_are_refused(shape: tuple[int, ...], line: str) -> None:
    with pytest.raises(ModelError, match=line):
        application(shape, 2)


def test_trainable_must_be_a_boolean() -> None:
    with pytest.raises(ConfigError, match=r"^model\.trainable=no: give true or false"):
        application(RGB, 2, trainable="no")  # type: ignore[arg-type]
