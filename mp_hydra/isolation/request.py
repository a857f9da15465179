"""What a job's process is told, and what it tells when it is done: files in a private directory."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

_REQUEST, _RESULT, _PROGRESS, _CONFIG = "request", "result", "progress", "config"


@dataclass(frozen=True)
class Main:
    """The script that was started, to be imported anew: its file, or its name where it was started with `-m`."""

    file: str | None
    module: str | None


@dataclass(frozen=True)
class Request:
    """The surroundings of a job.

    Attributes:
        environ: the whole environment.
        cwd: working directory.
        path: `sys.path`.
        argv: `sys.argv`.
        task: file with what all jobs of a launch share, pickled.
        cores: what it may run on; None for all that its server may.
        output: the file that takes what it prints; None for the two file descriptors that it is given.
        main: what to import first, if anything.
    """

    environ: dict[str, str]
    cwd: str
    path: tuple[str, ...]
    argv: tuple[str, ...]
    task: str
    cores: tuple[int, ...] | None = None
    output: str | None = None
    main: Main | None = None


@dataclass(frozen=True)
class Will:
    """What is to be called if the launcher is killed.

    Attributes:
        functions: a list of functions, pickled.
        surroundings: where they are called.
    """

    functions: bytes
    surroundings: Request


class Kind(str, Enum):
    """How far a job came."""

    returned = "returned"
    unpicklable = "unpicklable"  # it returned something that cannot be sent
    raised = "raised"
    exited = "exited"  # sys.exit


@dataclass(frozen=True)
class Result:
    """What a job's process says at its end.

    Attributes:
        kind: how far it came.
        text: the exception in one line, what cannot be pickled about the value, or the argument of sys.exit.
        traceback: of the exception.
        job_return: Hydra's JobReturn without the value, pickled; None if it did not come to that.
        value: the value or the exception, pickled; None if it could not be.
    """

    kind: Kind
    text: str = ""
    traceback: str = ""
    job_return: bytes | None = None
    value: bytes | None = None


@dataclass(frozen=True)
class JobFiles:
    """The files of one job."""

    directory: Path

    @property
    def config(self) -> Path:
        """The composed config, pickled."""
        return self.directory / _CONFIG

    @property
    def progress(self) -> Path:
        """What the job reports while it runs."""
        return self.directory / _PROGRESS

    def write_request(self, request: Request) -> None:
        """Make the directory, and leave the request there."""
        self.directory.mkdir(parents=True)
        (self.directory / _REQUEST).write_bytes(pickle.dumps(request))

    def read_request(self) -> Request:
        """What `write_request` left."""
        request = pickle.loads((self.directory / _REQUEST).read_bytes())  # noqa: S301 - written by our launcher
        assert isinstance(request, Request)  # noqa: S101
        return request

    def write_result(self, result: Result) -> None:
        """Leave the result: all of it or nothing."""
        new = self.directory / f"{_RESULT}.new"
        new.write_bytes(pickle.dumps(result))
        new.replace(self.directory / _RESULT)

    def read_result(self) -> Result | None:
        """The result; None where the process ended before it had one."""
        try:
            result = pickle.loads((self.directory / _RESULT).read_bytes())  # noqa: S301 - written by our job
        except (OSError, EOFError, pickle.UnpicklingError):
            return None
        return result if isinstance(result, Result) else None
