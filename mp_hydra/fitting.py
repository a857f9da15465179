"""The training itself: `fit` with telemetry, limits, progress and the user's callbacks; import it late, it imports Keras."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import tensorflow as tf

from mp_hydra import hardware
from mp_hydra.compiling import callbacks
from mp_hydra.console import ProgressBar
from mp_hydra.finite_steps import finite_steps
from mp_hydra.preparation import Prepared, epochs_done
from mp_hydra.scaling_limits import ScalingLimits
from mp_hydra.telemetry.callback import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


@dataclass(frozen=True)
class Fitted:
    """What a training came to.

    Attributes:
        steps: training batches that the model has seen, those before a resume included.
        last_skipped: the number of the last step that this training skipped, counted from 1; 0 if it skipped none.
        nonfinite: path of the variable nearest to the loss whose gradient was not finite in a skipped step; None if none was.
        metrics: the last value of every metric.
        absent: for metrics that could not be measured, the reason.
        sources: where each kind of measurement comes from.
        step_ms: milliseconds of each steady step, in order.
    """

    steps: int
    last_skipped: int
    nonfinite: str | None
    metrics: dict[str, float]
    absent: dict[str, str]
    sources: dict[str, str]
    step_ms: list[float]

    def save(self, directory: Path) -> None:
        """Write step_times.npz: `milliseconds`, float64, one for each steady step in order."""
        np.savez_compressed(directory / "step_times.npz", milliseconds=np.asarray(self.step_ms))


def fit(
    config: Mapping[str, Any], prepared: Prepared, log_metrics: Callable[..., None], *, leftover: int = 0
) -> Fitted:
    """Train a prepared model up to `config["epochs"]`, reporting to `log_metrics(metrics, step=batches seen)`.

    Args:
        config: a resolved config.
        prepared: what to train, on what.
        log_metrics: where metrics go.
        leftover: bytes in use on the device before the run began, which it does not answer for.

    Raises:
        NoUpdatesError: if the gradients are never finite.
        ConfigError: if a resumed model has seen all epochs already.
    """
    data, model, batch_size, optimizer = prepared.data, prepared.model, config["batch_size"], prepared.optimizer
    done = epochs_done(config, prepared)
    seen_before = optimizer.counters().steps
    theirs = callbacks(config)
    boards = _summary_writers(theirs)
    last: dict[str, float] = {}

    def report(metrics: Mapping[str, float], step: int) -> None:
        last.update(metrics)
        log_metrics(metrics, step=seen_before + step)
        for writer in boards:
            with writer.as_default(step=seen_before + step):
                for name, value in metrics.items():
                    tf.summary.scalar(name, value)

    device = hardware.training_device()
    with finite_steps(model, optimizer) as batches:
        telemetry = Telemetry(
            report,
            optimizer=optimizer,
            batches=batches,
            batch_size=batch_size,
            samples=data.train.size,
            device=device,
            pci_bus_id=hardware.pci_bus_id(device),
            leftover=leftover,
            every=config["log_every_batches"],
        )
        limits = ScalingLimits(optimizer, max_skipped_in_a_row=config["loss_scale"]["max_skipped_in_a_row"])
        epoch = _Epoch()
        progress = ProgressBar(epochs=config["epochs"], batches=math.ceil(data.train.size / batch_size))
        try:
            model.fit(
                data.train.batches(batch_size, shuffle_seed=config["seed"], epoch=epoch.value),
                epochs=config["epochs"],
                initial_epoch=done,
                shuffle=False,  # the pipeline shuffles
                validation_data=data.validation.batches(batch_size) if data.validation else None,
                callbacks=[epoch, telemetry, limits, progress, *theirs],
                verbose=0,
            )
        finally:
            telemetry.close()
            progress.close()
    counters = optimizer.counters()
    return Fitted(
        steps=seen_before + telemetry.seen,
        last_skipped=max(counters.last_skipped - seen_before, 0),
        nonfinite=limits.nonfinite,
        metrics=last,
        absent=telemetry.absent,
        sources=telemetry.sources,
        step_ms=telemetry.clock.intervals(),
    )


class _Epoch(keras.callbacks.Callback):
    """The number of the epoch where the input pipeline reads it, so that a resumed run has the order of the later epochs."""

    def __init__(self) -> None:
        super().__init__()
        with tf.device("CPU:0"):
            self.value = tf.Variable(0, dtype="int64", trainable=False)

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Keras makes an epoch's iterator after this."""
        self.value.assign(epoch)


def _summary_writers(theirs: Sequence[Any]) -> list[Any]:
    """A writer beside that of each TensorBoard callback, for the metrics that Keras does not know."""
    boards = [callback for callback in theirs if isinstance(callback, keras.callbacks.TensorBoard)]
    return [tf.summary.create_file_writer(str(Path(board.log_dir) / "mp_hydra")) for board in boards]
