"""The end of a sweep in our application: its parent run is closed on every way out, and the user told where to look."""

from __future__ import annotations

import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

from mp_hydra.outcome import Terminated
from mp_hydra.sweep import callback
from mp_hydra.tracking import Outcome

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def closing_sweep() -> Iterator[None]:
    """End the sweep that begins within the block, if one does, with the outcome of the block."""
    try:
        yield
    except (KeyboardInterrupt, Terminated) as error:
        _close(Outcome.killed, type(error).__name__)
        raise
    except BaseException as error:
        lines = str(error).splitlines()
        _close(Outcome.error, lines[0] if lines else type(error).__name__)
        raise
    _close(Outcome.ok, None)


def _close(outcome: Outcome, reason: str | None) -> None:
    swept = callback.active()
    if swept is not None:
        for line in swept.close(outcome, reason):
            print(line, file=sys.stderr)  # noqa: T201 - for the person at the terminal
