"""The Keras callback that measures a training and reports it; import it late, it imports Keras.

It overrides no `on_train_batch_end`: that would make Keras convert the logs of every batch to Python numbers, and wait
for the device to do so.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import keras

from mp_hydra.scaled_optimizer import Counters, ScaledOptimizer
from mp_hydra.telemetry.memory import AllocatorMemory, HostMemory, variables_bytes
from mp_hydra.telemetry.nvml import NvmlSampler
from mp_hydra.telemetry.steps import StepClock

if TYPE_CHECKING:
    from mp_hydra.finite_steps import Batches

MIB = 2**20
Report = Callable[[Mapping[str, float], int], None]


class Telemetry(keras.callbacks.Callback):
    """Measures memory, time, loss scale and gradients over a `fit`.

    Args:
        report: called with metrics and the number of training batches seen: at the end of each epoch, and within one
            every `every` batches with loss scale and gradient norms.
        optimizer: the model's optimizer, whose counters live on the device.
        batches: the counts of batches that `finite_steps` gives.
        batch_size: samples in a full batch.
        samples: training samples of an epoch.
        device: the device that trains, "GPU:0" or "CPU:0".
        pci_bus_id: its bus id, for NVML; None on a CPU.
        leftover: bytes in use on the device before the run began, which it does not answer for.
        every: batches between reports within an epoch; 0 for none.

    Attributes:
        absent: for each metric that could not be measured, the reason.
        sources: for each kind of measurement, where it comes from.
        seen: training batches of this `fit`.
        applied: steps of this `fit` whose gradients were finite.
    """

    def __init__(
        self,
        report: Report,
        *,
        optimizer: ScaledOptimizer,
        batches: Batches,
        batch_size: int,
        samples: int,
        device: str,
        pci_bus_id: str | None,
        leftover: int = 0,
        every: int = 0,
    ) -> None:
        super().__init__()
        self.absent: dict[str, str] = {}
        self.seen = self.applied = 0
        self._report = report
        self._optimizer = optimizer
        self._batches = batches
        self._batch_size, self._samples, self._every = batch_size, samples, every
        self._allocator, self._host, self._nvml = (
            AllocatorMemory(device, leftover=leftover),
            HostMemory(),
            NvmlSampler(pci_bus_id),
        )
        self.sources = {"memory": self._allocator.source, "host_memory": self._host.source}
        # A CPU computes within the call, so that waiting costs nothing there; on a GPU each wait lets the device run dry.
        self.clock = StepClock(batch_size, self._wait, sync_every_s=0.0 if device.startswith("CPU") else 0.5)
        self._first = Counters(0, 0, 0, 0, 1.0, 0.0, 0.0)
        self._left_out = self._finite_batches = 0
        self._next_report = every
        self._baseline: int | None = None
        self._peak = self._host_peak = 0
        self._in_training_part = False
        self._train_seconds = self._epoch_began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the baseline: data, variables and optimizer state exist by now."""
        self._optimizer.reset_norms()
        self._first = self._optimizer.counters()
        self._baseline = self._allocator.current_bytes()
        self._nvml.start()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin an epoch."""
        self._host.reset()
        self._epoch_began = time.perf_counter()

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Stamp the time; the first batch of an epoch begins its training part.

        What evaluation needed before does not count, nor does the copy of the data that tf.data makes for a moment when
        the first iterator is created, on a CPU in the same allocator.
        """
        if not self._in_training_part:
            self._in_training_part = True
            self._allocator.reset()
        step = self.seen + batch
        self.clock.begin(step)
        if self._every and step >= self._next_report:
            self._next_report = step - step % self._every + self._every
            self._report(self._scaling(), step)

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation within `fit` ends the training part of an epoch."""
        self._end_training_part()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the epoch; the logs of one without a finite batch become nan."""
        self._end_training_part()
        seconds = time.perf_counter() - self._epoch_began
        self._train_seconds += seconds
        values = {
            **self._keras_logs({} if logs is None else logs),
            **self._scaling(),
            **self._memory(),
            **self._times(),
        }
        values["train/nonfinite_batches"] = float(self._left_out)
        values["time/epoch_seconds"] = seconds
        self._report(values, self.seen)

    def on_train_end(self, logs: Any = None) -> None:
        """Report what belongs to the whole training."""
        self._nvml.stop()
        if self._nvml.peak_bytes is not None:
            self.sources["device_memory"] = self._nvml.source
        values = {**self._memory(), **self._times(whole=True), **self._nvml_values()}
        values["time/train_seconds"] = self._train_seconds
        self._report(values, self.seen)

    def close(self) -> None:
        """Stop sampling, also where `fit` was left by an exception."""
        self._nvml.stop()

    def _wait(self) -> None:
        self._batches.read()

    def _end_training_part(self) -> None:
        if not self._in_training_part:
            return
        self._in_training_part = False
        seen, left_out = self._batches.read()  # waits for the device
        steps = seen - self.seen
        self._finite_batches = steps - (left_out - self._left_out)
        self.seen, self._left_out = seen, left_out
        self.clock.end_stretch(seen, samples=min(steps * self._batch_size, self._samples))
        self._peak = max(self._peak, self._allocator.peak_bytes() or 0)
        self._host_peak = max(self._host_peak, self._host.peak_bytes() or 0)

    def _keras_logs(self, logs: dict[str, Any]) -> dict[str, float]:
        """Keras' metrics under their names here; learning rates, which some callbacks add, are none."""
        values = {}
        for name, value in logs.items():
            split, metric = ("val", name[4:]) if name.startswith("val_") else ("train", name)
            if name == "learning_rate":
                continue
            if split == "train" and not self._finite_batches:
                # The mean of no batches is 0 to Keras: the best loss ever, for the callbacks that come after this one.
                logs[name] = math.nan
                self.absent[f"train/{metric}"] = "the last epoch had no batch with a finite loss"
            else:
                values[f"{split}/{metric}"] = float(value)
                self.absent.pop(f"{split}/{metric}", None)
        return values

    def _scaling(self) -> dict[str, float]:
        """Loss scale and counters; gradient norms over the finite steps since the last call."""
        now = self._optimizer.counters()
        self._optimizer.reset_norms()
        applied, self.applied = now.applied - self._first.applied - self.applied, now.applied - self._first.applied
        values = {
            "loss_scale/value": now.scale_used,
            "loss_scale/skipped_steps": float(now.skipped - self._first.skipped),
            "loss_scale/applied_steps": float(self.applied),
        }
        if applied:
            values["gradients/global_norm"] = now.norm_sum / applied
            values["gradients/global_norm_max"] = now.norm_max
        for name in ("gradients/global_norm", "gradients/global_norm_max"):
            if self.applied:
                self.absent.pop(name, None)
            else:
                self.absent[name] = "no step had a finite gradient"
        return values

    def _memory(self) -> dict[str, float]:
        values = {"memory/state_mib": variables_bytes([*self.model.variables, *self._optimizer.variables]) / MIB}
        if self._allocator.unavailable is None and self._baseline is not None:
            values["memory/peak_mib"] = self._peak / MIB
            values["memory/baseline_mib"] = self._baseline / MIB
            values["memory/training_mib"] = (self._peak - self._baseline) / MIB
        else:
            reason = str(self._allocator.unavailable)
            self.absent.update({f"memory/{name}_mib": reason for name in ("peak", "baseline", "training")})
        if self._host.unavailable is None:
            values["memory/host_peak_mib"] = self._host_peak / MIB
        else:
            self.absent["memory/host_peak_mib"] = self._host.unavailable
        return values

    def _times(self, *, whole: bool = False) -> dict[str, float]:
        values = {}
        first = self.clock.first_step_seconds
        if first is not None:
            values["time/first_step_seconds"] = first
        steady = self.clock.total() if whole else self.clock.epoch()
        if steady is not None:
            values["time/step_ms"] = steady.step_ms
            values["time/step_ms_p95"] = steady.step_ms_p95
            values["time/samples_per_second"] = steady.samples_per_second
        elif whole:
            self.absent.update(
                {
                    f"time/{name}": str(self.clock.unavailable)
                    for name in ("step_ms", "step_ms_p95", "samples_per_second")
                }
            )
        return values

    def _nvml_values(self) -> dict[str, float]:
        values = {}
        if self._nvml.peak_bytes is not None:
            values["memory/device_used_peak_mib"] = self._nvml.peak_bytes / MIB
        if self._nvml.joules is not None:
            values["energy/joules"] = self._nvml.joules
        names = {"memory": "memory/device_used_peak_mib", "energy": "energy/joules"}
        self.absent.update({names[key]: reason for key, reason in self._nvml.unavailable.items() if key in names})
        return values
