"""Runs made by hand, as the collector would give them."""

from __future__ import annotations

from itertools import count
from typing import Any

import numpy as np

from mp_hydra.compare.records import RunRecord

SAMPLES = 10_000
_CLOCK = count(1000)  # each run starts after the one before
POLICIES = {"fp32": "float32", "tf32": "float32"}
ENVIRONMENT: dict[str, Any] = {
    "versions": {"tensorflow": "2.21.0", "keras": "3.15.1", "mp_hydra": "0.1.0"},
    "devices": [{"kind": "CPU", "name": "AMD EPYC"}, {"kind": "GPU", "name": "NVIDIA H200"}],
    "cpu": {"usable_cores": 16},
    "xla": {"auto_jit": "off"},
    "onednn": True,
    "jit_compile": False,
}
FP32 = {
    "memory/training_mib": 400.0,
    "memory/baseline_mib": 100.0,
    "memory/peak_mib": 500.0,
    "memory/state_mib": 80.0,
    "time/step_ms": 10.0,
    "time/samples_per_second": 6400.0,
    "time/first_step_seconds": 2.0,
    "energy/joules": 900.0,
    "loss_scale/applied_steps": 100.0,
    "loss_scale/skipped_steps": 0.0,
    "test/accuracy": 0.9,
    "test/loss": 0.5,
}
MIXED = {
    **FP32,
    "memory/training_mib": 220.0,
    "memory/peak_mib": 320.0,
    "time/step_ms": 5.0,
    "time/samples_per_second": 12800.0,
    "time/first_step_seconds": 3.0,
    "energy/joules": 450.0,
    "loss_scale/applied_steps": 97.0,
    "loss_scale/skipped_steps": 3.0,
    "test/loss": 0.51,
}


def right(wrong: int = 0, *, samples: int = SAMPLES) -> np.ndarray:
    """A test set of which the first `wrong` samples were predicted wrongly."""
    return np.arange(samples) >= wrong


def run(precision: str = "fp32", seed: object = 0, **changes: Any) -> RunRecord:
    """A finished run; `params`, `tags`, `metrics` and `environment` add to what it has, None takes away."""
    policy = POLICIES.get(precision, precision)
    params = {
        "model.name": "cnn",
        "model.dense": "128",
        "dataset.name": "digits",
        "optimizer.learning_rate": "0.001",
        "batch_size": "64",
        "epochs": "3",
        "log_every_batches": "100",
        "objective": "test/accuracy",
        "resume": "null",
        "seed": str(seed),
        "precision.name": precision,
        "precision.policy": policy,
        "precision.tf32": str(precision != "fp32").lower(),
        "precision.pinned": "[]",
        "loss_scale.mode": "auto",
        "loss_scale.value": "null",
        "loss_scale.initial": "32768.0",
        "tracking.run_name": "null",
    }
    tags = {
        "mp_hydra.precision": precision,
        "mp_hydra.precision_resolved": precision,
        "mp_hydra.outcome": "ok",
        "mp_hydra.memory_source": "TensorFlow allocator, GPU:0",
    }
    metrics = dict(FP32 if policy == "float32" else MIXED)
    name = changes.pop("name", f"cnn-digits-{precision}-s{seed}")
    given: dict[str, Any] = {
        "run_id": changes.pop("run_id", name),
        "experiment_id": "1",
        "name": name,
        "status": "FINISHED",
        "started": next(_CLOCK),
        "dataset": ("digits", "a2c3f5a87216522b"),
        "correct": right(),
        "labels": np.arange(SAMPLES) % 10,
    }
    whole: dict[str, dict[str, Any]] = {"params": params, "tags": tags, "metrics": metrics, "environment": ENVIRONMENT}
    for field, values in whole.items():
        changed = {**values, **changes.pop(field, {})}
        given[field] = {key: value for key, value in changed.items() if value is not None}
    return RunRecord(**{**given, **changes})


def ended(
    outcome: str, precision: str = "mixed_float16", seed: object = 0, *, reason: str = "", **changes: Any
) -> RunRecord:
    """A run that ended otherwise than well; it recorded no environment and no test results."""
    status = {"diverged": "FINISHED", "killed": "KILLED", "running": "RUNNING"}.get(outcome, "FAILED")
    tags = {"mp_hydra.outcome": None if outcome == "running" else outcome, "mp_hydra.reason": reason or None}
    changes = {"correct": None, "labels": None, "status": status, "tags": tags, **changes}
    if status != "FINISHED":
        changes = {"environment": dict.fromkeys(ENVIRONMENT), "metrics": dict.fromkeys(FP32), **changes}
    return run(precision, seed, **changes)
