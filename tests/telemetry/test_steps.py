"""Step times, on a clock that stands still unless the test moves it."""

from __future__ import annotations

from typing import Any

import pytest

from mp_hydra.telemetry.steps import StepClock


class Device:
    """A training device: work is launched for later, and takes its time when somebody waits."""

    def __init__(self) -> None:
        self.now = 100.0
        self.pending = 0.0
        self.waits = 0

    def read(self) -> float:
        return self.now

    def synchronise(self) -> None:
        self.now += self.pending
        self.pending = 0.0
        self.waits += 1


def stepper(device: Device, **options: Any) -> StepClock:
    options = {"batch_size": 10, "warmup_steps": 2, "sync_every_s": 0.0, **options}
    return StepClock(synchronise=device.synchronise, clock=device.read, **options)


def train(clock: StepClock, device: Device, seconds: list[float], start: int = 0, steps_each: int = 1) -> int:
    """Executions that take the given seconds; returns the steps seen after them."""
    for number, duration in enumerate(seconds):
        clock.begin(start + number * steps_each)
        device.pending += duration
    return start + len(seconds) * steps_each


def test_median_p95_and_throughput_of_the_steps_after_warm_up() -> None:
    device = Device()
    clock = stepper(device)
    step = train(clock, device, [5.0, 0.9, 0.1, 0.2, 0.3, 0.4])
    clock.end_stretch(step, samples=60)
    total = clock.total()
    assert total is not None
    assert clock.first_step_seconds == pytest.approx(5.0)
    assert clock.intervals() == pytest.approx([100, 200, 300, 400])
    assert total.step_ms == pytest.approx(250)
    # Linear between order statistics: position 0.95 * 3 = 2.85, so 300 + 0.85 * 100.
    assert total.step_ms_p95 == pytest.approx(385)
    assert total.steps == 4
    assert total.seconds == pytest.approx(1.0)
    assert total.samples_per_second == pytest.approx(40)
    assert clock.unavailable is None
    assert clock.epoch() == total


def test_a_smaller_last_batch_counts_with_the_samples_that_it_had() -> None:
    device = Device()
    clock = stepper(device)
    step = train(clock, device, [5.0, 0.5, 0.5, 0.5])
    clock.end_stretch(step, samples=33)  # batches of 10, 10, 10 and 3
    total = clock.total()
    assert total is not None
    assert total.samples_per_second == pytest.approx((10 + 3) / 1.0)


def test_steps_per_execution_divides_an_interval_by_its_steps_and_a_remainder_by_its_own() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=3)
    for step, seconds in ((0, 9.0), (4, 2.0), (8, 4.0), (12, 0.8)):  # the last execution has 2 steps
        clock.begin(step)
        device.pending += seconds
    clock.end_stretch(14, samples=140)
    total = clock.total()
    assert total is not None
    assert clock.first_step_seconds == pytest.approx(9.0)
    assert clock.intervals() == pytest.approx([500] * 4 + [1000] * 4 + [400] * 2)
    assert total.step_ms == pytest.approx(500)  # of 400 400 500 500 500 500 1000 1000 1000 1000
    assert total.steps == 10
    assert total.samples_per_second == pytest.approx(100 / 6.8)


def test_warm_up_that_ends_inside_an_execution_leaves_that_execution_out() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=6)
    step = train(clock, device, [9.0, 7.0, 2.0], steps_each=4)
    clock.end_stretch(step, samples=120)
    assert clock.intervals() == pytest.approx([500] * 4)


def test_the_whole_first_execution_is_left_out_even_without_warm_up() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=0)
    step = train(clock, device, [9.0, 2.0], steps_each=4)
    clock.end_stretch(step, samples=80)
    assert clock.intervals() == pytest.approx([500] * 4)


def test_what_happens_between_stretches_is_not_counted() -> None:
    device = Device()
    clock = stepper(device)
    step = train(clock, device, [5.0, 0.9, 0.1, 0.3])
    clock.end_stretch(step, samples=40)
    first = clock.epoch()
    device.now += 1000.0  # validation
    device.pending += 50.0  # and work that it has left on the device
    step = train(clock, device, [0.5, 0.5], start=step)
    clock.end_stretch(step, samples=15)
    second = clock.epoch()
    total = clock.total()
    assert first is not None
    assert second is not None
    assert total is not None
    assert (first.steps, first.seconds, first.samples_per_second) == pytest.approx((2, 0.4, 50))
    assert (second.steps, second.seconds, second.samples_per_second) == pytest.approx((2, 1.0, 15))
    assert (total.steps, total.seconds, total.samples_per_second) == pytest.approx((4, 1.4, 35 / 1.4))
    assert clock.intervals() == pytest.approx([100, 300, 500, 500])


