"""Does a model's own `train_step` scale the loss? One step at two scales tells.

The gradients that reach the optimizer grow with the scale to the power of an exponent: 1 where the loss was scaled once, 0
where it was not (or the scaled loss was thrown away), 2 where it was scaled twice, -1 where the gradients were unscaled by
hand as well.
"""

from __future__ import annotations

import math
import random
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_hydra.scaled_optimizer import ScaledOptimizer

_FACTOR = 4.0
_PROBLEMS = {
    0: "does not scale the loss: write `loss = self.optimizer.scale_loss(loss)` before the gradient is taken",
    2: "scales the loss twice: keep one `self.optimizer.scale_loss(loss)`",
    -1: "unscales the gradients itself: leave that to `self.optimizer.apply_gradients`",
}


def overrides_train_step(model: Any) -> bool:
    """Whether the model's class has a `train_step` of its own."""
    import keras

    return type(model).train_step is not keras.Model.train_step


def require_scaled_loss(model: Any, optimizer: ScaledOptimizer, batch: Any) -> None:
    """Check a custom `train_step` against the scale, before training; every variable and seed is put back afterwards.

    Args:
        model: compiled and built.
        optimizer: its optimizer.
        batch: (x, y) as training feeds it; a small one suffices.

    Raises:
        ModelError: naming the class and what is wrong with its step.
    """
    exponent = scale_exponent(model, optimizer, batch)
    if exponent is None or exponent == 1:
        return
    problem = _PROBLEMS.get(exponent, f"changes the gradients by the scale to the power of {exponent} instead of 1")
    raise ModelError(f"{type(model).__name__}.train_step {problem}")


def scale_exponent(model: Any, optimizer: ScaledOptimizer, batch: Any) -> int | None:
    """The power of the scale by which the gradients grow, rounded to an integer.

    Returns:
        None where no gradient reached the optimizer, or a norm was zero or not finite: nothing can be said then.
    """
    norms = [_gradient_norm(model, optimizer, batch, scale) for scale in (1.0, _FACTOR)]
    if not all(norm is not None and 0.0 < norm < math.inf for norm in norms):
        return None
    return round(math.log(norms[1] / norms[0], _FACTOR))  # type: ignore[operator]


def _gradient_norm(model: Any, optimizer: ScaledOptimizer, batch: Any, scale: float) -> float | None:
    """The norm of what `optimizer.apply` is given by one step at this scale."""
    from mp_hydra.scaled_optimizer import sum_of_squares

    seen: list[Any] = []

    def apply(grads: Any, _trainable_variables: Any = None) -> None:
        seen.append(sum_of_squares(list(grads)))

    with _restored(model, optimizer):
        optimizer.dynamic_scale.assign(scale)
        optimizer.__dict__["apply"] = apply
        try:
            model.train_step(batch)
        finally:
            del optimizer.__dict__["apply"]
    return float(np.sqrt(seen[0])) if seen else None


@contextmanager
def _restored(model: Any, optimizer: ScaledOptimizer) -> Iterator[None]:
    """Put back every variable of model, metrics and optimizer, and the seeds, as they were."""
    from keras.src.random.seed_generator import global_seed_generator

    variables = [*model.variables, *model.metrics_variables, *optimizer.variables, global_seed_generator().state]
    values = [(variable, np.array(variable.value)) for variable in variables]
    states = random.getstate(), np.random.get_state()  # noqa: NPY002 - the user's step may use it
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
        random.setstate(states[0])
        np.random.set_state(states[1])  # noqa: NPY002
