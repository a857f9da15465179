"""The application as a user types it, run inside the test's process, and what it left in the store."""

from __future__ import annotations

import functools
import json
import math
import os
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import numpy as np
from hydra.experimental.callback import Callback

from mp_hydra import app
from mp_hydra.tracking import Settings, open_client, store_uri

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
EXPERIMENT = "e2e"
BASIC = "hydra/launcher=basic"
BRIEF = (f"tracking.experiment={EXPERIMENT}", "epochs=1")


@dataclass(frozen=True)
class Tracked:
    """One run as the store holds it."""

    run: Any
    artifacts: Path

    @property
    def metrics(self) -> dict[str, float]:
        return dict(self.run.data.metrics)

    @property
    def params(self) -> dict[str, str]:
        return dict(self.run.data.params)

    @property
    def tags(self) -> dict[str, str]:
        return dict(self.run.data.tags)

    @property
    def status(self) -> str:
        return str(self.run.info.status)

    @property
    def outcome(self) -> str:
        return self.tags["mp_hydra.outcome"]

    def steps(self, metric: str) -> list[int]:
        return [value.step for value in client().get_metric_history(self.run.info.run_id, metric)]

    def json(self, name: str) -> Any:
        return json.loads((self.artifacts / name).read_text(encoding="utf-8"))

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        with np.load(self.artifacts / name, allow_pickle=False) as file:
            return {key: file[key] for key in file.files}


class JobReturns(Callback):
    """A Hydra callback that keeps what each job returned, as a sweeper would see it."""

    TARGET = "tests.e2e.app_driver.JobReturns"
    values: ClassVar[list[Any]] = []

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        self.values.append(job_return.return_value)


@functools.cache
def client() -> Any:
    """A client of the store that the tests of this session share."""
    return open_client(store_uri(Settings()))


def tracked(experiment: str = EXPERIMENT) -> list[Tracked]:
    """The runs of an experiment in the order in which they began, without the parent runs of sweeps."""
    found = client().get_experiment_by_name(experiment)
    if found is None:
        return []
    runs = client().search_runs([found.experiment_id], order_by=["attributes.start_time ASC"])
    return [
        Tracked(run, Path(run.info.artifact_uri.removeprefix("file://")))
        for run in runs
        if run.data.tags.get("mp_hydra.kind") != "sweep"
    ]


def type_command(*overrides: str, cwd: Path) -> int:
    """Run the application with these words on its command line, in `cwd`; return the exit code.

    Raises:
        Exception: what the interpreter would answer with a traceback.
    """
    cwd.mkdir(parents=True, exist_ok=True)
    where = (
        [] if any("sweep.dir=" in word or "run.dir=" in word for word in overrides) else [f"hydra.run.dir={cwd}/out"]
    )
    with _inside(cwd), mock.patch.object(sys, "argv", ["train.py", *overrides, *where]):
        try:
            app.main()
        except SystemExit as leaving:
            return int(leaving.code or 0)
    return 0


def train(*overrides: str, cwd: Path) -> Tracked:
    """One successful tracked run of one epoch."""
    before = {entry.run.info.run_id for entry in tracked()}
    assert type_command(*BRIEF, *overrides, cwd=cwd) == 0
    (new,) = [entry for entry in tracked() if entry.run.info.run_id not in before]
    return new


def sweep(*overrides: str, cwd: Path) -> list[Tracked]:
    """A sweep with Hydra's basic launcher, in this process; the runs of its jobs in their order."""
    before = {entry.run.info.run_id for entry in tracked()}
    words = ("--multirun", BASIC, *BRIEF, *overrides, f"hydra.sweep.dir={cwd}/sweep")
    assert type_command(*words, cwd=cwd) == 0
    return [entry for entry in tracked() if entry.run.info.run_id not in before]


def git_repository(directory: Path) -> str:
    """Make `directory` a repository with one commit; return the commit."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "notes.txt").write_text("first\n", encoding="utf-8")
    author = ["-c", "user.name=Tester", "-c", "user.email=tester@example.org", "-c", "commit.gpgsign=false"]
    for words in (["init", "-q"], ["add", "notes.txt"], [*author, "commit", "-q", "-m", "first"]):
        subprocess.run(["git", *words], cwd=directory, check=True)
    done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=directory, check=True, capture_output=True, text=True)
    return done.stdout.strip()


def small_images(path: Path, *, side: int = 8, train_size: int = 96, test_size: int = 32) -> Path:
    """Write an .npz file of random grey images of two classes: dark and bright."""
    generator = np.random.default_rng(0)

    def part(size: int) -> tuple[np.ndarray, np.ndarray]:
        y = np.arange(size) % 2
        x = generator.integers(0, 120, (size, side, side)) + 120 * y[:, None, None]
        return x.astype("uint8"), y

    (x_train, y_train), (x_test, y_test) = part(train_size), part(test_size)
    np.savez(path, x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return path


def all_finite(metrics: dict[str, float]) -> bool:
    """Whether no value is nan, inf or what MLflow stores in the place of inf."""
    return all(math.isfinite(value) and abs(value) < sys.float_info.max for value in metrics.values())


@contextmanager
def _inside(cwd: Path) -> Iterator[None]:
    """Stand in `cwd`, and undo what a process's own end would: working directory and import path."""
    before, path = Path.cwd(), list(sys.path)
    os.chdir(cwd)
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path
