"""The random states that running or tracing a model may move: Python's, NumPy's and Keras' global one."""

from __future__ import annotations

import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterator

_KEY = "global_seed_generator"  # what Keras calls it in its global state; it makes one where it is first needed


@contextmanager
def seeds_kept() -> Iterator[Any]:
    """Put the random states back when the block ends.

    The state of Keras' generator is put back only if the block puts back the values of variables: it is one.

    Yields:
        Keras' global `SeedGenerator`; None if there is none yet.
    """
    from keras.src.backend.common import global_state

    generator = global_state.get_global_attribute(_KEY)
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - a user's model or step may use it
    try:
        yield generator
    finally:
        global_state.set_global_attribute(_KEY, generator)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
