from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_hydra.activation_memory.functions import lean_functions

DTYPES = ("float16", "bfloat16", "float32")


def _reference(tensors: list[np.ndarray], scale: float, allowed: np.ndarray) -> list[np.ndarray]:
    """Plain float64 attention and its gradients; [batch, positions, heads, features]."""
    q, k, v, do = tensors
    raw = np.einsum("btnh,bsnh->bnts", q, k) * scale
    scores = np.where(allowed, raw, -1e300)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    dp = np.einsum("btnh,bsnh->bnts", do, v)
    ds = np.where(allowed, p * (dp - (p * dp).sum(-1, keepdims=True)), 0) * scale
    return [
        np.einsum("bnts,bsnh->btnh", p, v),
        np.einsum("bnts,bsnh->btnh", ds, k),
        np.einsum("bnts,btnh->bsnh", ds, q),
        np.einsum("bnts,btnh->bsnh", p, do),
    ]


def _run(tensors: list[Any], *, lean: bool, **options: Any) -> list[np.ndarray]:
    import keras
    import tensorflow as tf

    *inputs, do = tensors
    with lean_functions(lean), tf.GradientTape() as tape:
        tape.watch(inputs)
        output = keras.ops.dot_product_attention(*inputs, **options)
    return [tf.cast(t, tf.float64).numpy() for t in (output, *tape.gradient(output, inputs, do))]


def _tensors(
    dtype: str, positions: tuple[int, int] = (6, 9), *, offset: float = 0.0, seed: int = 0, heads: int = 2
) -> list[Any]:
    """Queries, keys, values and a gradient of the output, for a number of queries and of keys."""
    import tensorflow as tf

    rng = np.random.default_rng(seed)
    queries, keys = positions
    sizes = (queries, keys, keys, queries)
    return [
        tf.cast(rng.normal(size=(2, size, heads, 8)) + (offset if i in {1, 2} else 0), dtype)
        for i, size in enumerate(sizes)
    ]


def _exact(tensors: list[Any]) -> list[np.ndarray]:
    import tensorflow as tf

    return [tf.cast(t, tf.float64).numpy() for t in tensors]


def _errors(got: list[np.ndarray], right: list[np.ndarray]) -> list[float]:
    return [float(np.linalg.norm(a - b) / np.linalg.norm(b)) for a, b in zip(got, right, strict=True)]


@pytest.mark.parametrize("offset", [0.0, 4.0])
@pytest.mark.parametrize(
    ("dtype", "masked", "causal"),
    [
        *(("bfloat16", masked, causal) for masked in (False, True) for causal in (False, True)),
        *((dtype, both, both) for dtype in ("float16", "float32") for both in (False, True)),
    ],
)
def test_it_is_as_accurate_as_stock_keras(dtype: str, masked: bool, causal: bool, offset: float) -> None:
    tensors = _tensors(dtype, offset=offset)
    mask = np.random.default_rng(3).random((2, 1, 6, 9)) < 0.7
    mask[..., 0] = True
    allowed = mask if masked else np.ones((2, 1, 6, 9), bool)
    if causal:
        allowed = allowed & (np.arange(6)[:, None] >= np.arange(9))
    options = {"mask": mask if masked else None, "is_causal": causal, "scale": 0.3}
    right = _reference(_exact(tensors), 0.3, allowed)
    stock, lean = (_errors(_run(tensors, lean=on, **_as_tensors(options)), right) for on in (False, True))
    slack = 1e-6 if dtype == "float32" else 0.0
    assert [a <= b * 1.05 + slack for a, b in zip(lean, stock, strict=True)] == [True] * 4, (lean, stock)


def _as_tensors(options: dict[str, Any]) -> dict[str, Any]:
    import tensorflow as tf

    return {**options, "mask": None if options["mask"] is None else tf.constant(options["mask"])}


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([(1, 1), (1, 5), (4, 1), (6, 9)]), st.sampled_from([0.01, 1.0, 30.0]), st.integers(0, 99))
def test_one_or_more_queries_and_keys_of_any_size_agree_with_stock(
    positions: tuple[int, int], size: float, seed: int
) -> None:
    tensors = [t * size for t in _tensors("bfloat16", positions, seed=seed)]
    for stock, lean in zip(_run(tensors, lean=False), _run(tensors, lean=True), strict=True):
        np.testing.assert_allclose(lean, stock, rtol=0.02, atol=0.01 * size**2 + 1e-3 * abs(stock).max())


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_without_any_pair_attends_to_all_alike_as_in_keras(dtype: str) -> None:
    import tensorflow as tf

    tensors = _tensors(dtype)
    mask = np.ones((2, 1, 6, 9), bool)
    mask[:, :, 2] = False
    stock, lean = (_run(tensors, lean=on, mask=tf.constant(mask)) for on in (False, True))
    np.testing.assert_allclose(lean[0][:, 2], _exact(tensors)[2].mean(1), rtol=1e-2, atol=1e-2)
    for one, other in zip(stock, lean, strict=True):
        assert np.isfinite(other).all()
        np.testing.assert_allclose(other, one, rtol=1e-2, atol=1e-2)


def test_scores_beyond_float16_are_no_worse_than_in_keras() -> None:
    tensors = [t * 150 for t in _tensors("float16")]
    stock, lean = (_run(tensors, lean=on) for on in (False, True))
    for one, other in zip(stock, lean, strict=True):
        np.testing.assert_array_equal(np.isfinite(other) | ~np.isfinite(one), True)


