"""Signals that end a launch, received where they can do no harm.

Python calls a signal's handler between any two steps of the main thread, and an exception from it would lose a message that
is being read. So they are noted while `held`, and acted upon right after.
"""

from __future__ import annotations

import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mp_hydra.isolation.processes import ENDING_SIGNALS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from types import FrameType, TracebackType

    from typing_extensions import Self


class Interrupts:
    """While in force, SIGTERM and SIGHUP raise SystemExit where nobody handles them; other handlers are called as they are.

    In threads but the main one, which receives no signals, nothing changes.

    Attributes:
        noted: signals that came while they were held, oldest first.
    """

    def __init__(self) -> None:
        self.noted: list[int] = []
        self._held = False
        self._before: dict[int, Callable[[int, FrameType | None], Any] | int] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in ENDING_SIGNALS:
                before = signal.getsignal(number)
                if before not in (None, signal.SIG_IGN):  # set by C code; ignored, as under nohup
                    self._before[number] = before  # type: ignore[assignment]
                    signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Let signals wait until the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self._held = False
        while self.noted:
            self._act(self.noted.pop(0), None)

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Only note signals, and forget them at the end of the block."""
        self._held = True
        try:
            yield
        finally:
            self.noted.clear()
            self._held = False

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self._held:
            self.noted.append(number)
        else:
            self._act(number, frame)

    def _act(self, number: int, frame: FrameType | None) -> None:
        before = self._before[number]
        if callable(before):
            before(number, frame)
        else:
            raise SystemExit(128 + number)
