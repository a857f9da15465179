"""Watching the calls of layers while a model runs: what arrives after Keras' autocast, and what is returned."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


@contextmanager
def intercepted(
    around: Callable[[Any, tuple[Any, ...], Callable[[], Any]], Any], entering: Callable[[Any], None] | None = None
) -> Iterator[None]:
    """Let `around(operation, arguments, call)` stand in for the `call` of every Keras layer and operation; it returns `call()`.

    The arguments are as `call` gets them: cast to the layer's compute dtype. They hold the positional ones, then the others.
    `entering(layer)` is told before a layer casts them.
    """
    import keras
    from keras.src.ops.operation import Operation  # the one place that all calls go through after the autocast

    original = Operation.__call__

    def intercepting(self: Any, *args: Any, **kwargs: Any) -> Any:
        return around(self, (*args, *kwargs.values()), partial(original, self, *args, **kwargs))

    outer = keras.layers.Layer.__call__

    def enters(self: Any, *args: Any, **kwargs: Any) -> Any:
        if entering is not None:
            entering(self)
        return outer(self, *args, **kwargs)

    Operation.__call__, keras.layers.Layer.__call__ = intercepting, enters
    try:
        yield
    finally:
        Operation.__call__, keras.layers.Layer.__call__ = original, outer


def dtypes_of(structure: Any) -> list[str]:
    """The dtypes of the tensors in a structure, in order."""
    import keras

    return [
        keras.backend.standardize_dtype(tensor.dtype)
        for tensor in keras.tree.flatten(structure)
        if hasattr(tensor, "dtype") and hasattr(tensor, "shape")
    ]
