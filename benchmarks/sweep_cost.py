"""What a sweep costs beside bare Keras scripts: processor and wall-clock seconds, and the ratios.

    python benchmarks/sweep_cost.py --rounds 3

Six jobs (fp32 and mixed_bfloat16, three seeds) train the net `cnn` on scikit-learn's digits for the same epochs:

    bare      six processes, one after the other: import Keras, load, build, fit, evaluate, print; nothing recorded
    mp_hydra  `train.py --multirun`: isolated processes, MLflow, per-sample predictions, and the comparison at the end

Processor seconds are those of all descendants, job server included. The ways take turns. The MLflow store is there already, as
it is from a user's second run on; what making one costs is shown first.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).resolve().parent.parent
SET_CHILD_SUBREAPER = 36  # prctl(2)
PRECISIONS = {"fp32": "float32", "mixed_bfloat16": "mixed_bfloat16"}
SEEDS = (0, 1, 2)
MAKE_STORE = "from mp_hydra import tracking; tracking.open_client(tracking.store_uri(tracking.Settings()))"
BARE = """
import sys

import keras
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

policy, seed, epochs = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
keras.utils.set_random_seed(seed)
keras.config.set_dtype_policy(policy)
x, y = load_digits(return_X_y=True)
x = x.reshape(-1, 8, 8, 1) / 16
x, x_test, y, y_test = train_test_split(x, y, test_size=360, random_state=0)
layers = keras.layers
model = keras.Sequential(
    [
        keras.Input((8, 8, 1)),
        layers.Conv2D(32, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Conv2D(64, 3, padding="same", activation="relu"),
        layers.MaxPooling2D(2),
        layers.Flatten(),
        layers.Dense(128, activation="relu"),
        layers.Dense(10, dtype="float32"),
    ]
)
loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model.compile(keras.optimizers.Adam(0.001), loss, metrics=["accuracy"])
model.fit(x, y, batch_size=64, epochs=epochs, validation_split=0.1, verbose=0)
print(model.evaluate(x_test, y_test, verbose=0))
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=3)
    given = parser.parse_args()
    # What a process leaves behind becomes a child of this one, and so is counted.
    ctypes.CDLL(None).prctl(SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    measured: dict[str, list[tuple[float, float]]] = {"bare": [], "mp_hydra": []}
    with tempfile.TemporaryDirectory() as home:
        os.environ["MP_HYDRA_HOME"] = home
        _show("store", _cost(lambda: _python(MAKE_STORE)))
        for _ in range(given.rounds):
            for name, way in (("bare", _bare), ("mp_hydra", _mp_hydra)):
                with tempfile.TemporaryDirectory() as directory:
                    cost = _cost(partial(way, Path(directory), given.epochs))
                measured[name].append(cost)
                _show(name, cost)
    for place, what in enumerate(("processor", "wall clock")):
        ratios = [ours[place] / bare[place] for ours, bare in zip(measured["mp_hydra"], measured["bare"], strict=True)]
        shown = ", ".join(f"{ratio:.2f}" for ratio in ratios)
        print(f"{what}: mp_hydra / bare = {statistics.median(ratios):.2f} (median of {shown})")


def _show(name: str, cost: tuple[float, float]) -> None:
    print(f"{name:<9} {cost[0]:6.1f} s of processor  {cost[1]:6.1f} s of wall clock", flush=True)


def _python(code: str, *arguments: str, cwd: Path = ROOT) -> None:
    subprocess.run([sys.executable, "-c", code, *arguments], cwd=cwd, check=True, capture_output=True)


def _bare(directory: Path, epochs: int) -> None:
    for policy in PRECISIONS.values():
        for seed in SEEDS:
            _python(BARE, policy, str(seed), str(epochs), cwd=directory)


def _mp_hydra(directory: Path, epochs: int) -> None:
    words = [
        sys.executable,
        str(ROOT / "train.py"),
        "--multirun",
        f"precision={','.join(PRECISIONS)}",
        f"seed={','.join(map(str, SEEDS))}",
        f"epochs={epochs}",
        f"hydra.sweep.dir={directory}/sweep",
    ]
    subprocess.run(words, cwd=directory, check=True, capture_output=True)


def _cost(run: Callable[[], object]) -> tuple[float, float]:
    """Processor and wall-clock seconds of a call and of every process that it starts."""
    before, began = _processor(), time.perf_counter()
    run()
    seconds = time.perf_counter() - began
    with suppress(ChildProcessError):
        while True:
            os.wait()
    return _processor() - before, seconds


def _processor() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


if __name__ == "__main__":
    main()
