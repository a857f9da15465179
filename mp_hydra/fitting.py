"""The training itself: `fit` with telemetry, progress and the user's callbacks; import it late, it imports Keras."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra import hardware
from mp_hydra.console import ProgressBar
from mp_hydra.finite_steps import finite_steps
from mp_hydra.preparation import Prepared, callbacks
from mp_hydra.telemetry.callback import Telemetry

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path


@dataclass(frozen=True)
class Fitted:
    """What a training came to.

    Attributes:
        steps: training batches seen.
        applied: those whose gradients were finite.
        metrics: the last value of every metric.
        absent: for metrics that could not be measured, the reason.
        sources: where each kind of measurement comes from.
        step_ms: milliseconds of each steady step, in order.
    """

    steps: int
    applied: int
    metrics: dict[str, float]
    absent: dict[str, str]
    sources: dict[str, str]
    step_ms: list[float]

    def save(self, directory: Path) -> None:
        """Write step_times.npz: `milliseconds`, float64, one for each steady step in order."""
        np.savez_compressed(directory / "step_times.npz", milliseconds=np.asarray(self.step_ms))


def fit(config: Mapping[str, Any], prepared: Prepared, log_metrics: Callable[..., None]) -> Fitted:
    """Train a prepared model for `config["epochs"]`, reporting to `log_metrics(metrics, step=batches seen)`."""
    data, model, batch_size = prepared.data, prepared.model, config["batch_size"]
    last: dict[str, float] = {}

    def report(metrics: Mapping[str, float], step: int) -> None:
        last.update(metrics)
        log_metrics(metrics, step=step)

    device = hardware.training_device()
    with finite_steps(model, prepared.optimizer) as batches:
        telemetry = Telemetry(
            report,
            optimizer=prepared.optimizer,
            batches=batches,
            batch_size=batch_size,
            samples=data.train.size,
            device=device,
            pci_bus_id=hardware.pci_bus_id(device),
            every=config["log_every_batches"],
        )
        progress = ProgressBar(epochs=config["epochs"], batches=math.ceil(data.train.size / batch_size))
        try:
            model.fit(
                data.train.batches(batch_size, shuffle_seed=config["seed"]),
                epochs=config["epochs"],
                shuffle=False,  # the pipeline shuffles
                validation_data=data.validation.batches(batch_size) if data.validation else None,
                callbacks=[telemetry, progress, *callbacks(config)],
                verbose=0,
            )
        finally:
            telemetry.close()
            progress.close()
    return Fitted(
        telemetry.seen, telemetry.applied, last, telemetry.absent, telemetry.sources, telemetry.clock.intervals()
    )
