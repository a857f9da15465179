"""Training that loss scaling cannot save: warned of at the floor, ended where no step is applied any more."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import keras

from mp_hydra.errors import NoUpdatesError

if TYPE_CHECKING:
    from mp_hydra.scaled_optimizer import Counters, ScaledOptimizer

log = logging.getLogger(__name__)

_MOST_NAMED = 3


def advice(mode: str) -> str:
    """What to try where steps are skipped under this mode of loss scaling."""
    cures = ["a smaller learning rate", *(["loss_scale=dynamic"] if mode == "fixed" else [])]
    return (
        f"Try {', '.join(cures)} or precision=mixed_bfloat16, and look for values in the data that float16 cannot hold"
    )


class ScalingLimits(keras.callbacks.Callback):
    """Ends a training in which nothing is learnt, and says once that the scale has reached its floor.

    The optimizer's counters are read every `every` batches, or every `max_skipped_in_a_row` if that is less, and at the end of
    each epoch: reading waits for the device. A row of skipped steps that has ended by the next look is not seen.

    Args:
        optimizer: the model's optimizer.
        max_skipped_in_a_row: more steps skipped one after the other end the training; None for no such limit.
        every: batches between two looks.

    Attributes:
        nonfinite: path of the variable nearest to the loss whose gradient was not finite in the last skipped step that was seen.

    Raises:
        NoUpdatesError: from `fit`, for too many skipped steps or an epoch without an applied one.
    """

    def __init__(self, optimizer: ScaledOptimizer, *, max_skipped_in_a_row: int | None, every: int = 100) -> None:
        super().__init__()
        self._optimizer = optimizer
        self._limit = max_skipped_in_a_row
        self._every = every if max_skipped_in_a_row is None else min(every, max_skipped_in_a_row)
        self._next_look = self._every
        self._seen_before_epoch = self._applied_before_epoch = 0
        self._warned = False
        self._skipped = optimizer.counters().skipped if optimizer.built else 0
        self._named = 0
        self.nonfinite: str | None = None

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Remember where the epoch starts."""
        counters = self._optimizer.counters()
        self._applied_before_epoch, self._seen_before_epoch = counters.applied, counters.steps

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        """Look now and then."""
        step = self._seen_before_epoch + batch
        if step >= self._next_look:
            self._next_look = step + self._every
            self._look(self._optimizer.counters())

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Look, and end the training if the epoch applied nothing."""
        counters = self._optimizer.counters()
        self._look(counters)
        seen = counters.steps - self._seen_before_epoch
        if seen and counters.applied == self._applied_before_epoch:
            raise NoUpdatesError(
                f"none of the {seen} steps of epoch {epoch + 1} was applied: every gradient was inf or nan. "
                f"{advice(self._optimizer.mode)}"
            )

    def _look(self, counters: Counters) -> None:
        if counters.skipped > self._skipped:
            self._skipped = counters.skipped
            self._name(counters)
        if self._limit is not None and counters.skipped_in_a_row > self._limit:
            raise NoUpdatesError(
                f"{counters.skipped_in_a_row} steps in a row were skipped, more than loss_scale.max_skipped_in_a_row="
                f"{self._limit}, at a loss scale of {counters.scale_used:g}: their gradients were inf or nan. "
                f"{advice(self._optimizer.mode)}"
            )
        if not self._warned and self._optimizer.at_floor():
            self._warned = True
            log.warning(
                "the loss scale has come down to its floor, %g: %d of %d steps so far (%.1f %%) were skipped. %s",
                self._optimizer.rule.minimum,
                counters.skipped,
                counters.steps,
                100 * counters.skipped / counters.steps,
                advice(self._optimizer.mode),
            )

    def _name(self, counters: Counters) -> None:
        """Say, a few times a run, whose gradient made the last skipped step one."""
        names = self._optimizer.nonfinite_variables()
        if not names:
            return
        self.nonfinite = names[-1]
        self._named += 1
        if self._named <= _MOST_NAMED:
            log.info(
                "step %d was skipped: the gradient of %s was not finite, the one nearest to the loss of %d",
                counters.last_skipped,
                names[-1],
                len(names),
            )