def test_warm_up_may_last_beyond_the_first_epoch() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=3)
    step = train(clock, device, [5.0, 4.0])
    clock.end_stretch(step, samples=20)
    assert clock.epoch() is None
    step = train(clock, device, [3.0, 0.2, 0.4], start=step)
    clock.end_stretch(step, samples=24)  # batches of 10, 10 and 4
    epoch = clock.epoch()
    assert epoch is not None
    assert clock.intervals() == pytest.approx([200, 400])
    assert epoch.samples_per_second == pytest.approx(14 / 0.6)
    assert clock.total() == epoch


def test_an_epoch_of_one_step_ends_the_first_execution() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=1)
    step = train(clock, device, [5.0])
    clock.end_stretch(step, samples=10)
    assert clock.first_step_seconds == pytest.approx(5.0)
    step = train(clock, device, [0.3], start=step)
    clock.end_stretch(step, samples=10)
    assert clock.intervals() == pytest.approx([300])


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_run_within_the_warm_up_has_no_figures_and_a_reason(steps):
    device = Device()
    clock = stepper(device, warmup_steps=3)
    clock.end_stretch(train(clock, device, [1.0] * steps), samples=10 * steps)
    assert clock.total() is None
    assert clock.epoch() is None
    assert clock.intervals() == []
    assert clock.first_step_seconds == pytest.approx(1.0)
    assert f"none of the {steps} training steps is past the warm-up" in str(clock.unavailable)


def test_a_run_without_a_step_has_no_figures_at_all() -> None:
    clock = stepper(Device())
    clock.end_stretch(0, samples=0)
    assert (clock.total(), clock.epoch(), clock.first_step_seconds) == (None, None, None)
    assert clock.unavailable is not None


def test_a_resumed_run_warms_up_from_the_step_where_it_starts() -> None:
    device = Device()
    clock = stepper(device)
    step = train(clock, device, [5.0, 0.9, 0.1], start=1000)
    clock.end_stretch(step, samples=30)
    assert clock.intervals() == pytest.approx([100])


def test_a_stretch_that_was_broken_off_is_in_no_figure() -> None:
    device = Device()
    clock = stepper(device)
    step = train(clock, device, [5.0, 0.9, 0.1])
    clock.end_stretch(step, samples=30)
    train(clock, device, [0.7, 0.7], start=step)
    total = clock.total()
    assert total is not None
    assert (total.steps, total.samples_per_second) == pytest.approx((1, 100))


def test_it_synchronises_at_the_ends_of_stretch_first_execution_and_warm_up_and_then_in_intervals() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=4, sync_every_s=1.0)
    waited = []
    for step in range(12):
        before = device.waits
        clock.begin(step)
        if device.waits > before:
            waited.append(step)
        device.now += 0.3  # the program's own time, launching a step
        device.pending += 0.1
    clock.end_stretch(12, samples=120)
    # 0: the stretch begins; 1: end of the first execution; 4: end of warm-up; 8: the first begin 1.0 s after 4.
    assert waited == [0, 1, 4, 8]
    assert device.waits == 5


def test_a_device_that_runs_behind_is_timed_and_not_the_program_that_feeds_it() -> None:
    device = Device()
    clock = stepper(device, sync_every_s=1.0)
    for step in range(10):
        clock.begin(step)
        device.now += 0.001
        device.pending += 0.5
    clock.end_stretch(10, samples=100)
    total = clock.total()
    assert total is not None
    assert total.step_ms == pytest.approx(501)
    assert total.samples_per_second == pytest.approx(10 / 0.501)


def test_every_interval_measured_while_synchronised_spreads_its_mean_over_its_steps() -> None:
    device = Device()
    clock = stepper(device, warmup_steps=1, sync_every_s=0.5)
    for step, seconds in enumerate([2.0, 0.2, 0.4, 0.6]):
        clock.begin(step)
        device.now += seconds
    clock.end_stretch(4, samples=40)
    # Synchronised at 1 and, 0.6 s later, at 3.
    assert clock.intervals() == pytest.approx([300, 300, 600])
