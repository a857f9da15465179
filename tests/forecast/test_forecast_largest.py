"""The search for the largest batch, with dry runs made up, so that every number is known."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.errors import UserError
from mp_hydra.forecast import largest as module
from mp_hydra.forecast.largest import Search, largest_batch
from mp_hydra.forecast.limits import Memory
from mp_hydra.forecast.points import Measured, Point
from mp_hydra.outcome import MemoryExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from mp_hydra.forecast.ladder import Goal

CONFIG = {"precision": {"name": "fp32"}, "batch_size": "max"}
KIB = 2**10


def point(size: int, peak: int | None = None) -> Point:
    """60 KiB of state, 2 of input a sample; the peak is 100 KiB and 10 a sample, unless it is given."""
    peak = 100 * KIB + 10 * KIB * size if peak is None else peak
    state, given = 60 * KIB, 2 * KIB * size
    step = peak - state - given
    return Point(size, (step - 5, step), (7,), state, 40 * KIB, given, input_apart=True, seconds=0.1)


def measured(*, samples: int = 10_000, device_bytes: int | None = 2**40, data: int = 0) -> Measured:
    return Measured(tuple(point(size) for size in (8, 16, 32)), "CPU:0", device_bytes, samples, data)


def memory(kib: int, allowance: int = 0) -> Memory:
    return Memory(kib * KIB, "given", allowance * KIB, "a test")


def search(found: Measured, room: Memory) -> Search:
    return Search(CONFIG, found, room, Path.cwd())


def tried_out(monkeypatch: pytest.MonkeyPatch, peaks: Callable[[int], int]) -> list[int]:
    """Let batches that are tried out have these peaks; the sizes that were."""
    sizes: list[int] = []

    def measure(_config: Mapping[str, Any], goal: Goal, *, directory: Path) -> Measured:
        assert directory == Path.cwd()
        (size,) = goal.exactly
        sizes.append(size)
        return Measured((point(size, peaks(size)),), "CPU:0", 2**40, 10_000, 0)

    monkeypatch.setattr(module, "measure", measure)
    return sizes


def test_the_peak_is_state_and_input_and_the_largest_step() -> None:
    assert point(8).peak_bytes == 180 * KIB
    on_gpu = Point(8, (100, 90), (120,), 1000, 40, 50, input_apart=False, seconds=0.1)
    assert on_gpu.peak_bytes == 1120  # an evaluation may be the largest; the input came within the step


def test_a_batch_fits_with_its_whole_band() -> None:
    found = search(measured(), memory(1491)).largest(verify=False)
    assert (found.batch_size, found.predicted_bytes, found.band) == (128, 1380 * KIB, 0.08)
    assert found.measured_bytes is None
    assert not found.capped


def test_the_allowance_is_not_the_batchs() -> None:
    assert search(measured(), memory(2491, 1000)).largest(verify=False).batch_size == 128


def test_a_training_set_sets_the_limit_where_the_memory_does_not() -> None:
    found = search(measured(samples=100), memory(10**6)).largest(verify=False)
    assert (found.batch_size, found.capped) == (96, True)
    assert "100 training samples" in found.reason


def test_a_batch_that_stays_within_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tried_out(monkeypatch, lambda _: 1447 * KIB)  # and 3 % are 1490.4
    found = search(measured(), memory(1491)).largest(verify=True)
    assert sizes == [128]
    assert found.measured_bytes == 1447 * KIB
    assert found.trials[0].error == pytest.approx(1380 / 1447 - 1)


def test_a_batch_that_leaves_no_room_for_scatter_is_replaced_by_a_smaller_one(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tried_out(monkeypatch, lambda size: 1448 * KIB if size == 128 else 1400 * KIB)
    found = search(measured(), memory(1491)).largest(verify=True)
    assert sizes[0] == 128
    assert found.batch_size == sizes[1] < 128
    assert found.measured_bytes == 1400 * KIB
    assert [trial.fits for trial in found.trials] == [False, True]


def test_batches_whose_process_dies_are_replaced_by_ones_that_take_8_percent_less(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peaks(size: int) -> int:
        if size > 110:
            raise MemoryExhaustedError("its process was ended by SIGKILL")
        return 1100 * KIB

    sizes = tried_out(monkeypatch, peaks)
    found = search(measured(), memory(1491)).largest(verify=True)
    # 1.08 x (100 + 10 a sample) lies within 1491 x 0.92 up to 116.9, within that x 0.92 up to 106.8
    assert sizes == [128, 112, 104]
    assert [trial.problem for trial in found.trials] == 2 * ["its process was ended by SIGKILL"] + [None]
    assert found.batch_size == 104


def test_a_smallest_batch_whose_process_dies_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def peaks(size: int) -> int:
        raise MemoryExhaustedError("its process was ended by SIGKILL")

    sizes = tried_out(monkeypatch, peaks)
    with pytest.raises(
        UserError, match="a batch of 8 failed: its process was ended by SIGKILL, and none smaller is proposed"
    ):
        search(measured(), memory(200)).largest(verify=True)
    assert sizes == [8]


def test_a_trial_that_fails_for_another_reason_is_an_error_and_not_a_smaller_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def peaks(_: int) -> int:
        raise UserError("precision=fp32: a bug")

    sizes = tried_out(monkeypatch, peaks)
    with pytest.raises(UserError, match="a bug"):
        search(measured(), memory(1491)).largest(verify=True)
    assert sizes == [128]


def test_a_forecast_that_is_never_right_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tried_out(monkeypatch, lambda _: 10**9)
    with pytest.raises(UserError, match=r"of 1\.46 MiB, of which 3% are to stay free, and 4 batches were tried"):
        search(measured(), memory(1491)).largest(verify=True)
    assert len(set(sizes)) == 4


def test_a_batch_that_this_machine_cannot_hold_is_not_tried_out(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = tried_out(monkeypatch, lambda _: 0)
    monkeypatch.setattr(module, "available_bytes", lambda: 2**30 + 1000 * KIB)  # 1 GiB stays with the process
    found = search(measured(), memory(1491)).largest(verify=True)
    assert sizes == []
    assert found.measured_bytes is None
    assert found.obstacle == "it may take 1.46 MiB, and this machine has 1000 KiB left"


def test_too_little_memory_says_how_much_is_needed() -> None:
    with pytest.raises(UserError) as caught:
        search(measured(), memory(1100, 1000)).largest(verify=False)
    needed = "1.16 MiB, an allowance of 1000 KiB included"  # 180 KiB and 3 %, and the allowance
    assert str(caught.value) == f"precision=fp32: a batch of 8 needs at least {needed}, and there are 1.07 MiB"


def test_fewer_samples_than_the_smallest_batch_are_an_error() -> None:
    with pytest.raises(UserError, match="there are 7 training samples"):
        search(measured(samples=7), memory(10**6)).largest(verify=False)


def test_what_was_found_goes_through_json() -> None:
    found = search(measured(), memory(1491)).largest(verify=False)
    assert json.loads(json.dumps(asdict(found)))["points"][2]["batch_size"] == 32


def given(monkeypatch: pytest.MonkeyPatch, found: Measured) -> list[Goal]:
    goals: list[Goal] = []

    def measure(_config: Mapping[str, Any], goal: Goal, **_: Any) -> Measured:
        goals.append(goal)
        return found

    monkeypatch.setattr(module, "measure", measure)
    return goals


def test_on_a_cpu_data_set_and_input_pipeline_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one core, four batches of input: 18 KiB a sample instead of 10, and 200 KiB of data."""
    monkeypatch.setattr("os.cpu_count", lambda: 1)
    goals = given(monkeypatch, measured(data=200 * KIB))
    found = largest_batch(CONFIG, memory=2822 * KIB, directory=Path.cwd(), verify=False)
    assert goals[0].limit_bytes == 2822 * KIB
    assert found.batch_size == 128  # 300 and 18 * 128 are 2604 KiB, and 8 % are 2812.3
    assert found.allowance_bytes == 0


def test_no_more_than_the_device_has_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, measured(device_bytes=1000 * KIB))
    found = largest_batch(CONFIG, memory=10**9, directory=Path.cwd(), verify=False)
    assert found.memory_bytes == 1000 * KIB


def test_a_memory_that_is_neither_given_nor_known_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    given(monkeypatch, measured(device_bytes=None))
    with pytest.raises(UserError, match=r"give memory\.limit"):
        largest_batch(CONFIG, memory=None, directory=Path.cwd())
