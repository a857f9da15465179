"""The comparison at the end of a sweep: shown, written beside the jobs, and put into the parent run."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from mp_hydra.sweep.session import Session

log = logging.getLogger(__name__)


def compare_sweep(session: Session, directory: Path, settings: Mapping[str, Any]) -> Path | None:
    """Compare the runs of a sweep, if they are of more than one precision.

    A comparison that fails is said, and harms nothing: the runs are in the store.

    Args:
        session: the sweep's session; it may be closed.
        directory: where comparison.html and the other forms are written.
        settings: `baseline` and `margin`, as in the config's section `sweep`.

    Returns:
        The page; None if there is nothing to compare, or it could not be done.
    """
    try:
        precisions = {run.data.tags.get("mp_hydra.precision") for run in session.children()}
        return _compare(session, directory, settings) if len(precisions) > 1 else None
    except UserError as error:
        log.warning("the runs are recorded, but could not be compared: %s", error)
    except Exception:
        log.exception(
            "the runs are recorded, but comparing them failed; try again with: mp-hydra compare %s", directory
        )
    return None


def _compare(session: Session, directory: Path, settings: Mapping[str, Any]) -> Path:
    from rich.console import Console

    from mp_hydra.compare import story
    from mp_hydra.compare.judge import MARGIN
    from mp_hydra.compare.report import terminal

    store = session.store()
    given = {"baseline": story.BASELINE, "margin": MARGIN, **settings}  # an application of one's own may leave them out
    comparison, selection = story.compare(
        session.parent_run_id, store, cwd=directory, baseline=str(given["baseline"]), margin=float(given["margin"])
    )
    terminal.show(comparison, Console(stderr=True))
    page = story.save(comparison, directory)[0]
    try:
        story.publish(comparison, selection)
    except UserError as error:
        log.warning("the comparison is in %s, but not in the store: %s", page, error)
    return page
