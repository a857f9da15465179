"""The launcher's side of a job server."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.isolation import processes
from mp_hydra.isolation.channel import Channel
from mp_hydra.isolation.preloading import THREADLESS
from mp_hydra.isolation.request import JobFiles, Will
from mp_hydra.isolation.server import WILLS

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

_START = (
    "import json, sys; sys.path[:] = json.loads(sys.argv.pop(1)); from mp_hydra.isolation.server import main; main()"
)
_SECONDS_TO_CLOSE = 10.0


class ServerLostError(Exception):
    """The server is gone; its jobs are, too."""


@dataclass(frozen=True)
class Started:
    """A job's process runs."""

    job: int
    pid: int


@dataclass(frozen=True)
class Ended:
    """A job's process is gone.

    Attributes:
        job: the number that `Server.start` gave.
        status: as `os.wait4` tells it; None where no process could be started.
        cause: "timeout" or "stopped" where the server ended it.
        out_of_memory: whether the kernel has lately killed some process for want of memory.
        seconds: wall clock.
        cpu_seconds: of the process and the children that it waited for.
        max_rss_bytes: the largest resident memory.
        error: why no process could be started.
    """

    job: int
    status: int | None
    cause: str | None = None
    out_of_memory: bool = False
    seconds: float = 0.0
    cpu_seconds: float | None = None
    max_rss_bytes: int | None = None
    error: str | None = None


