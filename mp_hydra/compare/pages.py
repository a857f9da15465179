"""The pages worth opening for the latest sweep of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mp_hydra.compare.which import Selection, find
from mp_hydra.errors import UserError
from mp_hydra.tracking.links import links

if TYPE_CHECKING:
    from mp_hydra.compare.store import Store

PAGE = "comparison/comparison.html"


def latest_pages(store: Store, experiment: str, base: str) -> dict[str, str]:
    """Addresses by name: the UI itself; of the latest sweep its runs side by side, their table, and our comparison.

    Args:
        store: where the runs are.
        experiment: whose runs are meant if there is no sweep.
        base: where the store's UI is served.

    Raises:
        TrackingError: the store cannot be read.
    """
    pages = {"ui": base}
    try:
        found = find(None, store, cwd=Path.cwd(), experiment=experiment)
    except UserError:
        return pages
    return pages | sweep_pages(found, base)


def sweep_pages(selection: Selection, base: str | None = None) -> dict[str, str]:
    """Addresses by name for a selection of runs; see `mp_hydra.tracking.links.links`."""
    first = selection.runs[0].info
    ids = [run.info.run_id for run in selection.runs]
    pages = links(selection.store.uri, first.experiment_id, selection.parent_run_id, ids, base)
    if selection.parent_run_id is not None:
        artifacts = selection.store.client.get_run(selection.parent_run_id).info.artifact_uri
        local = Path(artifacts.removeprefix("file://")) / PAGE
        if artifacts.startswith("file://") and local.is_file():
            pages["page"] = local.as_uri()
    return pages
