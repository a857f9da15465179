"""Training steps at a few batch sizes in a process of its own, and the memory that each of them took.

    measured = measure(config, Goal(batch_sizes=(256,)), directory=Path.cwd())  # config: resolved, its precision settled

The steps are those of a run: the same preparation, optimizer, losses and `fit`, without the user's callbacks. The batches lie
ready in memory, so that data set and input pipeline do not count; samples are repeated where there are fewer than a batch needs.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import UserError
from mp_hydra.forecast.ladder import FIRST, Goal, following
from mp_hydra.forecast.line import Line
from mp_hydra.fresh_process import NoAnswerError, ask, serve
from mp_hydra.host_memory import available_bytes
from mp_hydra.outcome import MemoryExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mp_hydra.datasets import Data
    from mp_hydra.telemetry.memory import AllocatorMemory

STEPS, EVALUATION_STEPS = 3, 2
_MODULE = "mp_hydra.forecast.dry_run"


@dataclass(frozen=True)
class Point:
    """What one batch size took.

    Attributes:
        batch_size: samples in a batch.
        step_bytes: of each training step, the allocator's peak less what was in use before the step.
        evaluation_bytes: the same of each evaluation step.
        state_bytes: variables, optimizer state, counters and metrics: elements times bytes per element.
        gradient_bytes: a gradient for each trainable variable.
        input_bytes: the batch, targets included.
        input_apart: whether the batch was there before the step, as on a CPU, and is not part of `step_bytes`.
        seconds: what the last training step took.
    """

    batch_size: int
    step_bytes: tuple[int, ...]
    evaluation_bytes: tuple[int, ...]
    state_bytes: int
    gradient_bytes: int
    input_bytes: int
    input_apart: bool
    seconds: float

    @property
    def peak_bytes(self) -> int:
        """The most that the model held at one time, in training or evaluation, without the data set."""
        apart = self.input_bytes if self.input_apart else 0
        return self.state_bytes + apart + max(*self.step_bytes, *self.evaluation_bytes)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Point:
        """From what `asdict` gave, after JSON made lists of its tuples."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
        return cls(**fields)


@dataclass(frozen=True)
class Kept:
    """What a traced backward pass reads of the forward pass.

    Attributes:
        sample_bytes: of each sample.
        fixed_bytes: whatever the batch, such as weights in 16 bits.
    """

    sample_bytes: int = 0
    fixed_bytes: int = 0


@dataclass(frozen=True)
class Measured:
    """The dry runs of one config.

    Attributes:
        points: rising by batch size.
        device: where they were made, "GPU:0" or "CPU:0".
        device_bytes: memory that was available there; None where that cannot be known.
        samples: training samples of the data set.
        data_bytes: what the data set takes in the same memory: 0 on a GPU, as it stays in main memory.
        stopped: why there are no larger dry runs, although the goal asked for them; None where it did not.
        kept: what the backward pass reads of the forward pass; nothing where no trace was needed, or told it.
    """

    points: tuple[Point, ...]
    device: str
    device_bytes: int | None
    samples: int
    data_bytes: int
    stopped: str | None = None
    kept: Kept = Kept()

    @property
    def line(self) -> Line:
        """Through the peaks."""
        return line_through(self.points, self.kept)


@dataclass(frozen=True)
class Beside:
    """What lies in the same memory as the model while it is trained.

    Attributes:
        fixed_bytes: whatever the batch size, such as the data set.
        batches: of the input, beside the one that is being trained on.
    """

    fixed_bytes: int = 0
    batches: int = 0

    def bytes_at(self, point: Point) -> int:
        """At the batch size of a point."""
        return self.fixed_bytes + self.batches * point.input_bytes


def line_through(points: Sequence[Point], kept: Kept, beside: Beside = Beside()) -> Line:
    """The line through the peaks of at least one point.

    Args:
        points: rising by batch size.
        kept: as in `Measured`.
        beside: what to add to each peak.
    """
    peaks = tuple((point.batch_size, point.peak_bytes + beside.bytes_at(point)) for point in points)
    state = points[0].state_bytes + beside.fixed_bytes
    return Line(peaks, state, points[0].gradient_bytes, kept.sample_bytes, kept.fixed_bytes)


