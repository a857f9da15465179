"""What dry runs found: the memory of each batch size, and the line through it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.forecast.line import Line

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence


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
