"""A Keras optimizer that scales the loss, skips steps whose gradients are not finite, and counts what it did.

Import it late: it imports Keras.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from mp_hydra.loss_scale import Rule, State, next_state


@dataclass(frozen=True)
class Counters:
    """What a `ScaledOptimizer` counted since it was built.

    Attributes:
        steps: gradients seen, one for each training batch.
        applied: those that were finite and went to the inner optimizer.
        scale_used: the scale of the last step; 1.0 where there is no scaling.
        norm_sum: the sum over applied steps of the global L2 norm of the unscaled gradient.
        norm_max: the largest such norm since the last `reset_norm_max`.
    """

    steps: int
    applied: int
    scale_used: float
    norm_sum: float
    norm_max: float

    @property
    def skipped(self) -> int:
        """Steps whose gradients were not finite."""
        return self.steps - self.applied


@keras.saving.register_keras_serializable(package="mp_hydra")
class ScaledOptimizer(keras.optimizers.LossScaleOptimizer):
    """Loss scaling around an inner optimizer, with the same counters in every mode.

    A step whose unscaled gradients are not all finite never reaches the inner optimizer, in no mode. Clipping, weight
    decay, averaging, accumulation and schedules stay with the inner optimizer and see unscaled gradients. A gradient
    whose squared norm leaves float32's range (a norm above 1.8e19) counts as not finite.

    Args:
        inner_optimizer: the optimizer that updates the weights; it must not scale the loss itself.
        mode: "dynamic", "fixed" or "none".
        scale: the first scale (dynamic) or the only one (fixed); 1.0 for none.
        rule: the numbers of the dynamic rule, as a `Rule` or its fields in a dict.

    Raises:
        ValueError: for an inner optimizer that scales the loss, or an unknown mode.
    """

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        mode: str,
        scale: float = 1.0,
        rule: Rule | dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        if (
            isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer)
            or inner_optimizer.loss_scale_factor is not None
        ):
            raise ValueError("the inner optimizer scales the loss already; give one that does not")
        if mode not in ("dynamic", "fixed", "none") or (mode == "none" and scale != 1.0):
            raise ValueError(
                f"mode={mode!r}, scale={scale}: mode is dynamic, fixed or none, and the scale of none is 1"
            )
        super().__init__(inner_optimizer, initial_scale=float(scale), name=name)
        self.mode = mode
        self.rule = Rule(**rule) if isinstance(rule, dict) else rule or Rule()

    def build(self, var_list: list[Any]) -> None:
        """Create the scale and the counters, and build the inner optimizer."""

        def scalar(name: str, dtype: str, value: float = 0) -> Any:
            start = keras.initializers.Constant(value)
            return self.add_variable((), initializer=start, dtype=dtype, aggregation="only_first_replica", name=name)

        super().build(var_list)
        self.steps = scalar("steps", "int64")
        self.applied = scalar("applied", "int64")
        self.scale_used = scalar("scale_used", "float32", self.initial_scale)
        self.norm_sum = scalar("norm_sum", "float32")
        self.norm_max = scalar("norm_max", "float32")

    def scale_loss(self, loss: Any) -> Any:
        """The loss times the scale, in float32: a scaled 16-bit loss would overflow."""
        loss = ops.cast(loss, "float32")
        if self.mode == "none":
            return loss
        return loss * (self.dynamic_scale if self.built else self.initial_scale)

    def apply(self, grads: list[Any], trainable_variables: list[Any] | None = None) -> None:
        """Unscale, count, and update the weights if every gradient is finite.

        Args:
            grads: gradients of the scaled loss, one for each variable; None where there is none.
            trainable_variables: the variables; those that the optimizer was built with if left out.
        """
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)
            self.built = True
        # Times one: in a graph this reads the value, where the variable itself would show later assignments.
        scale = self.dynamic_scale * 1.0
        if self.mode != "none":
            grads = [None if g is None else _times(g, 1.0 / scale) for g in grads]
        square = sum_of_squares(grads)
        finite = tf.math.is_finite(square)

        def update() -> None:
            self.inner_optimizer.apply(grads, trainable_variables)

        tf.cond(finite, update, lambda: None)
        self._count(finite, square, scale)

    def _count(self, finite: Any, square: Any, scale: Any) -> None:
        norm = tf.where(finite, tf.sqrt(square), 0.0)
        self.steps.assign_add(1)
        self.applied.assign_add(tf.cast(finite, "int64"))
        self.scale_used.assign(scale)
        self.norm_sum.assign_add(norm)
        self.norm_max.assign(tf.maximum(self.norm_max, norm))
        if self.mode == "dynamic":
            state = State(scale, self.step_counter * 1)
            after = next_state(self.rule, state, finite, xp=ops)
            self.dynamic_scale.assign(after.scale)
            self.step_counter.assign(ops.cast(after.finite_in_a_row, self.step_counter.dtype))

    def save_own_variables(self, store: Any) -> None:
        """Store what the inner optimizer would store, so that a saved model opens in plain Keras with its state."""
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """The inverse of `save_own_variables`; scale and counters keep the values they have."""
        self.inner_optimizer.load_own_variables(store)

    def __dir__(self) -> list[str]:
        # Keras saves every optimizer that it finds in dir(): the inner one would be stored a second time.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def counters(self) -> Counters:
        """Read the counters; this waits until the device has finished the last step."""
        return Counters(
            steps=int(self.steps.numpy()),
            applied=int(self.applied.numpy()),
            scale_used=float(self.scale_used.numpy()),
            norm_sum=float(self.norm_sum.numpy()),
            norm_max=float(self.norm_max.numpy()),
        )

    def reset_norm_max(self) -> None:
        """Begin a new period for `norm_max`."""
        self.norm_max.assign(0.0)

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "mode": self.mode,
            "scale": self.initial_scale,
            "rule": dict(vars(self.rule)),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ScaledOptimizer:
        """The inverse of `get_config`."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "inner_optimizer": inner})


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def sum_of_squares(gradients: list[Any]) -> Any:
    """The squared global L2 norm of a gradient, float32.

    Rows of `tf.IndexedSlices` with the same id are added before they are squared, as an optimizer adds them.
    """
    parts = [_dense_square(g) for g in gradients if g is not None]
    return tf.add_n(parts) if parts else tf.zeros(())


def _dense_square(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        order = tf.argsort(gradient.indices)
        ids = tf.gather(gradient.indices, order)
        first = tf.concat([[0], tf.cast(ids[1:] != ids[:-1], "int32")], axis=0)
        rows = tf.gather(tf.cast(gradient.values, "float32"), order)
        gradient = tf.math.unsorted_segment_sum(rows, tf.cumsum(first), tf.shape(rows)[0])
    # l2_loss is half the sum of squares in one pass, without a squared copy.
    return 2.0 * tf.nn.l2_loss(tf.cast(gradient, "float32"))
