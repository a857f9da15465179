"""The builders: shapes and parameter counts worked out by hand, precision, saving, and answers to bad input."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.models import cnn, mlp, resnet, transformer, vit
from mp_hydra.models.attention import default_patch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

POLICIES = {"float32": "float32", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}
IMAGE = (8, 8, 1)
CLASSES = 10


def tiny(name: str) -> Any:
    if name == "mlp":
        return mlp((6,), CLASSES, widths=(5, 4))
    if name == "cnn":
        return cnn(IMAGE, CLASSES, filters=(3, 4), dense=8)
    if name == "resnet":
        return resnet(IMAGE, CLASSES, depth=8, width=4)
    if name == "vit":
        return vit(IMAGE, CLASSES, patch=2, width=8, depth=1, heads=2, dropout=0.1)
    return transformer((7,), CLASSES, 20, width=8, depth=1, heads=2, dropout=0.1)


NAMES = ("mlp", "cnn", "resnet", "vit", "transformer")


def batch(model: Any, size: int = 4) -> Any:
    shape = (size, *model.input_shape[1:])
    generator = np.random.default_rng(0)
    if "int" in model.inputs[0].dtype:
        return generator.integers(0, 20, shape, dtype=np.int32)
    return generator.random(shape, dtype=np.float32)


def array(tensor: Any) -> Any:
    import keras

    return np.asarray(keras.ops.convert_to_numpy(tensor), dtype=np.float32)


@pytest.fixture(params=list(POLICIES))
def policy(request: pytest.FixtureRequest) -> Iterator[str]:
    yield from in_policy(request.param)


@pytest.fixture
def bfloat16() -> Iterator[str]:
    yield from in_policy("mixed_bfloat16")


def in_policy(name: str) -> Iterator[str]:
    import keras

    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy(name)
    yield name
    keras.config.set_dtype_policy(before)


# Parameter counts


def test_mlp_has_weights_and_biases_of_each_layer() -> None:
    # 6 -> 5 -> 4 -> 10
    assert tiny("mlp").count_params() == (6 * 5 + 5) + (5 * 4 + 4) + (4 * 10 + 10)


def test_mlp_without_hidden_layers_is_linear() -> None:
    assert mlp((6,), 3, widths=[]).count_params() == 6 * 3 + 3


def test_mlp_flattens_images() -> None:
    assert mlp(IMAGE, 3, widths=[2]).count_params() == (64 * 2 + 2) + (2 * 3 + 3)


def test_cnn_is_the_net_of_the_keras_example_on_padded_images() -> None:
    # 8x8 -> conv 3x3x32 -> 4x4 -> conv 3x3x64 -> 2x2 -> 128 -> 10
    expected = (9 * 1 * 32 + 32) + (9 * 32 * 64 + 64) + (2 * 2 * 64 * 128 + 128) + (128 * 10 + 10)
    model = cnn(IMAGE, CLASSES)
    assert model.count_params() == expected
    assert [layer.name for layer in model.layers] == [
        "images", "conv_1", "pool_1", "conv_2", "pool_2", "flatten", "dense", "logits",
    ]  # fmt: skip


@pytest.mark.parametrize(("depth", "blocks"), [(8, 1), (14, 2), (20, 3)])
def test_resnet_has_6n_plus_2_weighted_layers_beside_its_shortcuts(depth: int, blocks: int) -> None:
    import keras

    model = resnet((16, 16, 3), CLASSES, depth=depth, width=4)
    weighted = [layer for layer in model.layers if isinstance(layer, (keras.layers.Conv2D, keras.layers.Dense))]
    shortcuts = [layer for layer in weighted if "shortcut" in layer.name]
    assert len(weighted) - len(shortcuts) == depth
    assert len(shortcuts) == 2
    assert sum(isinstance(layer, keras.layers.Add) for layer in model.layers) == 3 * blocks


def test_resnet_parameters_by_the_formula() -> None:
    w, c = 4, 1
    stem = 9 * c * w + 4 * w  # a batch normalisation has 4 numbers per channel
    first = 2 * (9 * w * w + 4 * w)
    stages = [
        9 * a * b + 4 * b + 9 * b * b + 4 * b + a * b + 4 * b  # two convolutions and the 1x1 shortcut
        for a, b in ((w, 2 * w), (2 * w, 4 * w))
    ]
    assert tiny("resnet").count_params() == stem + first + sum(stages) + 4 * w * 10 + 10


def test_resnet_20_of_the_paper_has_its_270_000_parameters() -> None:
    model = resnet((32, 32, 3), CLASSES)
    trainable = sum(math.prod(variable.shape) for variable in model.trainable_variables)
    shortcuts = (16 * 32 + 2 * 32) + (32 * 64 + 2 * 64)
    assert round((trainable - shortcuts) / 1e6, 2) == 0.27


def test_resnet_halves_the_image_twice() -> None:
    assert resnet((32, 24, 3), 2, depth=8, width=4).get_layer("stage_3_block_1_relu").output.shape == (None, 8, 6, 16)


def block_parameters(d: int, hidden: int) -> int:
    return 2 * 2 * d + 4 * (d * d + d) + (d * hidden + hidden) + (hidden * d + d)


def test_vit_parameters_by_the_formula() -> None:
    d, patches = 8, 16
    embedding = 2 * 2 * 1 * d + patches * d
    assert tiny("vit").count_params() == embedding + block_parameters(d, 32) + 2 * d + d * 10 + 10


def test_transformer_parameters_by_the_formula() -> None:
    d = 8
    assert tiny("transformer").count_params() == (20 + 7) * d + block_parameters(d, 32) + 2 * d + d * 10 + 10


def test_vit_embedding_is_a_strided_convolution_plus_a_bias_per_position() -> None:
    import keras

    model = vit((6, 4, 3), 2, patch=2, width=8, depth=1, heads=2)
    layer = model.get_layer("patch_embedding")
    images = np.random.default_rng(0).random((2, 6, 4, 3), dtype=np.float32)
    found = keras.Model(model.inputs[0], layer.output).predict(images, verbose=0)
    kernel, bias = (np.array(weight) for weight in layer.get_weights())
    assert kernel.shape == (2, 2, 3, 8)
    assert bias.shape == (3, 2, 8)
    convolved = array(keras.ops.conv(images, kernel, strides=2, padding="valid"))
    np.testing.assert_allclose(found, convolved + bias, rtol=1e-4, atol=1e-5)


# Precision


@pytest.mark.parametrize("name", NAMES)
def test_head_computes_in_float32_and_inner_layers_in_the_policy(name: str, policy: str) -> None:
    model = tiny(name)
    head = model.layers[-1]
    assert (head.name, head.compute_dtype, head.activation.__name__) == ("logits", "float32", "linear")
    assert model.outputs[0].dtype == "float32"
    assert model(batch(model)).dtype.name == "float32"
    assert model.output_shape == (None, CLASSES)
    inner = {layer.name: layer.compute_dtype for layer in model.layers[1:-1]}
    assert inner
    assert set(inner.values()) == {POLICIES[policy]}, inner
    assert {variable.dtype for variable in model.trainable_variables} == {"float32"}


@pytest.mark.parametrize("name", NAMES)
def test_one_step_in_bfloat16_has_a_finite_loss_and_reaches_every_weight(name: str, bfloat16: str) -> None:
    import keras

    model = tiny(name)
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    before = [array(variable) for variable in model.trainable_variables]
    loss = model.train_on_batch(batch(model), np.arange(4, dtype=np.int32))
    assert math.isfinite(float(loss))
    still = [
        variable.path
        for variable, old in zip(model.trainable_variables, before, strict=True)
        if np.array_equal(array(variable), old)
    ]
    # A bias of attention keys shifts all scores of a query alike, which softmax cancels.
    assert [path for path in still if "key/bias" not in path] == []


@pytest.mark.parametrize("ids", [(257, 258), (2049, 2050)])
def test_transformer_looks_up_the_row_of_each_id_under_every_policy(ids: tuple[int, int], policy: str) -> None:
    import keras

    model = transformer((2,), 2, 3000, width=4, depth=1, heads=1)
    layer = model.get_layer("token_embedding")
    table = np.arange(12000, dtype=np.float32).reshape(3000, 4) % 199  # exact in 16 bits
    layer.set_weights([table])
    rows = keras.Model(model.inputs[0], layer.output)(np.array([ids], dtype=np.int32))
    np.testing.assert_array_equal(array(rows)[0], table[list(ids)])
    assert not np.array_equal(table[ids[0]], table[ids[1]])


def test_transformer_counts_its_positions_as_integers_past_256(bfloat16: str) -> None:
    import keras

    model = transformer((600,), 2, 5, width=4, depth=1, heads=1)
    layer = model.get_layer("position_embedding")
    table = np.repeat(np.arange(600, dtype=np.float32)[:, None] % 199, 4, axis=1)
    layer.set_weights([table])
    rows = keras.Model(model.inputs[0], layer.output)(np.zeros((2, 600), np.int32))
    np.testing.assert_array_equal(array(rows), np.stack([table, table]))


# Saving


@pytest.mark.parametrize("name", NAMES)
def test_saved_model_opens_in_plain_keras_and_predicts_the_same(name: str, bfloat16: str, tmp_path: Path) -> None:
    import keras

    model = tiny(name)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    x = batch(model)
    np.testing.assert_array_equal(array(model(x)), array(loaded(x)))
    modules = {type(layer).__module__.split(".")[0] for layer in loaded.layers}
    assert modules == {"keras"}


# Options


@pytest.mark.parametrize(
    ("build", "layers"),
    [
        (lambda: mlp((6,), 2, widths=(5, 4), dropout=0.5), ["dropout_1", "dropout_2"]),
        (lambda: cnn(IMAGE, 2, dropout=0.5), ["dropout"]),
        (
            lambda: vit(IMAGE, 2, width=8, depth=1, heads=2, dropout=0.5),
            ["embedding_dropout", "block_1_attention_dropout", "block_1_mlp_dropout"],
        ),
        (lambda: cnn(IMAGE, 2), []),
        (lambda: transformer((4,), 2, 9, width=8, depth=1, heads=2), []),
    ],
)
def test_dropout_adds_layers_only_where_its_rate_is_above_zero(build: Callable[[], Any], layers: list[str]) -> None:
    import keras

    assert [layer.name for layer in build().layers if isinstance(layer, keras.layers.Dropout)] == layers


@pytest.mark.parametrize(
    ("size", "patch"),
    [
        ((8, 8), 1),
        ((28, 28), 4),
        ((32, 32), 4),
        ((96, 96), 12),
        ((224, 224), 28),
        ((30, 30), 3),
        ((17, 17), 1),
        ((2, 2), 1),
        ((32, 64), 4),
    ],
)
def test_default_patch_is_the_divisor_nearest_to_eight_a_side(size: tuple[int, int], patch: int) -> None:
    assert default_patch(*size) == patch


def test_default_patch_refuses_images_that_no_patch_tiles_reasonably() -> None:
    with pytest.raises(ModelError, match=r"^model.patch=null: no patch tiles images of 97x97"):
        vit((97, 97, 3), 2)


# Bad input


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: cnn((3, 8, 1), 2), "an image of 3x8 is too small for 2 poolings, which need at least 4 pixels a side"),
        (lambda: cnn((20,), 2), "model=cnn needs images of shape (height, width, channels), but the inputs have shape"),
        (lambda: cnn((None, None, 3), 2), "model=cnn needs images of shape"),  # type: ignore[arg-type]
        (lambda: resnet((20,), 2), "model=resnet needs images of shape"),
        (lambda: vit((20,), 2), "model=vit needs images of shape"),
        (lambda: transformer((8, 8, 1), 2, 9), "model=transformer needs token sequences of shape (length,)"),
        (lambda: mlp((20,), 2, vocabulary=9), "but the inputs are token ids: choose model=transformer"),
        (lambda: vit((8, 8, 1), 2, patch=3), "patches of 3x3 do not tile images of 8x8; give a divisor of 8"),
    ],
)
def test_data_that_does_not_suit_the_model_is_one_line(build: Callable[[], Any], line: str) -> None:
    with pytest.raises(ModelError) as caught:
        build()
    assert line in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "line"),
    [
        (lambda: resnet(IMAGE, 2, depth=18), "model.depth=18: give 6n + 2 layers, such as 8, 14"),
        (lambda: resnet(IMAGE, 2, depth=2), "model.depth=2: give 6n + 2 layers"),
        (lambda: resnet(IMAGE, 2, width=0), "model.width=0: give an integer of at least 1"),
        (lambda: cnn(IMAGE, 2, filters=[32, 0]), "model.filters=[32, 0]: give a list of integers of at least 1"),
        (lambda: cnn(IMAGE, 2, dropout=1.0), "model.dropout=1.0: give a number of at least 0 and below 1"),
        (lambda: cnn(IMAGE, 2, dense=True), "model.dense=true: give an integer of at least 1"),
        (lambda: mlp((6,), 2, widths=64), "model.widths=64: give a list of integers"),  # type: ignore[arg-type]
        (lambda: mlp((6,), 2, activation="rleu"), "model.activation=rleu: give the name of a function in keras.act"),
        (lambda: mlp((6,), 0), "model.outputs=0: give an integer of at least 1"),
        (lambda: vit(IMAGE, 2, width=10, heads=4), "model.heads=4: give a divisor of model.width=10"),
        (lambda: vit(IMAGE, 2, patch=0), "model.patch=0: give an integer of at least 1"),
        (lambda: vit(IMAGE, 2, mlp_ratio=-1), "model.mlp_ratio=-1: give a finite number above 0"),
        (lambda: transformer((4,), 2, 9, depth="two"), "model.depth=two: give an integer"),  # type: ignore[arg-type]
        (lambda: transformer((4,), 2, 0), "model.vocabulary=0: give an integer of at least 1"),
    ],
)
def test_an_argument_out_of_range_is_one_line_with_its_key(build: Callable[[], Any], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build()
    assert str(caught.value).startswith(line)
