"""SIGINT and SIGTERM kept away from what they must not interrupt."""

from __future__ import annotations

import contextlib
import signal
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def signals_held_back(*, lost: bool) -> Iterator[None]:
    """Let SIGINT and SIGTERM wait for the end of the block, and then act, unless they are to be ``lost``."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    previous = {
        number: handler
        for number in (signal.SIGINT, signal.SIGTERM)
        if (handler := signal.getsignal(number)) is not None  # None: set from C, and cannot be put back
    }
    try:
        for number in previous:
            signal.signal(number, lambda got, _frame: came.append(got))
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
    if came and not lost:
        signal.raise_signal(came[0])
