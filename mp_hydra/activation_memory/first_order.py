"""Gradients that have no gradient of their own say so."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


def first_order(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function of float tensors; a gradient of it raises LookupError.

    For what a custom gradient computes from numbers kept of the forward pass: TensorFlow would take those as constants in a
    second derivative, which would be wrong in silence. Every tensor that a second derivative may reach must be an argument.
    """

    @functools.wraps(function)
    def call(*tensors: Any) -> Any:
        import tensorflow as tf

        @tf.custom_gradient  # type: ignore[untyped-decorator]
        def computed(*tensors: Any) -> Any:
            # A tape that records eagerly would else see into the function, and keep what its operations need.
            return function(*map(tf.stop_gradient, tensors)), _raise

        return computed(*tensors)

    return call


def _raise(*_: Any) -> Any:
    raise LookupError(
        "lean layers have first derivatives only; use memory=stock where a gradient of a gradient is taken"
    )
