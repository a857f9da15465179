"""Epoch means over finite batches, and model state that a bad batch cannot poison.

Keras averages every batch's loss, so one non-finite batch makes the epoch's loss nan, and a step that loss scaling
skips has already moved BatchNorm's statistics. Both are undone inside the training step, without a synchronisation.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mp_hydra.overrides import overridden

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_hydra.scaled_optimizer import ScaledOptimizer


class Batches:
    """Training batches, counted on the device: it knows them one by one under `steps_per_execution` too."""

    def __init__(self) -> None:
        import keras

        # One variable for both counts is one kernel fewer in each step.
        self._counts = keras.Variable(
            [0, 0], dtype="int64", trainable=False, aggregation="only_first_replica", name="batches"
        )

    def add(self, bad: Any) -> None:
        """Count one batch; `bad` is a boolean tensor: whether it is left out of the means."""
        import tensorflow as tf

        self._counts.assign_add(tf.stack([tf.ones((), "int64"), tf.cast(bad, "int64")]))

    def read(self) -> tuple[int, int]:
        """Batches seen, and batches left out of the means; waits until the device has finished the last step."""
        import tensorflow as tf

        strategy = tf.distribute.get_strategy()
        seen, left_out = strategy.experimental_local_results(self._counts.value)[0].numpy()
        return int(seen), int(left_out)


@contextmanager
def finite_steps(model: Any, optimizer: ScaledOptimizer) -> Iterator[Batches]:
    """While in force, restore after each training batch what that batch made worse.

    The floating-point non-trainable variables (moving statistics) are restored if the step was skipped or left one of
    them non-finite; all metric variables are restored if one became non-finite. The override lives on the instance, so
    that what is saved meanwhile carries the model's own class. A `train_step` of the user's whose logs have other names
    than the model's metrics gives its own logs, as they are.

    Args:
        model: a compiled Keras model, built.
        optimizer: its optimizer, built.

    Yields:
        The counts of batches seen and of batches left out of the means.

    Raises:
        ValueError: for what Keras itself cannot do under a strategy of several replicas.
    """
    import keras

    _require_possible(model)
    with model.distribute_strategy.scope():
        batches = Batches()
    own_step = model.train_step

    def train_step(self: Any, data: Any) -> Any:
        import tensorflow as tf

        state = [v for v in self.non_trainable_variables if keras.backend.is_float_dtype(v.dtype)]
        state_before, skipped_before = _values(state), optimizer.skipped_steps()
        metrics = list(self.metrics_variables)
        metrics_before = _values(metrics)
        logs = own_step(data)
        if state:
            bad_state = _on_any_replica((optimizer.skipped_steps() != skipped_before) | ~_all_finite(state))
            tf.cond(bad_state, lambda: _assign(state, state_before), lambda: None)
        bad_metrics = _on_any_replica(~_all_finite(metrics))
        batches.add(bad_metrics)
        if metrics:
            tf.cond(bad_metrics, lambda: _assign(metrics, metrics_before), lambda: None)
        restored = self.get_metrics_result()
        return restored if _names(restored) == _names(logs) else logs

    with overridden(model, {"train_step": train_step}):
        yield batches


def _names(logs: Mapping[str, Any]) -> set[str]:
    """The metrics in logs; those of `compile` may stand in a mapping of their own, which Keras flattens."""
    nested = [_names(value) for value in logs.values() if isinstance(value, Mapping)]
    return {name for name, value in logs.items() if not isinstance(value, Mapping)}.union(*nested)


def _require_possible(model: Any) -> None:
    if model.distribute_strategy.num_replicas_in_sync == 1:
        return
    for name, asked in (
        ("steps_per_execution", model.steps_per_execution > 1),
        ("jit_compile", model.jit_compile is True),
    ):
        if asked:
            value = getattr(model, name)
            raise ValueError(f"{name}={value} does not work under a strategy of several replicas, in Keras neither")


def _on_any_replica(flag: Any) -> Any:
    """The flag, raised on all replicas where it is raised on one."""
    import tensorflow as tf

    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        return flag
    return context.all_reduce(tf.distribute.ReduceOp.SUM, tf.cast(flag, "int32")) > 0


def _values(variables: list[Any]) -> list[Any]:
    import tensorflow as tf

    return [tf.identity(variable.value) for variable in variables]


def _all_finite(variables: list[Any]) -> Any:
    import tensorflow as tf

    # A sum is finite only if every term is: one pass over each variable. (Finite terms whose sum leaves float32's range
    # count as not finite.)
    sums = [tf.cast(tf.reduce_sum(v.value), "float32") for v in variables if v.value.dtype.is_floating]
    return tf.math.is_finite(tf.add_n(sums)) if sums else tf.constant(value=True)


def _assign(variables: list[Any], values: list[Any]) -> None:
    for variable, value in zip(variables, values, strict=True):
        variable.assign(value)
