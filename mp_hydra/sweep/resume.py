"""Which earlier sweep `sweep.resume` means, and what of it is done."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra import tracking
from mp_hydra.errors import ConfigError, TrackingError
from mp_hydra.tracking import public
from mp_hydra.tracking.family import KIND_TAG, SWEEP_KIND
from mp_hydra.tracking.store import quiet

if TYPE_CHECKING:
    from pathlib import Path

FILE = "sweep.json"
KEY = "sweep.resume"
LAST = "last"


@dataclass(frozen=True)
class Manifest:
    """What a sweep's directory says of its parent run.

    Attributes:
        parent_run_id: MLflow's id of the parent run.
        experiment_id: MLflow's id of its experiment.
        uri: the address of the store, without user name and password.
    """

    parent_run_id: str
    experiment_id: str
    uri: str

    def save(self, directory: Path) -> None:
        """Write sweep.json."""
        directory.mkdir(parents=True, exist_ok=True)
        (directory / FILE).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, directory: Path) -> Manifest | None:
        """Read sweep.json; None if there is none, or it is none of ours."""
        try:
            return cls(**json.loads((directory / FILE).read_text(encoding="utf-8")))
        except (OSError, TypeError, ValueError):
            return None


def find_parent(client: Any, experiment_id: str, uri: str, wanted: str, cwd: Path) -> Any:
    """The parent run that is to go on, as MLflow's own object.

    Args:
        client: an MlflowClient on `uri`.
        experiment_id: where `last` looks.
        uri: the address of the store.
        wanted: `last`, a sweep's directory, or the id of its parent run.
        cwd: where a relative directory starts.

    Raises:
        ConfigError: there is no such sweep in this store.
        TrackingError: the store does not answer.
    """
    if wanted == LAST:
        found = tracking.latest_sweep(client, experiment_id)
        if found is None:
            raise ConfigError(KEY, wanted, f"there is no sweep in this experiment of {public(uri)} to go on with")
        return found
    run_id = wanted
    if (cwd / wanted).is_dir():
        manifest = Manifest.load(cwd / wanted)
        if manifest is None:
            raise ConfigError(KEY, wanted, f"the directory has no {FILE} of a tracked sweep; give that of a sweep")
        if manifest.uri != public(uri):
            raise ConfigError(KEY, wanted, f"its runs are in {manifest.uri}, not in {public(uri)}; set tracking.uri")
        run_id = manifest.parent_run_id
    return _parent(client, uri, run_id, wanted)


def _parent(client: Any, uri: str, run_id: str, wanted: str) -> Any:
    from mlflow.exceptions import MlflowException

    cure = "give the directory of a sweep, the id of its parent run, or last"
    try:
        with quiet():
            found = client.get_run(run_id)
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise TrackingError(f"the MLflow store {public(uri)} does not answer: {error}") from error
        problem = f"no directory and no run of {public(uri)} is called so; {cure}"
        raise ConfigError(KEY, wanted, problem) from None
    if found.data.tags.get(KIND_TAG) != SWEEP_KIND:
        raise ConfigError(KEY, wanted, f"this run is not the parent run of a sweep; {cure}")
    if found.info.lifecycle_stage != "active":
        problem = f"the sweep's parent run {run_id} has been deleted; restore it in the MLflow UI, or start a new sweep"
        raise ConfigError(KEY, wanted, problem)
    return found


def finished(client: Any, parent: Any) -> dict[str, float]:
    """The objective of each job of a sweep that has FINISHED, by job key; nan where it was not measured."""
    done = {}
    for run in tracking.children(client, parent.info.experiment_id, parent.info.run_id, status="FINISHED"):
        if (key := run.data.tags.get("mp_hydra.job_key")) is not None:
            done[key] = run.data.metrics.get(run.data.params.get("objective"), math.nan)
    return done
