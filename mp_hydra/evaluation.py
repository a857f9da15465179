"""The test set: Keras' metrics on it, and what the model said of every sample, which comparisons pair on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from mp_hydra.datasets import Data

FILE = "predictions.npz"


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the test set, finite ones only, and the per-sample record.

    Attributes:
        metrics: "test/<metric>" to value.
        absent: "test/<metric>" to the reason, where a value is not finite.
        samples: arrays of equal length, in the order of the test set: for classification `label` (int64), `predicted`
            (int64) and `correct` (bool); for regression `target` and `prediction` (float32).
    """

    metrics: dict[str, float]
    absent: dict[str, str]
    samples: dict[str, np.ndarray]

    def save(self, directory: Path) -> Path:
        """Write predictions.npz and return its path."""
        path = directory / FILE
        np.savez_compressed(path, **self.samples)  # type: ignore[arg-type]
        return path


def evaluate(model: Any, data: Data, batch_size: int) -> Evaluation:
    """Evaluate a trained model on the whole test set, in its own order."""
    batches = data.test.batches(batch_size)
    logs = model.evaluate(batches, return_dict=True, verbose=0)
    values = {f"test/{name}": float(value) for name, value in logs.items()}
    finite = {name: value for name, value in values.items() if math.isfinite(value)}
    absent = {name: f"the value is {values[name]}" for name in values.keys() - finite.keys()}
    outputs = model.predict(batches, verbose=0)
    return Evaluation(finite, absent, per_sample(outputs, data.test.labels(), data.classes))


def per_sample(outputs: Any, labels: np.ndarray, classes: int | None) -> dict[str, np.ndarray]:
    """What a model said of each sample.

    Args:
        outputs: predictions, (samples, outputs), or a structure of several, for which nothing is kept.
        labels: class indices (samples,), or float targets.
        classes: number of classes; None for regression.

    >>> per_sample(np.array([[0.1, 0.9], [2.0, -1.0]]), np.array([1, 1]), 2)["correct"].tolist()
    [True, False]
    """
    if not hasattr(outputs, "shape"):
        return {}
    outputs = np.asarray(outputs, dtype="float32")
    if classes is None:
        return {"target": labels, "prediction": outputs}
    if outputs.ndim == labels.ndim + 1 and outputs.shape[-1] > 1:
        predicted = outputs.argmax(axis=-1)
        return {"label": labels, "predicted": predicted, "correct": predicted == labels}
    return {"label": labels, "output": outputs}
