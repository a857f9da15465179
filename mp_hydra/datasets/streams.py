"""Data given as tf.data sets of single samples: the one pass that checks and describes them, and their batches."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.datasets.data import Samples, Shuffle
from mp_hydra.datasets.messages import reason
from mp_hydra.errors import DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt
    import tensorflow as tf

SHUFFLE_BYTES = 256 * 2**20
"""Memory that the shuffle buffer of a stream may take; smaller data are shuffled as a whole."""

_PASS_BATCH = 256
_REPEATED = 256  # samples read twice, to see that the order repeats


@dataclass(frozen=True, eq=False)
class StreamSamples(Samples):
    """A tf.data set of (x, y), read from its source at each pass."""

    dataset: Any
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None
    labels: npt.NDArray[Any]
    lowest: float | None
    highest: float | None
    digest: str
    sample_bytes: int
    structure: str

    def batches(
        self,
        index: npt.NDArray[np.int64],
        targets: npt.NDArray[Any],
        prepare: Callable[[Any], Any],
        *,
        batch_size: int,
        shuffle: Shuffle | None,
    ) -> tf.data.Dataset:
        """See `Samples.batches`; shuffles within a buffer of `SHUFFLE_BYTES`, in an order that an epoch does not fix."""
        import tensorflow as tf

        dataset = self.dataset
        if len(index) < len(targets):
            with tf.device("CPU:0"):
                wanted = tf.constant(np.isin(np.arange(len(targets)), index))
            dataset = dataset.enumerate().filter(lambda i, _: wanted[i]).map(lambda _, sample: sample)
        if shuffle is not None:
            buffer = min(len(index), max(1, SHUFFLE_BYTES // self.sample_bytes))
            dataset = dataset.shuffle(buffer, seed=shuffle.seed, reshuffle_each_iteration=True)

        def convert(x: Any, y: Any) -> tuple[Any, Any]:
            if self.shape is not None:
                x = tf.ensure_shape(x, self.shape)
            return prepare(x), tf.reshape(tf.cast(y, targets.dtype), targets.shape[1:])

        batches = dataset.map(convert, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True).batch(batch_size)
        return batches.apply(tf.data.experimental.assert_cardinality(math.ceil(len(index) / batch_size)))


class _Leaf:
    """What the pass learns about one tensor of the samples."""

    def __init__(self, where: str, spec: Any) -> None:
        self.where = where
        self.numpy_dtype = np.dtype(spec.dtype.as_numpy_dtype)
        self.dtype = np.dtype(np.float32) if spec.dtype.is_floating else self.numpy_dtype
        self.shape: tuple[int | None, ...] | None = None
        self.lowest, self.highest, self.bad, self.largest_sample = math.inf, -math.inf, 0, 1
        self._hash = hashlib.sha256(f"{spec.dtype.name} ".encode())

    def add(self, rows: npt.NDArray[Any]) -> None:
        """Take in an array of samples (n, ...)."""
        shape = rows.shape[1:]
        if self.shape is None:
            self.shape = shape
        elif len(shape) != len(self.shape):
            raise DataError(
                f"{self.where} has samples of different shapes, {self.shape} and {shape}; give them one shape"
            )
        else:
            self.shape = tuple(a if a == b else None for a, b in zip(self.shape, shape, strict=True))
        if rows.size == 0:
            raise DataError(f"{self.where} has an empty sample (shape {shape})")
        self._hash.update(f"{shape} ".encode() * len(rows))
        self._hash.update(np.ascontiguousarray(rows).tobytes())
        self.largest_sample = max(self.largest_sample, rows.nbytes // len(rows))
        values = rows.astype(self.dtype, copy=False)
        if self.dtype.kind == "f":
            self.bad += values.size - int(np.isfinite(values).sum())
        self.lowest, self.highest = min(self.lowest, float(values.min())), max(self.highest, float(values.max()))

    def digest(self) -> str:
        """Of everything taken in."""
        return self._hash.hexdigest()


def check(name: str, part: str, dataset: tf.data.Dataset) -> StreamSamples:
    """Read a tf.data set once, check every sample and describe it.

    Args:
        name: of the data set.
        part: train, validation or test.
        dataset: finite, of single samples (x, y), in the same order whenever it is read. With random changes to the
            training samples the digest is that of one pass, and differs from run to run.

    Raises:
        DataError: batches in place of samples, an endless or unreadable data set, bad values, an order that changes.
    """
    import tensorflow as tf

    where = f"dataset {name}: the {part} set"
    x_spec, y_spec = _specs(where, dataset)
    specs = [*tf.nest.flatten(x_spec), y_spec]
    nested = not isinstance(x_spec, tf.TensorSpec)
    leaves = [_Leaf(f"dataset {name}: {'y' if spec is y_spec else 'x'}_{part}", spec) for spec in specs]
    labels: list[npt.NDArray[Any]] = []
    for rows in _rows(where, dataset, specs):
        for leaf, values in zip(leaves, rows, strict=True):
            leaf.add(values)
        labels.append(rows[-1].astype(leaves[-1].dtype))
    if not labels:
        raise DataError(f"{where} is empty; give at least one sample")
    for leaf in leaves:
        if leaf.bad:
            raise DataError(f"{leaf.where} has {leaf.bad} values that are not finite in float32; remove or mend them")
    y = leaves[-1]
    if y.shape is None or None in y.shape:
        raise DataError(
            f"{y.where} has labels of different shapes; give one class index or one row of targets a sample"
        )
    _check_order(where, dataset, specs, labels_only=part == "train")
    x = leaves[0]
    return StreamSamples(
        dataset=dataset,
        dtype=x.dtype,
        shape=None if nested else x.shape,
        labels=np.concatenate(labels),
        lowest=None if nested else x.lowest,
        highest=None if nested else x.highest,
        digest=hashlib.sha256(" ".join(leaf.digest() for leaf in leaves).encode()).hexdigest(),
        structure=str(tf.nest.map_structure(lambda spec: spec.dtype.name, x_spec)) if nested else "",
        sample_bytes=sum(leaf.largest_sample for leaf in leaves),
    )


def _specs(where: str, dataset: tf.data.Dataset) -> tuple[Any, Any]:
    import tensorflow as tf

    element = dataset.element_spec
    if not isinstance(element, tuple) or len(element) != 2:  # noqa: PLR2004
        raise DataError(f"{where} does not hold pairs (x, y); make them with dataset.map(lambda ...: (x, y))")
    x, y = element
    for spec in [*tf.nest.flatten(x), *tf.nest.flatten(y)]:
        if not isinstance(spec, tf.TensorSpec) or not (
            spec.dtype.is_floating or spec.dtype.is_integer or spec.dtype.is_bool
        ):
            raise DataError(f"{where} holds {_kind(spec)}; give dense tensors of real numbers")
    if not isinstance(y, tf.TensorSpec):
        raise DataError(f"{where} has a nested structure as labels; give one tensor y a sample")
    if _looks_batched(tf.nest.flatten(x), y):
        raise DataError(f"{where} holds batches; give single samples: drop .batch(...) from it")
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise DataError(f"{where} never ends; drop .repeat() from it, or give it a count")
    return x, y


def _kind(spec: Any) -> str:
    dtype = getattr(spec, "dtype", None)
    return type(spec).__name__ if dtype is None or type(spec).__name__ != "TensorSpec" else f"{dtype.name} tensors"


def _looks_batched(xs: list[Any], y: Any) -> bool:
    """Whether the labels have a batch axis: of unknown size, or integers as many as x has rows."""
    if not y.shape.rank:
        return False
    rows = y.shape[0]
    if rows is None:
        return True
    same = all(x.shape.rank and x.shape[0] == rows for x in xs)
    return bool(same and rows > 1 and y.shape.rank == 1 and y.dtype.is_integer)


def _rows(where: str, dataset: tf.data.Dataset, specs: list[Any]) -> Iterator[list[npt.NDArray[Any]]]:
    """The samples as lists of arrays (n, ...), many at once where their shape is known beforehand."""
    import tensorflow as tf

    alike = all(spec.shape.is_fully_defined() for spec in specs)
    try:
        for element in dataset.batch(_PASS_BATCH if alike else 1).as_numpy_iterator():
            yield tf.nest.flatten(element)
    except tf.errors.OpError as error:
        raise DataError(f"{where} cannot be read: {reason(error)}") from error


def _check_order(where: str, dataset: tf.data.Dataset, specs: list[Any], *, labels_only: bool) -> None:
    """Labels and validation samples are found by position, so the positions must hold at the next pass.

    Training samples may be augmented at random, so that only their labels are compared.
    """

    def beginning() -> str:
        digest = hashlib.sha256()
        for rows in _rows(where, dataset.take(_REPEATED), specs):
            for values in rows[-1:] if labels_only else rows:
                digest.update(np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()

    if beginning() != beginning():
        raise DataError(
            f"{where} gives other samples each time it is read; drop .shuffle(...) and random changes from it "
            "(the training batches are shuffled anyway)"
        )
