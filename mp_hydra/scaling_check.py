"""Does a model's own `train_step` scale the loss? One step at two scales tells.

The gradients that reach the optimizer grow with the scale to the power of an exponent: 1 where the loss was scaled once, 0
where it was not, or the scaled loss was thrown away, or the gradients were unscaled by hand; 2 where it was scaled twice, -1
where gradients of an unscaled loss were unscaled by hand.
"""

from __future__ import annotations

import logging
import math
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.errors import ModelError
from mp_hydra.seeds import seeds_kept

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_hydra.scaled_optimizer import ScaledOptimizer

log = logging.getLogger(__name__)

_FACTOR = 4.0
_TOLERANCE = 0.25  # of an exponent: where float16 rounds gradients to zero, norms follow no power of the scale
_FORGOTTEN = "does not scale the loss: write `loss = self.optimizer.scale_loss(loss)` before the gradient is taken"
_INCONCLUSIVE = "no gradient was applied, or their norms are zero, not finite, or follow no power of the scale"
_PROBLEMS = {
    0: "calls `self.optimizer.scale_loss`, but its gradients are not scaled: take the gradient of the loss that is returned, "
    "and leave unscaling to `self.optimizer.apply_gradients`",
    2: "scales the loss twice: keep one `self.optimizer.scale_loss(loss)`",
    -1: "unscales the gradients itself: leave that to `self.optimizer.apply_gradients`",
}


@dataclass(frozen=True)
class _Step:
    """What one step did: the norms of the gradients that it applied, and whether it asked for a scaled loss."""

    norms: tuple[float, ...]
    scaled: bool


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
    steps = _two_steps(model, optimizer, batch)
    exponent = _exponent(*steps)
    name = f"{type(model).__name__}.train_step"
    if exponent is None:
        log.warning("%s could not be checked for loss scaling: %s", name, _INCONCLUSIVE)
    elif exponent == 0 and not steps[0].scaled:
        raise ModelError(f"{name} {_FORGOTTEN}")
    elif exponent != 1:
        problem = _PROBLEMS.get(exponent, f"changes the gradients by the scale to the power of {exponent} instead of 1")
        raise ModelError(f"{name} {problem}")


def scale_exponent(model: Any, optimizer: ScaledOptimizer, batch: Any) -> int | None:
    """The power of the scale by which the gradients grow: that of the first ones for which it is not 1.

    Returns:
        None where no gradient reached the optimizer, where a norm was zero or not finite, or where the norms follow no
        power of the scale: nothing can be said then.
    """
    return _exponent(*_two_steps(model, optimizer, batch))


def _two_steps(model: Any, optimizer: ScaledOptimizer, batch: Any) -> tuple[_Step, _Step]:
    """A step at some scale and one at `_FACTOR` times as much: the scale that training begins with, or less if that overflows.

    At small scales float16 may round gradients to zero, and their norm says nothing.
    """
    scale = max(optimizer.initial_scale, _FACTOR)
    while True:
        high = _step(model, optimizer, batch, scale)
        if scale <= _FACTOR or all(map(math.isfinite, high.norms)):
            return _step(model, optimizer, batch, scale / _FACTOR), high
        scale = max(scale / _FACTOR**2, _FACTOR)


def _exponent(low: _Step, high: _Step) -> int | None:
    norms = (*low.norms, *high.norms)
    if len(low.norms) != len(high.norms) or not norms or not all(0.0 < norm < math.inf for norm in norms):
        return None
    exponents = [math.log(b / a, _FACTOR) for a, b in zip(low.norms, high.norms, strict=True)]
    if any(abs(exponent - round(exponent)) > _TOLERANCE for exponent in exponents):
        return None
    return next((round(exponent) for exponent in exponents if round(exponent) != 1), 1)


def _step(model: Any, optimizer: ScaledOptimizer, batch: Any, scale: float) -> _Step:
    """One step at this scale, in which the optimizer notes what it is given instead of applying it."""
    from mp_hydra.scaled_optimizer import sum_of_squares

    squares: list[Any] = []
    scaled: list[Any] = []
    scale_loss = optimizer.scale_loss

    def apply(grads: Any, trainable_variables: Any = None) -> None:  # noqa: ARG001 - callers may name it
        squares.append(sum_of_squares(list(grads)))

    def noted(loss: Any) -> Any:
        scaled.append(loss)
        return scale_loss(loss)

    with _restored(model, optimizer):
        optimizer.dynamic_scale.assign(scale)
        optimizer.__dict__.update(apply=apply, scale_loss=noted)
        try:
            model.train_step(batch)
        finally:
            del optimizer.__dict__["apply"], optimizer.__dict__["scale_loss"]
    return _Step(tuple(math.sqrt(float(square)) for square in squares), bool(scaled))


@contextmanager
def _restored(model: Any, optimizer: ScaledOptimizer) -> Iterator[None]:
    """Put back every variable of model, metrics and optimizer, and the seeds, as they were."""
    with seeds_kept() as generator:
        variables = [*model.variables, *model.metrics_variables, *optimizer.variables]
        if generator is not None:
            variables.append(generator.state)
        values = [(variable, np.array(variable.value.numpy())) for variable in variables]
        try:
            yield
        finally:
            for variable, value in values:
                variable.assign(value)
