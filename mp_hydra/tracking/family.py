"""Parent runs and their children: found by MLflow's own tag, and ended where their process can no longer do so."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mp_hydra.tracking.batch import Batch, End, send
from mp_hydra.tracking.params import MAX_TAG_VALUE, cut
from mp_hydra.tracking.store import quiet, unusable

if TYPE_CHECKING:
    from mp_hydra.tracking.run import Outcome

PARENT_TAG = "mlflow.parentRunId"
KIND_TAG = "mp_hydra.kind"
SWEEP_KIND = "sweep"
PAGE = 1000


def children(client: Any, experiment_id: str, parent_run_id: str, *, status: str | None = None) -> list[Any]:
    """The runs below a parent run, the oldest first, as MLflow's own objects; those deleted in the UI are left out.

    Args:
        client: an MlflowClient.
        experiment_id: of the parent; MLflow shows families within one experiment.
        parent_run_id: the parent.
        status: only runs in this state, such as "RUNNING".

    Raises:
        TrackingError: the store does not answer.
    """
    wanted = f"tags.`{PARENT_TAG}` = '{parent_run_id}'"
    if status is not None:
        wanted += f" and attributes.status = '{status}'"
    found: list[Any] = []
    token = None
    try:
        with quiet():
            while True:
                page = client.search_runs(
                    [experiment_id],
                    wanted,
                    max_results=PAGE,
                    order_by=["attributes.start_time ASC"],
                    page_token=token,
                )
                found += page
                token = page.token
                if not token:
                    return found
    except Exception as error:
        raise unusable(client.tracking_uri, error) from error


def latest_sweep(client: Any, experiment_id: str) -> Any | None:
    """The newest parent run of a sweep in an experiment, as MLflow's own object; None if there is none.

    Raises:
        TrackingError: the store does not answer.
    """
    try:
        with quiet():
            found = client.search_runs(
                [experiment_id],
                f"tags.`{KIND_TAG}` = '{SWEEP_KIND}'",
                max_results=1,
                order_by=["attributes.start_time DESC"],
            )
    except Exception as error:
        raise unusable(client.tracking_uri, error) from error
    return found[0] if found else None


def end_run(client: Any, run_id: str, outcome: Outcome, reason: str) -> Exception | None:
    """End a run for a process that is gone; what it said of its own end is overwritten.

    Returns:
        What kept the store from taking it; None if it took it.
    """
    tags = {"mp_hydra.outcome": outcome.value, "mp_hydra.reason": cut(reason, MAX_TAG_VALUE)}
    _, error = send(client, run_id, Batch(tags=tags, end=End(outcome.status, int(time.time() * 1000))))
    return error


def end_children(client: Any, experiment_id: str, parent_run_id: str, outcome: Outcome, reason: str) -> int:
    """End all children that are still marked as running; return how many there were.

    Raises:
        TrackingError: the store does not answer.
    """
    running = children(client, experiment_id, parent_run_id, status="RUNNING")
    for run in running:
        if (error := end_run(client, run.info.run_id, outcome, reason)) is not None:
            raise unusable(client.tracking_uri, error) from error
    return len(running)