def measure(
    config: Mapping[str, Any], goal: Goal, *, directory: Path, heard: Callable[[Point], None] | None = None
) -> Measured:
    """Make the dry runs that a goal needs.

    Args:
        config: a resolved config; its precision must be settled, its batch size does not matter.
        goal: what they are for.
        directory: what a relative `resume` refers to.
        heard: receives each point as soon as it is there.

    Raises:
        MemoryExhaustedError: if memory did not suffice for even one point.
        UserError: if there is none for another reason, such as a model that cannot be trained.
    """
    facts: dict[str, Any] = {}
    points: list[Point] = []

    def listen(message: Mapping[str, Any]) -> None:
        if "kept" in message:
            facts["kept"] = Kept(**message["kept"])
            return
        if "point" not in message:
            facts.update(message)
            return
        points.append(Point.of(message["point"]))
        if heard is not None:
            heard(points[-1])

    try:
        answer = ask(_MODULE, (dict(config), str(directory), goal), heard=listen)
        stopped, exhausted = answer["stopped"], answer["exhausted"]
    except NoAnswerError as error:
        stopped, exhausted = str(error), error.killed
    if not points:
        kind = MemoryExhaustedError if exhausted else UserError
        raise kind(f"precision={config['precision']['name']}: {stopped}")
    return Measured(tuple(points), **facts, stopped=stopped)


def answered(request: tuple[Mapping[str, Any], str, Goal], say: Callable[[Any], None]) -> dict[str, Any]:
    """In the fresh process: say the facts, then each point; the answer is why there are no more."""
    import keras

    from mp_hydra import hardware
    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.float32_losses import float32_losses
    from mp_hydra.precision import scoped_policy
    from mp_hydra.preparation import load_data, prepare
    from mp_hydra.startup import start_tensorflow
    from mp_hydra.telemetry.memory import AllocatorMemory

    config, directory, goal = request
    config = {
        **config,
        "batch_size": 1,
    }  # so that a data set smaller than a batch is none of the preparation's business
    start_tensorflow()
    device = hardware.training_device()
    allocator = AllocatorMemory(device)
    precision = config["precision"]
    with scoped_policy(precision["policy"], tf32=precision["tf32"]) as scope:
        keras.utils.set_random_seed(config["seed"])
        empty = allocator.current_bytes()
        if empty is None:
            raise UserError(f"there is nothing to measure with: {allocator.unavailable}")
        data = load_data(config)
        on_host = device.startswith("CPU")
        device_bytes = available_bytes() if on_host else _limit(device)
        data_bytes = (allocator.current_bytes() or 0) - empty if on_host else 0
        say({"device": device, "device_bytes": device_bytes, "samples": data.train.size, "data_bytes": data_bytes})
        prepared = prepare(config, data, scope, directory=Path(directory))
        trial = _Trial(prepared.model, data, allocator, on_host=on_host)
        with float32_losses(prepared.model), finite_steps(prepared.model, prepared.optimizer):
            return _climb(trial, replace(goal, samples=data.train.size), device_bytes, say)


def _limit(device: str) -> int | None:
    from mp_hydra import hardware

    found = (entry["memory_limit_bytes"] for entry in hardware.devices() if entry["device"] == device)
    return next(found, None)


def _climb(trial: _Trial, goal: Goal, device_bytes: int | None, say: Callable[[Any], None]) -> dict[str, Any]:
    """Dry-run one batch size after the other; why it stopped before the goal was reached, and whether for want of memory."""
    import tensorflow as tf

    points: list[Point] = []
    kept: Kept | None = None
    began = time.perf_counter()
    spent_first = 0.0
    while True:
        line = line_through(points, kept or Kept()) if points else None
        if line is not None and kept is None and len(points) >= len(FIRST) and not line.settled:
            kept = trial.kept()
            say({"kept": asdict(kept)})
            continue
        step = following(
            goal,
            line,
            available_bytes=device_bytes,
            seconds_left=goal.seconds - (time.perf_counter() - began - spent_first),
            seconds_needed=2 * (STEPS + 1) * points[-1].seconds if points else 0.0,
        )
        if step.batch_size is None:
            return {"stopped": step.reason, "exhausted": False}
        try:
            points.append(trial.run(step.batch_size))
        except (tf.errors.ResourceExhaustedError, MemoryError) as error:
            said = str(error).strip().splitlines() or ["it said no more"]
            reason = f"out of memory at a batch of {step.batch_size}: {said[0][:300]}"
            return {"stopped": reason, "exhausted": True}
        say({"point": asdict(points[-1])})
        if goal.exactly or step.planned:
            spent_first = time.perf_counter() - began


class _Trial:
    """A model that is trained for some steps on batches of a given size."""

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


if __name__ == "__main__":
    serve(answered)
