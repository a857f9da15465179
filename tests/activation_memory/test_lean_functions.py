from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.activation_memory import functions
from mp_hydra.activation_memory.activations import gelu
from mp_hydra.activation_memory.functions import lean_functions, missing

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH, LENGTH, WIDTH, HEADS = 4, 32, 16, 4


def _kept(function: Callable[[Any], Any], shape: tuple[int, ...], dtype: str) -> dict[str, int]:
    """Bytes of the forward pass' tensors that its gradient reads, by dtype; of tensors as large as the input or larger."""
    import tensorflow as tf

    marks: list[int] = []

    def step(x: Any, scale: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = function(x)
        marks.append(len(tf.compat.v1.get_default_graph().get_operations()))
        return tape.gradient(y, x, tf.fill(tf.shape(y), tf.cast(scale, y.dtype)))

    graph = (
        tf.function(step, autograph=False).get_concrete_function(tf.TensorSpec(shape, dtype), tf.TensorSpec(())).graph
    )
    forward = {op.name for op in graph.get_operations()[: marks[0]]}
    kept: dict[str, tuple[str, int]] = {}
    seen: set[str] = set()
    waiting = [graph.outputs[0].op]
    while waiting:
        op = waiting.pop()
        if op.name in seen or op.name in forward:
            continue
        seen.add(op.name)
        for tensor in op.inputs:
            large = tensor.shape.is_fully_defined() and tensor.shape.num_elements() >= np.prod(shape) // 8
            if tensor.op.name not in forward:
                waiting.append(tensor.op)
            elif (
                large and tensor.op.type != "Const" and op.type not in {"Shape", "ShapeN", "Fill", "ZerosLike", "Size"}
            ):
                source = tensor
                while source.op.type in {"Identity", "IdentityN", "Reshape"}:  # the same buffer
                    source = source.op.inputs[source.value_index if source.op.type == "IdentityN" else 0]
                kept[source.name] = (source.dtype.name, source.shape.num_elements() * source.dtype.size)
    total: dict[str, int] = {}
    for name, size in kept.values():
        total[name] = total.get(name, 0) + size
    return total


def _activation(name: str) -> Any:
    import keras

    if name == "gelu_tanh":
        return lambda x: keras.activations.gelu(x, approximate=True)
    return getattr(keras.activations, name)


@pytest.mark.parametrize(
    ("name", "stock_tensors"),
    [("gelu", 3), ("gelu_tanh", 4), ("silu", 1), ("hard_silu", 3), ("mish", 2), ("celu", 2), ("hard_tanh", 2)],
)
def test_an_activation_keeps_its_input_alone(name: str, stock_tensors: int) -> None:
    shape = (64, 128)
    for lean, tensors in ((False, stock_tensors), (True, 1)):
        with lean_functions(lean):
            assert _kept(_activation(name), shape, "bfloat16") == {"bfloat16": tensors * 64 * 128 * 2}


def test_dropout_keeps_a_bit_an_element_where_keras_keeps_a_byte() -> None:
    import keras

    for lean, kept in ((False, {"bool": 64 * 128}), (True, {"uint8": 64 * 128 // 8})):
        with lean_functions(lean):
            assert _kept(lambda x: keras.random.dropout(x, 0.3, seed=1), (64, 128), "bfloat16") == kept


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_attention_keeps_nothing_in_float32_and_nothing_of_the_size_of_its_scores(dropout: float) -> None:
    import keras

    layer = keras.layers.MultiHeadAttention(HEADS, WIDTH // HEADS, dropout=dropout, dtype="mixed_bfloat16")
    shape = (BATCH, LENGTH, WIDTH)
    layer.build(shape, shape)
    scores = BATCH * HEADS * LENGTH * LENGTH
    kept = {}
    for lean in (False, True):
        with lean_functions(lean):
            kept[lean] = _kept(lambda x: layer(x, x, training=True), shape, "bfloat16")
    if dropout:
        assert kept[False]["bool"] >= scores  # so that this would see it
        assert kept[False]["bfloat16"] > 4 * scores
        assert kept[True]["uint8"] == scores // 8
    else:
        assert kept[False]["float32"] >= 4 * scores
    assert set(kept[True]) <= {"bfloat16", "uint8"}
    # Queries, keys, values (and the weights of the four projections, which are not activations).
    assert kept[True]["bfloat16"] <= 2 * (3 * BATCH * LENGTH * WIDTH + 4 * WIDTH * WIDTH)


def test_a_model_trains_with_them_as_it_does_without() -> None:
    """In float32, where the two differ by rounding alone, whatever is dropped."""
    import keras

    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(8, 8, 12)).astype("float32"), rng.integers(0, 3, 8)
    losses = []
    for lean in (False, True):
        keras.utils.set_random_seed(3)
        inputs = keras.Input((8, 12))
        hidden = keras.layers.MultiHeadAttention(2, 6, dropout=0.2)(inputs, inputs)
        hidden = keras.layers.Dense(12, activation="gelu")(hidden)
        hidden = keras.layers.Dropout(0.2)(keras.layers.Activation("mish")(hidden))
        model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Flatten()(hidden)))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        model.compile("sgd", loss, jit_compile=False)
        with lean_functions(lean):
            losses.append(model.fit(x, y, batch_size=8, epochs=3, shuffle=False, verbose=0).history["loss"])
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-4)


def test_every_function_is_found_in_this_keras() -> None:
    assert missing() == []


def test_a_function_that_keras_does_not_have_or_has_otherwise_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import keras.src.backend.tensorflow.nn as keras_nn

    monkeypatch.setattr(keras_nn, "gelu", lambda x, approximate, new: x)
    gone = functions._Target(functions._NN, "no_such_function", lambda x: x)
    nowhere = functions._Target("keras.src.no_such_module", "gelu", lambda x: x)
    changed = functions._Target(functions._NN, "gelu", gelu)
    assert [functions._install(target) for target in (gone, nowhere, changed)] == [False] * 3
    assert gone.path == "keras.src.backend.tensorflow.nn.no_such_function"


def test_names_and_signatures_of_keras_functions_stay() -> None:
    import inspect

    import keras
    import keras.src.backend.tensorflow.nn as keras_nn

    missing()
    assert list(inspect.signature(keras_nn.gelu).parameters) == ["x", "approximate"]
    assert keras_nn.gelu.__name__ == "gelu"

    class Own(keras.layers.MultiHeadAttention):
        pass

    # How Keras finds out whether a subclass has an attention of its own.
    assert Own._compute_attention is keras.layers.MultiHeadAttention._compute_attention


def _keeps_only_input() -> bool:
    return _kept(_activation("gelu"), (64, 128), "bfloat16") == {"bfloat16": 64 * 128 * 2}


def test_blocks_nest_and_end_with_an_error() -> None:
    with lean_functions():
        with lean_functions(on=False):
            assert not _keeps_only_input()
        assert _keeps_only_input()
        with pytest.raises(KeyError), lean_functions(on=False):
            raise KeyError
        assert _keeps_only_input()
    assert not _keeps_only_input()


def test_another_thread_is_left_alone() -> None:
    found: list[bool] = []
    with lean_functions():
        thread = threading.Thread(target=lambda: found.append(_keeps_only_input()))
        thread.start()
        thread.join()
    assert found == [False]


def test_symbolic_tensors_and_numpy_arrays_work_as_ever() -> None:
    import keras

    with lean_functions():
        assert keras.activations.gelu(keras.KerasTensor((None, 3), "bfloat16")).shape == (None, 3)
        assert keras.activations.mish(np.ones((2, 3), "float32")).shape == (2, 3)
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4, activation="gelu")])
    assert model.output_shape == (None, 4)


def test_a_batch_size_that_is_not_known_when_traced_works() -> None:
    import keras
    import tensorflow as tf

    layer = keras.layers.MultiHeadAttention(2, 4, dropout=0.3)
    layer.build((None, None, 8), (None, None, 8))

    @tf.function(input_signature=[tf.TensorSpec((None, None, 8))])
    def step(x: Any) -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = keras.activations.gelu(keras.random.dropout(layer(x, x, training=True), 0.2, seed=1))
        return tape.gradient(y, x)

    with lean_functions():
        for shape in ((2, 3, 8), (1, 5, 8)):
            assert step(tf.ones(shape)).shape == shape
