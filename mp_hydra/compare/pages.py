"""The pages worth opening for the latest sweep of a store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from mp_hydra.compare.artifacts import local_directory
from mp_hydra.compare.which import Selection, find
from mp_hydra.errors import TrackingError, UserError
from mp_hydra.tracking.links import links, view_tag
from mp_hydra.tracking.store import sqlite_path

if TYPE_CHECKING:
    from mp_hydra.compare.store import Store

FOLDER = "comparison"
PAGE = f"{FOLDER}/comparison.html"
NOTE = "mlflow.note.content"


def latest_pages(store: Store, experiment: str | None, base: str) -> dict[str, str]:
    """Addresses by name: the UI itself; of the latest sweep its runs side by side, their table, and our comparison.

    Args:
        store: where the runs are.
        experiment: where the latest sweep is looked for; None for the whole store.
        base: where the store's UI is served.

    Raises:
        UserError: there is no such experiment, or nothing in it.
        TrackingError: the store cannot be read.
    """
    pages = {"ui": base}
    try:
        found = find(None, store, cwd=Path.cwd(), experiment=experiment)
    except TrackingError:
        raise
    except UserError:
        if experiment is not None:
            raise
        return pages
    return pages | sweep_pages(found, base)


def sweep_pages(selection: Selection, base: str | None = None) -> dict[str, str]:
    """Addresses by name for a selection of runs; see `mp_hydra.tracking.links.links`.

    Of a sweep that has been compared, `page` too: the file, or where a server shows it.

    Raises:
        TrackingError: the store cannot be read.
    """
    store, parent_run_id = selection.store, selection.parent_run_id
    experiment_id = selection.runs[0].info.experiment_id
    ids = [run.info.run_id for run in selection.runs]
    if parent_run_id is None:
        return links(store.uri, experiment_id, None, ids, base)
    (tags,) = [one.tags for one in store.experiments() if one.experiment_id == experiment_id] or [{}]
    pages = links(store.uri, experiment_id, parent_run_id, ids, base, view=view_tag(parent_run_id)[0] in tags)
    parent = store.run(parent_run_id)
    directory = None if parent is None else local_directory(parent.info.artifact_uri)
    if directory is not None and (directory / PAGE).is_file():
        pages["page"] = (directory / PAGE).as_uri()
    elif parent is not None and directory is None and NOTE in parent.data.tags:
        server = store.name if base is None else base
        pages["page"] = f"{server}/#/experiments/{parent.info.experiment_id}/runs/{parent_run_id}/artifacts/{PAGE}"
    return pages


def announced(pages: dict[str, str], uri: str) -> list[str]:
    """A line for each page, and for a local store how to have the UI's pages served."""
    lines = [f"{name:<9}{address}" for name, address in pages.items()]
    return [*lines, "         (mp-hydra ui serves these pages)"] if sqlite_path(uri) is not None else lines
