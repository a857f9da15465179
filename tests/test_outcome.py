"""How a run ends: whatever leaves the block, the run is closed once, with the right outcome, and the cause goes on."""

from __future__ import annotations

import signal
import threading
from typing import Any

import pytest

from mp_hydra.errors import DataError, ModelError, UserError
from mp_hydra.outcome import Ending, MemoryExhaustedError, Terminated, closing, sigterm_raises
from mp_hydra.tracking import Outcome


class FakeRun:
    """Notes how it was closed."""

    def __init__(self) -> None:
        self.closed: list[tuple[Outcome, str | None]] = []

    def close(self, outcome: Outcome, *, reason: str | None = None) -> None:
        self.closed.append((outcome, reason))


def ended(raising: BaseException | None = None, *, ending: Ending | None = None) -> tuple[Any, Any]:
    """Leave the block so; the one closing of the run, and what came out."""
    run, out = FakeRun(), None
    try:
        with closing(run) as now:  # type: ignore[arg-type]
            if ending is not None:
                now.outcome, now.reason = ending.outcome, ending.reason
            if raising is not None:
                raise raising  # noqa: TRY301 - the way out of the block
    except BaseException as error:  # noqa: BLE001 - that is what is under test
        out = error
    (closed,) = run.closed
    return closed, out


def test_block_that_ends_by_itself_is_ok() -> None:
    assert ended() == ((Outcome.ok, None), None)


def test_outcome_that_the_run_found_itself_is_kept() -> None:
    assert ended(ending=Ending(Outcome.diverged, "nan"))[0] == (Outcome.diverged, "nan")


def test_error_of_the_user_is_an_error_with_its_line_and_goes_on() -> None:
    error = DataError("x_train has 3 values that are not finite")
    assert ended(error) == ((Outcome.error, f"DataError: {error}"), error)


def test_outcome_set_before_an_error_wins_over_error() -> None:
    closed, _ = ended(UserError("nothing was applied"), ending=Ending(Outcome.no_updates))
    assert closed == (Outcome.no_updates, "UserError: nothing was applied")


def test_reason_is_the_first_line_that_says_something_and_never_empty() -> None:
    assert ended(ValueError("\n  \nfirst\nsecond"))[0][1] == "ValueError: first"
    assert ended(KeyError())[0][1] == "KeyError: KeyError"
    assert len(ended(ValueError("x" * 10_000))[0][1]) < 600


@pytest.mark.parametrize("code", [0, 1, "bad"])
def test_sys_exit_inside_a_run_is_an_error(code: Any) -> None:
    closed, out = ended(SystemExit(code))
    assert closed[0] is Outcome.error
    assert isinstance(out, SystemExit)


def test_keyboard_interrupt_is_killed() -> None:
    error = KeyboardInterrupt()
    assert ended(error) == ((Outcome.killed, "KeyboardInterrupt"), error)


def exhausted() -> BaseException:
    import tensorflow as tf

    error: BaseException = tf.errors.ResourceExhaustedError(None, None, "OOM when allocating tensor\nand more")
    return error


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("make", [exhausted, lambda: MemoryError("no room")])
def test_out_of_memory_is_recognised_also_as_the_cause_of_another_error(make: Any, wrapped: bool) -> None:
    error = make()
    if wrapped:
        cause, error = error, ModelError("model._target_=x: it failed")
        error.__cause__ = cause
    (outcome, reason), out = ended(error)
    assert outcome is Outcome.out_of_memory
    assert reason in ("OOM when allocating tensor", "no room")
    assert isinstance(out, MemoryExhaustedError)
    assert str(out) == f"out of memory: {reason}; try a smaller batch_size"
    assert out.__cause__ is error


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        (Outcome.ok, "FINISHED"),
        (Outcome.diverged, "FINISHED"),
        (Outcome.out_of_memory, "FAILED"),
        (Outcome.no_updates, "FAILED"),
        (Outcome.error, "FAILED"),
        (Outcome.killed, "KILLED"),
    ],
)
def test_each_outcome_has_its_status(outcome: Outcome, status: str) -> None:
    assert outcome.status == status


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGTERM, Terminated), (signal.SIGINT, KeyboardInterrupt)])
def test_signal_closes_the_run_as_killed_and_the_handler_comes_back(number: signal.Signals, kind: type) -> None:
    before = signal.getsignal(number)
    run = FakeRun()
    with pytest.raises(kind), closing(run):  # type: ignore[arg-type]
        signal.raise_signal(number)
    assert run.closed == [(Outcome.killed, kind.__name__)]
    assert signal.getsignal(number) is before


def test_sigterm_exits_with_128_plus_its_number() -> None:
    with pytest.raises(SystemExit) as caught, sigterm_raises():
        signal.raise_signal(signal.SIGTERM)
    assert caught.value.code == 143


def test_another_handler_of_sigterm_comes_back_after_success_and_failure() -> None:
    def mine(*_: Any) -> None: ...

    before = signal.signal(signal.SIGTERM, mine)
    try:
        with sigterm_raises():
            assert signal.getsignal(signal.SIGTERM) is not mine
        assert signal.getsignal(signal.SIGTERM) is mine
        with pytest.raises(KeyError), sigterm_raises():
            raise KeyError
        assert signal.getsignal(signal.SIGTERM) is mine
    finally:
        signal.signal(signal.SIGTERM, before)


def test_outside_the_main_thread_signals_are_left_alone_and_the_run_is_closed() -> None:
    before, results = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        results.append(ended(KeyError("k"))[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [(Outcome.error, "KeyError: 'k'")]
    assert signal.getsignal(signal.SIGTERM) is before
