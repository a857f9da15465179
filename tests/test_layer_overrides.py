"""`precision.overrides`: which layers a pattern reaches, and that these really compute in what it says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from mp_hydra.config import InvalidConfigError
from mp_hydra.errors import ConfigError, PrecisionError, UserError
from mp_hydra.layer_overrides import Place, apply, assign, located, verify
from mp_hydra.precision import census, scoped_policy

PLACES = [
    Place("net", "", None),
    Place("stem", "stem", 0),
    Place("encoder", "encoder", 0),
    Place("dense_1", "encoder/dense_1", 2),
    Place("attention", "encoder/attention", 2),
    Place("attention/query", "encoder/attention/query", 4),
    Place("head", "head", 0),
]


# --- patterns --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ({}, {}),
        ({"head": "float32"}, {6: "float32"}),
        ({"encoder/.*": "float32"}, {3: "float32", 4: "float32", 5: "float32"}),
        ({"encoder": "float16"}, {2: "float16", 3: "float16", 4: "float16", 5: "float16"}),
        ({"attention": "float32"}, {4: "float32", 5: "float32"}),
        ({"attention": "float32", ".*query": "float16"}, {4: "float32", 5: "float16"}),
        ({"dense_.*": "float32"}, {3: "float32"}),
        ({"stem": "float32", "s.em": "float32"}, {1: "float32"}),
    ],
    ids=str,
)
def test_a_pattern_takes_the_layers_whose_whole_path_or_nesting_it_matches_and_what_they_hold(
    overrides: dict[str, str], expected: dict[int, str]
) -> None:
    assert assign(PLACES, overrides) == expected


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ({"hed": "float32"}, "precision.overrides=hed: matches no layer; did you mean head?"),
        ({"dense": "float32"}, "it must match whole paths, such as encoder/dense_1, dense_1"),
        ({"zzz": "float32"}, "the first paths are net, stem, encoder"),
        ({"(": "float32"}, "precision.overrides=(: is not a regular expression: missing )"),
        ({"head": "float32", "h.*": "float16"}, "ambiguous: head is to be float32 by head and float16 by h.*"),
    ],
    ids=str,
)
def test_a_pattern_that_matches_nothing_or_disagrees_is_one_line_with_near_misses(
    overrides: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        assign(PLACES, overrides)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


# --- models ----------------------------------------------------------------------------------------------------------


def functional() -> Any:
    import keras

    inner = keras.Input((8,))
    encoder = keras.Model(inner, keras.layers.LayerNormalization(name="norm")(keras.layers.Dense(8, name="d")(inner)))
    encoder.name = "encoder"
    x = keras.Input((8,))
    return keras.Model(x, keras.layers.Dense(2, dtype="float32", name="head")(encoder(x)))


def subclassed() -> Any:
    import keras

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.encoder = keras.Sequential([keras.layers.Dense(8, name="d")], name="encoder")
            self.head = keras.layers.Dense(2, dtype="float32", name="head")

        def call(self, x: Any) -> Any:
            return self.head(self.encoder(x))

    model = Net()
    model(np.zeros((1, 8), "float32"))
    return model


def sequential() -> Any:
    import keras

    encoder = keras.Sequential([keras.layers.Dense(8, name="d")], name="encoder")
    return keras.Sequential(
        [keras.Input((8,)), encoder, keras.layers.Dense(2, dtype="float32", name="head")], name="net"
    )


@pytest.mark.parametrize("build", [functional, subclassed, sequential])
@pytest.mark.parametrize("pattern", ["encoder", "(net/)?encoder/.*", "d|.*/d"])
def test_a_layer_inside_a_part_computes_in_what_its_pattern_says_whatever_kind_of_model(
    build: Any, pattern: str
) -> None:
    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        model = build()
        x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
        layer = next(layer for layer, _ in located(model) if layer.name == "d")
        before = [v.numpy() for v in layer.variables]
        assert str(layer(x).dtype.name) == "bfloat16"
        verify(model, x, apply(model, {pattern: "float32"}, scope))
        records = {record.path.rpartition("/")[2]: record for record in census(model, scope)}
        assert (records["d"].compute_dtype, records["d"].overridden, records["d"].dtype_given) == (
            "float32",
            True,
            True,
        )
        assert not records["head"].overridden
        np.testing.assert_allclose(layer(x), x @ before[0] + before[1], rtol=1e-5, atol=1e-6)  # float32 digits


def kinds() -> dict[str, Any]:
    import keras

    k = keras.layers
    return {
        "Dense": lambda **a: k.Dense(4, activation="gelu", kernel_initializer="ones", **a),
        "Conv2D": lambda **a: keras.Sequential([k.Reshape((2, 2, 2)), k.Conv2D(3, 2, **a)]),
        "BatchNormalization": k.BatchNormalization,
        "LayerNormalization": k.LayerNormalization,
        "MultiHeadAttention": lambda **a: _Self(k.MultiHeadAttention(2, 4, **a)),
        "LSTM": lambda **a: keras.Sequential([k.Reshape((4, 2)), k.LSTM(3, **a)]),
        "GRU, both ways": lambda **a: keras.Sequential([k.Reshape((4, 2)), k.Bidirectional(k.GRU(3, **a), **a)]),
        "Softmax": k.Softmax,
    }


def _Self(attention: Any) -> Any:  # noqa: N802 - as a layer
    import keras

    x = keras.Input((8,))
    sequence = keras.layers.Reshape((4, 2), dtype="float32")(x)
    return keras.Model(x, attention(sequence, sequence))


@pytest.mark.parametrize("kind", [
    "Dense", "Conv2D", "BatchNormalization", "LayerNormalization", "MultiHeadAttention", "LSTM", "GRU, both ways", "Softmax",
])  # fmt: skip
def test_a_layer_set_to_a_dtype_after_it_was_built_gives_bit_for_bit_what_one_constructed_with_it_gives(
    kind: str,
) -> None:
    import keras
    import tensorflow as tf

    x = np.random.default_rng(0).normal(size=(4, 8)).astype("float32")
    results = []
    for given in (True, False):
        with scoped_policy("mixed_bfloat16", tf32=False) as scope:
            keras.utils.set_random_seed(1)
            layer = kinds()[kind](**({"dtype": "float32"} if given else {}))
            inputs = keras.Input((8,))
            model = keras.Model(inputs, layer(inputs), name="net")
            if not given:
                apply(model, {layer.name: "float32"}, scope)
            with tf.GradientTape() as tape:
                tape.watch(source := tf.constant(x))
                y = model(source, training=True)
            gradients = tape.gradient(y, [source, *model.trainable_variables])
            results.append([np.array(part) for part in (y, *map(tf.convert_to_tensor, gradients))])
            assert {str(part.dtype) for part in results[-1]} == {"float32"}
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_an_override_to_float16_under_fp32_computes_in_float16_with_float32_variables() -> None:
    with scoped_policy("float32", tf32=False) as scope:
        model = functional()
        apply(model, {"encoder/d": "float16"}, scope)
        layer = next(layer for layer, _ in located(model) if layer.name == "d")
        assert (layer.compute_dtype, layer.variable_dtype) == ("float16", "float32")
        assert layer(np.ones((1, 8), "float32")).dtype.name == "float16"


def test_a_model_that_was_used_before_is_traced_anew() -> None:
    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        import keras

        model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(2, name="d")])
        x = np.ones((1, 8), "float32") / 3
        assert model.predict(x, verbose=0).dtype.name == "bfloat16"
        apply(model, {"d": "float32"}, scope)
        assert model.predict(x, verbose=0).dtype.name == "float32"


def test_no_override_changes_nothing() -> None:
    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        model = functional()
        before = census(model, scope)
        assert apply(model, {}, scope) == []
        assert census(model, scope) == before


def test_a_layer_whose_code_fixes_its_dtype_is_refused() -> None:
    import keras
    import tensorflow as tf

    class Stubborn(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return tf.cast(x, "bfloat16")

    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        model = keras.Sequential([keras.Input((8,)), Stubborn(name="stubborn")])
        x = np.ones((1, 8), "float32")
        with pytest.raises(
            PrecisionError, match=r"stubborn \(Stubborn\) was told to compute in float32 but returns bfloat16"
        ):
            verify(model, x, apply(model, {"stubborn": "float32"}, scope))


# --- in a run --------------------------------------------------------------------------------------------------------


def prepared(*words: str) -> Any:
    from mp_hydra.app import composed
    from mp_hydra.preparation import load_data, prepare

    config = composed(["model=mlp", "model.widths=[8]", *words])
    with scoped_policy(config["precision"]["policy"], tf32=False) as scope:
        return prepare(config, load_data(config), scope)


@pytest.mark.parametrize(
    ("words", "mode", "computed"),
    [
        (("precision=mixed_float16",), "dynamic", {"float16", "float32"}),
        (
            ("precision=mixed_bfloat16", "model.widths=[8,8]", "precision.overrides={dense_1: float16}"),
            "dynamic",
            {"float16", "bfloat16", "float32"},
        ),
        (
            ("precision=mixed_float16", "model.widths=[8,8]", "precision.overrides={dense_1|flatten: float32}"),
            "dynamic",
            {"float16", "float32"},
        ),
        (
            ("precision=mixed_float16", "precision.overrides={flatten: float32, dense_1: float16, logits: float32}"),
            "dynamic",
            {"float16", "float32"},
        ),
        (("precision=mixed_bfloat16", "precision.overrides={}"), "none", {"bfloat16", "float32"}),
        (("precision=fp32", "precision.overrides={dense_1: float16}"), "dynamic", {"float16", "float32"}),
        (
            ("precision=fp32", "precision.overrides={dense_1: float16}", "loss_scale=dynamic"),
            "dynamic",
            {"float16", "float32"},
        ),
    ],
    ids=lambda value: str(sorted(value) if isinstance(value, set) else value),  # the same in every process
)
def test_the_scaler_follows_what_the_layers_compute_in_after_the_overrides(
    words: tuple[str, ...], mode: str, computed: set[str]
) -> None:
    made = prepared(*words)
    assert made.optimizer.mode == mode
    assert {record.compute_dtype for record in made.layers} == computed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "precision.overrides={dense_l: float32}",
            "precision.overrides=dense_l: matches no layer; did you mean dense_1",
        ),
        (
            "precision.overrides={dense_1: float64}",
            "choose one of float32, float16, bfloat16 in place of dense_1: float64",
        ),
        ("precision.overrides={[a: float32}", "precision.overrides"),
        (
            "precision.overrides={.*: float32}",
            "precision.overrides leaves no layer with weights that computes in bfloat16",
        ),
        ("precision.overrides={dense_.: bfloat16, .*_1: float32}", "ambiguous: dense_1"),
        ("precision.overrides=[a]", "precision.overrides"),
    ],
)
def test_an_override_that_cannot_be_used_is_refused(words: str, message: str) -> None:
    with pytest.raises((UserError, InvalidConfigError)) as caught:
        prepared(words, "precision=mixed_bfloat16")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
