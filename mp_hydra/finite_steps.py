"""Epoch means over finite batches, and model state that a bad batch cannot poison.

Keras averages every batch's loss, so one non-finite batch makes the epoch's loss nan, and a step that loss scaling
skips has already moved BatchNorm's statistics. Both are undone inside the training step, without a synchronisation.
"""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_hydra.scaled_optimizer import ScaledOptimizer


@contextmanager
def finite_steps(model: Any, optimizer: ScaledOptimizer) -> Iterator[Any]:
    """While in force, restore after each training batch what that batch made worse.

    The floating-point non-trainable variables (moving statistics) are restored if the step was skipped or left one of
    them non-finite; all metric variables are restored if one became non-finite. The override lives on the instance, so
    that what is saved meanwhile carries the model's own class.

    Args:
        model: a compiled Keras model, built.
        optimizer: its optimizer.

    Yields:
        A Keras variable, int64: how many batches were left out of the means.
    """
    import keras

    left_out = keras.Variable(0, dtype="int64", trainable=False, name="nonfinite_batches")
    own_step = model.train_step

    def train_step(self: Any, data: Any) -> Any:
        import tensorflow as tf

        state = [v for v in self.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
        state_before, skipped_before = _values(state), _skipped(optimizer)
        metrics = list(self.metrics_variables)
        metrics_before = _values(metrics)
        logs = own_step(data)
        if state:
            bad_state = (_skipped(optimizer) != skipped_before) | ~_all_finite(state)
            tf.cond(bad_state, lambda: _assign(state, state_before), lambda: None)
        bad_metrics = ~_all_finite(metrics)
        left_out.assign_add(tf.cast(bad_metrics, "int64"))
        if metrics:
            tf.cond(bad_metrics, lambda: _assign(metrics, metrics_before), lambda: None)
        restored = self.get_metrics_result()
        return restored if set(restored) == set(logs) else logs

    model.__dict__["train_step"] = MethodType(train_step, model)
    model.train_function = None
    try:
        yield left_out
    finally:
        del model.__dict__["train_step"]
        model.train_function = None


def _values(variables: list[Any]) -> list[Any]:
    import tensorflow as tf

    return [tf.identity(variable.value) for variable in variables]


def _skipped(optimizer: ScaledOptimizer) -> Any:
    return optimizer.steps.value - optimizer.applied.value


def _all_finite(variables: list[Any]) -> Any:
    import tensorflow as tf

    floats = [v.value for v in variables if v.value.dtype.is_floating]
    return (
        tf.reduce_all([tf.reduce_all(tf.math.is_finite(value)) for value in floats])
        if floats
        else tf.constant(value=True)
    )


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
