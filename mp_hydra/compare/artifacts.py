"""The files that a run leaves: environment.json, predictions.npz, step_times.npz. What cannot be read is a line."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

import numpy as np

from mp_hydra.compare.store import CONNECTIONS, unreachable
from mp_hydra.tracking.store import explain, public

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from mp_hydra.compare.store import Store

ENVIRONMENT = "environment.json"
PREDICTIONS = "predictions.npz"
STEP_TIMES = "step_times.npz"
_FILES = (ENVIRONMENT, PREDICTIONS, STEP_TIMES)


class UnreadableError(Exception):
    """A file that cannot be used; the message says why."""


@dataclass
class Artifacts:
    """What the files of one run say; the fields are those of `mp_hydra.compare.records.RunRecord`."""

    environment: Mapping[str, object] = field(default_factory=dict)
    correct: np.ndarray | None = None
    labels: np.ndarray | None = None
    step_ms: np.ndarray | None = None
    missing: list[str] = field(default_factory=list)


def local_directory(uri: str) -> Path | None:
    """The directory behind the address of a run's artifacts; None if they are not on this machine's disks.

    >>> local_directory("file:///home/me/a%20b"), local_directory("mlflow-artifacts:/0/1")
    (PosixPath('/home/me/a b'), None)
    """
    parts = urlsplit(uri)
    if parts.scheme == "":
        return Path(uri)
    return Path(unquote(parts.path)) if parts.scheme == "file" and parts.netloc in ("", "localhost") else None


def read_artifacts(store: Store, runs: Sequence[Any]) -> Iterator[Artifacts]:
    """The files of each run in turn, read where they are if that is a disk of this machine, else fetched some at a time."""
    if all(local_directory(run.info.artifact_uri) is not None for run in runs):
        yield from (_read(store, run, []) for run in runs)
        return
    stopped: list[str] = []
    with ThreadPoolExecutor(CONNECTIONS) as pool:
        yield from pool.map(lambda run: _read(store, run, stopped), runs)


def _read(store: Store, run: Any, stopped: list[str]) -> Artifacts:
    """Read the files of a run; `stopped` says why none can be fetched any more."""
    found = Artifacts()
    try:
        with _directory(store, run, stopped) as directory:
            read_files(directory, found)
    except UnreadableError as error:
        found.missing.append(f"artifacts: {error}")
    return found


def read_files(directory: Path, found: Artifacts) -> None:
    """Fill in what the files of a directory say."""

    def attempt(name: str, read: Callable[[Path, Artifacts], None]) -> None:
        try:
            read(directory / name, found)
        except UnreadableError as error:
            found.missing.append(f"{name}: {error}")
        except FileNotFoundError:
            found.missing.append(f"{name}: the run has left none")
        except Exception as error:  # noqa: BLE001 - what a damaged file provokes is no closed list: zipfile, zlib, struct ...
            found.missing.append(f"{name}: damaged or not readable ({explain(error)})")

    attempt(ENVIRONMENT, _environment)
    attempt(PREDICTIONS, _predictions)
    attempt(STEP_TIMES, _step_times)


@contextmanager
def _directory(store: Store, run: Any, stopped: list[str]) -> Iterator[Path]:
    """A directory with the files, those of them that there are.

    Raises:
        UnreadableError: there are none, or they cannot be fetched.
    """
    uri = run.info.artifact_uri
    local = local_directory(uri)
    if local is not None:
        if not os.path.isdir(local):  # noqa: PTH112 - False where Path.is_dir raises, as for a directory out of reach
            raise UnreadableError(f"there is no directory {local}")
        yield local
        return
    if stopped:
        raise UnreadableError(stopped[0])
    with tempfile.TemporaryDirectory(prefix="mp_hydra_compare_") as copy:
        try:
            _download(store, run, copy)
        except Exception as error:
            problem = f"they cannot be fetched from {public(uri)} ({explain(error)})"
            if unreachable(error):
                stopped.append(problem)
            raise UnreadableError(problem) from error
        yield Path(copy)


def _download(store: Store, run: Any, into: str) -> None:
    from mlflow.artifacts import download_artifacts

    there = {info.path for info in store.client.list_artifacts(run.info.run_id)}
    for name in there.intersection(_FILES):
        source = f"{run.info.artifact_uri.rstrip('/')}/{name}"
        download_artifacts(artifact_uri=source, dst_path=into, tracking_uri=store.uri)


def _environment(path: Path, found: Artifacts) -> None:
    content = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise UnreadableError("it holds no JSON object")
    found.environment = content


def _predictions(path: Path, found: Artifacts) -> None:
    arrays = _arrays(path, "correct", "label", "target")
    correct, labels = arrays.get("correct"), arrays.get("label", arrays.get("target"))
    if correct is None:
        found.labels = labels
        raise UnreadableError("it does not say which samples were predicted correctly (no array `correct`)")
    if correct.ndim != 1 or correct.dtype != bool:
        raise UnreadableError(f"`correct` is {correct.dtype} of shape {correct.shape}, and not one bool a sample")
    if labels is not None and len(labels) != len(correct):
        raise UnreadableError(f"it has {len(labels)} labels for {len(correct)} samples")
    found.correct, found.labels = correct, labels


def _step_times(path: Path, found: Artifacts) -> None:
    milliseconds = _arrays(path, "milliseconds").get("milliseconds")
    if milliseconds is None or milliseconds.ndim != 1 or milliseconds.dtype.kind != "f":
        raise UnreadableError("it has no array `milliseconds` with one float a step")
    if not milliseconds.size:
        raise UnreadableError("it holds no steady step")
    found.step_ms = milliseconds


def _arrays(path: Path, *names: str) -> dict[str, np.ndarray]:
    """Those of the named arrays that an npz file has."""
    with path.open("rb") as file:
        archive = np.load(file, allow_pickle=False)
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise UnreadableError("it is no npz file")
        return {name: archive[name] for name in names if name in archive.files}
