"""Addresses in the MLflow UI."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING
from urllib.parse import quote

from mp_hydra.tracking.family import PARENT_TAG
from mp_hydra.tracking.store import public, sqlite_path

if TYPE_CHECKING:
    from collections.abc import Sequence

LOCAL_UI = "http://127.0.0.1:5000"
MAX_COMPARED = 30  # more columns than that nobody reads, and the address grows too long for a browser


def links(
    uri: str, experiment_id: str, parent_run_id: str | None, run_ids: Sequence[str], base: str | None = None
) -> dict[str, str]:
    """The pages that show a sweep: `compare`, its runs side by side, where there are two or more; `runs`, their table.

    Args:
        uri: the address of the store.
        experiment_id: MLflow's id of the experiment.
        parent_run_id: MLflow's id of the sweep's parent run; None for the table of the whole experiment.
        run_ids: MLflow's ids of its runs, of which the first 30 are compared.
        base: where the UI is served; None for the store's own server, or for a local store where `mlflow ui` would.
    """
    if base is None:
        base = LOCAL_UI if sqlite_path(uri) is not None else public(uri)
    found = {}
    if len(run_ids) > 1:
        runs, experiments = json.dumps(list(run_ids[:MAX_COMPARED])), json.dumps([experiment_id])
        packed = [quote(text.replace(" ", "")) for text in (runs, experiments)]
        found["compare"] = f"{base}/#/compare-runs?runs={packed[0]}&experiments={packed[1]}"
    table = f"{base}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if parent_run_id is not None:
        wanted = quote(f"tags.`{PARENT_TAG}` = '{parent_run_id}'", safe="")
        table += f"&searchFilter={wanted}"
    found["runs"] = table
    return found
