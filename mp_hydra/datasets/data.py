"""What the rest of the program sees of a data set: `Data` and its `Split`s."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import numpy.typing as npt
    import tensorflow as tf


@dataclass(frozen=True)
class Shuffle:
    """How samples are shuffled.

    Attributes:
        seed: of the orders.
        epoch: a `tf.Variable`, int64 scalar, whose value a pass takes when it begins: the order then follows from seed and
            epoch alone, whatever passes there were before. None: each pass has the next order of a sequence.
    """

    seed: int
    epoch: Any = None


class Samples(ABC):
    """The samples of one part (train, validation or test) as the builder gave them: not split, scaled or resized.

    Attributes:
        structure: describes a nested x; empty where x is one tensor.
        dtype: of x; any float type counts as float32.
        shape: of one x; a None inside is a size that differs from sample to sample. None for a nested structure.
        labels: y of every sample, as given.
        lowest: the smallest value in x; None for a nested structure.
        highest: the largest value in x; None for a nested structure.
        digest: sha256 (hex) over dtype, shape and bytes of x and y.
    """

    structure: str = ""
    dtype: np.dtype[Any]
    shape: tuple[int | None, ...] | None
    labels: npt.NDArray[Any]
    lowest: float | None
    highest: float | None
    digest: str

    @abstractmethod
    def batches(
        self,
        index: npt.NDArray[np.int64],
        targets: npt.NDArray[Any],
        prepare: Callable[[Any], Any],
        *,
        batch_size: int,
        shuffle: Shuffle | None,
    ) -> tf.data.Dataset:
        """Batches of the samples at `index`, through `prepare`, with the rows of `targets` that belong to them."""


@dataclass(frozen=True, eq=False)
class Split:
    """One of train, validation and test.

    Attributes:
        samples: the part that the split draws from; the validation split may share it with the training split.
        targets: y of every sample of the part: int64 (n,) class indices, or float32 (n, outputs) targets.
        index: int64, ascending: which samples of the part belong to the split.
        prepare: makes a sample or a batch of x into what the model receives.
    """

    samples: Samples
    targets: npt.NDArray[Any]
    index: npt.NDArray[np.int64]
    prepare: Callable[[Any], Any]

    @property
    def size(self) -> int:
        """Number of samples."""
        return len(self.index)

    def batches(self, batch_size: int, *, shuffle_seed: int | None = None, epoch: Any = None) -> tf.data.Dataset:
        """Batches (x, y) of `batch_size` samples; a smaller last batch is kept.

        x is float32, or int32 for token ids; y is int64 (batch,) class indices or float32 (batch, outputs) targets.

        Args:
            batch_size: samples in a batch.
            shuffle_seed: None for the stored order; otherwise every pass has an order of its own.
            epoch: as in `Shuffle`.
        """
        import tensorflow as tf

        shuffle = None if shuffle_seed is None else Shuffle(shuffle_seed, epoch)
        batches = self.samples.batches(self.index, self.targets, self.prepare, batch_size=batch_size, shuffle=shuffle)
        options = tf.data.Options()
        options.deterministic = True
        return batches.with_options(options).prefetch(2)

    def labels(self) -> npt.NDArray[Any]:
        """Y of every sample in the unshuffled order: int64 (size,) or float32 (size, outputs)."""
        chosen: npt.NDArray[Any] = self.targets[self.index]
        return chosen


@dataclass(frozen=True)
class Data:
    """A checked data set, ready for training.

    Attributes:
        name: the config's name for it.
        train: training samples, those of the validation split excluded.
        validation: None where the builder gave none and `validation_fraction` is 0.
        test: test samples.
        input_shape: one sample as the model receives it, after resizing; None for nested structures of a tf.data set.
        input_dtype: "float32", or "int32" for token ids; nested structures keep the types of their tensors.
        classes: None for regression.
        outputs: classes, or number of regression targets.
        vocabulary: number of token ids; None where x are not token ids.
        digest: 32 hex characters of a sha256 over dtype, shape and bytes of the data as the builder gave it, so neither
            scale nor split seed change it.
        source: where the data came from.
        peak_input: largest |x| that a model receives, after scaling; None for token ids and nested structures.
    """

    name: str
    train: Split
    validation: Split | None
    test: Split
    input_shape: tuple[int, ...] | None
    input_dtype: str
    classes: int | None
    outputs: int
    vocabulary: int | None
    digest: str
    source: str
    peak_input: float | None

    def profile(self) -> str:
        """Sizes and shapes as JSON, for a record of the run."""
        sizes = {
            "train": self.train.size,
            "validation": self.validation.size if self.validation else 0,
            "test": self.test.size,
        }
        return json.dumps({**sizes, "classes": self.classes, "input_shape": self.input_shape})


def in_order(index: npt.NDArray[np.int64], shuffle: Shuffle | None) -> tf.data.Dataset:
    """A data set of sample indices, one a sample; in a new order at each pass where they are shuffled.

    Each pass draws one permutation: a shuffle buffer would take 256 bytes for every index, the least that TensorFlow's
    allocator gives out, which on a CPU shows in the memory of the training.
    """
    import tensorflow as tf

    with tf.device("CPU:0"):
        if shuffle is None:
            return tf.data.Dataset.from_tensor_slices(index)
        seed, epoch = shuffle.seed, shuffle.epoch

        straight = tf.autograph.experimental.do_not_convert  # to look for branches costs every run 50 ms

        def shuffled(pair: Any) -> tf.data.Dataset:
            return tf.data.Dataset.from_tensor_slices(tf.random.experimental.stateless_shuffle(index, pair))

        if epoch is None:
            pairs = tf.data.Dataset.random(seed=seed, rerandomize_each_iteration=True).batch(2).take(1)
        else:
            pair = straight(lambda s: tf.stack([s, epoch.read_value()]))
            pairs = tf.data.Dataset.from_tensors(tf.constant(seed, "int64")).map(pair)
        return pairs.flat_map(straight(shuffled)).apply(tf.data.experimental.assert_cardinality(len(index)))
