"""What a run of the application imports on its way, beside TensorFlow, Keras and MLflow: for the preload of a job server.

Importing it initialises no device and starts no thread.
"""

from __future__ import annotations

import contextlib
import importlib

# By name, since none of them is used here; those of MLflow's own that a version may lack are passed over.
MODULES = (
    *(
        "mp_hydra.training",
        "mp_hydra.app",
        "mp_hydra.audit",
        "mp_hydra.evaluation",
        "mp_hydra.fitting",
        "mp_hydra.startup",
    ),
    *("mp_hydra.models", "mp_hydra.models.build", "mp_hydra.models.convolutional", "mp_hydra.models.perceptron"),
    *("mp_hydra.datasets.loading", "mp_hydra.datasets.stock", "mp_hydra.preparation", "mp_hydra.scaled_optimizer"),
    *("mp_hydra.scaling_check", "mp_hydra.checkpoint", "mp_hydra.probe"),
    *("mp_hydra.telemetry.callback", "mp_hydra.telemetry.nvml", "mp_hydra.sweep.callback", "mp_hydra.tracking"),
    *(
        "pynvml",
        "filelock",
        "sklearn.datasets",
        "sklearn.model_selection",
        "sqlalchemy.dialects.sqlite",
        "alembic.command",
    ),
    *("mlflow.store.tracking.sqlalchemy_store", "mlflow.store.tracking.sqlalchemy_workspace_store"),
)

for _name in MODULES:
    with contextlib.suppress(ImportError):
        importlib.import_module(_name)
