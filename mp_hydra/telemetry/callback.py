"""The Keras callback that measures a training and reports it; import it late, it imports Keras.

It overrides no `on_train_batch_end`: that would make Keras convert the logs of every batch to Python numbers, and wait
for the device to do so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import keras

from mp_hydra.scaled_optimizer import Counters, ScaledOptimizer
from mp_hydra.telemetry.memory import AllocatorMemory, HostMemory, variables_bytes
from mp_hydra.telemetry.nvml import NvmlSampler
from mp_hydra.telemetry.steps import StepClock

MIB = 2**20
Report = Callable[[Mapping[str, float], int], None]


class Telemetry(keras.callbacks.Callback):
    """Measures memory, time, loss scale and gradients over a `fit`.

    Args:
        report: called with metrics and the number of training batches seen: at the end of each epoch, and within one
            every `every` batches with loss scale and gradient norms.
        optimizer: the model's optimizer, whose counters live on the device.
        nonfinite_batches: the Keras variable that counts batches left out of the means.
        batch_size: samples in a full batch.
        samples: training samples of an epoch.
        device: the device that trains, "GPU:0" or "CPU:0".
        pci_bus_id: its bus id, for NVML; None on a CPU.
        every: batches between reports within an epoch; 0 for none.

    Attributes:
        absent: for each metric that could not be measured, the reason.
        sources: for each kind of measurement, where it comes from.
    """

    def __init__(
        self,
        report: Report,
        *,
        optimizer: ScaledOptimizer,
        nonfinite_batches: Any,
        batch_size: int,
        samples: int,
        device: str,
        pci_bus_id: str | None,
        every: int = 0,
    ) -> None:
        super().__init__()
        self.absent: dict[str, str] = {}
        self.final: dict[str, float] = {}
        self._report = report
        self._optimizer = optimizer
        self._nonfinite = nonfinite_batches
        self._batch_size, self._samples, self._every = batch_size, samples, every
        self._allocator, self._host, self._nvml = AllocatorMemory(device), HostMemory(), NvmlSampler(pci_bus_id)
        self.sources = {"memory": self._allocator.source, "host_memory": self._host.source}
        # A CPU computes within the call, so that waiting costs nothing there; on a GPU each wait lets the device run dry.
        self.clock = StepClock(batch_size, self._wait, sync_every_s=0.0 if device.startswith("CPU") else 0.5)
        self._seen = 0
        self._first = self._last = self._epoch_start = Counters(0, 0, 1.0, 0.0, 0.0)
        self._next_report = every
        self._baseline: int | None = None
        self._peak = self._host_peak = 0
        self._in_training_part = False
        self._train_seconds = self._epoch_began = 0.0

    def on_train_begin(self, logs: Any = None) -> None:
        """Take the baseline: data, variables and optimizer state exist by now."""
        self._first = self._last = self._epoch_start = self._optimizer.counters()
        self._baseline = self._allocator.current_bytes()
        self._nvml.start()

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Begin a training part: what evaluation needed before does not count."""
        self._allocator.reset()
        self._host.reset()
        self._epoch_began = time.perf_counter()
        self._in_training_part = True

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Stamp the time."""
        step = self._seen + batch
        self.clock.begin(step)
        if self._every and step >= self._next_report:
            self._next_report = step - step % self._every + self._every
            self._report(self._scaling(), step)

    def on_test_begin(self, logs: Any = None) -> None:
        """Validation within `fit` ends the training part of an epoch."""
        self._end_training_part()

    def on_epoch_end(self, epoch: int, logs: Mapping[str, Any] | None = None) -> None:
        """Report the epoch."""
        self._end_training_part()
        seconds = time.perf_counter() - self._epoch_began
        self._train_seconds += seconds
        values = {**self._keras_logs(logs or {}), **self._scaling(), **self._memory(), **self._times()}
        values["train/nonfinite_batches"] = float(self._nonfinite.numpy())
        values["time/epoch_seconds"] = seconds
        self._report(values, self._seen)

    def on_train_end(self, logs: Any = None) -> None:
        """Report what belongs to the whole training."""
        self._nvml.stop()
        if self._nvml.peak_bytes is not None:
            self.sources["device_memory"] = self._nvml.source
        values = {**self._memory(), **self._times(whole=True), **self._nvml_values()}
        values["time/train_seconds"] = self._train_seconds
        self.final = values
        self._report(values, self._seen)

    def close(self) -> None:
        """Stop sampling, also where `fit` was left by an exception."""
        self._nvml.stop()

    def counters(self) -> Counters:
        """What the optimizer counted so far."""
        return self._optimizer.counters()

    def _wait(self) -> None:
        self._optimizer.steps.numpy()

    def _end_training_part(self) -> None:
        if not self._in_training_part:
            return
        self._in_training_part = False
        now = self._optimizer.counters()  # reading waits for the device
        steps = now.steps - self._epoch_start.steps
        self._epoch_start = now
        whole = steps * self._batch_size >= self._samples
        self._seen += steps
        self.clock.end_stretch(self._seen, samples=self._samples if whole else steps * self._batch_size)
        self._peak = max(self._peak, self._allocator.peak_bytes() or 0)
        self._host_peak = max(self._host_peak, self._host.peak_bytes() or 0)

    def _keras_logs(self, logs: Mapping[str, Any]) -> dict[str, float]:
        every_batch_was_bad = int(self._nonfinite.numpy()) >= self._seen
        values = {}
        for name, value in logs.items():
            split, metric = ("val", name[4:]) if name.startswith("val_") else ("train", name)
            if split == "train" and every_batch_was_bad:
                self.absent[f"train/{metric}"] = "no batch had a finite loss"
            elif name != "learning_rate":
                values[f"{split}/{metric}"] = float(value)
        return values

    def _scaling(self) -> dict[str, float]:
        """Loss scale and counters; gradient norms over the finite steps since the last call."""
        now = self._optimizer.counters()
        applied = now.applied - self._last.applied
        values = {
            "loss_scale/value": now.scale_used,
            "loss_scale/skipped_steps": float(now.skipped - self._first.skipped),
            "loss_scale/applied_steps": float(now.applied - self._first.applied),
        }
        if applied:
            values["gradients/global_norm"] = (now.norm_sum - self._last.norm_sum) / applied
            values["gradients/global_norm_max"] = now.norm_max
            self.absent.pop("gradients/global_norm", None)
            self.absent.pop("gradients/global_norm_max", None)
        elif self._last == self._first:
            reason = "no step had a finite gradient"
            self.absent.update({"gradients/global_norm": reason, "gradients/global_norm_max": reason})
        self._optimizer.reset_norm_max()
        self._last = now
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
