"""Runs made by hand in a real MLflow store: a sweep's parent, and children with metrics, data set and files."""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.compare.collect import Store
from mp_hydra.tracking import Outcome, Run, Settings, open_client, open_run
from mp_hydra.tracking.store import sqlite_uri

if TYPE_CHECKING:
    from mp_hydra.compare.records import RunRecord

EXPERIMENT = "digits"


@cache
def _template() -> Path:
    """A database without runs; making one takes seconds, copying it none."""
    database = Path(mkdtemp(prefix="mp_hydra_template_")) / "mlflow.db"
    open_client(sqlite_uri(database))
    return database


@dataclass(frozen=True)
class Made:
    """A store of a test's own, in `home`."""

    home: Path

    @classmethod
    def at(cls, home: Path) -> Made:
        home.mkdir(parents=True)
        shutil.copy(_template(), home / "mlflow.db")
        return cls(home)

    @property
    def uri(self) -> str:
        return sqlite_uri(self.home / "mlflow.db")

    @property
    def store(self) -> Store:
        return Store.open(self.uri)

    def open(self, name: str, *, experiment: str = EXPERIMENT, **more: Any) -> Run:
        time.sleep(0.002)  # runs are ordered by milliseconds
        settings = Settings(uri=self.uri, experiment=experiment)
        given = {"params": {}, "tags": {}, **more}
        return open_run(settings, name=name, spool=self.home / "spool", cwd=self.home, **given)

    def parent(self, name: str = "precision=fp32,mixed_bfloat16", *, experiment: str = EXPERIMENT) -> str:
        """The parent run of a sweep whose directory is `home`/`name`."""
        tags = {"mp_hydra.kind": "sweep", "mp_hydra.sweep": str(self.home / name)}
        run = self.open(name, experiment=experiment, tags=tags)
        run.close(Outcome.ok)
        return str(run.run_id)

    def keep(self, record: RunRecord, parent: str | None = None, *, experiment: str = EXPERIMENT) -> str:
        """Put a run made by hand into the store; one that is "running" is left open. The answer is its id."""
        family = {} if parent is None else {"mlflow.parentRunId": parent}
        tags = {key: value for key, value in record.tags.items() if key not in ("mp_hydra.outcome", "mp_hydra.reason")}
        run = self.open(record.name, experiment=experiment, params=record.params, tags={**tags, **family})
        if record.dataset is not None:
            name, digest = record.dataset
            run.log_dataset(name=name, digest=digest, source="made by hand", schema=None, profile=None)
        run.log_metrics(record.metrics, step=100)
        files = self.home / "files" / str(run.run_id)
        files.mkdir(parents=True)
        if record.environment:
            (files / "environment.json").write_text(json.dumps(record.environment))
        if record.correct is not None and record.labels is not None:
            np.savez(files / "predictions.npz", correct=record.correct, label=record.labels)
        if record.step_ms is not None:
            np.savez(files / "step_times.npz", milliseconds=record.step_ms)
        for path in sorted(files.iterdir()):
            run.log_artifacts(path)
        run.flush()
        if record.outcome != "running":
            run.close(Outcome(record.outcome), reason=record.tags.get("mp_hydra.reason"))
        return str(run.run_id)

    def contents(self) -> dict[str, Any]:
        """Everything that publishing could change: by run its tags, the values of its metrics and its files."""
        client = self.store.client
        experiments = client.search_experiments()
        found: dict[str, Any] = {f"experiment {one.name}": dict(one.tags) for one in experiments}
        for run in client.search_runs([one.experiment_id for one in experiments]):
            directory = Path(run.info.artifact_uri.removeprefix("file://"))
            histories = {key: client.get_metric_history(run.info.run_id, key) for key in run.data.metrics}
            found[run.info.run_id] = {
                "tags": dict(run.data.tags),
                "metrics": {key: [(one.value, one.step) for one in values] for key, values in histories.items()},
                "files": {str(path): path.read_bytes() for path in directory.rglob("*") if path.is_file()},
            }
        return found
