"""Whether a part of a model is being run again for its backward pass, which follows at once.

What is kept then is kept for a moment: a lean function need not go out of its way to keep nothing.
"""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

_AGAIN: ContextVar[bool] = ContextVar("mp_hydra_second_run", default=False)


@contextmanager
def second_run() -> Iterator[None]:
    """While in force, in this thread, what is called is run again."""
    token = _AGAIN.set(True)
    try:
        yield
    finally:
        _AGAIN.reset(token)


def is_second_run() -> bool:
    """Whether it is."""
    return _AGAIN.get()