class Server:
    """A running job server.

    Args:
        preload: modules to import; None for a server whose jobs are all fresh interpreters.
        environ: its environment.
        key: what tells it from other servers.

    Attributes:
        environ: the environment that the preloaded modules have seen.
        forking: whether it has preloaded anything, so that its jobs may be forked.
        user: the thread that uses it.
        failures: a line for each module that could not be imported.
        unsafe: why jobs must not be forked from it; None if they may.
    """

    def __init__(self, preload: Sequence[str] | None, environ: Mapping[str, str], key: Hashable = None) -> None:
        self.environ = dict(environ)
        self.key = key
        self.forking = preload is not None
        self.user: int | None = None
        self.failures: list[str] = []
        self.unsafe: str | None = None
        self._lost = False
        self._jobs = 0
        self._pids: dict[int, int] = {}
        self._directory = Path(tempfile.mkdtemp(prefix="mp_hydra_jobs_"))
        ours, theirs = socket.socketpair()
        given = {
            "directory": str(self._directory),
            "socket": theirs.fileno(),
            "launcher": os.getpid(),
            "interpreter": interpreter(),
            "fork": preload is not None,
            "preload": list(preload or ()),
        }
        try:
            with theirs, (self._directory / "server.log").open("wb") as said:
                self._process = subprocess.Popen(
                    [*interpreter(), "-c", _START, json.dumps(search_path()), json.dumps(given)],
                    stdin=subprocess.DEVNULL,
                    stdout=said,
                    stderr=said,
                    env={**self.environ, **(THREADLESS if preload is not None else {})},
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                )
        except BaseException:
            ours.close()
            shutil.rmtree(self._directory, ignore_errors=True)
            raise
        self._channel = Channel(ours)

    def wait_until_ready(self) -> None:
        """Wait for the preload.

        Raises:
            ServerLostError: the server died of it.
        """
        try:
            while not (messages := self._receive(None)):
                pass
        except BaseException as error:
            words = self.last_words() if isinstance(error, ServerLostError) else ""
            self.kill()
            if words:
                raise ServerLostError(words) from None
            raise
        self.failures, self.unsafe = messages[0]["failures"], messages[0]["unsafe"]

    @property
    def alive(self) -> bool:
        """Whether it can start jobs."""
        return not self._lost and self._process.poll() is None

    @property
    def busy(self) -> bool:
        """Whether jobs of it are known to run."""
        return bool(self._pids)

    def new_job(self) -> tuple[int, JobFiles]:
        """A number for a job, and where its files go."""
        self._jobs += 1
        return self._jobs, JobFiles(self._directory / str(self._jobs))

    def token(self, job: int | str = "") -> str:
        """What the environment of the job must say in `processes.JOB_VARIABLE`; what it begins with for all jobs."""
        return f"{self._directory.name}/{job}"

    def share(self, name: str, content: bytes) -> Path:
        """Write a file that lasts as long as the server."""
        path = self._directory / name
        path.write_bytes(content)
        return path

    def start(self, job: int, *, fork: bool, timeout: float | None, grace: float, terminal: bool) -> None:
        """Start the job of this number, whose request is written."""
        message = {
            "do": "start",
            "job": job,
            "token": self.token(job),
            "fork": fork,
            "timeout": timeout,
            "grace": grace,
        }
        self._send(message, (1, 2) if terminal else ())

    def stop(self, *, at_once: bool) -> None:
        """End all jobs: with SIGTERM, and SIGKILL after their grace; or with SIGKILL at once."""
        self._send({"do": "stop", "at_once": at_once})

    def set_will(self, will: Will | None) -> None:
        """Say what is to be called if this process is killed."""
        directory = self._directory / WILLS
        shutil.rmtree(directory, ignore_errors=True)
        if will is not None:
            new = directory.with_suffix(".new")
            task = str(self.share("functions", will.functions))
            JobFiles(new).write_request(replace(will.surroundings, task=task))
            new.rename(directory)

    def events(self, timeout: float) -> list[Started | Ended]:
        """What has happened; waits up to `timeout` seconds for something to happen.

        Raises:
            ServerLostError: the server is gone.
        """
        events: list[Started | Ended] = []
        for message in self._receive(timeout):
            kind = message.pop("event")
            events.append(Started(**message) if kind == "started" else Ended(**message))
        for event in events:
            if isinstance(event, Started):
                self._pids[event.job] = event.pid
            else:
                self._pids.pop(event.job, None)
        return events

    def forget(self, job: int) -> None:
        """Remove the files of a job."""
        shutil.rmtree(self._directory / str(job), ignore_errors=True)

    def last_words(self) -> str:
        """How the server came to its end, with the last line that it wrote."""
        status = self._process.wait()
        end = f"was killed by {processes.signal_name(-status)}" if status < 0 else f"ended with exit code {status}"
        try:
            lines = (self._directory / "server.log").read_text(encoding="utf-8", errors="replace").splitlines()
        except OSError:
            lines = []
        return f"{end}: {lines[-1].strip()}" if status >= 0 and lines else end

    def bury(self) -> None:
        """Clear away what a server that died has left: its jobs go with it, their own processes and the files do not."""
        if self._lost:
            return
        self._lost = True
        for pid in self._pids.values():
            processes.send(pid, signal.SIGKILL)
            processes.wait_until_gone(pid)
        self._pids.clear()
        processes.kill_marked(self.token())
        self._channel.close()
        shutil.rmtree(self._directory, ignore_errors=True)

    def close(self) -> None:
        """Dismiss the server; it stops what still runs."""
        if not self._lost:
            self._lost = True
            with contextlib.suppress(OSError):
                self._channel.send({"do": "bye"})
            self._channel.close()
            try:
                self._process.wait(_SECONDS_TO_CLOSE)
            except subprocess.TimeoutExpired:
                self.kill()
            shutil.rmtree(self._directory, ignore_errors=True)

    def kill(self) -> None:
        """End the server by force."""
        self._process.kill()
        self._process.wait()
        self.bury()

    def _send(self, message: dict[str, Any], descriptors: tuple[int, ...] = ()) -> None:
        with contextlib.suppress(OSError):  # `events` will tell
            self._channel.send(message, descriptors)

    def _receive(self, timeout: float | None) -> list[dict[str, Any]]:
        waiting = select.poll()
        waiting.register(self._channel, select.POLLIN)
        if not waiting.poll(None if timeout is None else timeout * 1000):
            return []
        try:
            return self._channel.receive()
        except EOFError:
            raise ServerLostError from None


def search_path() -> list[str]:
    """`sys.path` as it reads from any directory."""
    return [entry or str(Path.cwd()) for entry in sys.path]


def interpreter() -> list[str]:
    """The command that starts an interpreter with the options of this one."""
    return [sys.executable, *subprocess._args_from_interpreter_flags()]  # type: ignore[attr-defined]  # noqa: SLF001
