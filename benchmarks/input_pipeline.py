"""Seconds per epoch of a small convolutional net, fed by our input pipeline and by bare `model.fit` on float32 arrays.

    python benchmarks/input_pipeline.py --path ../shared/data/mnist.npz

Both ways take turns in one process, so that a machine that slows down slows both. The first
epoch of each is not counted. On a machine shared with others the processor seconds are the steadier figure.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

BATCH = 64


def build_model() -> Any:
    """The small convolutional net of the classic Keras example, compiled."""
    import keras

    layers = keras.layers
    model = keras.Sequential(
        [
            layers.Input((28, 28, 1)),
            layers.Conv2D(32, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, activation="relu"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu"),
            layers.Dense(10),
        ]
    )
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    return model


def made_up(samples: int) -> dict[str, np.ndarray[Any, Any]]:
    """Random arrays in the form of MNIST."""
    random = np.random.default_rng(0)
    images = random.integers(0, 256, (samples + 10, 28, 28), dtype=np.uint8)
    labels = random.integers(0, 10, samples + 10)
    return {"x_train": images[10:], "y_train": labels[10:], "x_test": images[:10], "y_test": labels[:10]}


def from_file(path: str, samples: int) -> dict[str, np.ndarray[Any, Any]]:
    """The first training samples of an .npz file in the form of MNIST."""
    with np.load(Path(path), allow_pickle=False) as arrays:
        return {name: arrays[name][:samples] for name in ("x_train", "y_train", "x_test", "y_test")}


def epoch_seconds(model: Any, **fit: Any) -> tuple[float, float]:
    """Wall-clock and processor seconds of one epoch."""
    started, used = time.perf_counter(), time.process_time()
    model.fit(epochs=1, verbose=0, **fit)
    return time.perf_counter() - started, time.process_time() - used


def main() -> None:
    """Measure and print the medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--path", help="an .npz file in the form of MNIST; random arrays where it is left out")
    parser.add_argument("--samples", type=int, default=20000, help="training samples per epoch")
    parser.add_argument("--rounds", type=int, default=5, help="counted epochs of each way")
    options = parser.parse_args()
    arrays = from_file(options.path, options.samples) if options.path else made_up(options.samples)

    import keras

    from mp_hydra.datasets import load

    keras.utils.set_random_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "data.npz"
        np.savez(file, allow_pickle=False, **arrays)
        config = {"_target_": "mp_hydra.datasets.npz", "path": str(file), "validation_fraction": 0.0}
        ours = load(config, seed=0)
    x = (arrays["x_train"] / np.float32(255))[..., np.newaxis]
    y = arrays["y_train"].astype(np.int64)
    ways = {
        "pipeline": {"x": ours.train.batches(BATCH, shuffle_seed=0), "shuffle": False},
        "bare fit": {"x": x, "y": y, "batch_size": BATCH},
    }
    models = {way: build_model() for way in ways}
    measured: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
    for turn in range(options.rounds + 1):
        for way in ways if turn % 2 else reversed(ways):
            seconds = epoch_seconds(models[way], **ways[way])
            if turn:
                measured[way].append(seconds)
    for column, clock in enumerate(("wall clock", "processor")):
        medians = {way: statistics.median(pair[column] for pair in pairs) for way, pairs in measured.items()}
        for way, median in medians.items():
            print(f"{clock}, {way}: median {median:.3f} s/epoch")
        print(f"{clock}, ratio pipeline / bare fit: {medians['pipeline'] / medians['bare fit']:.3f}")


if __name__ == "__main__":
    main()
