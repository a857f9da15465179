"""The job server: a small process that starts jobs, watches over them, and leaves none behind, whatever becomes of the launcher.

It runs nothing of the user's but the imports of the preload, has one thread, and ends with its launcher. A job is forked from
it or, where it asks for a fresh interpreter, forked and at once replaced by one.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import shutil
import signal
import socket
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.isolation import processes
from mp_hydra.isolation.channel import Channel
from mp_hydra.isolation.request import JobFiles

if TYPE_CHECKING:
    from collections.abc import Callable

WILLS = "wills"
SECONDS_FOR_WILLS = 60.0
FRESH_JOB = """\
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from mp_hydra.isolation import job
job.run(sys.argv[2], descriptors=tuple(json.loads(sys.argv[3])))
"""

_LONGEST_SLEEP = 10.0  # seconds; also the age that the older count of out-of-memory kills has at least


@dataclass
class _Child:
    """A running job.

    Attributes:
        cause: why the server ends it, "timeout" or "stopped"; None where it does not.
        kill_at: when to send SIGKILL; None before SIGTERM was sent, and when that is done.
    """

    number: int
    pid: int
    token: str
    timeout: float | None
    grace: float
    started: float = field(default_factory=time.monotonic)
    cause: str | None = None
    kill_at: float | None = None


class Server:
    """Obeys the messages `start`, `stop` and `bye` of a launcher, and answers with `started` and `ended`."""

    def __init__(self, channel: Channel, directory: Path, launcher: int, interpreter: list[str]) -> None:
        self._channel = channel
        self._directory = directory
        self._interpreter = interpreter
        self._children: dict[int, _Child] = {}  # by process id
        self._dismissed = self._launcher_died = False
        self._kills: deque[tuple[float, int]] = deque([(time.monotonic(), processes.out_of_memory_kills())], maxlen=2)
        self._selector = selectors.DefaultSelector()
        self._wakeup, wake = socket.socketpair()
        for end in (self._wakeup, wake):
            end.setblocking(False)
        self._wake = wake
        signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda _number, _frame: None)
        self._watch(self._wakeup, lambda: self._wakeup.recv(4096))
        self._watch(channel, self._listen)
        self._life = _pidfd(launcher)
        if self._life is not None:
            self._watch(self._life, self._end_with_launcher)

    def serve(self) -> None:
        """Serve until the launcher has gone, and all jobs with it."""
        while self._children or not (self._dismissed or self._launcher_died):
            for key, _ in self._selector.select(self._patience()):
                key.data()
            self._collect()
            self._enforce()
        if self._launcher_died:
            self._run_wills()

    def _watch(self, source: Any, react: Callable[[], Any]) -> None:
        self._selector.register(source, selectors.EVENT_READ, react)

    def _patience(self) -> float | None:
        if not self._children:
            return None
        due = [_LONGEST_SLEEP]
        for child in self._children.values():
            at = child.kill_at if child.cause is not None else self._deadline(child)
            if at is not None:
                due.append(at - time.monotonic())
        return max(0.0, min(due))

    def _deadline(self, child: _Child) -> float | None:
        return None if child.timeout is None else child.started + child.timeout

    def _listen(self) -> None:
        try:
            messages = self._channel.receive()
        except EOFError:
            self._end_with_launcher()
            return
        for message in messages:
            if message["do"] == "start":
                self._start(message)
            elif message["do"] == "stop":
                self._stop_all(at_once=message["at_once"])
            else:
                self._dismissed = True
                self._stop_listening()
                self._stop_all(at_once=True)

    def _end_with_launcher(self) -> None:
        self._launcher_died = not self._dismissed
        self._stop_listening()
        self._stop_all(at_once=False)

    def _stop_listening(self) -> None:
        for source in (self._channel, self._life):
            if source is not None:
                with contextlib.suppress(KeyError):  # both may tell
                    self._selector.unregister(source)

    def _tell(self, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # that the launcher is gone is noticed elsewhere
            self._channel.send(message)

    def _start(self, message: dict[str, Any]) -> None:
        number, files = message["job"], self._directory / str(message["job"])
        descriptors = tuple(self._channel.descriptors)
        self._channel.descriptors.clear()
        sys.stdout.flush()
        sys.stderr.flush()
        if not self._children:
            self._kills.clear()
            self._kills.append((time.monotonic(), processes.out_of_memory_kills()))
        server = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            self._tell({"event": "ended", "job": number, "status": None, "error": str(error)})
            return
        if pid == 0:
            self._be_job(server, files, descriptors, fork=message["fork"])
        for descriptor in descriptors:
            os.close(descriptor)
        self._children[pid] = _Child(number, pid, message["token"], message["timeout"], message["grace"])
        self._tell({"event": "started", "job": number, "pid": pid})

    def _be_job(self, server: int, files: Path, descriptors: tuple[int, ...], *, fork: bool) -> None:
        try:
            processes.become_job(server)
            self._let_go()
            if fork:
                from mp_hydra.isolation import job

                job.run(str(files), descriptors=descriptors, forked=True)
            request = JobFiles(files).read_request()
            for descriptor in descriptors:
                os.set_inheritable(descriptor, True)
            words = [FRESH_JOB, json.dumps(request.path), str(files), json.dumps(descriptors)]
            os.execve(self._interpreter[0], [*self._interpreter, "-c", *words], request.environ)  # noqa: S606
        finally:
            os._exit(1)

    def _let_go(self) -> None:
        """Close what a forked copy of this process must not hold."""
        self._channel.close()
        self._wakeup.close()
        self._wake.close()
        self._selector.close()
        if self._life is not None:
            os.close(self._life)

    def _stop_all(self, *, at_once: bool) -> None:
        for child in self._children.values():
            self._stop(child, "stopped")
            if at_once:
                child.kill_at = time.monotonic()

    def _stop(self, child: _Child, cause: str) -> None:
        if child.cause is None:
            child.cause = cause
            child.kill_at = time.monotonic() + child.grace
            processes.send(child.pid, signal.SIGTERM)

    def _enforce(self) -> None:
        now = time.monotonic()
        for child in self._children.values():
            deadline = self._deadline(child)
            if child.cause is None and deadline is not None and now >= deadline:
                self._stop(child, "timeout")
            if child.kill_at is not None and now >= child.kill_at:
                child.kill_at = None
                processes.send(child.pid, signal.SIGKILL)
        if self._children and now - self._kills[-1][0] >= _LONGEST_SLEEP:
            self._kills.append((now, processes.out_of_memory_kills()))

    def _collect(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            child = self._children.pop(pid, None)
            if child is None:
                continue  # an orphan of a job
            seconds = time.monotonic() - child.started
            out_of_memory = processes.out_of_memory_kills() > self._kills[0][1]
            processes.sweep_up(pid, child.token, set(self._children))
            self._tell(
                {
                    "event": "ended",
                    "job": child.number,
                    "status": status,
                    "cause": child.cause,
                    "out_of_memory": out_of_memory,
                    "seconds": seconds,
                    "cpu_seconds": usage.ru_utime + usage.ru_stime,
                    "max_rss_bytes": usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024),
                }
            )

    def _run_wills(self) -> None:
        directory = self._directory / WILLS
        if not directory.is_dir():
            return
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            try:
                processes.become_job(server)
                self._let_go()
                from mp_hydra.isolation import job

                job.run_wills(str(directory))
            finally:
                os._exit(1)
        end = time.monotonic() + SECONDS_FOR_WILLS
        while os.waitpid(pid, os.WNOHANG) == (0, 0):
            if time.monotonic() >= end:
                processes.send(pid, signal.SIGKILL)
            time.sleep(0.02)
        processes.sweep_up(pid, "", set())


def main() -> None:
    """Be a job server; the only argument of the process is what `mp_hydra.isolation.client` passes, as JSON."""
    given = json.loads(sys.argv[1])
    # Blocked rather than ignored: a signal that reaches a job before it has its own handlers waits for them.
    signal.pthread_sigmask(signal.SIG_BLOCK, processes.ENDING_SIGNALS)
    directory = Path(given["directory"])
    channel = Channel(socket.socket(fileno=given["socket"]))
    processes.adopt_orphans()
    answer: dict[str, Any] = {"event": "ready", "failures": [], "unsafe": None}
    if given["fork"]:
        from mp_hydra.isolation import preloading

        answer["failures"] = preloading.preload(given["preload"])
        answer["unsafe"] = preloading.unsafe_to_fork()
    server = Server(channel, directory, given["launcher"], given["interpreter"])
    with contextlib.suppress(OSError):
        channel.send(answer)
    server.serve()
    shutil.rmtree(directory, ignore_errors=True)  # after an error, the launcher reads the log and does it


def _pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):  # not Linux, an old kernel, or gone already: the socket tells as well
        return None
