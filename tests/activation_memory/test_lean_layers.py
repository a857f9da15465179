"""The lean calls of normalisation layers beside stock Keras, both against float64.

Errors are norms, relative to the norm of the sums of absolute values that make up the number (so that a sum of 0 is no division
by it). A lean error may be 5 % above the stock one, because the last rounding to 16 bits, nearly all of the error of y and dx,
does not fall alike; and 5e-7 besides, some eight float32 roundings, because float32 sums in another order are luckier or not.
"""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from mp_hydra.activation_memory.layers import Replacement, replacement

if TYPE_CHECKING:
    from collections.abc import Callable

SLACK = 1.05
ROUNDINGS = 5e-7
CHANNELS = 8
EPSILON = 1e-3
BATCH, LAYER, GROUP, RMS = "BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization"
SHORT = ["float16", "bfloat16"]


def lean(layer: Any) -> Any:
    """The layer with its lean call on it, as `mp_hydra.lean` does it to a model."""
    found = replacement(layer)
    assert found is not None, layer
    assert found.call is not None, found.reason
    object.__setattr__(layer, "call", found.call)
    return layer


def policy(dtype: str) -> str:
    return dtype if dtype == "float32" else f"mixed_{dtype}"


def built(kind: str, shape: tuple[int, ...], dtype: str, seed: int = 0, **arguments: Any) -> Any:
    """A layer with random parameters (of numpy's, so that two of one seed are equal)."""
    layer = getattr(keras.layers, kind)(dtype=policy(dtype), **({"epsilon": EPSILON} | arguments))
    layer.build((None, *shape[1:]))
    rng = np.random.default_rng(seed)
    for weight in layer.trainable_weights:
        weight.assign(rng.uniform(0.5, 2.0, weight.shape) * rng.choice([-1.0, 1.0], weight.shape))
    return layer


def values(shape: tuple[int, ...], dtype: str, offset: float = 0.0, deviation: float = 1.0, seed: int = 1) -> Any:
    largest = float(tf.as_dtype(dtype).max)
    drawn = offset + deviation * np.random.default_rng(seed).standard_normal(shape)
    return tf.cast(tf.constant(np.clip(drawn, -largest, largest), tf.float32), dtype)


def wide(tensor: Any) -> Any:
    return np.asarray(tf.cast(tensor, tf.float64))


def results(layer: Any, x: Any, dy: Any, **call: Any) -> list[Any]:
    """y, dx, and the gradients of the trainable weights in their order."""
    variables = [weight.value for weight in layer.trainable_weights]
    with tf.GradientTape() as tape:
        tape.watch(x)
        y = layer(x, **call)
    return [y, *tape.gradient(y, [x, *variables], output_gradients=tf.cast(dy, y.dtype))]


def reference(
    x: Any, dy: Any, gamma: Any, beta: Any, axes: tuple[int, ...], *, epsilon: float = EPSILON, centered: bool = True
) -> list[tuple[Any, Any]]:
    """y, dx, dgamma, dbeta in float64, each with the size of the terms that it is the sum of."""
    x, dy, gamma, beta = wide(x), wide(dy), wide(gamma), wide(beta)
    own = tuple(axis for axis, size in enumerate(gamma.shape) if size == 1)
    mean = x.mean(axes, keepdims=True) if centered else 0.0
    scale = 1.0 / np.sqrt(np.square(x - mean).mean(axes, keepdims=True) + epsilon)
    normal, d = (x - mean) * scale, dy * gamma
    through_mean = d.mean(axes, keepdims=True) if centered else 0.0
    dx = scale * (d - through_mean - normal * (d * normal).mean(axes, keepdims=True))
    y = normal * gamma + beta
    return [
        (y, np.abs(normal * gamma) + np.abs(beta)),
        (dx, np.abs(scale * d)),
        ((dy * normal).sum(own).ravel(), np.abs(dy * normal).sum(own).ravel()),
        (dy.sum(own).ravel(), np.abs(dy).sum(own).ravel()),
    ]


