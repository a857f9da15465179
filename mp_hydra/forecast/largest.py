"""The largest batch that fits a memory, found by dry runs and tried out."""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError, UserError
from mp_hydra.forecast.dry_run import measure
from mp_hydra.forecast.ladder import Goal
from mp_hydra.forecast.limits import HOST_ALLOWANCE, Memory, to_fit
from mp_hydra.forecast.line import NEAR, SCATTER, STEP
from mp_hydra.forecast.points import Beside, Measured, Point, line_through
from mp_hydra.host_memory import available_bytes
from mp_hydra.outcome import MemoryExhaustedError
from mp_hydra.sizes import shown

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from mp_hydra.forecast.line import Line

TRIES = 4  # batches that are tried out for real until one stays within the memory


@dataclass(frozen=True)
class Trial:
    """A batch that was trained and evaluated for real.

    Attributes:
        batch_size: samples in the batch.
        predicted_bytes: the forecast of its peak.
        measured_bytes: its peak; None if it was not run to the end.
        fits: whether the peak stayed within the memory, with room for the scatter of the steps that were not tried.
        problem: why there is no figure; None where there is one.
    """

    batch_size: int
    predicted_bytes: int
    measured_bytes: int | None
    fits: bool
    problem: str | None = None

    @property
    def error(self) -> float | None:
        """By which share of the measured peak the forecast lies above it; None if it was not measured."""
        return None if not self.measured_bytes else self.predicted_bytes / self.measured_bytes - 1


@dataclass(frozen=True)
class LargestBatch:
    """The largest batch size, a multiple of 8, whose forecast fits a memory with its whole band.

    Attributes:
        batch_size: samples in the batch.
        predicted_bytes: the forecast of its peak.
        band: how far the peak may lie from that, as a share of it, either way.
        measured_bytes: its peak in a process that trained and evaluated with it; None if that was not asked for or not possible.
        memory_bytes: the memory to fit into.
        allowance_bytes: what of it is left to others than TensorFlow's allocator.
        reason: how it was found, in one line.
        device: where it was measured.
        settled: whether the peaks lay on a line.
        capped: whether the number of training samples set the limit, and not the memory.
        obstacle: why it was not tried out although that was asked for; None where it was, or was not asked for.
        points: the dry runs.
        trials: the batches that were tried out.
    """

    batch_size: int
    predicted_bytes: int
    band: float
    measured_bytes: int | None
    memory_bytes: int
    allowance_bytes: int
    reason: str
    device: str
    settled: bool
    capped: bool
    obstacle: str | None = None
    points: tuple[Point, ...] = ()
    trials: tuple[Trial, ...] = ()


def largest_batch(
    config: Mapping[str, Any],
    *,
    memory: int | None,
    directory: Path,
    verify: bool = True,
    allowance: int | None = None,
    heard: Callable[[Point], None] | None = None,
    trying: Callable[[int], None] = lambda _: None,
) -> LargestBatch:
    """The largest batch size that a run of this config can have on this machine.

    On a CPU the data set and the batches that the input pipeline holds count, since they lie in the same memory.

    Args:
        config: a resolved config; its precision must be settled, its batch size does not matter.
        memory: bytes that TensorFlow's allocator may hold; None for what the device has, less an allowance.
        directory: what a relative `resume` refers to.
        verify: try it out in a fresh process, evaluation included, and take a smaller one where it does not fit.
        allowance: bytes of the memory that are left to others than the allocator; None for the default: none of a memory that is
            given or a GPU's, 1 GiB of main memory.
        heard: receives each dry run as soon as it is there.
        trying: receives each batch size before it is tried out.

    Raises:
        ConfigError: if the memory is not known and not given.
        UserError: if not even the smallest batch fits, or the model cannot be trained.
    """
    measured = measure(config, Goal(limit_bytes=memory), directory=directory, heard=heard)
    own = measured.device_bytes
    if memory is None and own is None:
        raise ConfigError(
            "batch_size", "max", "the memory of this machine cannot be read: give memory.limit, such as 8GB"
        )
    if memory is not None and allowance is None:
        allowance = 0
    room = to_fit(memory, device=measured.device, device_bytes=own or 0, allowance=allowance)
    if memory is not None and own is not None and own < memory:
        room = replace(room, total_bytes=own, source=f"{room.source}, but no more is available here")
    search = Search(config, measured, room, directory, beside=pipeline(measured))
    return search.largest(verify=verify, trying=trying)


def pipeline(measured: Measured) -> Beside:
    """Data set and input pipeline, which share the memory of a model on a CPU: see `mp_hydra.datasets.Split.batches`."""
    if not measured.points[0].input_apart:
        return Beside()
    held = 3 + (os.cpu_count() or 1)  # two ahead, one handed over, one in each thread's hands
    return Beside(measured.data_bytes, held)


