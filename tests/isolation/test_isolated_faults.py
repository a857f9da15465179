"""Jobs that end badly, with real signals and limits: each FAILED with a reason, the others go on, and nothing is left."""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.errors import ConfigError
from mp_hydra.isolation.client import Ended
from mp_hydra.isolation.ending import JobDiedError, ending
from mp_hydra.isolation.jobs import Cause, End
from tests.isolation.isolated_driver import Launch, launch, left_over

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

pytestmark = pytest.mark.process


@pytest.fixture(autouse=True)
def nothing_left():
    yield
    assert left_over() == []


def with_fault(fault: Callable[[], Any], directory: Path, *settings: str) -> Launch:
    """Three jobs, the second of which meets the fault; the others must return their number."""

    def task(config: Any) -> Any:
        return fault() if config.n == 1 else config.n

    launched = launch(task, directory, [["+n=0"], ["+n=1"], ["+n=2"]], *settings)
    assert launched.ok(0)
    assert launched.ok(2)
    assert (launched.value(0), launched.value(2)) == (0, 2)
    assert launched.observer.events == [(event, number) for number in range(3) for event in ("started", "ended")]
    assert not launched.ok(1)
    return launched


def died(launched: Launch, cause: Cause, reason: str) -> None:
    """The second job ended so, and its error says so in one line that names its output."""
    end = launched.end(1)
    assert (end.cause, end.reason) == (cause, reason)
    error = launched.value(1)
    assert type(error) is JobDiedError
    assert str(error) == f"{reason}; its output is in {launched.directory}/1/output.log"


def test_an_exception_arrives_as_it_is_with_its_traceback_in_the_output(tmp_path: Path) -> None:
    def fault() -> None:
        raise ValueError("no such thing\nmore")

    launched = with_fault(fault, tmp_path)
    error = launched.value(1)
    assert type(error) is ValueError
    assert str(error) == "no such thing\nmore"
    assert "in fault" in str(error.__cause__)
    assert launched.end(1).cause is Cause.raised
    assert launched.end(1).reason == "ValueError: no such thing"
    assert "in fault" in launched.output(1)
    assert "ValueError: no such thing" in launched.output(1)


def test_an_error_made_for_users_arrives_as_it_is_without_traceback(tmp_path: Path) -> None:
    def fault() -> None:
        raise ConfigError("a.b", 3, "give 4")

    launched = with_fault(fault, tmp_path)
    assert type(launched.value(1)) is ConfigError
    assert launched.value(1).key == "a.b"
    assert launched.end(1).reason == "a.b=3: give 4"
    assert "Traceback" not in launched.output(1)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        (3, "called sys.exit(3)"),
        (0, "called sys.exit(0), and returned nothing"),
        (None, "called sys.exit(), and returned nothing"),
        ("bad luck", "called sys.exit(bad luck)"),
    ],
)
def test_sys_exit_is_a_failure_whatever_its_argument(tmp_path: Path, argument: Any, reason: str) -> None:
    launched = with_fault(lambda: sys.exit(argument), tmp_path)
    died(launched, Cause.exited, reason)


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (0, "ended with exit code 0 and no result, as after os._exit(0)"),
        (7, "ended with exit code 7 and no result, as after os._exit"),
    ],
)
def test_an_exit_past_python_is_a_failure(tmp_path: Path, code: int, reason: str) -> None:
    died(with_fault(lambda: os._exit(code), tmp_path), Cause.exited, reason)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_kills_is_named(tmp_path: Path, number: signal.Signals) -> None:
    died(with_fault(lambda: os.kill(os.getpid(), number), tmp_path), Cause.signalled, f"killed by {number.name}")


def test_a_crash_in_native_code_says_where_python_was(tmp_path: Path) -> None:
    def fault() -> None:
        import ctypes

        ctypes.string_at(1)

    launched = with_fault(fault, tmp_path)
    died(launched, Cause.signalled, "killed by SIGSEGV")
    assert "in fault" in launched.output(1)


def test_an_interrupt_of_the_job_alone_is_its_failure(tmp_path: Path) -> None:
    def fault() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)

    launched = with_fault(fault, tmp_path)
    died(launched, Cause.raised, "KeyboardInterrupt")


def test_memory_above_a_limit_is_a_memory_error_of_that_job(tmp_path: Path) -> None:
    def fault() -> bytearray:
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
        return bytearray(2**31)

    launched = with_fault(fault, tmp_path)
    assert type(launched.value(1)) is MemoryError
    assert launched.end(1).reason == "MemoryError"


