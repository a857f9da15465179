"""What became of a job: from what the server saw of its process and what the job itself left."""

from __future__ import annotations

import os
import pickle
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import UserError
from mp_hydra.isolation.jobs import Cause, End
from mp_hydra.isolation.processes import signal_name
from mp_hydra.isolation.request import Kind

if TYPE_CHECKING:
    from pathlib import Path

    from mp_hydra.isolation.client import Ended
    from mp_hydra.isolation.request import Result


_KILLED = 128  # the shell's exit code for a program that a signal ended, less the signal's number


class JobDiedError(UserError):
    """A job that ended without a result, and without an exception that could be raised in its place."""


class JobTraceback(Exception):  # noqa: N818 - a cause that shows where an exception came from, as in concurrent.futures
    """The traceback of an exception that was raised in another process."""

    def __str__(self) -> str:
        return f"\n\n{self.args[0]}"


@dataclass(frozen=True)
class Ending:
    """How a job ended, and what it gives to the sweep.

    Attributes:
        end: how.
        value: what it returned; the exception where it failed.
        job_return: Hydra's JobReturn without the value; None where the job did not come to that.
    """

    end: End
    value: Any
    job_return: Any = None


def ending(ended: Ended, result: Result | None, *, timeout: float | None, output: Path | None) -> Ending:
    """Judge a job.

    Args:
        ended: what the server saw.
        result: what the job left.
        timeout: seconds that it was allowed.
        output: where it printed to.
    """
    cause, reason = _process_end(ended, timeout, returned=result is not None and result.kind is Kind.returned)
    value: Any = None
    job_return = None
    if cause is Cause.completed:
        if result is None:
            cause, reason = Cause.exited, "ended with exit code 0 and no result, as after os._exit(0)"
        else:
            cause, reason, value = _result_end(result)
            job_return = _load(result.job_return)
    elif cause is Cause.exited and result is not None and result.kind is Kind.exited:
        cause, reason, value = _result_end(result)
    end = End(cause, reason, ended.seconds, ended.cpu_seconds, ended.max_rss_bytes)
    return Ending(end, died(reason, output) if value is None and not end.ok else value, job_return)


def lost(cause: Cause, reason: str, output: Path | None, seconds: float = 0.0) -> Ending:
    """The ending of a job of which nothing else is known."""
    return Ending(End(cause, reason, seconds), died(reason, output))


def died(reason: str, output: Path | None) -> JobDiedError:
    """The error that stands for a job's end."""
    return JobDiedError(reason if output is None else f"{reason}; its output is in {output}")


def _process_end(ended: Ended, timeout: float | None, *, returned: bool) -> tuple[Cause, str]:
    after = ", after its function had returned" if returned else ""
    if ended.status is None:
        return Cause.exited, f"could not be started: {ended.error}"
    if ended.cause == "timeout":
        return Cause.timeout, f"did not finish within {timeout:g} s{after}"
    if ended.cause == "stopped":
        return Cause.stopped, "stopped"
    code = os.waitstatus_to_exitcode(ended.status)
    if code < 0:
        return _killed(-code, after, out_of_memory=ended.out_of_memory)
    if code > 0:
        return Cause.exited, f"ended with exit code {code}{after or ' and no result, as after os._exit'}"
    return Cause.completed, ""


def _killed(number: int, after: str, *, out_of_memory: bool) -> tuple[Cause, str]:
    if number == signal.SIGKILL and out_of_memory:
        why = "killed because the kernel had no memory left (oom_kill in /proc/vmstat rose)"
        return Cause.out_of_memory, f"{why}{after}"
    return Cause.signalled, f"killed by {signal_name(number)}{after}"


def _result_end(result: Result) -> tuple[Cause, str, Any]:
    if result.kind is Kind.exited:
        return Cause.exited, f"called sys.exit({result.text}){_meaning(result.text)}", None
    if result.kind is Kind.unpicklable:
        return Cause.exited, f"returned something that cannot be pickled: {result.text}", None
    if result.kind is Kind.raised:
        return Cause.raised, result.text, _exception(result)
    try:
        return Cause.completed, "", pickle.loads(result.value or b"")  # noqa: S301 - from our own job
    except Exception as error:  # noqa: BLE001 - any class may refuse in its own way
        return Cause.exited, f"returned something that cannot be unpickled: {type(error).__name__}: {error}", None


def _meaning(argument: str) -> str:
    if argument in ("", "0"):
        return ", and returned nothing"
    by_signal = argument.isdecimal() and int(argument) - _KILLED in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    return f", as programs do after {signal_name(int(argument) - _KILLED)}" if by_signal else ""


def _exception(result: Result) -> Exception | None:
    """The exception; None if it could not travel, or is one that would end the launcher."""
    error = _load(result.value)
    if not isinstance(error, Exception):
        return None
    if not isinstance(error, UserError):
        error.__cause__ = JobTraceback(result.traceback)
    return error


def _load(pickled: bytes | None) -> Any:
    if pickled is None:
        return None
    try:
        return pickle.loads(pickled)  # noqa: S301 - from our own job
    except Exception:  # noqa: BLE001 - any class may refuse in its own way; the caller has words for it
        return None