@pytest.mark.parametrize("case", ["bias", "tensor scale", "float64"])
def test_a_bias_a_scale_that_is_a_tensor_and_float64_are_left_to_keras(case: str) -> None:
    import tensorflow as tf

    dtype = "float64" if case == "float64" else "bfloat16"
    options: dict[str, Any] = {
        "bias": {"bias": tf.ones((1, 1, 6, 9), dtype)},
        "tensor scale": {"scale": tf.constant(0.2)},
    }.get(case, {"scale": 0.2})
    stock, lean = (_run(_tensors(dtype), lean=on, **options) for on in (False, True))
    for one, other in zip(stock, lean, strict=True):
        np.testing.assert_array_equal(one, other)


def test_fewer_heads_of_keys_than_of_queries_agree_with_keras() -> None:
    import tensorflow as tf

    query, _, _, do = _tensors("bfloat16", heads=4)
    _, key, value, _ = _tensors("bfloat16", heads=2)
    try:
        stock = _run([query, key, value, do], lean=False)
    except tf.errors.InvalidArgumentError:
        pytest.skip("this Keras wants as many heads of keys as of queries")
    for one, other in zip(stock, _run([query, key, value, do], lean=True), strict=True):
        np.testing.assert_allclose(other, one, rtol=0.02, atol=0.02)


def _layer(kind: str, dropout: float, policy: str) -> Any:
    import keras

    keras.utils.set_random_seed(5)
    if kind == "grouped":
        layer = keras.layers.GroupQueryAttention(8, 4, 2, dropout=dropout, seed=3, dtype=policy)
    else:
        layer = keras.layers.MultiHeadAttention(4, 8, dropout=dropout, seed=3, dtype=policy)
    layer.build((2, None, 16), (2, None, 16))  # at once, while the seed is fresh
    return layer


def _layer_results(layer: Any, x: Any, *, lean: bool, jit: bool | None = None, **options: Any) -> list[np.ndarray]:
    import tensorflow as tf

    def step(x: Any) -> list[Any]:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, x, training=True, **options)
            loss = tf.reduce_sum(tf.cast(y, tf.float32) * tf.random.stateless_normal(y.shape, [1, 2]))
        return [y, *tape.gradient(loss, [x, *layer.trainable_variables])]

    with lean_functions(lean):
        results = (step if jit is None else tf.function(step, jit_compile=jit))(x)
    return [tf.cast(t, tf.float64).numpy() for t in results]


@pytest.mark.parametrize(
    ("kind", "masks"),
    [*(("heads", masks) for masks in ("none", "mask", "causal", "both", "empty row")), ("grouped", "both")],
)
def test_a_layer_with_dropout_drops_what_it_drops_in_keras(kind: str, masks: str) -> None:
    """In float32 the two agree to rounding, which they would not with other elements dropped."""
    import tensorflow as tf

    x = tf.random.stateless_normal((2, 6, 16), [5, 5])
    mask = np.random.default_rng(1).random((2, 6, 6)) < 0.6
    mask[:, 3] = masks != "empty row"
    options: dict[str, Any] = {
        "none": {},
        "mask": {"attention_mask": tf.constant(mask)},
        "causal": {"use_causal_mask": True},
        "both": {"attention_mask": tf.constant(mask), "use_causal_mask": True},
        "empty row": {"attention_mask": tf.constant(mask)},
    }[masks]
    stock_layer, lean_layer = (_layer(kind, 0.4, "float32") for _ in range(2))
    for _ in range(2):  # the generators move on alike
        stock, lean = (
            _layer_results(layer, x, lean=layer is lean_layer, **options) for layer in (stock_layer, lean_layer)
        )
        _assert_close(lean, stock)


def _assert_close(lean: list[np.ndarray], stock: list[np.ndarray]) -> None:
    for one, other in zip(stock, lean, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dropout", "jit"), [(0.0, False), (0.4, True)], ids=["graph", "dropout-xla"])
def test_a_16_bit_layer_is_closer_to_float32_than_keras_is(dropout: float, jit: bool) -> None:
    import tensorflow as tf

    x = tf.random.stateless_normal((2, 12, 16), [5, 5])
    reference = _layer_results(_layer("heads", 0.0, "float32"), x, lean=False)
    stock, lean = (
        _layer_results(_layer("heads", dropout, "mixed_float16"), x, lean=on, jit=jit) for on in (False, True)
    )
    if dropout:  # float32 draws other numbers: only the two with each other
        assert max(_errors(lean[:2], stock[:2])) < 5e-3
    else:
        errors = zip(_errors(lean[:2], reference[:2]), _errors(stock[:2], reference[:2]), strict=True)
        assert all(a <= b * 1.05 for a, b in errors)


def test_scores_that_are_asked_for_and_inference_are_as_in_keras() -> None:
    import tensorflow as tf

    x = tf.random.stateless_normal((2, 6, 16), [5, 5])
    layer = _layer("heads", 0.4, "mixed_bfloat16")
    stock = layer(x, x, training=False)
    with lean_functions():
        np.testing.assert_array_equal(layer(x, x, training=False), stock)
        _, scores = layer(x, x, training=True, return_attention_scores=True)
    assert scores.shape == (2, 4, 6, 6)


def test_a_layer_with_a_softmax_of_its_own_keeps_it() -> None:
    import keras
    import tensorflow as tf

    class Doubled(keras.layers.Softmax):
        def call(self, inputs: Any, mask: Any = None) -> Any:
            return 2 * super().call(inputs, mask)

    x = tf.random.stateless_normal((2, 6, 16), [5, 5])
    results = []
    for on in (False, True):
        layer = _layer("heads", 0.4, "float32")
        layer.__dict__["_softmax"] = Doubled()
        results.append(_layer_results(layer, x, lean=on)[0])
    np.testing.assert_array_equal(results[0], results[1])
