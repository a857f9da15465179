"""The lean `call` of Keras' normalisation layers, or why a layer stays as it is.

Variables, their names and what is saved stay the layer's own. A lean call reads the parameters in float32, also where Keras
would cast them to the compute dtype first (RMSNormalization; GroupNormalization before Keras 3.15).
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.batch_normalization import moved, normalize_batch, normalize_by
from mp_hydra.activation_memory.normalization import normalize

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

_SHORT = ("float16", "bfloat16")
_LEAN = (*_SHORT, "float32")
_HARMLESS = {"__init__", "build", "get_config", "from_config", "compute_output_shape"}


@dataclass(frozen=True)
class Replacement:
    """What stands in for a layer's `call`: a function with its parameters but `self`, or the reason why nothing does."""

    call: Callable[..., Any] | None
    reason: str | None = None


def replacement(layer: Any) -> Replacement | None:
    """The lean call of a layer; None where there is nothing to gain: in a layer of another kind than the normalisations.

    The call reads the layer when it is called: `trainable`, `momentum` and the variables may change after. It leaves a call
    that it does not fit (a mask, an input of another dtype than was to be expected) to the layer's own.
    """
    import keras

    rules: dict[str, Callable[[Any], Replacement | None]] = {
        "BatchNormalization": _batch,
        "LayerNormalization": _layer,
        "GroupNormalization": _group,
        "RMSNormalization": _rms,
    }
    for name, rule in rules.items():
        kind = getattr(keras.layers, name, None)
        if kind is not None and isinstance(layer, kind):
            problem = _problem(layer, kind)
            return rule(layer) if problem is None else Replacement(None, problem)
    return None


def _problem(layer: Any, kind: type) -> str | None:
    below = type(layer).__mro__[: type(layer).__mro__.index(kind)]
    changed = {name for cls in below for name in vars(cls)} & {
        name for name, value in vars(kind).items() if callable(value)
    }
    if changed - _HARMLESS:
        return f"{type(layer).__name__} has its own {', '.join(sorted(changed - _HARMLESS))}"
    if "call" in layer.__dict__:
        return "its call was replaced before"
    if layer.compute_dtype not in _LEAN:
        return f"it computes in {layer.compute_dtype}"
    return None


def _batch(layer: Any) -> Replacement | None:
    if layer.compute_dtype not in _SHORT:
        return None  # stock Keras keeps no more than its float32 input
    if layer.synchronized:
        return Replacement(None, "synchronized=True: its statistics are those of all replicas")
    if getattr(layer, "renorm", False):
        return Replacement(None, "renorm=True")
    stock = layer.call

    def call(inputs: Any, training: Any = None, mask: Any = None) -> Any:
        import tensorflow as tf

        if mask is not None or _dtype(inputs) != layer.compute_dtype:
            return stock(inputs, training=training, mask=mask)
        mean, variance = _float32(layer.moving_mean), _float32(layer.moving_variance)
        gamma = _float32(layer.gamma) if layer.scale else tf.ones_like(mean)
        beta = _float32(layer.beta) if layer.center else tf.zeros_like(mean)
        static = {"axis": layer.axis % len(inputs.shape), "epsilon": layer.epsilon}
        if not (training and layer.trainable):
            trainable = layer.trainable and (layer.scale or layer.center)
            return normalize_by(inputs, gamma, beta, mean, variance, trainable=trainable, **static)
        outputs, batch_mean, batch_variance = normalize_batch(inputs, gamma, beta, **static)
        layer.moving_mean.assign(moved(mean, batch_mean, layer.momentum))
        layer.moving_variance.assign(moved(variance, batch_variance, layer.momentum))
        return outputs

    return Replacement(call)


def _layer(layer: Any) -> Replacement:
    if getattr(layer, "rms_scaling", False):
        return Replacement(None, "rms_scaling=True, which Keras deprecates for RMSNormalization")
    stock = layer.call

    def call(inputs: Any) -> Any:
        import tensorflow as tf

        axes = _axes(layer.axis, inputs) if _dtype(inputs) in _LEAN else None
        if axes is None:
            return stock(inputs)
        shape = [size if axis in axes else 1 for axis, size in enumerate(inputs.shape)]
        gamma = None if layer.gamma is None else tf.reshape(_float32(layer.gamma), shape)
        beta = None if layer.beta is None else tf.reshape(_float32(layer.beta), shape)
        y, *_ = normalize(inputs, gamma, beta, axes=axes, epsilon=layer.epsilon, dtype=layer.compute_dtype)
        return y

    return Replacement(call)


def _group(layer: Any) -> Replacement:
    stock = layer.call

    def call(inputs: Any) -> Any:
        import tensorflow as tf

        axes = _axes(layer.axis, inputs) if _dtype(inputs) in _LEAN else None
        if axes is None or axes == [0]:
            return stock(inputs)
        (axis,) = axes
        split = [layer.groups, inputs.shape[axis] // layer.groups]
        sizes = tf.unstack(tf.shape(inputs))
        grouped = tf.reshape(inputs, [*sizes[:axis], *split, *sizes[axis + 1 :]])
        ones = [1] * len(sizes)
        shape = [*ones[:axis], *split, *ones[axis + 1 :]]
        gamma = None if layer.gamma is None else tf.reshape(_float32(layer.gamma), shape)
        beta = None if layer.beta is None else tf.reshape(_float32(layer.beta), shape)
        shared = [a for a in range(1, len(shape)) if a != axis]
        y, *_ = normalize(grouped, gamma, beta, axes=shared, epsilon=layer.epsilon, dtype=layer.compute_dtype)
        return tf.ensure_shape(tf.reshape(y, tf.shape(inputs)), inputs.shape)

    return Replacement(call)


def _rms(layer: Any) -> Replacement:
    stock = layer.call

    def call(x: Any) -> Any:
        import tensorflow as tf

        dtype = _dtype(x)
        axes = _axes(layer.axis, x) if dtype in _LEAN else None
        if axes is None or axes != list(range(len(x.shape) - len(axes), len(x.shape))):
            return stock(x)
        shape = [size if axis in axes else 1 for axis, size in enumerate(x.shape)]
        scale = tf.reshape(_float32(layer.scale), shape)
        y, *_ = normalize(x, scale, None, axes=axes, epsilon=layer.epsilon, dtype=str(dtype), centered=False)
        return y

    return Replacement(call)


def _dtype(inputs: Any) -> str | None:
    """The dtype of a dense tensor of known rank; None of anything else."""
    import tensorflow as tf

    dense = isinstance(inputs, tf.Tensor) and inputs.shape.rank is not None
    return inputs.dtype.name if dense else None


def _axes(axis: int | Sequence[int], inputs: Any) -> list[int] | None:
    """The axes counted from 0, in order; None if the input's size is not known along one."""
    rank = len(inputs.shape)
    axes = sorted({a % rank for a in ([axis] if isinstance(axis, int) else axis)})
    return axes if all(inputs.shape[a] is not None for a in axes) else None


def _float32(variable: Any) -> Any:
    """The value of a Keras variable, not cast to the compute dtype of the layer that is being called."""
    import tensorflow as tf

    with _no_autocast():
        return tf.cast(tf.convert_to_tensor(variable), tf.float32)


def _no_autocast() -> AbstractContextManager[Any]:
    from keras.src import backend

    scope = getattr(backend, "AutocastScope", None)
    return scope(None) if scope is not None else nullcontext()
