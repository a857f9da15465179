"""A few operations, timed in every dtype: what this machine does, beside what its data sheet says.

An operation is a Keras layer under the policy, casts included, in the middle of a model: its output is made, and the gradient
that comes back to it is a tensor like any other. TensorFlow would fold a gradient of ones into constants, and leave out an output
that nobody takes; float32 gains more by that than 16 bits do.

For each operation the dtypes take turns, so that a drift of the machine favours none. A sample is as many calls as take about
`SAMPLE_SECONDS`, between two points at which the device has finished. Times are medians over the rounds; a ratio is the median of
the rounds' own ratios, which other load on the machine disturbs less than a ratio of medians.
"""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

OPERATIONS = ("matmul", "convolution", "BatchNorm", "softmax")
SAMPLE_SECONDS = 0.005
ROUNDS = (5, 50)  # at least, at most
_MOST_CALLS = 1000


@dataclass(frozen=True)
class Measured:
    """One operation in one dtype.

    Attributes:
        operation: one of `OPERATIONS`.
        dtype: "float32", "tf32", or the compute dtype of a mixed policy: "float16" or "bfloat16".
        shape: of the layer's input.
        milliseconds: median of a call; None where it could not be timed.
        ratio: float32's time over this one: above 1 it is faster than float32; None where one of them is missing.
        quartiles: the middle half of the rounds' ratios lies between these.
        samples: how many samples the median is of.
        problem: why it could not be timed.
    """

    operation: str
    dtype: str
    shape: str
    milliseconds: float | None
    ratio: float | None
    quartiles: tuple[float, float] | None = None
    samples: int = 0
    problem: str | None = None


def measure(device: str, *, tf32: bool, seconds: float = 5.0) -> list[Measured]:
    """Time the operations on a device, forward and backward.

    Args:
        device: "CPU:0" or "GPU:0".
        tf32: whether the device has TF32, which is then timed as well.
        seconds: about how long it may take, tracing and warming up aside.
    """
    import tensorflow as tf

    before = tf.config.experimental.tensor_float_32_execution_enabled()
    found: list[Measured] = []
    try:
        for operation in OPERATIONS:
            products = operation in ("matmul", "convolution")
            dtypes = ("float32", *(["tf32"] if tf32 and products else []), "bfloat16", "float16")
            found += _operation_in(operation, dtypes, device, seconds / len(OPERATIONS))
    finally:
        tf.config.experimental.enable_tensor_float_32_execution(before)
    return found


def _operation_in(operation: str, dtypes: Sequence[str], device: str, seconds: float) -> list[Measured]:
    import tensorflow as tf

    tried = {dtype: _tried(operation, dtype, device) for dtype in dtypes}
    problems = {dtype: call for dtype, call in tried.items() if isinstance(call, str)}
    calls = {dtype: call for dtype, call in tried.items() if not isinstance(call, str)}
    times = interleaved(calls, tf.test.experimental.sync_devices, seconds=seconds)
    shape = "x".join(map(str, _size(operation, device)))
    return [
        Measured(operation, dtype, shape, None, None, problem=problems[dtype])
        if dtype in problems
        else _figures(operation, dtype, shape, times[dtype], times.get("float32"))
        for dtype in dtypes
    ]


def _tried(operation: str, dtype: str, device: str) -> Callable[[], object] | str:
    """A call that has worked once, which is when it is traced and compiled; or why there is none."""
    try:
        call = _prepared(operation, dtype, device)
        call()
    except Exception as error:  # noqa: BLE001 - a kernel that is missing is an answer
        return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return call


def _figures(
    operation: str, dtype: str, shape: str, times: Sequence[float], reference: Sequence[float] | None
) -> Measured:
    ratio = quartiles = None
    if reference is not None:
        ratios = [one / other for one, other in zip(reference, times, strict=True)]
        low, ratio, high = statistics.quantiles(ratios, n=4, method="inclusive")
        quartiles = (low, high)
    return Measured(operation, dtype, shape, 1e3 * statistics.median(times), ratio, quartiles, len(times))


def interleaved(
    calls: Mapping[Any, Callable[[], object]],
    synchronise: Callable[[], object],
    *,
    seconds: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[Any, list[float]]:
    """Seconds of a call, one figure a round; each round takes every call in turn, every other one backwards.

    Args:
        calls: what to time; each has been called once already.
        synchronise: returns when the device has finished.
        seconds: no round begins after so many, once there are `ROUNDS[0]`.
        clock: seconds from any origin, never going back.
    """

    def sample(call: Callable[[], object], repeats: int) -> float:
        synchronise()
        begin = clock()
        for _ in range(repeats):
            call()
        synchronise()
        return (clock() - begin) / repeats

    end = clock() + seconds
    repeats = {
        key: min(_MOST_CALLS, max(1, math.ceil(SAMPLE_SECONDS / max(sample(call, 1), 1e-9))))
        for key, call in calls.items()
    }
    times: dict[Any, list[float]] = {key: [] for key in calls}
    for done in range(ROUNDS[1] if calls else 0):
        if done >= ROUNDS[0] and clock() > end:
            break
        for key in list(calls)[:: -1 if done % 2 else 1]:
            times[key].append(sample(calls[key], repeats[key]))
    return times


# Sizes at which the arithmetic outweighs the call: about 1 GFLOP for a CPU, 100 for a GPU.
_SIZES: dict[str, dict[str, tuple[int, ...]]] = {
    "CPU": {
        "matmul": (768, 768),
        "convolution": (8, 32, 32, 64),
        "BatchNorm": (32, 32, 32, 64),
        "softmax": (2048, 1024),
    },
    "GPU": {
        "matmul": (4096, 4096),
        "convolution": (64, 56, 56, 128),
        "BatchNorm": (64, 56, 56, 128),
        "softmax": (16384, 1024),
    },
}


def _size(operation: str, device: str) -> tuple[int, ...]:
    return _SIZES["GPU" if device.startswith("GPU") else "CPU"][operation]


def _prepared(operation: str, dtype: str, device: str) -> Callable[[], object]:
    """One call of the layer and of its gradients, on tensors that are there already."""
    import tensorflow as tf

    size = _size(operation, device)
    with tf.device(device):
        layer = _layer(operation, dtype, size)
        x, upstream = (tf.cast(tf.random.stateless_normal(size, (0, seed)), layer.compute_dtype) for seed in (1, 2))
        weights = [variable.value for variable in layer.trainable_variables]
        arguments = {"training": True} if operation == "BatchNorm" else {}

        def there_and_back(x: Any, upstream: Any) -> Any:
            with tf.GradientTape() as tape:
                tape.watch(x)
                y = layer(x, **arguments)
            return y, tape.gradient(y, [x, *weights], output_gradients=upstream)

        function = tf.function(there_and_back, autograph=False)

    def call() -> object:
        tf.config.experimental.enable_tensor_float_32_execution(dtype == "tf32")
        with tf.device(device):
            return function(x, upstream)

    return call


def _layer(operation: str, dtype: str, size: tuple[int, ...]) -> Any:
    """The layer, built; its output is as large as its input."""
    import keras

    policy = "float32" if dtype in ("float32", "tf32") else f"mixed_{dtype}"
    if operation == "matmul":
        layer = keras.layers.Dense(size[-1], use_bias=False, dtype=policy)
    elif operation == "convolution":
        layer = keras.layers.Conv2D(size[-1], 3, padding="same", use_bias=False, dtype=policy)
    elif operation == "BatchNorm":
        layer = keras.layers.BatchNormalization(dtype=policy)
    else:
        layer = keras.layers.Softmax(dtype=policy)
    layer.build(size)
    return layer
