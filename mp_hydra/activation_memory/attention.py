"""Dot-product attention that keeps queries, keys and values for backward, and nothing of the size of its scores.

For a head, with queries Q, keys K, values V and gradient dO of the output O, where P = softmax(scale Q K^T) and, with dropout, P'
is P dropped out and scaled (P' = P without)::

    dV = P'^T dO      dP' = dO V^T      dS = scale P (dP - rowsum(P dP))      dQ = dS K      dK = dS^T Q

Stock Keras keeps P in float32 and in the dtype of the tensors; with dropout P and P' in that dtype, and a byte an element.
Here P is computed again from Q and K, which are kept anyway; with dropout one bit an element is kept. P in 16 bits could be kept
instead of one product more, but dS made of it is 10 to 25 % less accurate than stock Keras', and far less where values have an
offset. (So has rowsum(P dP) taken from O and dO, as flash attention does with a float32 O.)

Products run as Keras runs them, in the dtype of the tensors; scores, softmax and gradients of scores in float32, rounded once.
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.activations import is_lean_tensor
from mp_hydra.activation_memory.dropout import drawn_seed, is_lean_rate, packed, scaled, uniform, unpacked
from mp_hydra.activation_memory.first_order import first_order
from mp_hydra.activation_memory.kernels import kernel
from mp_hydra.activation_memory.ordering import after
from mp_hydra.activation_memory.second_run import is_second_run

if TYPE_CHECKING:
    from collections.abc import Callable

# Keras' score of a masked pair (backend.tensorflow.nn._get_large_negative); finite, so that a row without any pair stays finite.
_MASKED_SCORE = -0.7 * 3.38953e38
_RANK = 4  # of queries, keys, values and scores


@dataclass(frozen=True)
class _Heads:
    """What attention computes with besides queries, keys and values.

    Attributes:
        scale: factor of the scores.
        mask: boolean, broadcast to [batch, heads, queries, keys]: the pairs that count. None: all.
        causal: a query sees the keys up to its own position alone.
    """

    scale: float
    mask: Any = None
    causal: bool = False

    @property
    def masks(self) -> tuple[Any, ...]:
        return () if self.mask is None else (self.mask,)

    @property
    def static(self) -> dict[str, Any]:
        return {"scale": self.scale, "causal": self.causal}


def dot_product_attention_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The lean form of `nn.dot_product_attention`: no `scale` becomes a number, which `_dot_product_attention_xla` needs here."""
    signature = inspect.signature(original)

    def dot_product_attention(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        dimension = getattr(bound.arguments["key"], "shape", [None])[-1]
        if bound.arguments.get("scale") is not None or not dimension:
            return NotImplemented
        bound.arguments["scale"] = 1.0 / math.sqrt(dimension)
        return original(*bound.args, **bound.kwargs)

    return dot_product_attention


def dot_product_attention_xla(  # noqa: PLR0917 - Keras' parameters
    query: Any, key: Any, value: Any, bias: Any, mask: Any, is_causal: Any, scale: Any
) -> Any:
    """As `nn._dot_product_attention_xla`; NotImplemented with a bias, a scale that is a tensor, or a mask that is not boolean."""
    if bias is not None or not isinstance(scale, (int, float)) or not isinstance(is_causal, bool):
        return NotImplemented
    if not _are_lean(query, key, value) or not _is_lean_mask(mask):
        return NotImplemented
    return _attention(query, key, value, _Heads(float(scale), mask, is_causal))


def compute_attention_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """The lean form of `_compute_attention` of MultiHeadAttention and GroupedQueryAttention, for training with dropout.

    Without dropout the layers go through `dot_product_attention`, which is lean by itself. NotImplemented for attention scores
    that are returned, for other than one attention axis, masks that are not boolean, and layers whose softmax or dropout is not
    Keras' own. The same seed is drawn and the same elements are dropped as in Keras.
    """
    signature = inspect.signature(original)

    def compute_attention(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        layer, query, key, value = given["self"], given["query"], given["key"], given["value"]
        rate = _dropout_rate(layer)
        returns_scores = given.get("return_attention_scores") or getattr(layer, "_return_attention_scores", False)
        if rate is None or given.get("training") is not True or returns_scores or not _are_lean(query, key, value):
            return NotImplemented
        mask = _with_heads_axis(given.get("attention_mask"))
        scale = getattr(layer, "_inverse_sqrt_key_dim", getattr(layer, "_inverse_sqrt_head_dim", None))
        if not _is_lean_mask(mask) or scale is None:
            return NotImplemented
        heads = _Heads(float(scale), mask, bool(given.get("use_causal_mask", False)))
        seed = drawn_seed(layer._dropout_layer.seed_generator)  # noqa: SLF001 - what Keras' Dropout draws from
        return _attention_with_dropout(query, key, value, heads, rate=rate, seed=seed), None

    return compute_attention


def _dropout_rate(layer: Any) -> float | None:
    """The rate of an attention layer with dropout that is Keras' own throughout; None for another."""
    from keras.layers import Dropout, Softmax

    dropout, softmax = getattr(layer, "_dropout_layer", None), getattr(layer, "_softmax", None)
    if not isinstance(dropout, Dropout) or not isinstance(softmax, Softmax):
        return None
    known = type(dropout) is Dropout and dropout.noise_shape is None and type(softmax) is Softmax
    one_axis = getattr(layer, "_attention_axes", None) in {None, (1,)}
    one_dtype = dropout.compute_dtype == softmax.compute_dtype == layer.compute_dtype
    return float(dropout.rate) if known and one_axis and one_dtype and is_lean_rate(dropout.rate) else None


def _are_lean(*tensors: Any) -> bool:
    return all(is_lean_tensor(t) and t.shape.rank == _RANK for t in tensors) and len({t.dtype for t in tensors}) == 1


def _is_lean_mask(mask: Any) -> bool:
    import tensorflow as tf

    if mask is None:
        return True
    return isinstance(mask, tf.Tensor) and mask.dtype == tf.bool and mask.shape.rank in range(1, _RANK + 1)


def _with_heads_axis(mask: Any) -> Any:
    """A mask of [batch, queries, keys] as [batch, 1, queries, keys], as both layers do."""
    import tensorflow as tf

    if isinstance(mask, tf.Tensor) and mask.shape.rank == _RANK - 1:
        return mask[:, tf.newaxis]
    return mask


def _attention(query: Any, key: Any, value: Any, heads: _Heads) -> Any:
    import tensorflow as tf

    def function(query: Any, key: Any, value: Any) -> tuple[Any, Callable[[Any], Any]]:
        p = _probabilities(query, key, heads)
        kept = (p,) if is_second_run() else ()

        @first_order
        def gradient(output_gradient: Any, query: Any, key: Any, value: Any, *kept: Any) -> tuple[Any, Any, Any]:
            (p,) = kept or (_probabilities(_held(output_gradient, query), key, heads),)
            dp = _products(output_gradient, value)
            ds, weights = _score_gradient(dp, p, _row_sums(_shares(dp, p)), *heads.masks, **heads.static)
            return _weighted(ds, key), _weighted_keys(ds, query), _weighted_keys(weights, output_gradient)

        return _weighted(tf.cast(p, query.dtype), value), lambda dy: gradient(dy, query, key, value, *kept)

    return tf.custom_gradient(function)(query, key, value)


def _attention_with_dropout(query: Any, key: Any, value: Any, heads: _Heads, *, rate: float, seed: Any) -> Any:
    import tensorflow as tf

    def function(query: Any, key: Any, value: Any) -> tuple[Any, Callable[[Any], Any]]:
        p = _probabilities(query, key, heads)
        kept = (p,) if is_second_run() else ()
        dropped, bits = _drop(p, uniform(p, seed, query.dtype), *heads.masks, rate=rate, causal=heads.causal)

        @first_order
        def gradient(output_gradient: Any, query: Any, key: Any, value: Any, *kept: Any) -> tuple[Any, Any, Any]:
            (p,) = kept or (_probabilities(_held(output_gradient, query), key, heads),)
            dp = _products(output_gradient, value)
            sums = _row_sums(_dropped_shares(dp, p, bits, *heads.masks, rate=rate, causal=heads.causal))
            ds, weights = _dropped_score_gradient(dp, p, sums, bits, *heads.masks, rate=rate, **heads.static)
            return _weighted(ds, key), _weighted_keys(ds, query), _weighted_keys(weights, output_gradient)

        return _weighted(dropped, value), lambda dy: gradient(dy, query, key, value, *kept)

    return tf.custom_gradient(function)(query, key, value)


def _products(query: Any, key: Any) -> Any:
    """Of every query with every key, [batch, heads, queries, keys]."""
    import tensorflow as tf

    return tf.einsum("BTNH,BSNH->BNTS", query, key, optimize="optimal")


def _weighted(weights: Any, value: Any) -> Any:
    """The weighted sum of the values (or keys) for each query, [batch, queries, heads, features]."""
    import tensorflow as tf

    return tf.einsum("BNTS,BSNH->BTNH", weights, value, optimize="optimal")


def _weighted_keys(weights: Any, query: Any) -> Any:
    """The weighted sum of the queries for each key, [batch, keys, heads, features]."""
    import tensorflow as tf

    return tf.einsum("BNTS,BTNH->BSNH", weights, query, optimize="optimal")


def _probabilities(query: Any, key: Any, heads: _Heads) -> Any:
    """The softmax of the scores, float32."""
    import tensorflow as tf

    # The softmax stays TensorFlow's: on a CPU, XLA's reductions over rows take longer than the whole of it.
    products = _products(query, key)
    scores = _scores(products, *heads.masks, **heads.static)
    # TensorFlow's graph optimizer does not see shapes through a kernel, and complains of a softmax without a rank.
    return tf.nn.softmax(tf.ensure_shape(scores, products.shape))


def _row_sums(shares: Any) -> Any:
    import tensorflow as tf

    # As the softmax, TensorFlow's own on a CPU: within an XLA kernel the sums cost 4 to 8 bytes an element more, and time.
    return tf.reduce_sum(shares, axis=-1, keepdims=True)


def _allowed(scores: Any, masks: tuple[Any, ...], *, causal: bool) -> Any:
    """The pairs that count, broadcastable to the scores; None for all."""
    import tensorflow as tf

    allowed = masks[0] if masks else None
    if causal:
        past = tf.range(tf.shape(scores)[-2])[:, tf.newaxis] >= tf.range(tf.shape(scores)[-1])
        allowed = past if allowed is None else tf.logical_and(allowed, past)
    return allowed


@kernel
def _scores(products: Any, *masks: Any, scale: float, causal: bool) -> Any:
    import tensorflow as tf

    scores = tf.cast(products, tf.float32) * scale
    allowed = _allowed(scores, masks, causal=causal)
    return scores if allowed is None else tf.where(allowed, scores, _MASKED_SCORE)


@kernel
def _held(gradient: Any, tensor: Any) -> Any:
    return after(gradient, tensor)[1]


@kernel
def _shares(dp: Any, p: Any) -> Any:
    import tensorflow as tf

    return p * tf.cast(dp, tf.float32)


@kernel
def _score_gradient(dp: Any, p: Any, sums: Any, *masks: Any, scale: float, causal: bool) -> tuple[Any, Any]:
    """The gradient of the products and the weights of the values, both in the dtype of dp."""
    import tensorflow as tf

    ds = p * (tf.cast(dp, tf.float32) - sums) * scale
    return tf.cast(_of_pairs(ds, masks, causal=causal), dp.dtype), tf.cast(p, dp.dtype)


@kernel
def _drop(p: Any, numbers: Any, *masks: Any, rate: float, causal: bool) -> tuple[Any, Any]:
    """The weights of the values, in the dtype of the numbers, and what was kept, packed."""
    import tensorflow as tf

    keep = numbers >= rate
    return tf.cast(scaled(_of_pairs(p, masks, causal=causal), keep, rate), numbers.dtype), packed(keep)


@kernel
def _dropped_shares(dp: Any, p: Any, bits: Any, *masks: Any, rate: float, causal: bool) -> Any:
    import tensorflow as tf

    return _of_pairs(p, masks, causal=causal) * scaled(tf.cast(dp, tf.float32), unpacked(bits, dp), rate)


@kernel
def _dropped_score_gradient(
    dp: Any, p: Any, sums: Any, bits: Any, *masks: Any, rate: float, scale: float, causal: bool
) -> tuple[Any, Any]:
    """As `_score_gradient`, through what was kept."""
    import tensorflow as tf

    keep = unpacked(bits, dp)
    p = _of_pairs(p, masks, causal=causal)
    ds = p * (scaled(tf.cast(dp, tf.float32), keep, rate) - sums) * scale
    return tf.cast(ds, dp.dtype), tf.cast(scaled(p, keep, rate), dp.dtype)


def _of_pairs(p: Any, masks: tuple[Any, ...], *, causal: bool) -> Any:
    """Probabilities as Keras' Softmax layer has them: 0 in a row without any pair, where equal scores gave equal shares."""
    import tensorflow as tf

    allowed = _allowed(p, masks, causal=causal)
    return p if allowed is None else tf.where(allowed, p, 0.0)
