"""Single layers, forward and backward, under fp32 and a mixed policy: what `mp-hydra doctor --measure` is checked against.

    python benchmarks/operations.py [--policy mixed_bfloat16]

The same computation, a Keras layer inside a model: its output is made, and the gradient that comes back is no constant. Another
method on purpose: the global policy, a process for each policy and repeat that runs this policy alone, medians of `timeit`. The
shapes are those of the doctor on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import timeit
from typing import Any

SHAPES = {"matmul": (768, 768), "convolution": (8, 32, 32, 64), "BatchNorm": (32, 32, 32, 64), "softmax": (2048, 1024)}


def times(policy: str, repeats: int) -> dict[str, float]:
    """Milliseconds of a layer's forward and backward pass, by operation."""
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import keras
    import tensorflow as tf

    keras.config.set_dtype_policy(policy)
    dtype = keras.config.dtype_policy().compute_dtype
    layers = {
        "matmul": keras.layers.Dense(768, use_bias=False),
        "convolution": keras.layers.Conv2D(64, 3, padding="same", use_bias=False),
        "BatchNorm": keras.layers.BatchNormalization(),
        "softmax": keras.layers.Softmax(),
    }
    return {name: _milliseconds(layers[name], shape, dtype, repeats, tf) for name, shape in SHAPES.items()}


def _milliseconds(layer: Any, shape: tuple[int, ...], dtype: str, repeats: int, tf: Any) -> float:
    x, upstream = (tf.cast(tf.random.stateless_normal(shape, (0, seed)), dtype) for seed in (1, 2))
    arguments = {"training": True} if type(layer).__name__ == "BatchNormalization" else {}

    def there_and_back() -> Any:
        with tf.GradientTape() as tape:
            tape.watch(x)
            y = layer(x, **arguments)
        variables = [variable.value for variable in layer.trainable_variables]
        return y, tape.gradient(y, [x, *variables], output_gradients=upstream)

    step = tf.function(there_and_back)
    step()
    step()
    calls = max(1, round(0.02 / timeit.timeit(step, number=1)))
    return 1e3 * statistics.median(timeit.repeat(step, number=calls, repeat=repeats)) / calls


def main() -> None:
    """Print the ratios, and each process's own to show the noise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--policy", default="mixed_bfloat16")
    parser.add_argument("--processes", type=int, default=3, help="for each policy, taking turns")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        print(json.dumps(times(options.policy, options.repeats)))
        return
    found: dict[str, list[dict[str, float]]] = {"float32": [], options.policy: []}
    for _ in range(options.processes):
        for policy, results in found.items():
            words = ["--child", "--policy", policy, "--repeats", str(options.repeats)]
            done = subprocess.run([sys.executable, __file__, *words], check=True, stdout=subprocess.PIPE, text=True)
            results.append(json.loads(done.stdout.splitlines()[-1]))
    print(f"{'operation':<14}{'float32 ms':>12}{options.policy + ' ms':>20}{'times as fast':>16}   pairs")
    for operation in SHAPES:
        reference, other = ([result[operation] for result in found[policy]] for policy in ("float32", options.policy))
        pairs = [one / two for one, two in zip(reference, other, strict=True)]
        times_shown = f"{statistics.median(reference):>12.2f}{statistics.median(other):>20.2f}"
        shown = " ".join(f"{ratio:.2f}" for ratio in pairs)
        print(f"{operation:<14}{times_shown}{statistics.median(pairs):>16.2f}   {shown}")


if __name__ == "__main__":
    main()
