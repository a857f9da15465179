"""Mixed precision for Keras as a Hydra config group, measured and tracked in MLflow."""

__version__ = "0.1.0"
