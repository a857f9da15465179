"""What the trace of a model says of its layers: numbers worked out by hand, and nothing changed by looking."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from mp_hydra.audit.tracing import UntraceableError, trace
from mp_hydra.layer_overrides import located
from mp_hydra.precision import scoped_policy

BATCH = 4


def traced(build: Any, policy: str, x: Any) -> dict[str, Any]:
    """By name of a layer what it does."""
    with scoped_policy(policy, tf32=False):
        model = build()
        model(x)
        found = trace(model, x, BATCH)
        return {layer.name: found.layers[id(layer)] for layer, _ in located(model) if id(layer) in found.layers}


def perceptron() -> Any:
    import keras

    x = keras.Input((16,))
    y = keras.layers.Dense(8, activation="relu", name="body")(x)
    return keras.Model(x, keras.layers.Dense(2, dtype="float32", name="head")(y))


def convolution() -> Any:
    import keras

    x = keras.Input((6, 6, 3))
    y = keras.layers.Conv2D(8, 3, use_bias=False, name="conv")(x)
    y = keras.layers.DepthwiseConv2D(3, use_bias=False, name="depthwise")(y)
    y = keras.layers.BatchNormalization(name="norm")(y)
    return keras.Model(x, keras.layers.Dense(2, dtype="float32", name="head")(keras.layers.Flatten(name="flat")(y)))


def recurrent() -> Any:
    import keras

    x = keras.Input((5, 3))
    y = keras.layers.LSTM(8, name="lstm")(x)
    return keras.Model(x, keras.layers.Dense(2, dtype="float32", name="head")(y))


X = np.ones((BATCH, 16), "float32")
IMAGES = np.ones((BATCH, 6, 6, 3), "float32")
SERIES = np.ones((BATCH, 5, 3), "float32")


@pytest.mark.parametrize(("policy", "dtype"), [("mixed_float16", "float16"), ("mixed_bfloat16", "bfloat16")])
def test_a_layers_dtypes_outputs_and_flops_are_those_worked_out_by_hand(policy: str, dtype: str) -> None:
    found = traced(perceptron, policy, X)
    body, head = found["body"], found["head"]
    assert (body.computes_in, body.input_dtypes, body.output_dtypes) == (dtype, (dtype,), (dtype,))
    assert (head.computes_in, head.input_dtypes, head.output_dtypes) == ("float32", ("float32",), ("float32",))
    assert (body.output_elements, head.output_elements) == (4 * 8, 4 * 2)
    assert dict(body.flops) == {dtype: 2 * 4 * 16 * 8}
    assert dict(head.flops) == {"float32": 2 * 4 * 8 * 2}


def test_bytes_kept_are_what_the_backward_pass_reads() -> None:
    found = traced(perceptron, "mixed_bfloat16", X)
    # body: its input cast to 16 bits, for the gradient of the weights, and the result of its relu.
    assert found["body"].kept_bytes == 2 * 4 * 16 + 2 * 4 * 8
    # head: what it gets, cast to float32, and no cast of its weights; in float32 there is no cast, and it is the body's relu.
    assert found["head"].kept_bytes == 4 * 4 * 8
    assert (found["body"].kept_bytes_float32, found["head"].kept_bytes_float32) == (4 * 4 * 8, 0)


def test_convolutions_count_as_the_textbook_says_and_batch_normalisation_shows_as_float32() -> None:
    found = traced(convolution, "mixed_bfloat16", IMAGES)
    assert dict(found["conv"].flops) == {"bfloat16": 2 * (4 * 4 * 4 * 8) * 3 * 3 * 3}
    assert dict(found["depthwise"].flops) == {"bfloat16": 2 * (4 * 2 * 2 * 8) * 3 * 3}
    norm = found["norm"]
    assert (norm.computes_in, norm.input_dtypes, norm.output_dtypes) == ("float32", ("bfloat16",), ("bfloat16",))
    assert norm.work["float32"] > 0


@pytest.mark.parametrize("build", [perceptron, convolution, recurrent])
def test_the_float32_estimate_under_a_mixed_policy_is_what_the_float32_model_keeps(build: Any) -> None:
    x = {perceptron: X, convolution: IMAGES, recurrent: SERIES}[build]
    single, mixed = (sum_of(traced(build, policy, x)) for policy in ("float32", "mixed_bfloat16"))
    assert single[0] == single[1]  # under float32 both are one
    assert mixed[1] == single[1]


def sum_of(found: dict[str, Any]) -> tuple[int, int]:
    return sum(f.kept_bytes for f in found.values()), sum(f.kept_bytes_float32 for f in found.values())


def test_a_loop_over_time_counts_each_step() -> None:
    found = traced(recurrent, "mixed_bfloat16", SERIES)
    cell = found["lstm_cell"]
    assert cell.computes_in == "bfloat16"
    assert dict(cell.flops) == {"bfloat16": 5 * 2 * 4 * (3 + 8) * 4 * 8}  # steps, batch, inputs and state, four gates
    assert cell.kept_bytes > 5 * 4 * 8 * 2  # more than one state a step


def test_tracing_changes_no_variable_no_seed_and_leaves_no_loss() -> None:
    import keras

    with scoped_policy("float32", tf32=False):
        x = keras.Input((16,))
        y = keras.layers.BatchNormalization(name="norm")(x)
        y = keras.layers.Dropout(0.5, name="drop")(keras.layers.Dense(8, activity_regularizer="l2", name="body")(y))
        model = keras.Model(x, keras.layers.Dense(2, dtype="float32")(y))
        model(X)
        before = [v.numpy() for v in model.variables]
        states = random.getstate(), str(np.random.get_state())  # noqa: NPY002
        trace(model, X, BATCH)
        assert all(np.array_equal(a, b.numpy()) for a, b in zip(before, model.variables, strict=True))
        assert states == (random.getstate(), str(np.random.get_state()))  # noqa: NPY002
        model.compile("sgd", "mse")
        assert np.isfinite(model.fit(X, np.zeros((BATCH, 2)), verbose=0).history["loss"][0])


def test_several_inputs_are_traced_by_their_structure() -> None:
    import keras

    def two() -> Any:
        a, b = keras.Input((3,), name="a"), keras.Input((5,), name="b", dtype="int32")
        rows = keras.layers.Flatten()(keras.layers.Embedding(7, 2, name="rows")(b))
        return keras.Model({"a": a, "b": b}, keras.layers.Dense(2, name="head")(keras.layers.Concatenate()([a, rows])))

    x = {"a": np.ones((2, 3), "float32"), "b": np.ones((2, 5), "int32")}
    found = traced(two, "mixed_bfloat16", x)
    assert dict(found["head"].flops) == {"bfloat16": 2 * BATCH * (3 + 10) * 2}
    assert found["rows"].input_dtypes == ("int32",)


def test_a_model_that_needs_numbers_is_untraceable_with_the_reason() -> None:
    import keras

    class Net(keras.Model):
        def call(self, x: Any) -> Any:
            return x * float(keras.ops.max(x))

    with scoped_policy("float32", tf32=False):
        model = Net()
        model(X)
        with pytest.raises(UntraceableError, match=r"."):
            trace(model, X, BATCH)
