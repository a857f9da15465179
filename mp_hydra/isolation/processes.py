"""What the operating system offers to keep a job's processes together, and to leave none behind.

All of it works on Linux; elsewhere the parts that Linux alone has do nothing.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mp_hydra.host_memory import be_killed_first

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

LINUX = sys.platform == "linux"
JOB_VARIABLE = "MP_HYDRA_ISOLATED_JOB"  # in the environment of a job and of all that it starts

# What the terminal and the system send to end a program: the server leaves them to the launcher.
ENDING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h
_PATIENCE = 5.0  # seconds that a process may take to go after SIGKILL
_libc = ctypes.CDLL(None, use_errno=True) if LINUX else None


@dataclass(frozen=True)
class Process:
    """One line of the process table."""

    pid: int
    parent: int
    session: int


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    if _libc is not None:
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def become_job(parent: int) -> None:
    """Make this fresh child of the server a process of its own: session, signals as in a new program, dies with the server.

    Args:
        parent: the server's process id.
    """
    os.setsid()
    if _libc is not None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:  # it died before the kernel knew that we care
            os._exit(1)
        be_killed_first()
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ENDING_SIGNALS)


def send(pid: int, number: int) -> None:
    """Send a signal to a job and all of its process group; none if they are gone."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if os.getpgid(pid) == pid:
            os.killpg(pid, number)
        else:  # it has not come to setsid yet
            os.kill(pid, number)


def sweep_up(pid: int, token: str, keep: set[int]) -> None:
    """Kill what a job that has ended left behind in this process' care, and wait until it is gone.

    Orphans that changed their session and carry no job's mark belong to the ended job for sure only if no other job runs;
    where one does, they stay for the time being.

    Args:
        pid: the job's process id, and so its session's.
        token: the value of `JOB_VARIABLE` in the job's environment.
        keep: process ids of the jobs that still run.
    """
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
    me = os.getpid()

    def left() -> list[Process]:
        children = [process for process in table() if process.parent == me and process.pid not in keep]
        return [process for process in children if not keep or process.session == pid or mark(process.pid) == token]

    _kill_until_gone(left, reap=True)


def kill_marked(prefix: str) -> None:
    """Kill all processes whose value of `JOB_VARIABLE`, in the environment that they were started with, begins so."""

    def left() -> list[Process]:
        return [process for process in table() if (mark(process.pid) or "").startswith(prefix)]

    _kill_until_gone(left, reap=False)


def table() -> Iterator[Process]:
    """All processes that can be seen; none but on Linux."""
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError, ValueError, IndexError):
            fields = _stat(entry)
            yield Process(int(entry.name), int(fields[1]), int(fields[3]))


def mark(pid: int) -> str | None:
    """The value of `JOB_VARIABLE` in the environment that a process was started with; None where there is none."""
    prefix = f"{JOB_VARIABLE}=".encode()
    try:
        variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return None
    return next(
        (entry[len(prefix) :].decode(errors="replace") for entry in variables if entry.startswith(prefix)), None
    )


def wait_until_gone(pid: int, *, patience: float = _PATIENCE) -> None:
    """Wait until a process that is no child of this one has ended, whether or not its parent has noticed."""
    end = time.monotonic() + patience
    while time.monotonic() < end and _runs(pid):
        time.sleep(0.01)


def threads() -> list[str]:
    """The names of this process' threads as the system knows them; empty where it does not tell.

    A library may stop its threads when the process forks, as OpenBLAS does until it needs them again: so this forks once.
    """
    gc.collect()
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    names = []
    for entry in Path("/proc/self/task").glob("*/comm"):
        with contextlib.suppress(OSError):
            names.append(entry.read_text(encoding="utf-8", errors="replace").strip())
    return names


def signal_name(number: int) -> str:
    """Such as SIGKILL."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def out_of_memory_kills() -> int:
    """How many processes the kernel has killed for want of memory since the system started; 0 where it does not tell."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        for line in Path("/proc/vmstat").read_text(encoding="ascii").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    return 0


def _runs(pid: int) -> bool:
    try:
        state = _stat(Path("/proc") / str(pid))[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def _stat(entry: Path) -> list[str]:
    """The fields of /proc/PID/stat from the state on (proc_pid_stat(5)); the name before them may hold anything."""
    return (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()


def _kill_until_gone(left: Callable[[], list[Process]], *, reap: bool) -> None:
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end and (found := left()):
        for process in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(process.pid, signal.SIGKILL)
        for process in found:
            if reap:
                _reap(process.pid, end)
            else:
                wait_until_gone(process.pid, patience=end - time.monotonic())


def _reap(pid: int, end: float) -> None:
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            if os.waitpid(pid, os.WNOHANG) == (0, 0):
                time.sleep(0.002)
                continue
        return
