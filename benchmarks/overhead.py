"""What scaling, counting and telemetry cost: a training as mp_hydra runs it, layer by layer, against stock Keras.

    python benchmarks/overhead.py --mode dynamic

Ways to train the same net (a small convolutional one in float32) on the same batches of images of 28x28x1, verbose=0:

    adam            bare `model.fit`
    stock scaling   with Keras' own LossScaleOptimizer around Adam
    scaler          with mp_hydra's ScaledOptimizer around it: scale, counters, gradient norm
    guarded         and bad batches undone (`finite_steps`)
    mp_hydra        and telemetry, with a report every 100 batches: what a run does

They take turns in one process, in short fits, so that a machine that slows down slows all; the fits of one round give
ratios. The first round, which traces and compiles, is not counted. On a machine shared with others the processor seconds
are the steadier figure.
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


def random_batches(steps: int, batch: int) -> Any:
    """`steps` batches of `batch` random images and labels, held in memory."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    images = random.random((4 * batch, *SHAPE), dtype=np.float32)
    labels = random.integers(0, 10, 4 * batch)
    return tf.data.Dataset.from_tensor_slices((images, labels)).batch(batch).cache().repeat().take(steps).prefetch(2)


def ways(batches: Any, batch: int, *, jit_compile: bool, mode: str, stack: ExitStack) -> dict[str, Callable[[], Fit]]:
    """The ways to train, by name; each has a model of its own."""
    import keras

    from mp_hydra.finite_steps import Batches, finite_steps
    from mp_hydra.hardware import pci_bus_id, training_device
    from mp_hydra.scaled_optimizer import ScaledOptimizer
    from mp_hydra.telemetry.callback import Telemetry

    device = training_device()
    bus = pci_bus_id(device)

    def stock(*, scaled: bool) -> Callable[[], Fit]:
        model = build_model(jit_compile=jit_compile)
        if scaled:
            model.optimizer = keras.optimizers.LossScaleOptimizer(model.optimizer)
        return lambda: timed(model, batches, [])

    def ours(*, guarded: bool, measured: bool) -> Callable[[], Fit]:
        model = build_model(jit_compile=jit_compile)
        scale = 1.0 if mode == "none" else 1024.0
        optimizer = model.optimizer = ScaledOptimizer(model.optimizer, mode=mode, scale=scale)
        optimizer.build(model.trainable_variables)
        counted = stack.enter_context(finite_steps(model, optimizer)) if guarded else Batches()

        def telemetry() -> Any:
            return Telemetry(
                lambda _metrics, _step: None,
                optimizer=optimizer,
                batches=counted,
                batch_size=batch,
                samples=batch * len(batches),
                device=device,
                pci_bus_id=bus,
                every=100,
            )

        return lambda: timed(model, batches, [telemetry()] if measured else [])

    return {
        "adam": stock(scaled=False),
        "stock scaling": stock(scaled=True),
        "scaler": ours(guarded=False, measured=False),
        "guarded": ours(guarded=True, measured=False),
        "mp_hydra": ours(guarded=True, measured=True),
    }


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
    parser.add_argument("--batch", type=int, default=128, help="images in a batch")
    parser.add_argument("--rounds", type=int, default=30, help="counted rounds, one fit of each way in each")
    parser.add_argument("--jit", action="store_true", help="compile both ways with XLA")
    options = parser.parse_args()
    count_every_cpu_allocation()
    batches = random_batches(options.steps, options.batch)
    with ExitStack() as stack:
        found = ways(batches, options.batch, jit_compile=options.jit, mode=options.mode, stack=stack)
        fits: dict[str, list[Fit]] = {name: [] for name in found}
        for turn in range(options.rounds + 1):
            for name in found if turn % 2 else reversed(found):
                fits[name].append(found[name]())
    for column, clock in enumerate(("processor", "wall clock")):
        seconds = {name: np.array([pair[1 - column] for pair in pairs[1:]]) for name, pairs in fits.items()}
        print(
            f"{clock}, loss scaling {options.mode}, {options.rounds} rounds of {options.steps} steps of {options.batch} images"
        )
        print(f"  {'':14} {'ms/step':>8}  {'ratio to adam':>22}  {'ratio to stock scaling':>22}")
        for name, values in seconds.items():
            ratios = [_shown(values / seconds[base]) if name != base else "" for base in ("adam", "stock scaling")]
            print(f"  {name:14} {1e3 * np.median(values) / options.steps:8.2f}  {ratios[0]:>22}  {ratios[1]:>22}")


def _shown(ratios: np.ndarray[Any, Any]) -> str:
    low, high = interval(ratios)
    return f"{np.median(ratios):.3f} ({low:.3f}-{high:.3f})"


if __name__ == "__main__":
    main()
