"""What jobs of a sweep meet in real life, each at the end of the first epoch, by the seed of the job; FAULTS=off: none."""

from __future__ import annotations

import os
import random
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf

FAULTS = ("none", "raise", "exit", "kill", "memory", "hang", "kernel")


class Fault(keras.callbacks.Callback):
    """Does what `FAULTS` says for its seed."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.kind = FAULTS[seed % len(FAULTS)] if os.environ.get("FAULTS") != "off" else "none"

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Fail."""
        if self.kind == "raise":
            raise RuntimeError("a bug of the user's")
        if self.kind == "exit":
            sys.exit(3)
        if self.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.kind == "memory":
            in_use = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()  # noqa: PTH123, SIM115
            resource.setrlimit(resource.RLIMIT_AS, (in_use + 2**28, in_use + 2**28))
            np.ones(2**29)
        if self.kind == "hang":
            time.sleep(600)
        if self.kind == "kernel":  # a control group of the test's, in which memory runs out
            Path(os.environ["MEMORY_CGROUP"], "cgroup.procs").write_text(str(os.getpid()))
            taken = [bytearray(os.urandom(2**20)) for _ in range(2**12)]
            raise RuntimeError(f"{len(taken)} MiB were there")


class Hang(keras.callbacks.Callback):
    """Waits for ever in the job with the seed 1, until a file `go on` lies in the working directory."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.hangs = seed == 1

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Hang."""
        if self.hangs and not os.path.exists("go on"):  # noqa: PTH110
            print("hanging", flush=True)
            time.sleep(600)


def first_numbers(input_shape: tuple[int, ...], num_classes: int) -> keras.Model:
    """A small model that says what the allocator holds, and which random numbers come first."""
    print("allocator", tf.config.experimental.get_memory_info("CPU:0"), flush=True)
    drawn = [random.random(), np.random.rand(), float(tf.random.uniform([])), float(keras.random.uniform([]))]  # noqa: NPY002
    print("first numbers", drawn, flush=True)
    layers = [keras.layers.Flatten(), keras.layers.Dense(16, "relu"), keras.layers.Dense(num_classes, dtype="float32")]
    return keras.Sequential([keras.Input(input_shape), *layers])
