"""A model of one's own, in every precision: any importable function or class that returns a keras.Model will do.

Three jobs on digits. About 10 seconds on two CPU cores.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Sequence


def build(input_shape: Sequence[int], classes: int, width: int = 64) -> Any:
    """A perceptron that ends in float32 logits, as mixed precision wants it."""
    import keras

    return keras.Sequential(
        [
            keras.Input(tuple(input_shape)),
            keras.layers.Flatten(),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(width, activation="relu"),
            keras.layers.Dense(classes, dtype="float32"),
        ]
    )


if __name__ == "__main__":
    root = Path(__file__).resolve().parents[1]
    words = ["model=custom", "model._target_=multirun_examples.own_model.build", "+model.width=64"]
    precisions = os.environ.get("PRECISIONS", "fp32,mixed_float16,mixed_bfloat16")
    sweep = ["--multirun", *words, f"precision={precisions}", *sys.argv[1:]]
    sys.exit(subprocess.run([sys.executable, "train.py", *sweep], cwd=root, check=False).returncode)
