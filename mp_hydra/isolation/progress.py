"""How a running job tells its launcher where it stands: a small file, replaced as a whole.

from mp_hydra.isolation.jobs import Progress
from mp_hydra.isolation.progress import report

report(Progress(0.5, "epoch 1/2", {"loss": 0.3}))  # does nothing outside an isolated job
"""

from __future__ import annotations

import contextlib
import json
import time
from typing import TYPE_CHECKING

from mp_hydra.isolation.jobs import Progress

if TYPE_CHECKING:
    from pathlib import Path

SHORTEST_INTERVAL = 0.2  # seconds


class _Reporter:
    def __init__(self) -> None:
        self.file: Path | None = None
        self.last = -float("inf")


_reporter = _Reporter()


def report_to(file: Path | None) -> None:
    """Make `file` the place for this process' reports; None for none."""
    _reporter.file, _reporter.last = file, -float("inf")


def report(progress: Progress) -> None:
    """Say where this job stands; at most five times a second, but for the last time.

    Does nothing in a process that is no isolated job, and where the launcher is gone.
    """
    now = time.monotonic()
    if _reporter.file is None or (now - _reporter.last < SHORTEST_INTERVAL and progress.fraction < 1):
        return
    _reporter.last = now
    text = json.dumps([float(progress.fraction), progress.text, {k: float(v) for k, v in progress.figures.items()}])
    with contextlib.suppress(OSError):
        _replace(_reporter.file, text)


def read(file: Path) -> Progress | None:
    """The newest report in `file`; None where there is none yet."""
    try:
        fraction, text, figures = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return Progress(fraction, text, figures)


def _replace(file: Path, text: str) -> None:
    new = file.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(file)