def test_a_job_past_its_time_is_ended_with_all_that_it_started(tmp_path: Path) -> None:
    def fault() -> None:
        import subprocess

        script = (
            "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); print(1, flush=True)"
        )
        script += "; time.sleep(60)"
        child = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(60)

    launched = with_fault(fault, tmp_path, "hydra.launcher.timeout=0.7", "hydra.launcher.grace=0.3")
    died(launched, Cause.timeout, "did not finish within 0.7 s")
    assert 1.0 <= launched.end(1).seconds < 3


def test_a_job_past_its_time_may_close_what_it_has_open(tmp_path: Path) -> None:
    def fault() -> None:
        def handler(*_: Any) -> None:
            raise SystemExit(143)

        signal.signal(signal.SIGTERM, handler)
        try:
            time.sleep(60)
        finally:
            print("closed")

    launched = with_fault(fault, tmp_path, "hydra.launcher.timeout=0.5")
    died(launched, Cause.timeout, "did not finish within 0.5 s")
    assert launched.output(1) == "closed\n"
    assert launched.end(1).seconds < 3


def test_what_cannot_be_pickled_is_named(tmp_path: Path) -> None:
    def fault() -> Any:
        import threading

        return threading.Lock()

    died(
        with_fault(fault, tmp_path),
        Cause.exited,
        "returned something that cannot be pickled: TypeError: cannot pickle '_thread.lock' object",
    )


def test_what_cannot_be_unpickled_is_named(tmp_path: Path) -> None:
    def fault() -> Any:
        class Odd:
            def __reduce__(self) -> Any:
                return int, ("no number",)

        return Odd()

    launched = with_fault(fault, tmp_path)
    assert type(launched.value(1)) is JobDiedError
    assert launched.end(1).reason.startswith("returned something that cannot be unpickled: ValueError: invalid literal")


@pytest.mark.parametrize("trouble", ["pickle", "unpickle"])
def test_an_exception_that_cannot_travel_arrives_as_type_and_text(tmp_path: Path, trouble: str) -> None:
    def fault() -> None:
        import threading

        class OddError(Exception):
            def __init__(self, first: str, second: Any) -> None:
                super().__init__(first)
                self.second = second

        raise OddError("so odd", threading.Lock() if trouble == "pickle" else 2)

    died(with_fault(fault, tmp_path), Cause.raised, "OddError: so odd")


def test_threads_and_exit_handlers_run_to_their_end(tmp_path: Path) -> None:
    def task(config: Any) -> int:
        import atexit
        import threading

        atexit.register(lambda: print("at exit"))

        def later() -> None:
            time.sleep(0.2)
            print("thread")

        threading.Thread(target=later).start()
        return 1

    launched = launch(task, tmp_path, [[]])
    assert launched.value(0) == 1
    assert launched.output(0) == "thread\nat exit\n"


def test_a_process_that_a_job_leaves_behind_is_ended(tmp_path: Path) -> None:
    def task(config: Any) -> int:
        import subprocess

        return subprocess.Popen(["sleep", "60"], start_new_session=True).pid

    launched = launch(task, tmp_path, [[]])
    with pytest.raises(ProcessLookupError):
        os.kill(launched.value(0), 0)


def test_a_kernel_kill_for_want_of_memory_is_told_from_another_kill() -> None:
    # A real one would need a machine that runs out of memory.
    def judged(*, out_of_memory: bool) -> End:
        return ending(Ended(1, signal.SIGKILL, out_of_memory=out_of_memory), None, timeout=None, output=None).end

    assert judged(out_of_memory=False).cause is Cause.signalled
    assert judged(out_of_memory=True).cause is Cause.out_of_memory
    assert "the kernel had no memory left" in judged(out_of_memory=True).reason


def test_an_end_after_the_function_returned_is_still_a_failure(tmp_path: Path) -> None:
    def fault() -> int:
        import atexit

        atexit.register(os._exit, 5)
        return 1

    died(with_fault(fault, tmp_path), Cause.exited, "ended with exit code 5, after its function had returned")


def test_an_error_of_a_died_job_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(JobDiedError("killed; its output is in /x")))  # noqa: S301
    assert str(error) == "killed; its output is in /x"
    assert type(error) is JobDiedError


@pytest.mark.parametrize(
    ("fault", "timeout", "reason"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGKILL), 60, "killed by SIGKILL"),
        (lambda: time.sleep(60), 3, "did not finish within 3 s"),
        (lambda: 1 / 0, 60, "ZeroDivisionError: division by zero"),
    ],
    ids=["kill", "hang", "raise"],
)
def test_a_fresh_interpreter_fails_in_the_same_way(
    tmp_path: Path, fault: Callable[[], Any], timeout: int, reason: str
) -> None:
    launched = with_fault(fault, tmp_path, "hydra.launcher.start=exec", f"hydra.launcher.timeout={timeout}")
    assert launched.end(1).reason == reason