@dataclass(frozen=True)
class Search:
    """The search for the largest batch, from dry runs that were made.

    Attributes:
        config: a resolved config.
        measured: its dry runs.
        memory: what to fit into.
        directory: what a relative `resume` refers to.
        beside: what lies in the same memory.
    """

    config: Mapping[str, Any]
    measured: Measured
    memory: Memory
    directory: Path
    beside: Beside = field(default_factory=Beside)

    def largest(self, *, verify: bool, trying: Callable[[int], None] = lambda _: None) -> LargestBatch:
        """The largest batch that fits.

        Args:
            verify: try it out, and take a smaller one where it does not fit.
            trying: receives each batch size before it is tried out.

        Raises:
            UserError: if not even the smallest batch fits, there are fewer training samples than it has, or none of several
                batches stays within the memory when it is run.
        """
        points, trials, most = {point.batch_size: point for point in self.measured.points}, list[Trial](), 2**31
        while True:
            line = line_through([points[size] for size in sorted(points)], self.measured.kept, self.beside)
            size = self._fitting(line, min(most, self.measured.samples))
            obstacle = self._obstacle(line.upper_at(size)) if verify else None
            if obstacle is not None or not verify:
                return self._found(size, line, trials, obstacle)
            trying(size)
            trial, point = self._tried(size, line)
            trials.append(trial)
            if trial.fits:
                return self._found(size, line, trials)
            if len(trials) == TRIES:
                raise UserError(f"{self._name}: {self._outcome(trial)}, and {TRIES} batches were tried")
            if size == STEP:
                raise UserError(f"{self._name}: {self._outcome(trial)}, and none smaller is proposed")
            most = size - STEP
            if point is not None:
                points[size] = point
            else:  # no figure to learn from: the next one takes less by the width of a band
                less = line.largest(int(self.memory.usable_bytes * (1 - NEAR) ** len(trials)), most)
                most = STEP if less is None else less

    @property
    def _name(self) -> str:
        return f"precision={self.config['precision']['name']}"

    def _fitting(self, line: Line, most: int) -> int:
        """The largest batch size up to `most` that fits by forecast."""
        if self.measured.samples < STEP:
            raise UserError(
                f"there are {self.measured.samples} training samples, fewer than the smallest batch that is proposed, {STEP}"
            )
        size = line.largest(self.memory.usable_bytes, most)
        if size is None:
            allowance, total = self.memory.allowance_bytes, shown(self.memory.total_bytes)
            needed = shown(line.upper_at(STEP) + allowance)
            left = f", an allowance of {shown(allowance)} included" if allowance else ""
            raise UserError(f"{self._name}: a batch of {STEP} needs at least {needed}{left}, and there are {total}")
        return size

    def _obstacle(self, needed: int) -> str | None:
        """Why a batch cannot be tried out on this machine; None if it can."""
        here = self.measured.device_bytes
        if self.measured.device.startswith("CPU"):
            now = available_bytes()
            here = None if now is None else max(now - HOST_ALLOWANCE, 0)
        if here is None or needed <= here:
            return None
        return f"it may take {shown(needed)}, and this machine has {shown(here)} left"

    def _tried(self, size: int, line: Line) -> tuple[Trial, Point | None]:
        """Train and evaluate with a batch in a fresh process; what came of it."""
        predicted = line.bytes_at(size)
        try:
            point = measure(self.config, Goal(exactly=(size,)), directory=self.directory).points[0]
        except MemoryExhaustedError as error:
            return Trial(size, predicted, None, fits=False, problem=str(error)), None
        peak = point.peak_bytes + self.beside.bytes_at(point)
        return Trial(size, predicted, peak, fits=peak * (1 + SCATTER) <= self.memory.usable_bytes), point

    def _outcome(self, trial: Trial) -> str:
        if trial.measured_bytes is None:
            return f"a batch of {trial.batch_size} failed: {trial.problem}"
        took = f"{shown(trial.measured_bytes)} of {shown(self.memory.usable_bytes)}"
        return f"a batch of {trial.batch_size} took {took}, of which {SCATTER:.0%} are to stay free"

    def _found(self, size: int, line: Line, trials: list[Trial], obstacle: str | None = None) -> LargestBatch:
        memory, samples = self.memory, self.measured.samples
        predicted, band = line.bytes_at(size), line.band_at(size)
        tried = trials[-1] if trials and trials[-1].batch_size == size else None
        capped = size + STEP > samples
        limit = (
            f"the most that {samples} training samples allow" if capped else f"the largest multiple of {STEP} that fits"
        )
        room = f"{shown(memory.total_bytes)} ({memory.source})"
        if memory.allowance_bytes:
            room += f" less {shown(memory.allowance_bytes)}"
        if tried is not None and tried.measured_bytes is not None:
            proof = f"{shown(tried.measured_bytes)} when it was tried out"
        else:
            proof = "not tried out" if obstacle is None else f"not tried out: {obstacle}"
        return LargestBatch(
            batch_size=size,
            predicted_bytes=predicted,
            band=band,
            measured_bytes=tried.measured_bytes if tried else None,
            memory_bytes=memory.total_bytes,
            allowance_bytes=memory.allowance_bytes,
            reason=f"{limit}; memory {room}, forecast {shown(predicted)} within {band:.0%}, {proof}",
            device=self.measured.device,
            settled=line.settled,
            capped=capped,
            obstacle=obstacle,
            points=self.measured.points,
            trials=tuple(trials),
        )