def error(found: Any, expected: tuple[Any, Any]) -> float:
    value, terms = expected
    size = max(float(np.linalg.norm(terms.ravel())), 1e-30)
    return float(np.linalg.norm(wide(found).ravel() - value.ravel())) / size


def assert_as_exact(found: list[Any], stock: list[Any], expected: list[tuple[Any, Any]]) -> None:
    for name, ours, theirs, right in zip(("y", "dx", "dgamma", "dbeta"), found, stock, expected, strict=False):
        assert np.isfinite(wide(ours)).all(), name
        assert ours.dtype == theirs.dtype
        assert error(ours, right) <= SLACK * error(theirs, right) + ROUNDINGS, name


# Each kind with its arguments, the shape of an input, the axes of a mean and the shape of gamma over the input; for
# GroupNormalization the last two are those of the tensor of groups.
CASES: dict[str, tuple[str, dict[str, Any], tuple[int, ...], tuple[int, ...], tuple[int, ...]]] = {
    "batch, rank 2": (BATCH, {}, (48, CHANNELS), (0,), (1, CHANNELS)),
    "batch, rank 3": (BATCH, {}, (6, 9, CHANNELS), (0, 1), (1, 1, CHANNELS)),
    "batch, rank 4": (BATCH, {}, (5, 6, 7, CHANNELS), (0, 1, 2), (1, 1, 1, CHANNELS)),
    "batch, rank 5": (BATCH, {}, (3, 2, 4, 3, CHANNELS), (0, 1, 2, 3), (1, 1, 1, 1, CHANNELS)),
    "batch, channels first": (BATCH, {"axis": 1}, (5, CHANNELS, 6, 7), (0, 2, 3), (1, CHANNELS, 1, 1)),
    "batch, channels in the middle": (BATCH, {"axis": -2}, (5, 6, CHANNELS, 7), (0, 1, 3), (1, 1, CHANNELS, 1)),
    "layer, rank 2": (LAYER, {}, (7, 40), (1,), (1, 40)),
    "layer, rank 3": (LAYER, {}, (5, 11, 24), (2,), (1, 1, 24)),
    "layer, two axes": (LAYER, {"axis": [-1, -2]}, (6, 4, 5, CHANNELS), (2, 3), (1, 1, 5, CHANNELS)),
    "layer, channels first": (LAYER, {"axis": 1}, (6, CHANNELS, 4, 5), (1,), (1, CHANNELS, 1, 1)),
    "layer, axes apart": (LAYER, {"axis": [1, 3]}, (6, 4, 5, CHANNELS), (1, 3), (1, 4, 1, CHANNELS)),
    "group": (GROUP, {"groups": 4}, (5, 6, 7, CHANNELS), (1, 2, 4), (1, 1, 1, 4, 2)),
    "instance": (GROUP, {"groups": -1}, (5, 6, 7, CHANNELS), (1, 2, 4), (1, 1, 1, CHANNELS, 1)),
    "group, channels first": (GROUP, {"groups": 2, "axis": 1}, (5, CHANNELS, 6, 7), (2, 3, 4), (1, 2, 4, 1, 1)),
    "group, channels first, from the end": (
        GROUP,
        {"groups": 2, "axis": -3},
        (5, CHANNELS, 6, 7),
        (2, 3, 4),
        (1, 2, 4, 1, 1),
    ),
    "rms": (RMS, {}, (5, 11, 24), (2,), (1, 1, 24)),
    "rms, two axes": (RMS, {"axis": [-2, -1]}, (5, 6, 7, CHANNELS), (2, 3), (1, 1, 7, CHANNELS)),
}


