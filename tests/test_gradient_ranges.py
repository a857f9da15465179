"""Where gradients lie in float16's range: counted by hand, against numpy's cast, and for models solved on paper."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from keras import layers

from mp_hydra.errors import ModelError, PrecisionError
from mp_hydra.gradient_ranges import BINS, LARGEST, GradientRange, common_scales, float16_range, gradient_ranges, plot

if TYPE_CHECKING:
    from pathlib import Path


def of(*values: float) -> GradientRange:
    return float16_range("layer", "weights", [np.array(values, "float32")])


# --- one array -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "underflow", "subnormal"),
    [
        pytest.param(2.0**-24, 0, 1, id="the smallest float16"),
        pytest.param(2.0**-25, 1, 0, id="half of it, which rounds to zero"),
        pytest.param(2.0**-25 * (1 + 2.0**-20), 0, 1, id="just above half of it"),
        pytest.param(2.0**-14, 0, 0, id="the smallest normal one"),
        pytest.param(2.0**-14 * (1 - 2.0**-9), 0, 1, id="below it"),
        pytest.param(65504.0, 0, 0, id="the largest one"),
        pytest.param(1e30, 0, 0, id="far above it"),
        pytest.param(1e-30, 1, 0, id="far below the smallest"),
    ],
)
@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_single_values_are_placed_as_float16_would_hold_them(
    value: float, underflow: float, subnormal: float, sign: float, recwarn: pytest.WarningsRecorder
) -> None:
    found = of(sign * value)
    assert (found.count, found.zero, found.underflow, found.subnormal) == (1, 0.0, underflow, subnormal)
    assert found.smallest == found.largest == np.float32(value)
    assert [str(w.message) for w in recwarn] == []


def test_shares_refer_to_all_values_zeros_included() -> None:
    found = of(0.0, 0.0, -(2.0**-30), 2.0**-20, -(2.0**-20), 2.0**-10, 1.0, -4.0)
    assert (found.count, found.zero, found.underflow, found.subnormal) == (8, 2 / 8, 1 / 8, 2 / 8)
    assert (found.smallest, found.largest) == (2.0**-30, 4.0)
    assert found.scales == (2.0**-24 / 2.0**-30, 65504.0 / 4.0)


def test_parts_of_any_shape_are_one_record() -> None:
    found = float16_range(
        "a", "outputs", [np.zeros((2, 3), "f"), np.ones((1, 4), "f"), np.full(1, 2, "f"), np.zeros((0, 5), "f")]
    )
    assert (found.count, found.zero, found.largest) == (11, 6 / 11, 2.0)


def test_exponents_count_powers_of_two_and_outliers_in_the_end_bins() -> None:
    found = of(1.0, 1.5, 2.0, 0.75, 2.0**-61, 2.0**-90, 2.0**41, 2.0**100, 0.0)
    counted = {int(power): n for power, n in zip(BINS, found.exponents, strict=True) if n}
    assert counted == {0: 2, 1: 1, -1: 1, -60: 2, 40: 2}


def test_zeros_only_have_no_smallest_value_and_no_scales() -> None:
    found = of(0.0, -0.0)
    assert (found.count, found.zero, found.underflow, found.smallest, found.largest) == (2, 1.0, 0.0, None, 0.0)
    assert found.scales is None
    assert sum(found.exponents) == 0


@pytest.mark.parametrize("parts", [[], [np.zeros((0, 3))]])
def test_nothing_at_all_is_refused_for_it_has_no_shares(parts: list[Any]) -> None:
    with pytest.raises(ValueError, match="there are no gradients of the weights of layer a"):
        float16_range("a", "weights", parts)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_inf_and_nan_in_float32_are_refused_by_name(value: float) -> None:
    with pytest.raises(ModelError, match=r"^the gradient of the weights of layer layer holds inf or nan in float32"):
        of(1.0, value)


@settings(max_examples=200, deadline=None)
@given(arrays("float32", st.integers(1, 30), elements=st.floats(width=32, allow_nan=False, allow_infinity=False)))
def test_shares_and_scales_agree_with_numpys_cast(values: Any) -> None:
    found = float16_range("a", "weights", [values])
    with np.errstate(over="ignore"):
        cast = np.abs(values.astype("float16")).astype("float64")
    magnitudes = np.abs(values.astype("float64"))
    total = len(values)
    assert found.zero == np.sum(magnitudes == 0) / total
    assert found.underflow == np.sum((magnitudes > 0) & (cast == 0)) / total
    assert found.subnormal == np.sum((cast > 0) & (magnitudes < 2.0**-14)) / total
    assert sum(found.exponents) == np.sum(magnitudes > 0)
    if found.scales is None:
        assert not magnitudes.any()
        return
    lowest, highest = found.scales
    with np.errstate(over="ignore"):
        assert (np.float64(magnitudes[magnitudes > 0].min() * lowest)).astype("float16") > 0
        assert np.isfinite(np.float64(magnitudes.max() * highest).astype("float16"))
        assert np.isinf(np.float64(magnitudes.max() * highest * 1.001).astype("float16"))


def test_json_ready_values_hold_everything_and_the_scales() -> None:
    found = of(2.0**-26, 1.0)
    values = found.asdict()
    assert values["scales"] == (4.0, LARGEST)
    assert GradientRange(**{key: value for key, value in values.items() if key != "scales"}) == found


# --- several layers --------------------------------------------------------------------------------------------------


def test_common_scales_are_those_that_suit_every_layer() -> None:
    assert common_scales([of(2.0**-30, 1.0), of(2.0**-26, 8.0), of(0.0)]) == (2.0**6, LARGEST / 8)


def test_common_scales_cross_where_no_single_one_suits() -> None:
    lowest, highest = common_scales([of(2.0**-40), of(2.0**10)]) or (0.0, 0.0)
    assert lowest > highest


@pytest.mark.parametrize("ranges", [[], [of(0.0)]])
def test_there_are_no_common_scales_without_a_gradient(ranges: list[GradientRange]) -> None:
    assert common_scales(ranges) is None


# --- models ----------------------------------------------------------------------------------------------------------


def dense(units: int, value: float, name: str) -> Any:
    constant = keras.initializers.Constant(value)
    return layers.Dense(units, use_bias=False, kernel_initializer=constant, name=name)


def ready(model: Any) -> Any:
    model.compile("sgd", "mse", jit_compile=False)
    return model


def named(ranges: list[GradientRange]) -> dict[tuple[str, str], GradientRange]:
    return {(r.layer.rpartition("/")[2], r.kind): r for r in ranges}


def test_two_linear_layers_have_the_gradients_worked_out_on_paper() -> None:
    # x = 1; a = 2 x in two units, y = (1 * 2 + 1 * 2) = 4, loss (y - 1)^2: dL/dy = 6, dL/da = 6 each;
    # weights: head 6 * a = 12 each, body 6 * 1 * x = 6 each.
    model = ready(keras.Sequential([keras.Input((1,)), dense(2, 2.0, "body"), dense(1, 1.0, "head")]))
    ranges = gradient_ranges(model, [(np.ones((1, 1), "float32"), np.ones((1, 1), "float32"))])
    assert [(r.layer.rpartition("/")[2], r.kind) for r in ranges] == [
        ("body", "outputs"),
        ("head", "outputs"),
        ("body", "weights"),
        ("head", "weights"),
    ]
    assert [(r.count, r.smallest, r.largest) for r in ranges] == [(2, 6, 6), (1, 6, 6), (2, 6, 6), (2, 12, 12)]


def test_batches_are_gathered_and_the_loss_is_the_mean_over_each() -> None:
    # As above for a batch of two equal samples: the mean halves the gradient of each output; weights add up to the same.
    model = ready(keras.Sequential([keras.Input((1,)), dense(2, 2.0, "body"), dense(1, 1.0, "head")]))
    batch = np.ones((2, 1), "float32"), np.ones((2, 1), "float32")
    found = named(gradient_ranges(model, [batch, batch, batch]))
    assert [found["body", kind].count for kind in ("outputs", "weights")] == [3 * 2 * 2, 3 * 2]
    assert (found["head", "outputs"].largest, found["head", "weights"].largest) == (3.0, 12.0)


def test_layer_that_is_called_twice_has_both_of_its_outputs() -> None:
    # y = w (w x) with w = 2, x = 1: y = 4; dL/dy = 6 and dL/da = 12; dL/dw = 6 * 2 + 12 * 1 = 24.
    shared = dense(1, 2.0, "shared")
    x = keras.Input((1,))
    model = ready(keras.Model(x, shared(shared(x))))
    found = named(gradient_ranges(model, [(np.ones((1, 1), "float32"), np.ones((1, 1), "float32"))]))
    outputs, weights = found["shared", "outputs"], found["shared", "weights"]
    assert (outputs.count, outputs.smallest, outputs.largest) == (2, 6, 12)
    assert (weights.count, weights.largest) == (1, 24)


class Subclassed(keras.Model):
    """A model in whose list a nested model stands."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [keras.Sequential([dense(2, 2.0, "body")], name="inner"), dense(1, 1.0, "head")]

    def call(self, x: Any, training: bool = False) -> Any:
        for part in self.parts:
            x = part(x)
        return x


