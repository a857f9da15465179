"""Mixed precision for Keras as a Hydra config group, measured and tracked in MLflow.

As a library, without Hydra: `mp_hydra.lean(model)` and `mp_hydra.recompute(model)` let any Keras model keep less for its
backward pass.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_hydra.activation_memory.install import LeanReport
    from mp_hydra.activation_memory.recompute import RecomputeReport

__version__ = "0.1.0"


def lean(model: Any) -> LeanReport:
    """Let a Keras model keep only what its backward pass needs, in place: see `mp_hydra.activation_memory.install.lean`."""
    from mp_hydra.activation_memory.install import lean as apply

    return apply(model)


def recompute(model: Any, every: str | int | Sequence[str] = "block") -> RecomputeReport:
    """Let a Keras model recompute activations in its backward pass: see `mp_hydra.activation_memory.recompute.recompute`."""
    from mp_hydra.activation_memory.recompute import recompute as apply

    return apply(model, every)