def grouped(tensor: Any, layer: Any, parameters: tuple[int, ...]) -> Any:
    if layer.__class__.__name__ != GROUP:
        return tensor
    shape = list(tensor.shape)
    axis = layer.axis % len(shape)
    return tf.reshape(tensor, [*shape[:axis], layer.groups, shape[axis] // layer.groups, *shape[axis + 1 :]])


def check(case: str, dtype: str, offset: float, deviation: float, seed: int = 1) -> None:
    kind, arguments, shape, axes, parameters = CASES[case]
    x, dy = values(shape, dtype, offset, deviation, seed), values(shape, dtype, seed=seed + 1)
    call = {"training": True} if kind == BATCH else {}
    plain, changed = built(kind, shape, dtype, **arguments), lean(built(kind, shape, dtype, **arguments))
    gamma, *beta = (tf.reshape(weight.value, parameters) for weight in plain.trainable_weights)
    expected = reference(
        grouped(x, plain, parameters),
        grouped(dy, plain, parameters),
        gamma,
        beta[0] if beta else tf.zeros(parameters),
        axes,
        centered=kind != RMS,
    )
    assert_as_exact(results(changed, x, dy, **call), results(plain, x, dy, **call), expected)


@pytest.mark.parametrize("case", CASES)
def test_lean_layer_is_as_exact_as_stock_keras_in_forward_and_backward(case: str) -> None:
    check(case, "bfloat16", offset=0.5, deviation=1.0)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(
    case=st.sampled_from(["batch, rank 4", "batch, channels first", "layer, rank 3", "group", "rms"]),
    dtype=st.sampled_from(SHORT),
    offset=st.sampled_from([0.0, -30.0, 1e3, 1e4]),
    deviation=st.sampled_from([0.0, 1e-4, 1.0, 50.0]),
    seed=st.integers(0, 1000),
)
@example(case="batch, rank 4", dtype="float16", offset=0.0, deviation=5e4, seed=0)
@example(case="batch, channels first", dtype="float16", offset=0.0, deviation=5e4, seed=0)
@example(case="layer, rank 3", dtype="float16", offset=6e4, deviation=5e3, seed=0)
@example(case="group", dtype="float16", offset=0.0, deviation=5e4, seed=0)
@example(case="rms", dtype="float16", offset=0.0, deviation=6e-8, seed=0)
@example(case="batch, rank 4", dtype="bfloat16", offset=0.0, deviation=1e15, seed=0)
def test_lean_layer_is_as_exact_as_stock_keras_at_large_offsets_tiny_variances_and_the_ends_of_float16(
    case: str, dtype: str, offset: float, deviation: float, seed: int
) -> None:
    check(case, dtype, offset, deviation, seed)


@pytest.mark.parametrize("case", ["layer, rank 3", "group", "rms"])
def test_float32_layer_is_as_exact_as_stock_keras(case: str) -> None:
    for offset in (0.0, 1e3):
        check(case, "float32", offset, 1.0)


@pytest.mark.parametrize("kind", [BATCH, LAYER, GROUP])
@pytest.mark.parametrize(("scale", "center"), [(True, False), (False, True), (False, False)])
def test_layer_without_scale_or_center_gives_what_stock_keras_gives(kind: str, scale: bool, center: bool) -> None:
    shape = (6, 5, CHANNELS)
    arguments: dict[str, Any] = {"scale": scale, "center": center} | ({"groups": 2} if kind == GROUP else {})
    call = {"training": True} if kind == BATCH else {}
    x, dy = values(shape, "float16"), values(shape, "float16", seed=2)
    plain, changed = built(kind, shape, "float16", **arguments), lean(built(kind, shape, "float16", **arguments))
    ours, theirs = results(changed, x, dy, **call), results(plain, x, dy, **call)
    assert len(ours) == 2 + scale + center
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(wide(one), wide(other), rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("kind", [LAYER, GROUP])
def test_float32_input_of_a_16_bit_layer_is_not_rounded_first(kind: str) -> None:
    """These layers take their input as it comes (autocast off)."""
    x = values((4, 5, CHANNELS), "float32", offset=1000.0)
    arguments = {"groups": 2} if kind == GROUP else {}
    plain = built(kind, x.shape, "bfloat16", **arguments)
    if plain.autocast:
        pytest.skip("this Keras casts the input")
    changed = lean(built(kind, x.shape, "bfloat16", **arguments))
    assert changed(x).dtype == tf.bfloat16
    np.testing.assert_allclose(wide(changed(x)), wide(plain(x)), rtol=8e-3, atol=2e-3)


def test_layer_pinned_to_float32_gives_float32_for_16_bit_input() -> None:
    x = values((4, 5, CHANNELS), "float16")
    layer = lean(built(LAYER, x.shape, "float32"))
    y = layer(x)
    assert y.dtype == tf.float32
    np.testing.assert_allclose(wide(y), wide(built(LAYER, x.shape, "float32")(tf.cast(x, tf.float32))), atol=2e-6)


# ---------------------------------------------------------------------------------------- statistics of BatchNormalization


@pytest.mark.parametrize("momentum", [0.99, 0.5, 0.0])
@pytest.mark.parametrize("axis", [-1, 1])
def test_moving_statistics_follow_the_rule_of_keras_step_by_step(momentum: float, axis: int) -> None:
    """By hand: average * momentum + statistic * (1 - momentum), with the population variance."""
    shape = (4, CHANNELS, CHANNELS)
    layers = [built(BATCH, shape, "bfloat16", momentum=momentum, axis=axis) for _ in range(2)]
    plain, changed = layers[0], lean(layers[1])
    mean, variance = np.zeros(CHANNELS), np.ones(CHANNELS)
    axes = (0, 1) if axis == -1 else (0, 2)
    for step in range(4):
        x = values(shape, "bfloat16", offset=3.0 * step, seed=step)
        plain(x, training=True)
        changed(x, training=True)
        mean = mean * momentum + wide(x).mean(axes) * (1 - momentum)
        variance = variance * momentum + wide(x).var(axes) * (1 - momentum)
        np.testing.assert_allclose(changed.moving_mean.numpy(), mean, rtol=3e-6, atol=1e-6)
        np.testing.assert_allclose(changed.moving_variance.numpy(), variance, rtol=3e-6)
        np.testing.assert_allclose(changed.moving_variance.numpy(), plain.moving_variance.numpy(), rtol=3e-6)
    assert changed.moving_variance.dtype == "float32"


def test_variance_of_a_single_value_is_0_and_not_that_of_a_division_by_0() -> None:
    layer = lean(built(BATCH, (1, CHANNELS), "float16", momentum=0.5))
    x = values((1, CHANNELS), "float16", offset=2.0)
    y = layer(x, training=True)
    np.testing.assert_array_equal(layer.moving_variance.numpy(), np.full(CHANNELS, 0.5))
    np.testing.assert_allclose(layer.moving_mean.numpy(), 0.5 * wide(x)[0], rtol=1e-6)
    np.testing.assert_allclose(wide(y)[0], layer.beta.numpy(), rtol=1e-3)


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_batch_that_is_not_finite_leaves_the_moving_statistics_of_its_channel(bad: float) -> None:
    x = np.ones((4, 2), np.float32) * [[1.0], [2.0], [3.0], [4.0]]
    x[0, 0] = bad
    layers = [built(BATCH, x.shape, "float16", momentum=0.5) for _ in range(2)]
    plain, changed = layers[0], lean(layers[1])
    plain(x, training=True)
    changed(x, training=True)
    assert not np.isfinite(plain.moving_mean.numpy()[0])
    np.testing.assert_allclose(changed.moving_mean.numpy(), [0.0, 1.25])
    np.testing.assert_allclose(changed.moving_variance.numpy(), [1.0, 1.125])


def test_batch_without_samples_leaves_the_moving_statistics() -> None:
    layer = lean(built(BATCH, (4, 3, CHANNELS), "float16"))
    assert layer(tf.zeros((0, 3, CHANNELS), tf.float16), training=True).shape == (0, 3, CHANNELS)
    np.testing.assert_array_equal(layer.moving_mean.numpy(), np.zeros(CHANNELS))
    np.testing.assert_array_equal(layer.moving_variance.numpy(), np.ones(CHANNELS))


@pytest.mark.parametrize(("dtype", "axis"), [("float16", -1), ("bfloat16", 1)])
@pytest.mark.parametrize("frozen", [True, False])
def test_frozen_layer_and_inference_use_the_moving_statistics(dtype: str, frozen: bool, axis: int) -> None:
    shape = (5, CHANNELS, 6, CHANNELS)
    x, dy = values(shape, dtype, offset=1000.0, deviation=20.0), values(shape, dtype, seed=2)
    outputs = []
    for change in (lean, lambda layer: layer):
        layer = change(built(BATCH, shape, dtype, axis=axis))
        layer.moving_mean.assign(np.linspace(900.0, 1100.0, CHANNELS))
        layer.moving_variance.assign(np.linspace(1.0, 400.0, CHANNELS))
        gamma, beta = layer.gamma.numpy(), layer.beta.numpy()
        layer.trainable = not frozen
        outputs.append(results(layer, x, dy, training=frozen))
        np.testing.assert_array_equal(layer.moving_mean.numpy(), np.linspace(900.0, 1100.0, CHANNELS, dtype=np.float32))
    ours, theirs = outputs
    parameters = [CHANNELS if a == axis % 4 else 1 for a in range(4)]
    own = tuple(a for a in range(4) if a != axis % 4)
    mean, scale, gamma, beta = (
        np.reshape(np.float64(t), parameters)
        for t in (np.linspace(900.0, 1100.0, CHANNELS), np.linspace(1.0, 400.0, CHANNELS) + EPSILON, gamma, beta)
    )
    scale = 1.0 / np.sqrt(scale)
    normal = (wide(x) - mean) * scale
    expected = [
        (normal * gamma + beta, np.abs(normal * gamma) + np.abs(beta)),
        (wide(dy) * scale * gamma, np.abs(wide(dy) * scale * gamma)),
        ((wide(dy) * normal).sum(own), np.abs(wide(dy) * normal).sum(own)),
        (wide(dy).sum(own), np.abs(wide(dy)).sum(own)),
    ]
    assert len(ours) == (2 if frozen else 4)
    assert_as_exact(ours, theirs, expected)


def test_mask_is_left_to_stock_keras() -> None:
    x = values((4, 6, CHANNELS), "float16")
    mask = tf.constant(np.random.default_rng(0).random((4, 6)) < 0.5)
    layers = [built(BATCH, x.shape, "float16") for _ in range(2)]
    plain, changed = layers[0], lean(layers[1])
    np.testing.assert_array_equal(wide(changed(x, training=True, mask=mask)), wide(plain(x, training=True, mask=mask)))
    np.testing.assert_array_equal(changed.moving_mean.numpy(), plain.moving_mean.numpy())


# -------------------------------------------------------------------------------------------------------- what is kept


def read_by_the_gradient(call: Callable[[Any], Any], x: Any, variables: list[Any]) -> set[tuple[str, str]]:
    """Name and dtype of the forward pass's tensors of x's size that operations of the gradient read."""
    found: set[tuple[str, str]] = set()

    @tf.function(autograph=False)
    def step(x: Any) -> Any:
        graph = tf.compat.v1.get_default_graph()
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = call(x)
        forward = set(graph.get_operations())
        gradients = [g for g in tape.gradient(y, [x, *variables]) if g is not None]
        wanted, seen = [g.op for g in gradients], set()
        while wanted:
            operation = wanted.pop()
            if operation in seen or operation in forward:
                continue
            seen.add(operation)
            for tensor in operation.inputs:
                if tensor.op not in forward:
                    wanted.append(tensor.op)
                elif tensor.shape.num_elements() == x.shape.num_elements():
                    source = tensor
                    while (
                        source.op.type in {"Reshape", "Identity", "IdentityN", "StopGradient"} and source.op in forward
                    ):
                        source = source.op.inputs[source.value_index if source.op.type == "IdentityN" else 0]
                    found.add((source.name, source.dtype.name))
        return gradients

    step.get_concrete_function(tf.TensorSpec(x.shape, x.dtype))
    return found


SIZE = (4, 6, 6, CHANNELS)


@pytest.mark.parametrize("kind", [BATCH, LAYER, GROUP, RMS])
@pytest.mark.parametrize("dtype", SHORT)
def test_gradient_reads_the_16_bit_input_and_no_other_tensor_of_its_size(kind: str, dtype: str) -> None:
    x = values(SIZE, dtype)
    arguments = {"groups": 2} if kind == GROUP else {}
    call = {"training": True} if kind == BATCH else {}

    def kept(layer: Any) -> set[tuple[str, str]]:
        return read_by_the_gradient(lambda x: layer(x, **call), x, [w.value for w in layer.trainable_weights])

    assert [d for _, d in kept(lean(built(kind, SIZE, dtype, **arguments)))] == [dtype]
    assert "float32" in {d for _, d in kept(built(kind, SIZE, dtype, **arguments))}


def test_gradient_of_a_frozen_batch_normalization_reads_nothing_of_its_inputs_size() -> None:
    x = values(SIZE, "bfloat16")
    layer = lean(built(BATCH, SIZE, "bfloat16"))
    layer.trainable = False
    assert read_by_the_gradient(lambda x: layer(x, training=True), x, []) == set()


@pytest.mark.parametrize("kind", [BATCH, LAYER, GROUP, RMS])
def test_eager_tape_holds_no_further_tensor_of_the_inputs_size(kind: str) -> None:
    """Bytes an element that are free again when the tape is gone and its input and output are not, as the allocator counts.

    It may count up to twice the size of a tensor: a free chunk of less than that is not split.
    """
    shape = (64, 8, 8, 8 * CHANNELS)
    x = values(shape, "bfloat16")
    call = {"training": True} if kind == BATCH else {}

    def held(layer: Any) -> float:
        layer(x, **call)
        return float(np.median([held_once(layer) for _ in range(3)]))  # what ran before may free something meanwhile

    def held_once(layer: Any) -> float:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **call)
        both = in_use()
        del tape
        alone = in_use()
        assert y.dtype == x.dtype
        return float((both - alone) / x.shape.num_elements())

    def in_use() -> int:
        gc.collect()
        return int(tf.config.experimental.get_memory_info("CPU:0")["current"])

    arguments = {"groups": 2} if kind == GROUP else {}
    gc.collect()
    gc.freeze()  # each collection looks at what is new alone
    try:
        # Statistics of three float32 numbers a row of 64: 0.19 bytes an element.
        assert held(lean(built(kind, shape, "bfloat16", **arguments))) <= 0.4
        assert held(built(kind, shape, "bfloat16", **arguments)) >= 3.9
    finally:
        gc.unfreeze()


@pytest.mark.parametrize("kind", [BATCH, LAYER, RMS])
def test_second_derivative_raises_where_it_would_be_wrong(kind: str) -> None:
    x = values((4, CHANNELS), "bfloat16")
    layer = lean(built(kind, x.shape, "bfloat16"))
    call = {"training": False} if kind == BATCH else {}
    with tf.GradientTape() as outer:
        outer.watch([x, layer.trainable_weights[0].value])
        with tf.GradientTape() as inner:
            inner.watch(x)
            y = tf.reduce_sum(tf.square(layer(x, **call)))
        dx = inner.gradient(y, x)
    with pytest.raises(LookupError, match="first derivatives only"):
        outer.gradient(dx, x)


# ---------------------------------------------------------------------------------------------------- where it must work


@pytest.mark.parametrize("axis", [-1, 1])
def test_batch_normalization_in_a_function_compiled_by_xla_is_exact_at_a_large_mean(axis: int) -> None:
    """XLA's own expansion of TensorFlow's fused operation is off by some percent here."""
    shape = (16, CHANNELS, CHANNELS)
    x, dy = values(shape, "float16", offset=1e4, deviation=50.0), values(shape, "float16", seed=2)
    layer = lean(built(BATCH, shape, "float16", axis=axis))
    y, dx, *_ = tf.function(lambda x, dy: results(layer, x, dy, training=True), jit_compile=True, autograph=False)(
        x, dy
    )
    parameters = (1, 1, CHANNELS) if axis == -1 else (1, CHANNELS, 1)
    gamma, beta = (tf.reshape(w.value, parameters) for w in layer.trainable_weights)
    expected = reference(x, dy, gamma, beta, (0, 1) if axis == -1 else (0, 2))
    assert error(y, expected[0]) < 3e-4
    assert error(dx, expected[1]) < 3e-4


def test_batch_and_spatial_sizes_may_be_unknown_when_traced() -> None:
    for kind in (BATCH, LAYER, GROUP, RMS):
        plain = built(kind, SIZE, "bfloat16", **({"groups": 2} if kind == GROUP else {}))
        changed = lean(built(kind, SIZE, "bfloat16", **({"groups": 2} if kind == GROUP else {})))
        signature = [tf.TensorSpec((None, None, None, CHANNELS), tf.bfloat16)]
        x = values(SIZE, "bfloat16")
        y = tf.function(changed, input_signature=signature, autograph=False)(x)
        np.testing.assert_allclose(wide(y), wide(plain(x)), rtol=1.6e-2, atol=1.6e-2)


def test_lean_layer_can_be_called_on_symbolic_inputs() -> None:
    layer = lean(keras.layers.BatchNormalization(dtype="mixed_bfloat16"))
    inputs = keras.Input((4, CHANNELS))
    model = keras.Model(inputs, layer(inputs))
    assert model(np.ones((2, 4, CHANNELS), np.float32)).dtype == tf.bfloat16


# ------------------------------------------------------------------------------------------------------------- reasons


class OwnCall(keras.layers.BatchNormalization):
    def call(self, inputs: Any, training: Any = None, mask: Any = None) -> Any:
        return inputs


class OwnMoments(keras.layers.BatchNormalization):
    def _moments(self, inputs: Any, mask: Any) -> Any:
        return super()._moments(inputs, mask)


class OwnName(keras.layers.LayerNormalization):
    """Adds nothing to what is computed."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.note = "mine"


def test_layer_of_another_kind_and_float32_batch_normalisation_have_nothing_to_gain() -> None:
    assert replacement(keras.layers.Dense(2)) is None
    assert replacement(keras.layers.BatchNormalization(dtype="float32")) is None


STAYS: dict[str, tuple[Callable[[], Any], str]] = {
    "synchronized": (lambda: keras.layers.BatchNormalization(synchronized=True, dtype="mixed_float16"), "synchronized"),
    "float64": (lambda: keras.layers.LayerNormalization(dtype="float64"), "float64"),
    "own call": (lambda: OwnCall(dtype="mixed_float16"), "OwnCall has its own call"),
    "own moments": (lambda: OwnMoments(dtype="mixed_float16"), "OwnMoments has its own _moments"),
    "rms_scaling": (lambda: keras.layers.LayerNormalization(rms_scaling=True, dtype="mixed_float16"), "rms_scaling"),
    "replaced before": (lambda: lean(keras.layers.LayerNormalization(dtype="mixed_float16")), "replaced before"),
}


@pytest.mark.parametrize("name", STAYS)
@pytest.mark.filterwarnings("ignore:You passed .rms_scaling")
def test_layer_that_stays_stock_says_why(name: str) -> None:
    make, reason = STAYS[name]
    found = replacement(make())
    assert found is not None
    assert found.call is None
    assert found.reason is not None
    assert reason in found.reason


def test_renorm_stays_stock_where_keras_has_it() -> None:
    try:
        layer = keras.layers.BatchNormalization(renorm=True, dtype="mixed_float16")
    except (TypeError, ValueError):
        pytest.skip("this Keras has no renorm")
    assert replacement(layer) == Replacement(None, "renorm=True")


def test_subclass_that_changes_nothing_of_the_computation_is_replaced() -> None:
    found = replacement(OwnName(dtype="mixed_float16"))
    assert found is not None
    assert found.call is not None
