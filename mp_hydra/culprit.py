"""`mp-hydra audit --bisect`: which layers of a model have to compute in float32 for it to work under the policy."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.delta_debugging import minimised
from mp_hydra.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mp_hydra.layer_overrides import Place

SIXTEEN_BITS = ("float16", "bfloat16")
FAR_OFF = 0.5  # a loss that differs from float32's by more than this share of it is wrong, not rounded


@dataclass(frozen=True)
class Bisection:
    """What was found.

    Attributes:
        policy: the policy that was tried.
        trouble: what goes wrong under it, in one line; None if nothing does.
        trouble_in_float32: what goes wrong in float32 as well; None if nothing does.
        culprits: paths of the layers that cure it by computing in float32; none of them can be spared.
        trials: how many sets of layers were tried.
    """

    policy: str
    trouble: str | None
    trouble_in_float32: str | None = None
    culprits: tuple[str, ...] = ()
    trials: int = 0

    @property
    def overrides(self) -> dict[str, str]:
        """The culprits as `precision.overrides`."""
        return {re.escape(path).replace(r"\-", "-"): "float32" for path in self.culprits}

    def lines(self) -> list[str]:
        """The result for a person, and as the block to put into a config."""
        if self.trouble is None:
            return [f"under {self.policy} nothing goes wrong on these batches"]
        said = [f"under {self.policy}: {self.trouble}"]
        if self.trouble_in_float32 is not None:
            return [*said, f"in float32 as well: {self.trouble_in_float32}; this is not the precision's doing"]
        said.append(f"cured by float32 in {', '.join(self.culprits)} ({self.trials} sets of layers tried):")
        return [*said, "precision:", "  overrides:", *(f"    {_quoted(p)}: {d}" for p, d in self.overrides.items())]


def bisect(config: Mapping[str, Any], batches: int) -> Bisection:
    """Build the configured model, try it on the first batches of its training data, and find what has to be float32.

    A set of layers cures if, with them in float32, every loss is finite and within a factor of 1.5 of that of float32, and
    every gradient of the unscaled loss is finite, over `batches` steps of the configured optimizer from the same start.

    Args:
        config: a resolved config.
        batches: how many batches, at most.

    Raises:
        UserError: for a policy without 16 bits, or a config that cannot be used.
    """
    import keras

    from mp_hydra.auto_precision import settle
    from mp_hydra.float32_losses import float32_losses
    from mp_hydra.precision import scoped_policy
    from mp_hydra.preparation import load_data, prepare
    from mp_hydra.startup import start_tensorflow

    start_tensorflow()
    config = settle(config, directory=Path.cwd()).config
    precision = config["precision"]
    if not precision["policy"].endswith(SIXTEEN_BITS):
        raise UserError(
            f"precision={precision['name']} computes nothing in 16 bits, so there is no culprit to find: "
            "give the precision that fails, such as precision=mixed_float16"
        )
    with scoped_policy(precision["policy"], tf32=precision["tf32"]) as scope:
        keras.utils.set_random_seed(config["seed"])
        data = load_data(config, judge=False)
        prepared = prepare(config, data, scope, judge=False)
        taken = list(islice(data.train.batches(config["batch_size"], shuffle_seed=config["seed"]), batches))
        with float32_losses(prepared.model):
            return _search(_Trial(prepared.model, prepared.optimizer, taken, config["seed"]), precision["name"])


class _Trial:
    """Runs the model with some of its layers in float32, always from the same start."""

    def __init__(self, model: Any, optimizer: Any, batches: Sequence[Any], seed: int) -> None:
        from mp_hydra.layer_overrides import located

        self._model, self._optimizer, self._batches, self._seed = model, optimizer, batches, seed
        self._layers = located(model)
        self._policies = {
            index: layer.dtype_policy
            for index, (layer, _) in enumerate(self._layers)
            if layer.compute_dtype in SIXTEEN_BITS
        }
        self._start = [(variable, variable.numpy()) for variable in (*model.variables, *optimizer.variables)]
        self.units = [index for index in self._policies if self._layers[index][1].parent is not None]
        self.count = 0
        self._wanted: list[float] = []
        self.trouble_in_float32 = self.trouble(self.units)
        self._wanted = self._losses

    def place(self, index: int) -> Place:
        """Where a layer is."""
        return self._layers[index][1]

    def inside(self, index: int) -> list[int]:
        """The units that a layer holds directly."""
        return [unit for unit in self.units if self.place(unit).parent == index]

    def trouble(self, in_float32: Sequence[int]) -> str | None:
        """What goes wrong with these layers, and all that they hold, in float32; None if nothing does."""
        self.count += 1
        pinned = set(in_float32)
        for index, (layer, place) in enumerate(self._layers):  # parents come first
            if place.parent in pinned and index in self._policies:
                pinned.add(index)
            if index in self._policies:
                layer.dtype_policy = "float32" if index in pinned else self._policies[index]
        try:
            return next(self._troubles(), None)
        finally:
            for index, policy in self._policies.items():
                self._layers[index][0].dtype_policy = policy
            for variable, value in self._start:
                variable.assign(value)

    def _troubles(self) -> Iterator[str]:
        import keras
        import tensorflow as tf

        keras.utils.set_random_seed(self._seed)
        model, self._losses = self._model, []
        for number, (x, y) in enumerate(self._batches):
            with tf.GradientTape() as tape:
                loss = tf.cast(model.compute_loss(x=x, y=y, y_pred=model(x, training=True), training=True), "float32")
            value = float(loss)
            self._losses.append(value)
            if not math.isfinite(value):
                yield f"the loss of batch {number + 1} is {value}"
                return
            if self._wanted and abs(value - self._wanted[number]) > FAR_OFF * abs(self._wanted[number]):
                yield f"the loss of batch {number + 1} is {value:.4g}, in float32 {self._wanted[number]:.4g}"
            variables = model.trainable_variables
            gradients = tape.gradient(loss, [variable.value for variable in variables])
            for variable, gradient in zip(variables, gradients, strict=True):
                if gradient is not None and not _finite(gradient):
                    yield f"the gradient of {variable.path} is not finite in batch {number + 1}"
            pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
            self._optimizer.inner_optimizer.apply([g for g, _ in pairs], [v for _, v in pairs])


def _search(trial: _Trial, policy: str) -> Bisection:
    trouble = trial.trouble([])
    if trouble is None or trial.trouble_in_float32 is not None:
        return Bisection(policy, trouble, trial.trouble_in_float32, trials=trial.count)

    def cures(units: Sequence[int]) -> bool:
        return trial.trouble(units) is None

    # The outermost layers first: what a layer holds follows it.
    outermost = [unit for unit in trial.units if trial.place(unit).parent not in trial.units]
    found = minimised(outermost, cures)
    for unit in list(found):
        found = _narrowed(found, unit, trial, cures)
    paths = tuple(trial.place(unit).path or trial.place(unit).nesting for unit in found)
    return Bisection(policy, trouble, None, paths, trial.count)


def _narrowed(found: Sequence[int], unit: int, trial: _Trial, cures: Any) -> list[int]:
    """Put what a layer holds in its place, as long as that cures as well."""
    inner = trial.inside(unit)
    others = [other for other in found if other != unit]
    if not inner or not cures([*others, *inner]):
        return list(found)
    kept = minimised(inner, lambda units: cures([*others, *units]))
    result = [*others, *kept]
    for smaller in kept:
        result = _narrowed(result, smaller, trial, cures)
    return result


def _finite(gradient: Any) -> bool:
    import tensorflow as tf

    values = gradient.values if isinstance(gradient, tf.IndexedSlices) else gradient
    return bool(tf.reduce_all(tf.math.is_finite(values)))


def _quoted(path: str) -> str:
    return f'"{path}"' if "\\" not in path else f"'{path}'"
