"""A Keras optimizer that scales the loss, skips steps whose gradients are not finite, and counts what it did.

Without Hydra, in a loop of your own:

    optimizer = ScaledOptimizer(keras.optimizers.Adam(), mode="dynamic", scale=2.0**15)
    with tf.GradientTape() as tape:
        loss = optimizer.scale_loss(loss_fn(y, model(x, training=True)))
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply(gradients, model.trainable_variables)

With `fit`: compile with the inner optimizer and `auto_scale_loss=False`, then `model.optimizer = ScaledOptimizer(...)`, so
that what is saved opens in plain Keras. Import this module late: it imports Keras.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from keras import ops

from mp_hydra.loss_scale import Rule, State, next_state

ASSET = "loss_scale.json"


@dataclass(frozen=True)
class Counters:
    """What a `ScaledOptimizer` counted since it was built.

    Attributes:
        steps: gradients seen, one for each training batch (each micro-batch under gradient accumulation).
        applied: those that were finite and went to the inner optimizer.
        skipped_in_a_row: steps skipped since the last applied one.
        last_skipped: the number of the last skipped step, counted from 1; 0 if none was skipped.
        scale_used: the scale of the last step; 1.0 where there is no scaling.
        norm_sum: the sum over applied steps, since the last `reset_norms`, of the global L2 norm of the unscaled gradient.
        norm_max: the largest of these norms.
    """

    steps: int
    applied: int
    skipped_in_a_row: int
    last_skipped: int
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

    Under a `tf.distribute` strategy all replicas agree: finiteness and norm are those of the gradient summed over them.

    Args:
        inner_optimizer: the optimizer that updates the weights; it must not scale the loss itself.
        mode: "dynamic", "fixed" or "none".
        scale: the first scale (dynamic) or the only one (fixed), positive and finite; 1.0 for none.
        rule: the numbers of the dynamic rule, as a `Rule` or its fields in a dict.

    Raises:
        ValueError: for an inner optimizer that scales the loss, an unknown mode, or a scale that does not fit them.
    """

    built: bool

    def __init__(
        self,
        inner_optimizer: Any,
        *,
        mode: str,
        scale: float = 1.0,
        rule: Rule | dict[str, Any] | None = None,
        name: str | None = None,
    ) -> None:
        scales_already = isinstance(inner_optimizer, keras.optimizers.LossScaleOptimizer)
        if scales_already or inner_optimizer.loss_scale_factor is not None:
            raise ValueError("the inner optimizer scales the loss already; give one that does not")
        rule = Rule(**rule) if isinstance(rule, dict) else rule or Rule()
        _check(mode, scale, rule)
        super().__init__(inner_optimizer, initial_scale=float(scale), name=name)
        self.mode = mode
        self.rule = rule
        self._seeds: tuple[Any, ...] = ()

    def build(self, var_list: Any) -> None:
        """Create the scale and the counters, and build the inner optimizer."""

        def state(name: str, size: int, dtype: str, start: Any = "zeros") -> Any:
            return self.add_variable(
                (size,), initializer=start, dtype=dtype, aggregation="only_first_replica", name=name
            )

        super().build(var_list)
        # Few variables, because each assignment is a kernel in every step: [steps, applied, in a row, last skipped] ...
        self._counts = state("counts", 4, "int64")
        # ... and [scale used, sum of norms, largest norm].
        self._norms = state("norms", 3, "float32", keras.initializers.Constant([self.initial_scale, 0.0, 0.0]))
        self._nonfinite = state("nonfinite", max(len(var_list), 1), "bool")

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

        Raises:
            ValueError: for gradient accumulation under a strategy of several replicas, which Keras cannot do.
        """
        if not self.built:
            with keras.name_scope(self.name):
                self.build(trainable_variables)
            self.built = True
        # Times one: in a graph this reads the value, where the variable itself would show later assignments.
        scale = self.dynamic_scale * 1.0
        if self.mode != "none":
            grads = [None if g is None else _times(g, 1.0 / scale) for g in grads]
        context = tf.distribute.get_replica_context()
        if context is not None and context.num_replicas_in_sync > 1:
            finite, square = self._apply_on_replicas(context, grads, trainable_variables)
        else:
            squares = _squares(grads)
            square = tf.reduce_sum(squares)
            finite = tf.math.is_finite(square)
            tf.cond(
                finite,
                lambda: self.inner_optimizer.apply(grads, trainable_variables),
                lambda: self._note_nonfinite(squares),
            )
        self._count(finite, square, scale)

    def _apply_on_replicas(self, context: Any, grads: list[Any], trainable_variables: Any) -> tuple[Any, Any]:
        """Agree on the summed gradient, then update on every replica or on none."""
        if self.inner_optimizer.gradient_accumulation_steps:
            raise ValueError(
                "gradient_accumulation_steps does not work under a strategy of several replicas, in Keras neither"
            )
        there = [g for g in grads if g is not None]
        summed = iter(context.all_reduce(tf.distribute.ReduceOp.SUM, there) if there else [])
        squares = _squares([None if g is None else next(summed) for g in grads])
        square = tf.reduce_sum(squares)
        finite = tf.math.is_finite(square)

        def on_all(strategy: Any, finite: Any, grads: Any, variables: Any, squares: Any) -> None:
            tf.cond(
                strategy.experimental_local_results(finite)[0],
                lambda: strategy.extended.call_for_each_replica(self.inner_optimizer.apply, args=(grads, variables)),
                lambda: strategy.extended.call_for_each_replica(self._note_nonfinite, args=(squares,)),
            )

        # A conditional whose branches merge replicas has to stand outside of them.
        context.merge_call(on_all, args=(finite, grads, trainable_variables, squares))
        return finite, square

    def _note_nonfinite(self, squares: Any) -> None:
        self._nonfinite.assign(~tf.math.is_finite(squares))

    def _count(self, finite: Any, square: Any, scale: Any) -> None:
        one, zero = tf.ones((), "int64"), tf.zeros((), "int64")
        steps, applied, in_a_row, last = tf.unstack(self._counts * 1)
        step = steps + one
        self._counts.assign(
            tf.where(
                finite, tf.stack([step, applied + one, zero, last]), tf.stack([step, applied, in_a_row + one, step])
            )
        )
        norm = tf.where(finite, tf.sqrt(square), 0.0)
        _, norm_sum, norm_max = tf.unstack(self._norms * 1.0)
        self._norms.assign(tf.stack([scale, norm_sum + norm, tf.maximum(norm_max, norm)]))
        if self.mode == "dynamic":
            after = next_state(self.rule, State(scale, self.step_counter * 1), finite, xp=ops)
            self.dynamic_scale.assign(after.scale)
            self.step_counter.assign(ops.cast(after.finite_in_a_row, self.step_counter.dtype))

    def skipped_steps(self) -> Any:
        """Steps skipped so far, as a scalar int64 tensor; for use in a graph, where it waits for nothing."""
        return self._counts[0] - self._counts[1]

    def counters(self) -> Counters:
        """Read the counters; this waits until the device has finished the last step."""
        counts, norms = self._read(self._counts), self._read(self._norms)
        return Counters(*(int(n) for n in counts), *(float(n) for n in norms))

    def at_floor(self) -> bool:
        """Whether a dynamic scale has come down to its minimum by skipped steps; waits for the device."""
        if self.mode != "dynamic" or self.initial_scale <= self.rule.minimum:
            return False
        return float(self._read(self.dynamic_scale)) <= self.rule.minimum

    def nonfinite_variables(self) -> list[str]:
        """The variables whose gradients were not finite in the last skipped step, by path, in the order of the model.

        An overflow on the way back spreads from the loss towards the input, so the last one stands nearest to its cause; if
        all are named, the forward pass was not finite already. Waits for the device.
        """
        flags = self._read(self._nonfinite)
        return [v.path for v, bad in zip(self._trainable_variables, flags, strict=False) if bad]

    def reset_norms(self) -> None:
        """Begin a new period for `norm_sum` and `norm_max`: in one long float32 sum, later norms would be lost."""
        self._norms.assign([self._read(self._norms)[0], 0.0, 0.0])

    def _read(self, variable: Any) -> Any:
        """The value on the host; under a strategy that of the first replica."""
        return tf.distribute.get_strategy().experimental_local_results(variable.value)[0].numpy()

    def save_own_variables(self, store: Any) -> None:
        """Store what the inner optimizer would store, so that a saved model opens in plain Keras with its state."""
        self.inner_optimizer.save_own_variables(store)

    def load_own_variables(self, store: Any) -> None:
        """The inverse of `save_own_variables`.

        Raises:
            ValueError: if the stored state does not fit, which stock Keras answers by training on without it.
        """
        if len(store.keys()) != len(self.inner_optimizer.variables):
            raise ValueError(
                f"the saved optimizer state has {len(store.keys())} variables and {self.inner_optimizer.name} needs "
                f"{len(self.inner_optimizer.variables)}: it belongs to another optimizer, or to other trainable weights"
            )
        self.inner_optimizer.load_own_variables(store)

    def remember_seeds(self, model: Any) -> None:
        """Store with the optimizer's state also that of the model's random layers, which a `.keras` file lacks."""
        seeds = tuple(v for v in model.variables if v.path.endswith("seed_generator_state"))
        object.__setattr__(
            self, "_seeds", seeds
        )  # past Keras' tracking, which would make them the optimizer's variables

    def save_assets(self, directory: str) -> None:
        """Store mode, scale, counters and seeds beside the weights in a `.keras` file; stock Keras passes over them."""
        own = (
            {v.path.rpartition("/")[2]: np.asarray(self._read(v)).tolist() for v in self._variables}
            if self.built
            else {}
        )
        settings = {"mode": self.mode, "scale": self.initial_scale, "rule": asdict(self.rule), "state": own}
        settings["seeds"] = [np.asarray(self._read(seed)).tolist() for seed in self._seeds]
        Path(directory, ASSET).write_text(json.dumps(settings), encoding="utf-8")

    def restore(self, saved: dict[str, Any]) -> None:
        """Set scale, counters and seeds to what `save_assets` stored; the optimizer must be built.

        Raises:
            ValueError: if the number of random layers has changed.
        """
        if len(saved["seeds"]) != len(self._seeds):
            raise ValueError(f"the saved model has {len(saved['seeds'])} random layers, this one {len(self._seeds)}")
        for seed, value in zip(self._seeds, saved["seeds"], strict=True):
            seed.assign(value)
        state = saved["state"]
        for variable in self._variables:
            value = state.get(variable.path.rpartition("/")[2])
            if value is not None:
                variable.assign(np.asarray(value, dtype=variable.dtype))

    def __dir__(self) -> list[str]:
        # Keras saves every optimizer that it finds in dir(): the inner one would be stored a second time.
        return [name for name in super().__dir__() if name != "inner_optimizer"]

    def get_config(self) -> dict[str, Any]:
        """The constructor's arguments."""
        return {
            "name": self.name,
            "inner_optimizer": keras.saving.serialize_keras_object(self.inner_optimizer),
            "mode": self.mode,
            "scale": self.initial_scale,
            "rule": asdict(self.rule),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any], custom_objects: Any = None) -> ScaledOptimizer:
        """The inverse of `get_config`."""
        inner = keras.saving.deserialize_keras_object(config["inner_optimizer"], custom_objects=custom_objects)
        return cls(**{**config, "inner_optimizer": inner})