@pytest.mark.parametrize("kind", ["functional", "subclassed"])
def test_layers_in_nested_models_are_reached(kind: str) -> None:
    if kind == "functional":
        x = keras.Input((1,))
        model = keras.Model(x, dense(1, 1.0, "head")(keras.Sequential([dense(2, 2.0, "body")], name="inner")(x)))
    else:
        model = Subclassed()
    batch = np.ones((1, 1), "float32"), np.ones((1, 1), "float32")
    model(batch[0])
    found = named(gradient_ranges(ready(model), [batch]))
    assert {key: r.largest for key, r in found.items()} == {
        ("body", "outputs"): 6,
        ("head", "outputs"): 6,
        ("body", "weights"): 6,
        ("head", "weights"): 12,
    }


def test_attention_embedding_and_normalization_are_looked_into() -> None:
    x = keras.Input((5,), dtype="int32")
    body = layers.LayerNormalization()(layers.Embedding(10, 4)(x))
    body = layers.MultiHeadAttention(2, 2)(body, body)
    model = ready(keras.Model(x, layers.Dense(1)(layers.GlobalAveragePooling1D()(body))))
    batch = np.array([[1, 1, 2, 3, 4]]), np.ones((1, 1), "float32")
    found = gradient_ranges(model, [batch])
    weights = sum(r.count for r in found if r.kind == "weights")
    assert weights == model.count_params()
    embedding = next(r for r in found if "embedding" in r.layer and r.kind == "weights")
    assert embedding.zero == 6 / 10  # of ten rows, four were looked up


