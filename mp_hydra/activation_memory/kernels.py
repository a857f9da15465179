"""Inner functions of a custom gradient, as one XLA kernel where XLA can be had.

A lean gradient reads 16-bit tensors and computes in float32. As single TensorFlow operations that takes several float32
temporaries of the tensor's size, and the executor may run the first of them, a cast that does not depend on the incoming
gradient, long before it is needed. One kernel has neither problem.
"""

from __future__ import annotations

import functools
import logging
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

log = logging.getLogger(__name__)


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a pure function of tensors one kernel; it is traced once for each set of shapes and dtypes.

    Keyword arguments of the result are Python values and part of what identifies a trace; positional ones are tensors. Without
    XLA the function runs as it is, with its float32 temporaries. Decorate functions at module level: what is shared between
    layers is compiled once.

    >>> @kernel
    ... def scaled(x, *, by):
    ...     return x * by
    >>> float(scaled(2.0, by=3.0))
    6.0
    """

    @functools.cache
    def compiled(**static: Any) -> Callable[..., Any]:
        import tensorflow as tf

        return tf.function(functools.partial(function, **static), jit_compile=True, autograph=False)  # type: ignore[no-any-return]

    @functools.wraps(function)
    def call(*tensors: Any, **static: Any) -> Any:
        if xla_problem() is None:
            return compiled(**static)(*tensors)
        return function(*tensors, **static)

    return call


@functools.cache
def xla_problem() -> str | None:
    """Why XLA cannot compile here, such as a GPU without libdevice; None if it can. Said once in the log."""
    import tensorflow as tf

    try:
        with tf.init_scope():
            tf.function(lambda x: tf.exp(x) + 1.0, jit_compile=True, autograph=False)(tf.zeros((8,)))
    except (tf.errors.OpError, ValueError, RuntimeError) as error:
        lines = str(error).strip().splitlines()
        problem = f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"
        log.warning(
            "XLA cannot compile here (%s): lean layers run as single operations, with larger temporaries", problem
        )
        return problem
    return None
