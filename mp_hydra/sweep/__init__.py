"""Sweeps: one parent run in MLflow, jobs known by their config, a fair order, and going on after an interruption."""
