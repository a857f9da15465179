"""Trainings that stop and go on: `train DIRECTORY` leaves files after two epochs, `resume DIRECTORY` goes on from them.

Both write what they end with as .npz, the first after four epochs in one go. Operations are deterministic.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SEED = 7
HALF, WHOLE = 2, 4

Case = tuple[str, str, float, dict[str, Any], str]  # policy, mode, scale, settings of Adam, global policy when resuming
CASES: dict[str, Case] = {
    "dynamic": ("mixed_float16", "dynamic", 2.0**10, {}, "mixed_float16"),
    "dynamic, global policy float32": ("mixed_float16", "dynamic", 2.0**10, {}, "float32"),
    "fixed, global policy mixed_bfloat16": ("mixed_float16", "fixed", 128.0, {}, "mixed_bfloat16"),
    "none, global policy mixed_float16": ("float32", "none", 1.0, {}, "mixed_float16"),
    "accumulating": ("mixed_float16", "dynamic", 2.0**10, {"gradient_accumulation_steps": 3}, "mixed_float16"),
    "averaging": ("mixed_bfloat16", "none", 1.0, {"use_ema": True, "weight_decay": 1e-3}, "mixed_bfloat16"),
}


def batches() -> Any:
    """Five batches an epoch, of which the fourth cannot be used."""
    generator = np.random.default_rng(0)
    x = generator.normal(size=(20, 4)).astype("float32")
    x[13, 2] = np.inf
    return tf.data.Dataset.from_tensor_slices((x, generator.normal(size=(20, 1)).astype("float32"))).batch(4)


def fresh(case: Case) -> Any:
    """A compiled model with a random layer and moving statistics."""
    from mp_hydra.loss_scale import Rule
    from mp_hydra.precision import scoped_policy
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    policy, mode, scale, settings, _ = case
    keras.utils.set_random_seed(SEED)
    with scoped_policy(policy, tf32=False):
        stack = [layers.Dense(8), layers.BatchNormalization(), layers.Dropout(0.5), layers.Dense(1, dtype="float32")]
        model = keras.Sequential([keras.Input((4,)), *stack])
        model.compile(keras.optimizers.Adam(0.01, **settings), "mse", jit_compile=False, auto_scale_loss=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode=mode, scale=scale, rule=Rule(growth_interval=3))
    model.optimizer.build(model.trainable_variables)
    model.optimizer.remember_seeds(model)
    return model


def fit(model: Any, start: int, stop: int, *callbacks: Any) -> list[float]:
    """The losses of these epochs."""
    from mp_hydra.finite_steps import finite_steps

    with finite_steps(model, model.optimizer):
        done = model.fit(batches(), initial_epoch=start, epochs=stop, verbose=0, shuffle=False, callbacks=callbacks)
    return list(done.history["loss"])


def write(path: Path, model: Any, losses: list[float]) -> None:
    """Everything that a training ends with."""
    variables = [*model.variables, *model.optimizer.variables]
    values: dict[str, Any] = {
        f"{i} {v.name.removeprefix('sequential_')}": np.asarray(v.value.numpy()) for i, v in enumerate(variables)
    }
    np.savez(path, losses=np.array(losses), **values)


def train(directory: Path) -> None:
    """Half of a training to a file, and a whole one."""
    for name, case in CASES.items():
        # Saved within fit: with use_ema, Keras exchanges the weights for their averages at its end.
        fit(fresh(case), 0, HALF, keras.callbacks.ModelCheckpoint(directory / f"{name}.keras"))
        whole = fresh(case)
        write(directory / f"{name} whole.npz", whole, fit(whole, 0, WHOLE)[HALF:])


def resume_all(directory: Path) -> None:
    """First as plain Keras opens the files, then as ours does."""
    stock: dict[str, Any] = {}
    for name in CASES:
        model = keras.saving.load_model(directory / f"{name}.keras")
        stock[name] = [type(model.optimizer).__name__, int(model.optimizer.iterations)]
    stock["mp_hydra imported"] = "mp_hydra" in sys.modules
    (directory / "stock.json").write_text(json.dumps(stock), encoding="utf-8")

    from mp_hydra.checkpoint import resume

    for name, case in CASES.items():
        keras.config.set_dtype_policy(case[4])
        model = resume(directory / f"{name}.keras")
        write(directory / f"{name} resumed.npz", model, fit(model, HALF, WHOLE))


if __name__ == "__main__":
    tf.config.experimental.enable_op_determinism()
    keras.utils.set_random_seed(SEED if sys.argv[1] == "train" else SEED + 1)
    {"train": train, "resume": resume_all}[sys.argv[1]](Path(sys.argv[2]))
