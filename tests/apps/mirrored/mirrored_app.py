"""Training on two replicas, which are two logical CPU devices: prints what became of it as JSON, for test_mirrored.py.

Each fit sees BATCHES batches of 8 rows, of which the first four go to replica 0. A bad row holds one nan.
"""

from __future__ import annotations

import json
import logging
import sys
from typing import Any

import numpy as np

BATCHES = 6
BAD = (1, 4)  # the batches that hold a bad row
WAYS: dict[str, dict[str, Any]] = {"graph": {"jit_compile": False}, "eager": {"run_eagerly": True}}


def data(bad_row: int | None, *, left_out: bool = False) -> Any:
    """The batches; with `left_out` without those that hold the bad row."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(BATCHES, 8, 3)).astype("float32")
    y = random.normal(size=(BATCHES, 8, 1)).astype("float32")
    if bad_row is not None:
        x[list(BAD), bad_row, 1] = np.nan
    keep = [i for i in range(BATCHES) if not (left_out and i in BAD)]
    batches = tf.data.Dataset.from_tensor_slices((x[keep].reshape(-1, 3), y[keep].reshape(-1, 1))).batch(8)
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
    return batches.with_options(options)


def model(*, normalized: bool) -> Any:
    """A small model; the same weights at every call."""
    import keras

    keras.utils.set_random_seed(1)
    middle = [keras.layers.BatchNormalization()] if normalized else []
    return keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), *middle, keras.layers.Dense(1)])


def fitted(
    strategy: Any,
    batches: Any,
    *,
    mode: str = "fixed",
    normalized: bool = False,
    inner: dict[str, Any] | None = None,
    **settings: Any,
) -> dict[str, Any]:
    """One epoch with our optimizer; values of mirrored variables are given once for each replica."""
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.loss_scale import Rule
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    def everywhere(variable: Any) -> list[Any]:
        return [np.asarray(value).tolist() for value in strategy.experimental_local_results(variable.value)]

    with strategy.scope():
        trained = model(normalized=normalized)
        optimizer = keras.optimizers.Adam(0.01, **(inner or {}))
        trained.compile(optimizer, "mse", metrics=["mae"], auto_scale_loss=False, **settings)
        rule = Rule(growth_interval=2)
        trained.optimizer = ScaledOptimizer(optimizer, mode=mode, scale=1024.0, rule=rule)
        trained.optimizer.build(trained.trainable_variables)
        with finite_steps(trained, trained.optimizer) as counted:
            history = trained.fit(batches, verbose=0, shuffle=False).history
        counters = trained.optimizer.counters()
        return {
            "weights": [everywhere(variable) for variable in trained.weights],
            "slots": [everywhere(variable) for variable in optimizer.variables],
            "counts": everywhere(trained.optimizer._counts),
            "scale": everywhere(trained.optimizer.dynamic_scale),
            "steps": counters.steps,
            "applied": counters.applied,
            "norm_sum": counters.norm_sum,
            "norm_max": counters.norm_max,
            "nonfinite": trained.optimizer.nonfinite_variables(),
            "batches": list(counted.read()),
            "history": {name: values[0] for name, values in history.items()},
        }


def stock(strategy: Any, bad_row: int) -> bool:
    """Whether the weights are finite after an epoch with Keras' own loss scaling."""
    import keras

    with strategy.scope():
        trained = model(normalized=False)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01))
        trained.compile(optimizer, "mse", auto_scale_loss=False, jit_compile=False)
        trained.fit(data(bad_row), verbose=0, shuffle=False)
        values = [v for w in trained.weights for v in strategy.experimental_local_results(w.value)]
        return bool(all(np.isfinite(value).all() for value in values))


def refusal(strategy: Any, **settings: Any) -> str:
    """The error with which a fit is refused."""
    try:
        fitted(strategy, data(None), **settings)
    except Exception as error:  # noqa: BLE001 - its class is part of the answer
        return f"{type(error).__name__}: {error}"
    return "not refused"


def main() -> None:
    """Run every case."""
    import tensorflow as tf

    logging.disable(logging.WARNING)
    cpus = tf.config.list_physical_devices("CPU")
    tf.config.set_logical_device_configuration(cpus[0], [tf.config.LogicalDeviceConfiguration()] * 2)
    two = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    one = tf.distribute.get_strategy()
    graph = WAYS["graph"]
    answers: dict[str, Any] = {"single": fitted(one, data(0), **graph), "replicas": two.num_replicas_in_sync}
    for row, replica in ((0, 0), (7, 1)):
        for way, settings in WAYS.items():
            answers[f"{way} {replica}"] = fitted(two, data(row), **settings)
        answers[f"stock {replica}"] = stock(two, row)
        answers[f"normalized {replica}"] = fitted(two, data(row), normalized=True, **graph)
        answers[f"dynamic {replica}"] = fitted(two, data(row), mode="dynamic", **graph)
    answers["single dynamic"] = fitted(one, data(0), mode="dynamic", **graph)
    answers["normalized without"] = fitted(two, data(None, left_out=True), normalized=True, **graph)
    answers["refused"] = {
        "steps_per_execution": refusal(two, steps_per_execution=2, **graph),
        "jit_compile": refusal(two, jit_compile=True),
        "gradient_accumulation_steps": refusal(two, inner={"gradient_accumulation_steps": 2}, **graph),
    }
    json.dump(answers, sys.stdout)


if __name__ == "__main__":
    main()
