"""A trained model as an MLflow model that opens in plain Keras, without mp_hydra."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from pathlib import Path

    from mp_hydra.datasets import Data


def save_model(model: Any, data: Data, path: Path) -> None:
    """Write an MLflow model directory with a signature.

    Args:
        model: a trained model.
        data: what it was trained on; two test samples give the signature.
        path: the directory to make.
    """
    import keras
    import mlflow.keras
    import tensorflow as tf
    from mlflow.models import infer_signature

    inputs = next(iter(data.test.batches(min(2, data.test.size))))[0]
    outputs = np.asarray(model.predict(inputs, verbose=0), dtype="float32")
    # Naming the requirements saves MLflow the seconds that it takes to guess them.
    requirements = [f"tensorflow=={tf.__version__}", f"keras=={keras.__version__}"]
    signature = infer_signature(inputs.numpy(), outputs) if isinstance(inputs, tf.Tensor) else None
    mlflow.keras.save_model(model, str(path), signature=signature, pip_requirements=requirements)
