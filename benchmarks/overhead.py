"""What scaling, counting and telemetry cost: a training as mp_hydra runs it against a bare `model.fit` with Adam.

    python benchmarks/overhead.py --mode dynamic

Same net (a small convolutional one in float32), same batches of 64 images of 28x28x1, verbose=0. Both ways take turns in
one process, in short fits, so that a machine that slows down slows both; each pair of neighbouring fits gives a ratio. The
first round, which traces and compiles, is not counted. On a machine shared with others the processor seconds are the
steadier figure.
"""

from __future__ import annotations

import argparse
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.telemetry.memory import count_every_cpu_allocation

if TYPE_CHECKING:
    from collections.abc import Callable

BATCH = 64
SHAPE = (28, 28, 1)
Fit = tuple[float, float]


def build_model(*, jit_compile: bool) -> Any:
    """The small convolutional net, compiled with Adam; the same weights at every call."""
    import keras

    from mp_hydra.models.convolutional import cnn

    keras.utils.set_random_seed(0)
    model = cnn(SHAPE, 10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"], jit_compile=jit_compile, auto_scale_loss=False)
    return model


def random_batches(steps: int) -> Any:
    """`steps` batches of random images and labels, held in memory."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    images = random.random((4 * BATCH, *SHAPE), dtype=np.float32)
    labels = random.integers(0, 10, 4 * BATCH)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(BATCH).cache().repeat().take(steps).prefetch(2)


def bare(batches: Any, *, jit_compile: bool) -> Callable[[], Fit]:
    """A way to train: Keras alone."""
    model = build_model(jit_compile=jit_compile)
    return lambda: timed(model, batches, [])


def ours(batches: Any, *, jit_compile: bool, mode: str, stack: ExitStack) -> Callable[[], Fit]:
    """A way to train: scaled optimizer, restored bad batches and telemetry with a report every 100 batches."""
    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.hardware import pci_bus_id, training_device
    from mp_hydra.scaled_optimizer import ScaledOptimizer
    from mp_hydra.telemetry.callback import Telemetry

    model = build_model(jit_compile=jit_compile)
    optimizer = model.optimizer = ScaledOptimizer(model.optimizer, mode=mode, scale=1.0 if mode == "none" else 1024.0)
    optimizer.build(model.trainable_variables)
    counted = stack.enter_context(finite_steps(model, optimizer))
    device = training_device()
    bus = pci_bus_id(device)

    def fit() -> Fit:
        telemetry = Telemetry(
            lambda _metrics, _step: None,
            optimizer=optimizer,
            batches=counted,
            batch_size=BATCH,
            samples=BATCH * len(batches),
            device=device,
            pci_bus_id=bus,
            every=100,
        )
        return timed(model, batches, [telemetry])

    return fit


def timed(model: Any, batches: Any, callbacks: list[Any]) -> Fit:
    """Wall-clock and processor seconds of one epoch."""
    started, used = time.perf_counter(), time.process_time()
    model.fit(batches, epochs=1, shuffle=False, verbose=0, callbacks=callbacks)
    return time.perf_counter() - started, time.process_time() - used


def interval(ratios: np.ndarray[Any, Any], *, resamples: int = 10_000) -> tuple[float, float]:
    """95 % percentile-bootstrap interval of the median of (rounds,) ratios (Efron and Tibshirani, 1993, chapter 13)."""
    random = np.random.default_rng(0)
    medians = np.median(random.choice(ratios, (resamples, len(ratios))), axis=1)
    low, high = np.percentile(medians, (2.5, 97.5))
    return float(low), float(high)


def main() -> None:
    """Measure and print medians, ratio and interval."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=("none", "fixed", "dynamic"), default="dynamic", help="of loss scaling")
    parser.add_argument("--steps", type=int, default=50, help="steps of one fit")
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds, one fit of each way in each")
    parser.add_argument("--jit", action="store_true", help="compile both ways with XLA")
    options = parser.parse_args()
    count_every_cpu_allocation()
    batches = random_batches(options.steps)
    with ExitStack() as stack:
        ways = {
            "bare fit": bare(batches, jit_compile=options.jit),
            "mp_hydra": ours(batches, jit_compile=options.jit, mode=options.mode, stack=stack),
        }
        fits: dict[str, list[Fit]] = {way: [] for way in ways}
        for turn in range(options.rounds + 1):
            for way in ways if turn % 2 else reversed(ways):
                fits[way].append(ways[way]())
    for column, clock in enumerate(("wall clock", "processor")):
        seconds = {way: np.array([pair[column] for pair in pairs[1:]]) for way, pairs in fits.items()}
        for way, values in seconds.items():
            print(f"{clock}, {way}: median {1e3 * np.median(values) / options.steps:.2f} ms/step")
        ratios = seconds["mp_hydra"] / seconds["bare fit"]
        low, high = interval(ratios)
        print(
            f"{clock}, ratio mp_hydra / bare fit: median {np.median(ratios):.3f} (95 % interval {low:.3f} to {high:.3f})"
        )


if __name__ == "__main__":
    main()