def test_nothing_is_left_on_the_layers_and_no_weight_is_changed() -> None:
    model = ready(
        keras.Sequential([keras.Input((1,)), dense(2, 2.0, "body"), layers.Dropout(0.5), dense(1, 1.0, "head")])
    )
    before = model.get_weights()
    gradient_ranges(model, [(np.ones((1, 1), "float32"), np.ones((1, 1), "float32"))])
    assert not [layer for layer in model._flatten_layers() if "call" in layer.__dict__]
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_layer_that_computes_in_16_bits_is_refused_for_its_gradients_have_lost_what_is_to_be_counted() -> None:
    model = ready(keras.Sequential([keras.Input((1,)), layers.Dense(1, dtype="mixed_float16", name="half")]))
    with pytest.raises(PrecisionError, match=r"half \(Dense\) computes in float16 whatever the policy"):
        gradient_ranges(model, [(np.ones((1, 1), "float32"), np.ones((1, 1), "float32"))])


def test_gradient_that_is_not_finite_in_float32_is_refused() -> None:
    model = ready(keras.Sequential([keras.Input((1,)), dense(1, 1.0, "body")]))
    with pytest.raises(ModelError, match="body holds inf or nan in float32 already"):
        gradient_ranges(model, [(np.full((1, 1), np.inf, "float32"), np.ones((1, 1), "float32"))])


# --- the picture -----------------------------------------------------------------------------------------------------


def spread(layer: str, center: float) -> GradientRange:
    values = 2.0 ** np.random.default_rng(0).normal(center, 3.0, 2000)
    return float16_range(layer, "outputs", [values.astype("float32")])


@pytest.mark.parametrize("centers", [[], [-20], [-26, -20, -14, 0, 14]])
def test_plot_is_a_picture_that_grows_with_the_layers(centers: list[float], tmp_path: Path) -> None:
    from PIL import Image

    plot([spread(f"block/dense_{i}", center) for i, center in enumerate(centers)], tmp_path / "plot.png")
    with Image.open(tmp_path / "plot.png") as image:
        pixels = np.asarray(image.convert("RGB"))
    assert math.prod(pixels.shape[:2]) > 100_000
    assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20
