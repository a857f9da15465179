"""Step times in steady state: the arithmetic, without TensorFlow.

A device runs behind the program that feeds it, so the time between two calls says nothing unless the device was idle at
both. `StepClock` therefore reads the clock only after it has synchronised, and divides by the steps in between.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class StepTimes:
    """Steady-state figures of one epoch or of a whole run.

    Attributes:
        step_ms: median time of a step in milliseconds.
        step_ms_p95: 95th percentile in milliseconds.
        samples_per_second: training samples in `seconds`, over `seconds`.
        steps: steady steps measured.
        seconds: the time that they took.

    Each step counts once in the percentiles, with the mean of the interval that it was measured in. They interpolate
    linearly between order statistics (numpy's default; definition 7 of Hyndman and Fan, 1996).
    """

    step_ms: float
    step_ms_p95: float
    samples_per_second: float
    steps: int
    seconds: float


@dataclass
class _Steady:
    """Steady intervals as (steps, seconds), and the samples that they trained on."""

    intervals: list[tuple[int, float]] = field(default_factory=list)
    samples: int = 0

    def per_step_ms(self) -> list[float]:
        return [1e3 * seconds / steps for steps, seconds in self.intervals for _ in range(steps)]

    def times(self) -> StepTimes:
        import numpy as np

        median, p95 = np.percentile(self.per_step_ms(), (50, 95))
        seconds = sum(seconds for _, seconds in self.intervals)
        steps = sum(steps for steps, _ in self.intervals)
        return StepTimes(float(median), float(p95), self.samples / seconds, steps, seconds)


class StepClock:
    """Times the training steps of a run, epoch by epoch.

    A stretch is the training part of an epoch: from its first `begin` to `end_stretch`. What happens between stretches
    (validation, checkpoints) is not counted. Left out of every figure are the first `warmup_steps` steps of the run
    and, whatever its size, the first execution: it traces and compiles, and is `first_step_seconds`.

    The clock synchronises at both ends of each stretch and at the ends of the first execution and the warm-up; from
    there on, at the first `begin` that is `sync_every_s` or more after the last time. The intervals between these
    points are what is measured. With 0 every execution is measured by itself: right for a CPU, where waiting costs
    nothing. A GPU stands idle, after each synchronisation, until the next step is launched: there an interval should
    span many steps.

    Args:
        batch_size: samples in a full batch.
        synchronise: returns when the device has finished all that was launched.
        warmup_steps: steps at the start of the run that are not steady.
        sync_every_s: seconds between synchronisations in steady state.
        clock: seconds from any origin, never going back.

    Attributes:
        first_step_seconds: time of the first execution; None before its end.
    """

    def __init__(
        self,
        batch_size: int,
        synchronise: Callable[[], object],
        *,
        warmup_steps: int = 3,
        sync_every_s: float = 1.0,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.first_step_seconds: float | None = None
        self._batch_size = batch_size
        self._synchronise = synchronise
        self._warmup_steps = warmup_steps
        self._sync_every_s = sync_every_s
        self._clock = clock
        self._origin: int | None = None  # the step at which the run began
        self._stretch_start: int | None = None  # None between stretches
        self._mark = (0, 0.0)  # step and time of the last synchronised point
        self._steady = False  # whether the mark lies behind the warm-up
        self._trained = 0
        self._current = _Steady()  # of the stretch under way
        self._epoch = _Steady()  # of the last one that ended
        self._total = _Steady()  # of all that ended

    def begin(self, step: int) -> None:
        """Say that an execution (one step, or `steps_per_execution` of them) is about to be launched.

        Args:
            step: training batches launched before it, over the whole run; a resumed run may start above 0.
        """
        if self._stretch_start is None:
            self._start_stretch(step)
        elif (
            self.first_step_seconds is None
            or (not self._steady and self._warm(step))
            or (self._steady and self._clock() - self._mark[1] >= self._sync_every_s)
        ):
            self._close_interval(step)

    def end_stretch(self, step: int, *, samples: int) -> None:
        """Say that the training part of an epoch has ended.

        Args:
            step: training batches launched so far, over the whole run.
            samples: training samples in this stretch. Less than full batches would hold means that its last batch was
                smaller.
        """
        self._epoch = _Steady()
        if self._stretch_start is None:
            return
        self._close_interval(step)
        steps = step - self._stretch_start
        self._trained += steps
        self._stretch_start = None
        if self._current.intervals:
            left_out = steps - sum(steady for steady, _ in self._current.intervals)
            self._current.samples = samples - left_out * self._batch_size
            self._epoch = self._current
            self._total.intervals += self._epoch.intervals
            self._total.samples += self._epoch.samples

    def epoch(self) -> StepTimes | None:
        """The figures of the stretch that has just ended; None if it had no steady step."""
        return self._epoch.times() if self._epoch.intervals else None

    def total(self) -> StepTimes | None:
        """The figures of all stretches that have ended; None where `unavailable` says why."""
        return self._total.times() if self._total.intervals else None

    @property
    def unavailable(self) -> str | None:
        """Why `total` has no figures; None where it has."""
        if self._total.intervals:
            return None
        return (
            f"none of the {self._trained} training steps is past the warm-up "
            f"(the first {self._warmup_steps} steps, and all of the first execution)"
        )

    def intervals(self) -> list[float]:
        """Milliseconds of each steady step of the run, in order; steps measured together share their mean."""
        return self._total.per_step_ms()

    def _warm(self, step: int) -> bool:
        return self._origin is not None and step - self._origin >= self._warmup_steps

    def _start_stretch(self, step: int) -> None:
        if self._origin is None:
            self._origin = step
        self._stretch_start = step
        self._current = _Steady()
        self._steady = self.first_step_seconds is not None and self._warm(step)
        self._synchronise()
        self._mark = (step, self._clock())

    def _close_interval(self, step: int) -> None:
        last_step, last_time = self._mark
        self._synchronise()
        now = self._clock()
        if step > last_step:
            if self.first_step_seconds is None:
                self.first_step_seconds = now - last_time
            elif self._steady:
                self._current.intervals.append((step - last_step, now - last_time))
        self._mark = (step, now)
        self._steady = self._warm(step)