def _check(mode: str, scale: float, rule: Rule) -> None:
    if mode not in ("dynamic", "fixed", "none"):
        raise ValueError(f"mode={mode!r}: give dynamic, fixed or none")
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"scale={scale}: give a positive, finite number")
    if mode == "none" and scale != 1.0:
        raise ValueError(f"scale={scale}: the scale of mode none is 1")
    if mode == "dynamic" and not rule.minimum <= scale <= rule.maximum:
        raise ValueError(f"scale={scale}: give a number from minimum={rule.minimum:g} to maximum={rule.maximum:g}")


def _times(gradient: Any, factor: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        return tf.IndexedSlices(gradient.values * factor, gradient.indices, gradient.dense_shape)
    return gradient * factor


def sum_of_squares(gradients: list[Any]) -> Any:
    """The squared global L2 norm of a gradient, float32.

    Rows of `tf.IndexedSlices` with the same id are added before they are squared, as an optimizer adds them.
    """
    return tf.reduce_sum(_squares(gradients))


def _squares(gradients: list[Any]) -> Any:
    """The squared L2 norm of each gradient, float32 (gradients,); 0 for None."""
    return tf.stack([tf.zeros(()) if g is None else _square(g) for g in gradients] or [tf.zeros(())])


def _square(gradient: Any) -> Any:
    if isinstance(gradient, tf.IndexedSlices):
        order = tf.argsort(gradient.indices)
        ids = tf.gather(gradient.indices, order)
        first = tf.concat([[0], tf.cast(ids[1:] != ids[:-1], "int32")], axis=0)
        rows = tf.gather(tf.cast(gradient.values, "float32"), order)
        gradient = tf.math.unsorted_segment_sum(rows, tf.cumsum(first), tf.shape(rows)[0])
    # l2_loss is half the sum of squares in one pass, without a squared copy.
    return 2.0 * tf.nn.l2_loss(tf.cast(gradient, "float32"))
