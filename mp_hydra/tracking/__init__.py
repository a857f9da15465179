"""Tracking of runs in MLflow: where they are kept, how they live and end, and what waits when a server is away.

    run = open_run(Settings(), name="fp32 cnn", params=config, tags=git_state(cwd).tags(), spool=output, cwd=cwd)
    run.log_metrics({"train/loss": 0.25}, step=100)
    run.close(Outcome.ok)

MlflowClient and ids throughout: no active run is set, so nothing leaks into the next run of the process.
"""

from __future__ import annotations

from mp_hydra.tracking.family import children, end_children, end_run, latest_sweep
from mp_hydra.tracking.git import GitState, git_state
from mp_hydra.tracking.params import flatten
from mp_hydra.tracking.run import OffRun, Outcome, Run, open_run, reopen_run
from mp_hydra.tracking.spool import SyncReport, sync
from mp_hydra.tracking.store import Settings, home, open_client, public, store_uri

__all__ = [
    "GitState",
    "OffRun",
    "Outcome",
    "Run",
    "Settings",
    "SyncReport",
    "children",
    "end_children",
    "end_run",
    "flatten",
    "git_state",
    "home",
    "latest_sweep",
    "open_client",
    "open_run",
    "public",
    "reopen_run",
    "store_uri",
    "sync",
]
