"""The policy in force while a model is built, the census of its layers, and what `probe` refuses."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.errors import PrecisionError
from mp_hydra.precision import (
    LayerRecord,
    census,
    needs_loss_scaling,
    require,
    resolved_name,
    scoped_policy,
)
from mp_hydra.probe import probe

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

MIXED = ("mixed_float16", "mixed_bfloat16")
COMPUTE = {"float32": "float32", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


def settings() -> tuple[str, str, bool]:
    import keras
    import tensorflow as tf

    return (
        keras.config.dtype_policy().name,
        keras.config.floatx(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )


@pytest.fixture
def odd_settings() -> Any:
    """Settings that no run would choose, so that a restoration shows; the real ones come back afterwards."""
    import keras
    import tensorflow as tf

    before = keras.config.dtype_policy(), keras.config.floatx(), settings()[2]
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("bfloat16")
    tf.config.experimental.enable_tensor_float_32_execution(False)
    yield ("bfloat16", "float64", False)
    keras.config.set_dtype_policy(before[0])
    keras.config.set_floatx(before[1])
    tf.config.experimental.enable_tensor_float_32_execution(before[2])


# --- scoped_policy ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["float32", *MIXED])
@pytest.mark.parametrize("tf32", [True, False])
def test_scope_sets_policy_floatx_and_tf32_for_every_policy_and_restores_them(
    odd_settings: Any, policy: str, tf32: bool
) -> None:
    with scoped_policy(policy, tf32=tf32):
        assert settings() == (policy, "float32", tf32)
    assert settings() == odd_settings


def test_scope_restores_after_an_exception_and_lets_it_through(odd_settings: Any) -> None:
    with pytest.raises(ZeroDivisionError), scoped_policy("mixed_float16", tf32=True):
        _ = 1 / 0
    assert settings() == odd_settings


def test_scope_restores_after_an_inner_clear_session(odd_settings: Any) -> None:
    import keras

    with scoped_policy("mixed_float16", tf32=True):
        keras.utils.clear_session()
    assert settings() == odd_settings


def test_scopes_can_be_nested_and_sequential() -> None:
    with scoped_policy("mixed_float16", tf32=True):
        with scoped_policy("float32", tf32=False):
            assert settings() == ("float32", "float32", False)
        assert settings() == ("mixed_float16", "float32", True)


def test_constructor_of_layers_is_untouched_after_the_scope_and_after_an_exception_in_it() -> None:
    import keras

    before = keras.layers.Layer.__init__
    with scoped_policy("float32", tf32=False):
        assert keras.layers.Layer.__init__ is not before
    assert keras.layers.Layer.__init__ is before
    with ExitStack() as stack:
        stack.enter_context(pytest.raises(KeyError))
        stack.enter_context(scoped_policy("float32", tf32=False))
        raise KeyError
    assert keras.layers.Layer.__init__ is before


@pytest.mark.parametrize("name", ["float16", "Mixed_Float16", "mixed-float16", "16", ""])
def test_unknown_policy_is_refused_before_anything_changes(name: str) -> None:
    before = settings()
    with pytest.raises(PrecisionError, match="choose one of float32, mixed_float16, mixed_bfloat16"):
        scoped_policy(name, tf32=True).__enter__()
    assert settings() == before


# --- census and require ----------------------------------------------------------------------------------------------


def dense_model(**head: Any) -> Any:
    import keras

    layers = [keras.Input((4,)), keras.layers.Dense(8, name="body"), keras.layers.Dense(3, name="head", **head)]
    return keras.Sequential(layers)


@pytest.mark.parametrize("policy", ["float32", *MIXED])
def test_census_gives_every_layer_its_dtype_parameters_and_whether_dtype_was_given(policy: str) -> None:
    with scoped_policy(policy, tf32=False) as scope:
        body, head = census(dense_model(dtype="float32"), scope)
    assert body.class_name == "Dense"
    assert body.path.endswith("body")
    assert (body.policy, body.compute_dtype, body.parameters, body.dtype_given) == (policy, COMPUTE[policy], 40, False)
    assert (head.policy, head.compute_dtype, head.parameters, head.dtype_given) == ("float32", "float32", 27, True)
    assert set(body.asdict()) == {
        "path",
        "class_name",
        "policy",
        "compute_dtype",
        "parameters",
        "dtype_given",
        "overridden",
    }


def test_loss_scaling_is_needed_exactly_where_some_layer_computes_in_float16() -> None:
    for policy, needed in (("float32", False), ("mixed_float16", True), ("mixed_bfloat16", False)):
        with scoped_policy(policy, tf32=False) as scope:
            assert needs_loss_scaling(census(dense_model(), scope)) is needed


@pytest.mark.parametrize("policy", MIXED)
def test_head_with_a_dtype_of_its_own_is_accepted(policy: str) -> None:
    with scoped_policy(policy, tf32=False) as scope:
        require(census(dense_model(dtype="float32"), scope), policy)


@pytest.mark.parametrize("policy", MIXED)
def test_class_that_pins_itself_through_super_is_accepted(policy: str) -> None:
    import keras

    class Careful(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__(dtype="float32")

        def call(self, x: Any) -> Any:
            return x * 2.0

    with scoped_policy(policy, tf32=False) as scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), Careful()])
        require(census(model, scope), policy)


@pytest.mark.parametrize("policy", MIXED)
def test_layer_built_before_the_scope_is_named_with_that_reason(policy: str) -> None:
    import keras

    early = keras.layers.Dense(3, name="early")
    with scoped_policy(policy, tf32=False) as scope:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), early])
        records = census(model, scope)
    with pytest.raises(PrecisionError, match=r"early \(Dense\) computes in float32.*before the policy was set"):
        require(records, policy)


def test_mixed_layer_that_leaks_into_an_fp32_scope_is_named() -> None:
    import keras

    with scoped_policy("mixed_float16", tf32=False):
        leaked = keras.layers.Dense(3, name="leaked")
    with scoped_policy("float32", tf32=False) as scope:
        records = census(keras.Sequential([keras.Input((4,)), leaked]), scope)
    with pytest.raises(
        PrecisionError, match=r"leaked \(Dense\) computes in float16, not in float32: it was constructed"
    ):
        require(records, "float32")


def test_layer_built_after_an_inner_change_of_policy_is_named_with_that_reason() -> None:
    import keras

    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        first = keras.layers.Dense(4)
        keras.config.set_dtype_policy("float32")
        records = census(keras.Sequential([keras.Input((4,)), first, keras.layers.Dense(3, name="late")]), scope)
    with pytest.raises(PrecisionError, match=r"late \(Dense\) computes in float32.*it took another policy"):
        require(records, "mixed_bfloat16")


def test_layer_built_in_another_thread_is_named_with_that_reason() -> None:
    import keras

    made: list[Any] = []
    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        thread = threading.Thread(target=lambda: made.append(keras.layers.Dense(3, name="elsewhere")))
        thread.start()
        thread.join()
        records = census(keras.Sequential([keras.Input((4,)), keras.layers.Dense(4), *made]), scope)
    with pytest.raises(PrecisionError, match=r"elsewhere \(Dense\) computes in float32.*a thread"):
        require(records, "mixed_bfloat16")


def test_error_counts_the_other_layers_that_are_wrong() -> None:
    records = [record(f"layer_{i}", "float32", given=None) for i in range(3)]
    with pytest.raises(PrecisionError, match=r"layer_0 \(Dense\) \(and 2 more\)"):
        require(records, "mixed_float16")


def record(path: str, dtype: str, *, parameters: int = 1, given: bool | None = False) -> LayerRecord:
    return LayerRecord(path, "Dense", dtype, dtype, parameters, given)


def test_layers_whose_whole_path_matches_a_pinned_pattern_may_differ() -> None:
    records = [record("body/a", "float16"), record("tail/b", "float32")]
    require(records, "mixed_float16", pinned=["tail/.*"])
    with pytest.raises(PrecisionError, match="tail/b"):
        require([*records, record("tail/b/c", "float32")], "mixed_float16", pinned=["tail/b/c"])


def test_pinned_pattern_that_matches_no_layer_is_refused_and_shows_paths() -> None:
    with pytest.raises(PrecisionError, match=r"precision.pinned: 'tail' matches no layer; the first paths are body/a"):
        require([record("body/a", "float16")], "mixed_float16", pinned=["tail"])


def test_pinned_pattern_that_is_no_regular_expression_is_refused() -> None:
    with pytest.raises(PrecisionError, match=r"precision.pinned: '\(' is not a regular expression"):
        require([record("body/a", "float16")], "mixed_float16", pinned=["("])


@pytest.mark.parametrize("policy", MIXED)
def test_fp32_model_from_a_file_is_refused_under_mixed_for_the_policy_reaches_no_layer(
    policy: str, tmp_path: Path
) -> None:
    import keras

    with scoped_policy("float32", tf32=False):
        dense_model().save(tmp_path / "fp32.keras")
    with scoped_policy(policy, tf32=False) as scope:
        records = census(keras.models.load_model(tmp_path / "fp32.keras"), scope)
    with pytest.raises(PrecisionError, match=r"no layer with weights computes in .*loaded from a file"):
        require(records, policy)


def test_mixed_model_from_a_file_is_accepted_under_the_same_policy(tmp_path: Path) -> None:
    import keras

    with scoped_policy("mixed_bfloat16", tf32=False):
        dense_model(dtype="float32").save(tmp_path / "mixed.keras")
    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        records = census(keras.models.load_model(tmp_path / "mixed.keras"), scope)
    require(records, "mixed_bfloat16")


def test_layers_without_weights_do_not_count_as_reached() -> None:
    records = [record("flatten", "float16", parameters=0), record("dense", "float32", given=True)]
    with pytest.raises(PrecisionError, match="all 1 of them"):
        require(records, "mixed_float16")


def composite(name: str) -> Any:
    """One model of each kind whose layers hide inside others: (model, a batch, class names that the census must hold)."""
    import keras

    layers = keras.layers
    if name == "nested":
        inner = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="inside")], name="inner")
        x = keras.Input((4,))
        return (
            keras.Model(x, layers.Dense(2, dtype="float32")(inner(x))),
            np.ones((2, 4), "float32"),
            ["Dense", "Dense"],
        )
    if name == "subclassed":

        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.blocks = [layers.Dense(4), layers.Dense(4)]
                self.head = layers.Dense(2, dtype="float32")

            def call(self, x: Any) -> Any:
                for block in self.blocks:
                    x = block(x)
                return self.head(x)

        return Model(), np.ones((2, 4), "float32"), ["Model", "Dense", "Dense", "Dense"]
    wrapped: dict[str, Callable[[], list[Any]]] = {
        "rnn_cells": lambda: [layers.RNN([layers.LSTMCell(3), layers.GRUCell(3)])],
        "bidirectional": lambda: [layers.Bidirectional(layers.LSTM(3))],
        "time_distributed": lambda: [layers.TimeDistributed(layers.Dense(3)), layers.GlobalAveragePooling1D()],
    }
    held = {
        "rnn_cells": ["RNN", "StackedRNNCells", "LSTMCell", "GRUCell"],
        "bidirectional": ["Bidirectional", "LSTM", "LSTMCell", "LSTM", "LSTMCell"],
        "time_distributed": ["TimeDistributed", "Dense", "GlobalAveragePooling1D"],
        "attention": ["MultiHeadAttention", *["EinsumDense"] * 4, "Softmax"],
    }
    x = keras.Input((5, 4))
    if name == "attention":
        body = layers.Flatten()(layers.MultiHeadAttention(2, 2)(x, x))
    else:
        body = x
        for layer in wrapped[name]():
            body = layer(body)
    return keras.Model(x, layers.Dense(2, dtype="float32")(body)), np.ones((2, 5, 4), "float32"), held[name]


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize(
    "name", ["nested", "subclassed", "attention", "rnn_cells", "bidirectional", "time_distributed"]
)
def test_census_reaches_layers_inside_others_and_accepts_them(name: str, policy: str) -> None:
    with scoped_policy(policy, tf32=False) as scope:
        model, batch, held = composite(name)
        probe(model, batch)
        records = census(model, scope)
        require(records, policy)
    classes = [r.class_name for r in records]
    for class_name in set(held):
        assert classes.count(class_name) >= held.count(class_name), class_name
    assert sum(r.parameters for r in records) == model.count_params()


@pytest.mark.parametrize("name", ["attention", "rnn_cells", "bidirectional", "time_distributed"])
def test_wrapper_with_sublayers_built_before_the_scope_is_refused(name: str) -> None:
    model, batch, _ = composite(name)
    with scoped_policy("mixed_bfloat16", tf32=False) as scope:
        probe(model, batch)
        with pytest.raises(PrecisionError, match="constructed before the policy was set"):
            require(census(model, scope), "mixed_bfloat16")


# --- probe: the head -------------------------------------------------------------------------------------------------


def head_layers(head: str) -> list[Any]:
    """The last layers of a model, right or wrong in the way that `head` says; the head proper is named head."""
    from keras import layers

    activation = {"logits": None, "float32": "softmax", "sigmoid_cast": "sigmoid"}.get(head, "softmax")
    if head == "softmax_layer":
        return [
            layers.Dense(3, dtype="float32"),
            layers.Softmax(name="head"),
            layers.Activation("linear", dtype="float32"),
        ]
    found = [layers.Dense(3, name="head", activation=activation, dtype="float32" if head == "float32" else None)]
    if head in ("softmax_cast", "sigmoid_cast"):
        found.append(layers.Activation("linear", dtype="float32", name="cast"))
    if head == "softmax_reshape":
        found += [layers.Reshape((3, 1)), layers.Identity(dtype="float32")]
    return found


def headed(kind: str, head: str) -> Any:
    """A model of the kind with such a head."""
    import keras

    layers = keras.layers
    if kind == "functional":
        x = y = keras.Input((4,))
        for layer in [layers.Dense(4), *head_layers(head)]:
            y = layer(y)
        return keras.Model(x, y)
    if kind == "sequential":
        return keras.Sequential([layers.Dense(4), *head_layers(head)])
    if kind == "nested":
        x = keras.Input((4,))
        return keras.Model(x, keras.Sequential([keras.Input((4,)), layers.Dense(4), *head_layers(head)])(x))

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.parts = [layers.Dense(4), *head_layers(head)]

        def call(self, x: Any) -> Any:
            for part in self.parts:
                x = part(x)
            return x

    return Model()


BATCH = np.array([[1, 2, 3, 4], [4, -3, 2, 1]], "float32")
KINDS = ("functional", "sequential", "nested", "subclassed")
WRONG = ("logits", "softmax", "softmax_cast", "sigmoid_cast", "softmax_reshape", "softmax_layer")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", WRONG)
def test_16_bit_head_is_refused_by_name_in_every_kind_of_model(kind: str, head: str) -> None:
    policy = MIXED[WRONG.index(head) % 2]
    with scoped_policy(policy, tf32=False):
        model = headed(kind, head)
        with pytest.raises(PrecisionError, match=rf"the head, layer (\S*/)?head .*{COMPUTE[policy]}"):
            probe(model, BATCH)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_head_is_accepted_in_every_kind_of_model(kind: str) -> None:
    with scoped_policy("mixed_float16", tf32=False):
        outputs = probe(headed(kind, "float32"), BATCH)
    assert outputs.dtype == "float32"
    assert outputs.shape == (2, 3)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", WRONG)
def test_fp32_model_is_never_refused_for_its_head(kind: str, head: str) -> None:
    with scoped_policy("float32", tf32=False):
        probe(headed(kind, head), BATCH)


def test_16_bit_logits_cast_to_float32_are_accepted() -> None:
    import keras

    with scoped_policy("mixed_bfloat16", tf32=False):
        layers = [keras.Input((4,)), keras.layers.Dense(3), keras.layers.Activation("linear", dtype="float32")]
        assert probe(keras.Sequential(layers), BATCH).dtype == "float32"


def test_16_bit_softmax_cast_by_an_operation_is_refused_in_a_subclassed_model() -> None:
    import keras

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.head = keras.layers.Dense(3, activation="softmax")

        def call(self, x: Any) -> Any:
            return keras.ops.cast(self.head(x), "float32")

    with scoped_policy("mixed_bfloat16", tf32=False), pytest.raises(PrecisionError, match="computes its softmax"):
        probe(Model(), BATCH)


def test_16_bit_tanh_inside_a_model_with_float32_head_is_accepted_for_black_images_too() -> None:
    import keras

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body = keras.layers.Dense(3, activation="tanh")
            self.head = keras.layers.Dense(3, dtype="float32")

        def call(self, x: Any) -> Any:
            return self.head(self.body(x))

    with scoped_policy("mixed_float16", tf32=False):
        probe(Model(), np.zeros((2, 4), "float32"))


def test_second_output_in_16_bits_is_refused() -> None:
    import keras

    with scoped_policy("mixed_float16", tf32=False):
        x = keras.Input((4,))
        model = keras.Model(x, [keras.layers.Dense(2, dtype="float32")(x), keras.layers.Dense(2, name="second")(x)])
        with pytest.raises(PrecisionError, match="float16 outputs"):
            probe(model, BATCH)


def test_probe_leaves_no_override_on_the_layers_and_trains_nothing() -> None:
    with scoped_policy("mixed_float16", tf32=False):
        for kind in KINDS:
            model = headed(kind, "float32")
            probe(model, BATCH)
            assert not any("call" in vars(layer) for layer in model._flatten_layers()), kind


# --- probe: integer ids ----------------------------------------------------------------------------------------------

IDS = np.array([[3001, 3003, 7], [1, 2, 3]], "int32")


def reader(kind: str) -> Any:
    import keras

    layers = keras.layers
    tail = [layers.Flatten(), layers.Dense(2, dtype="float32")]
    if kind == "sequential_without_input":
        return keras.Sequential([layers.Embedding(4000, 4, name="ids"), *tail])
    if kind != "subclassed":
        x = y = keras.Input((3,), dtype="int32" if kind == "int_input" else None)
        if kind == "float_input_reshaped":
            y = layers.Reshape((3, 1))(y)
        y = layers.Embedding(4000, 4, name="ids")(y)
        for layer in tail:
            y = layer(y)
        return keras.Model(x, y)

    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.ids = layers.Embedding(4000, 4, name="ids")
            self.tail = tail

        def call(self, x: Any) -> Any:
            x = self.ids(x)
            for layer in self.tail:
                x = layer(x)
            return x

    return Model()


@pytest.mark.parametrize(("policy", "limit"), [("mixed_float16", 2048), ("mixed_bfloat16", 256)])
@pytest.mark.parametrize(
    ("kind", "ids"),
    [
        ("sequential_without_input", IDS),
        ("float_input_reshaped", IDS),
        ("subclassed", IDS.astype("float32")),
    ],
)
def test_ids_that_reach_an_embedding_as_16_bit_floats_are_refused(kind: str, ids: Any, policy: str, limit: int) -> None:
    with scoped_policy(policy, tf32=False):
        model = reader(kind)
        with pytest.raises(PrecisionError, match=rf"ids \(Embedding\) receives its ids as {COMPUTE[policy]}.*{limit};"):
            probe(model, ids)


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("kind", ["int_input", "subclassed"])
def test_ids_that_stay_integers_are_accepted(kind: str, policy: str) -> None:
    with scoped_policy(policy, tf32=False):
        assert probe(reader(kind), IDS).shape == (2, 2)


@pytest.mark.parametrize("policy", MIXED)
def test_float_input_right_before_an_embedding_is_accepted_for_the_ids_arrive_in_float32(policy: str) -> None:
    import keras

    with scoped_policy(policy, tf32=False):
        model = reader("float_input")
        probe(model, IDS)
        rows = keras.Model(model.inputs, model.get_layer("ids").output)(IDS)
        right = keras.ops.cast(model.get_layer("ids").embeddings.numpy()[IDS], rows.dtype)
    np.testing.assert_array_equal(rows.numpy().astype("float32"), right.numpy().astype("float32"))


@pytest.mark.parametrize("kind", ["sequential_without_input", "float_input_reshaped", "int_input", "subclassed"])
def test_ids_are_never_refused_in_fp32(kind: str) -> None:
    with scoped_policy("float32", tf32=False):
        probe(reader(kind), IDS)


# --- names -----------------------------------------------------------------------------------------------------------


def test_tf32_comes_to_fp32_with_a_remark_where_no_device_has_it() -> None:
    name, remark = resolved_name("tf32", [{"compute_capability": None}])
    assert name == "fp32"
    assert remark is not None
    assert "8.0" in remark
    assert resolved_name("tf32", [{"compute_capability": [8, 0]}]) == ("tf32", None)
    assert resolved_name("fp32", [{"compute_capability": None}]) == ("fp32", None)
