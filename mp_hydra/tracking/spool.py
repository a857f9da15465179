"""A file for what could not reach the store, and its replay.

A spool is a text file of JSON lines: a header that names the store and the run, then one batch a line, each written
to the disk before it counts. It is locked while its run is alive.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import TrackingError
from mp_hydra.tracking.batch import Batch, End, send
from mp_hydra.tracking.store import open_client, public, quiet, unusable

if TYPE_CHECKING:
    from filelock import FileLock

FORMAT = "mp_hydra spool 1"


@dataclass(frozen=True)
class Header:
    """The first line of a spool: which run of which store it belongs to."""

    uri: str
    experiment_id: str
    run_id: str
    run_name: str


@dataclass(frozen=True)
class SyncReport:
    """What a replay has sent.

    Attributes:
        run_id: the run.
        uri: the store, without user name and password.
        metrics, params, tags, datasets, artifacts: how many of each.
        missing: artifacts that were no longer on the disk, and so are lost.
        status: the status that the run was given; None if it had one already.
        torn: whether the last line was incomplete, as it is when a process is killed while writing, and left out.
    """

    run_id: str
    uri: str
    metrics: int
    params: int
    tags: int
    datasets: int
    artifacts: int
    missing: tuple[Path, ...]
    status: str | None
    torn: bool


class Spool:
    """The spool of a living run; no file exists before there is something to keep."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._header = header
        self._lock: FileLock | None = None

    def append(self, batch: Batch) -> None:
        """Write a batch and wait until it is on the disk.

        Raises:
            OSError: it could not be written, or another process reads it; the file is as it was before.
        """
        if self._lock is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            lock = _lock(self.path)
            lock.acquire()
            self._lock = lock
        # Readable by the user alone: the address of a store may hold a password.
        with os.fdopen(os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600), "r+b", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            lines = [] if size else [{"format": FORMAT, **vars(self._header)}]
            try:
                _write_all(file, "".join(f"{json.dumps(line)}\n" for line in [*lines, batch.to_json()]).encode())
                os.fsync(file.fileno())
            except OSError:
                file.truncate(size)
                raise

    def remove(self) -> None:
        """Delete the file, all of it having reached the store."""
        if self._lock is not None:
            self.path.unlink(missing_ok=True)
            self.release()
            _lock_path(self.path).unlink(missing_ok=True)

    def release(self) -> None:
        """Leave the file to `sync`."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None


def sync(path: Path) -> SyncReport:
    """Send a spool to its store, and remove it once all of it is there.

    A run that ended without a word (its process was killed) and is still marked as running becomes KILLED. Repeating
    an interrupted sync does no harm.

    Args:
        path: a spool file.

    Raises:
        TrackingError: the file is no spool, its run is still alive, or the store does not take it. The file stays.
    """
    from filelock import Timeout

    if not path.is_file():
        raise TrackingError(f"{path}: there is no such spool file")
    lock = _lock(path)
    try:
        with lock:
            report = _replay(path)
            path.unlink()
    except Timeout:
        raise TrackingError(f"{path}: its run is still going; it will send the file itself") from None
    except OSError as error:
        raise TrackingError(f"{path}: {error.strerror}") from error
    with contextlib.suppress(OSError):
        _lock_path(path).unlink(missing_ok=True)
    return report


def read(path: Path) -> tuple[Header, Batch, bool]:
    """Read a spool.

    Returns:
        The header, all batches in one, and whether an incomplete last line was left out.

    Raises:
        TrackingError: this is not a spool.
        OSError: it cannot be read.
    """
    lines = path.read_bytes().split(b"\n")
    torn = lines.pop() != b""
    try:
        head = json.loads(lines[0])
        if head.pop("format") != FORMAT:
            raise KeyError
        header = Header(**head)
    except (LookupError, TypeError, ValueError, AttributeError):
        raise TrackingError(f"{path}: this is not a spool file of mp_hydra") from None
    batch, number = Batch(), 1
    try:
        for number, line in enumerate(lines[1:], start=2):  # noqa: B007 - the message below names it
            batch.add(Batch.from_json(json.loads(line)))
    except (TypeError, ValueError, AttributeError):
        raise TrackingError(f"{path}, line {number}: damaged; delete the line to send the others") from None
    return header, batch, torn


def _replay(path: Path) -> SyncReport:
    header, batch, torn = read(path)
    client = open_client(header.uri)
    missing = [item for item in batch.artifacts if not Path(item.path).exists()]
    batch.artifacts = [item for item in batch.artifacts if item not in missing]
    if batch.end is None and _still_marked_running(client, header):
        newest = max((metric.timestamp for metric in batch.metrics), default=int(time.time() * 1000))
        batch.tags.setdefault("mp_hydra.outcome", "killed")
        batch.end = End("KILLED", newest)
    _, error = send(client, header.run_id, batch)
    if error is not None:
        raise unusable(header.uri, error) from error
    return SyncReport(
        run_id=header.run_id,
        uri=public(header.uri),
        metrics=len(batch.metrics),
        params=len(batch.params),
        tags=len(batch.tags),
        datasets=len(batch.datasets),
        artifacts=len(batch.artifacts),
        missing=tuple(Path(item.path) for item in missing),
        status=batch.end and batch.end.status,
        torn=torn,
    )


def _still_marked_running(client: Any, header: Header) -> bool:
    try:
        with quiet():
            return bool(client.get_run(header.run_id).info.status == "RUNNING")
    except Exception as error:
        raise unusable(header.uri, error) from error


def _lock_path(path: Path) -> Path:
    return path.with_name(f"{path.name}.lock")


def _lock(path: Path) -> FileLock:
    from filelock import FileLock

    return FileLock(_lock_path(path), timeout=0)


def _write_all(file: Any, data: bytes) -> None:
    while data:
        data = data[file.write(data) :]
