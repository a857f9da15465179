"""Data held in memory as arrays: the checks, and batches gathered by index."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.datasets.data import Samples, Shuffle, in_order
from mp_hydra.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt
    import tensorflow as tf


@dataclass(frozen=True, eq=False)
class ArraySamples(Samples):
    """x as one tensor in main memory, integers in their stored type; the builder's array is not kept beside it."""

    x: Any
    labels: npt.NDArray[Any]
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    lowest: float
    highest: float
    digest: str

    def batches(
        self,
        index: npt.NDArray[np.int64],
        targets: npt.NDArray[Any],
        prepare: Callable[[Any], Any],
        *,
        batch_size: int,
        shuffle: Shuffle | None,
    ) -> tf.data.Dataset:
        """See `Samples.batches`; whole batches are gathered at once, which per-sample slicing is too slow for."""
        import tensorflow as tf

        x = self.x
        with tf.device("CPU:0"):
            y = tf.constant(targets)

        def gather(chosen: Any) -> tuple[Any, Any]:
            return prepare(tf.gather(x, chosen)), tf.gather(y, chosen)

        straight = tf.autograph.experimental.do_not_convert  # to look for branches costs every run 50 ms
        return (
            in_order(index, shuffle)
            .batch(batch_size)
            .map(straight(gather), num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        )


def check(name: str, part: str, x: Any, y: Any) -> ArraySamples:
    """The arrays of one part, checked on their own; floats become float32.

    Args:
        name: of the data set.
        part: train, validation or test.
        x: (n, ...) samples, anything that numpy can make an array of.
        y: (n,) or (n, k) labels.

    Raises:
        DataError: arrays that are empty, of differing length, not numeric or not finite.
    """
    import tensorflow as tf

    samples = _array(f"dataset {name}: x_{part}", x)
    labels = _array(f"dataset {name}: y_{part}", y)
    if len(samples) != len(labels):
        raise DataError(
            f"dataset {name}: x_{part} has {len(samples)} samples but y_{part} has {len(labels)}; "
            "give one label a sample"
        )
    digest = hashlib.sha256()
    for array in (samples, labels):
        digest.update(f"{array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).data)
    if samples.dtype.kind == "f":
        samples = _finite(f"dataset {name}: x_{part}", samples)
    samples = samples.astype(samples.dtype.newbyteorder("="), copy=False)
    with tf.device("CPU:0"):  # gathering happens in the input pipeline, on the CPU
        tensor = tf.constant(samples)
    return ArraySamples(
        x=tensor,
        labels=labels,
        dtype=samples.dtype,
        shape=samples.shape[1:],
        lowest=float(samples.min()),
        highest=float(samples.max()),
        digest=digest.hexdigest(),
    )


def _array(where: str, value: Any) -> npt.NDArray[Any]:
    try:
        array = np.asarray(value)
    except (TypeError, ValueError) as error:
        raise DataError(f"{where} is no array ({error}); give samples of one shape") from error
    if array.dtype.kind not in "biuf":
        raise DataError(f"{where} holds {array.dtype}; give an array of real numbers")
    if array.ndim == 0:
        raise DataError(f"{where} is a single number; give an array with one row a sample")
    if array.size == 0:
        raise DataError(f"{where} is empty (shape {array.shape}); give at least one sample")
    return array


def _finite(where: str, x: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    with np.errstate(over="ignore"):
        values = x.astype(np.float32, copy=False)
    if bad := values.size - int(np.isfinite(values).sum()):
        raise DataError(
            f"{where} has {bad} of {values.size} values that are not finite in float32; remove or mend them"
        )
    return values
