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
# Tags of an experiment in which the MLflow UI keeps the views that people share: filter, order and columns, as JSON.
VIEW_TAG = "mlflow.sharedViewState."
COLUMNS = (
    *("params.`precision.name`", "params.`seed`"),
    *("metrics.`memory/training_mib`", "metrics.`compare/training_memory_ratio`", "metrics.`memory/peak_mib`"),
    *("metrics.`time/step_ms`", "metrics.`compare/step_time_ratio`"),
    *("metrics.`test/accuracy`", "metrics.`compare/accuracy_difference_points`", "tags.`mp_hydra.outcome`"),
)
# Any order but that of time makes the UI show the runs themselves instead of their parent alone.
_ORDER = "metrics.`memory/training_mib`"


def view_tag(parent_run_id: str) -> tuple[str, str]:
    """Name and value of the tag that makes a sweep's experiment hold the view that `links` opens.

    An address alone can name filter and order, and no columns.
    """
    state = {
        "searchFilter": _children(parent_run_id),
        "orderByKey": _ORDER,
        "orderByAsc": True,
        "selectedColumns": COLUMNS,
    }
    return f"{VIEW_TAG}{_view(parent_run_id)}", json.dumps(state)


def links(
    uri: str,
    experiment_id: str,
    parent_run_id: str | None,
    run_ids: Sequence[str],
    base: str | None = None,
    *,
    view: bool = False,
) -> dict[str, str]:
    """The pages that show a sweep: `compare`, its runs side by side, where there are two or more; `runs`, their table.

    Args:
        uri: the address of the store.
        experiment_id: MLflow's id of the experiment.
        parent_run_id: MLflow's id of the sweep's parent run; None for the table of the whole experiment.
        run_ids: MLflow's ids of its runs, of which the first 30 are compared.
        base: where the UI is served; None for the store's own server, or for a local store where `mlflow ui` would.
        view: whether the experiment holds the sweep's `view_tag`; without it the table shows no figures at first.
    """
    if base is None:
        base = LOCAL_UI if sqlite_path(uri) is not None else public(uri)
    found = {}
    if len(run_ids) > 1:
        runs, experiments = json.dumps(list(run_ids[:MAX_COMPARED])), json.dumps([experiment_id])
        packed = [quote(text.replace(" ", "")) for text in (runs, experiments)]
        found["compare"] = f"{base}/#/compare-runs?runs={packed[0]}&experiments={packed[1]}"
    table = f"{base}/#/experiments/{experiment_id}/runs?workflowType=machine_learning"
    if parent_run_id is not None and view:
        table += f"&viewStateShareKey={_view(parent_run_id)}"
    elif parent_run_id is not None:
        wanted, order = quote(_children(parent_run_id), safe=""), quote(_ORDER, safe="")
        table += f"&searchFilter={wanted}&orderByKey={order}&orderByAsc=true"
    found["runs"] = table
    return found


def _children(parent_run_id: str) -> str:
    return f"tags.`{PARENT_TAG}` = '{parent_run_id}'"


def _view(parent_run_id: str) -> str:
    return f"mp_hydra.{parent_run_id}"
