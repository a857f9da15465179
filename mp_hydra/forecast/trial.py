"""A few real steps at one batch size: of training and of evaluation, measured one by one."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from mp_hydra.forecast.ladder import FIRST
from mp_hydra.forecast.points import Kept, Point

if TYPE_CHECKING:
    from mp_hydra.datasets import Data
    from mp_hydra.telemetry.memory import AllocatorMemory

STEPS, EVALUATION_STEPS = 3, 2


class Trial:
    """A model that is trained for some steps on batches of a given size.

    Args:
        model: compiled.
        data: whose training samples the batches are made of.
        allocator: counts the memory that the model is trained in.
        on_host: whether that is main memory, where a batch is before its step.
    """

    def __init__(self, model: Any, data: Data, allocator: AllocatorMemory, *, on_host: bool) -> None:
        from mp_hydra.telemetry.memory import variables_bytes

        self._model, self._data, self._allocator, self._on_host = model, data, allocator, on_host
        self._state = variables_bytes([*model.variables, *model.optimizer.variables, *model.metrics_variables])
        self._gradients = variables_bytes(model.trainable_variables)
        self._together = max(int(model.steps_per_execution), 1)  # so many batches are there at a time

    def kept(self) -> Kept:
        """What a traced backward pass reads of the forward pass; nothing where a trace does not tell.

        XLA chooses itself what it keeps, and recomputation keeps what no trace can tell from the rest.
        """
        from mp_hydra.activation_memory.recompute import recomputes
        from mp_hydra.audit.tracing import UntraceableError, trace

        if self._model.jit_compile or recomputes(self._model):
            return Kept()
        few, many = FIRST[:2]
        try:
            less, more = (trace(self._model, _batch(self._data, n)[0], n).total().kept_bytes for n in (few, many))
        except UntraceableError:
            return Kept()
        each = (more - less) // (many - few)
        return Kept(each, less - few * each)

    def run(self, size: int) -> Point:
        """Train and evaluate on one batch, several times."""
        import keras

        batch = _batch(self._data, size)
        training, evaluation = _meter(self._allocator), _meter(self._allocator)
        for method, steps, meter in (
            (self._model.fit, STEPS, training),
            (self._model.evaluate, EVALUATION_STEPS, evaluation),
        ):
            method(_stream(batch, steps * self._together), verbose=0, callbacks=[meter])
        return Point(
            size,
            tuple(training.peaks),
            tuple(evaluation.peaks),
            self._state,
            self._gradients,
            self._together * sum(part.shape.num_elements() * part.dtype.size for part in keras.tree.flatten(batch)),
            self._on_host,
            training.seconds,
        )


def _batch(data: Data, size: int) -> Any:
    """A batch (x, y) of training samples in main memory, the samples repeated where there are fewer."""
    import keras
    import numpy as np
    import tensorflow as tf

    with tf.device("CPU:0"):
        some = next(iter(data.train.batches(min(size, data.train.size))))
        rows = np.resize(np.arange(len(some[1])), size)
        return keras.tree.map_structure(lambda part: tf.gather(part, rows), some)


def _stream(batch: Any, steps: int) -> Any:
    """The batch, `steps` times.

    Joined with a stream of empty batches that ends at once, its batch axis has no size of its own: as in a run, one traced step
    serves all batch sizes.
    """
    import keras
    import tensorflow as tf

    empty = keras.tree.map_structure(lambda part: part[:0], batch)
    whole = tf.data.Dataset.from_tensors(batch).repeat(steps)
    return whole.concatenate(tf.data.Dataset.from_tensors(empty).take(0))


def _meter(allocator: AllocatorMemory) -> Any:
    """A Keras callback that reads the allocator's peak of every execution; unlike a run's it waits for each one to end."""
    import keras

    class Meter(keras.callbacks.Callback):
        def __init__(self) -> None:
            super().__init__()
            self.peaks: list[int] = []
            self.seconds = 0.0
            self._before = 0
            self._since = 0.0

        def _begin(self) -> None:
            allocator.reset()
            self._before = allocator.current_bytes() or 0
            self._since = time.perf_counter()

        def _end(self) -> None:
            self.seconds = time.perf_counter() - self._since
            self.peaks.append((allocator.peak_bytes() or 0) - self._before)

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._begin()

        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self._end()

        def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
            self._begin()

        def on_test_batch_end(self, batch: int, logs: Any = None) -> None:
            self._end()

    return Meter()
