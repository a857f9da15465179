"""Additional losses in float32: `add_loss` and activity regularizers under a mixed policy.

Stock Keras adds them to the float32 loss in the dtype that the layer computes in, which raises TypeError on TensorFlow, and
an activity regularizer sums squares in 16 bits, which overflows in float16.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mp_hydra.overrides import overridden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_AGGREGATE = "_aggregate_additional_loss"  # what the stock compute_loss calls for each additional loss
_THEIRS = "mp_hydra_theirs"  # the user's regularizer, on the function that stands in for it


@contextmanager
def float32_losses(model: Any) -> Iterator[None]:
    """While in force, `model` sums additional losses in float32, in training and in evaluation.

    The overrides live on the instance, and activity regularizers are exchanged only while a step runs or is traced, so that
    what is saved meanwhile is the user's model. A `compute_loss` of the user's that adds `self.losses` by itself is not
    reached, and neither is arithmetic inside the user's own `add_loss`.

    Args:
        model: a Keras model.

    Raises:
        AttributeError: if this version of Keras lacks the method that is overridden.
    """
    from keras import ops

    aggregate = getattr(model, _AGGREGATE)
    methods: dict[str, Callable[..., Any]] = {
        _AGGREGATE: lambda _model, loss: aggregate(ops.cast(loss, "float32")),
        "train_step": _with_float32_regularizers(model.train_step),
        "test_step": _with_float32_regularizers(model.test_step),
    }
    with overridden(model, methods):
        yield


def _with_float32_regularizers(step: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    def wrapped(model: Any, data: Any) -> Any:
        from keras import ops

        layers = [layer for layer in model._flatten_layers() if layer.activity_regularizer is not None]  # noqa: SLF001
        # Under a strategy the steps of two replicas overlap, and the second one finds what the first has set.
        regularizers = [getattr(layer.activity_regularizer, _THEIRS, layer.activity_regularizer) for layer in layers]
        for layer, regularizer in zip(layers, regularizers, strict=True):
            layer.activity_regularizer = _in_float32(regularizer, ops)
        try:
            return step(data)
        finally:
            for layer, regularizer in zip(layers, regularizers, strict=True):
                layer.activity_regularizer = regularizer

    return wrapped


def _in_float32(regularizer: Callable[[Any], Any], ops: Any) -> Callable[[Any], Any]:
    def in_float32(output: Any) -> Any:
        return regularizer(ops.cast(output, "float32"))

    setattr(in_float32, _THEIRS, regularizer)
    return in_float32
