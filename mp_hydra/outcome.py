"""How a run ends: exceptions and signals become an outcome, and the tracking run is closed with it on every way out."""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra.errors import NoUpdatesError, UserError
from mp_hydra.tracking import Outcome, Run

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType


class Terminated(SystemExit):
    """SIGTERM, as an exception, so that everything open is closed on the way out."""

    def __init__(self) -> None:
        super().__init__(128 + signal.SIGTERM)


class MemoryExhaustedError(UserError):
    """The device or the host had no memory left: a result for a comparison, and an error for a single run."""


@dataclass
class Ending:
    """The outcome so far; the run sets it where training itself tells more than the absence of an exception."""

    outcome: Outcome = Outcome.ok
    reason: str | None = None


@contextmanager
def closing(run: Run) -> Iterator[Ending]:
    """Close `run` with the outcome of the block, whatever ends it, and let the exception go on.

    Out-of-memory errors are recognised by class, as causes of others too, and raised on as `MemoryExhaustedError`.
    """
    ending = Ending()
    try:
        with sigterm_raises():
            yield ending
    except (KeyboardInterrupt, Terminated) as error:
        ending.outcome, ending.reason = Outcome.killed, type(error).__name__
        raise
    except BaseException as error:
        exhausted = _out_of_memory(error)
        if exhausted is not None:
            ending.outcome, ending.reason = Outcome.out_of_memory, _first_line(exhausted)
            raise MemoryExhaustedError(f"out of memory: {ending.reason}; try a smaller batch_size") from error
        if ending.outcome is Outcome.ok:
            ending.outcome = Outcome.no_updates if isinstance(error, NoUpdatesError) else Outcome.error
        ending.reason = ending.reason or f"{type(error).__name__}: {_first_line(error)}"
        raise
    finally:
        run.close(ending.outcome, reason=ending.reason)


def _out_of_memory(error: BaseException | None) -> BaseException | None:
    """The error, or the first in the chain of its causes, that says that there was no memory left."""
    import tensorflow as tf

    seen: set[int] = set()  # an error may be its own cause
    while error is not None and id(error) not in seen:
        if isinstance(error, (MemoryError, tf.errors.ResourceExhaustedError)):
            return error
        seen.add(id(error))
        error = error.__cause__
    return None


def _first_line(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[0][:500] if lines else type(error).__name__


@contextmanager
def sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into `Terminated` while in force; only the main thread can, elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handler(_number: int, _frame: FrameType | None) -> None:
        raise Terminated

    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
