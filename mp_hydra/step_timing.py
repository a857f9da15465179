"""A few training steps of the configured model, timed under one precision in a process of its own.

    measure(config, directory=Path.cwd())  # config: resolved, with the policy to time

The process is fresh, so that nothing of the timing is left in the one that asked: no traced function, no variable, no random
state, no allocated memory. It trains as a run does, through `mp_hydra.fitting`, but without the user's callbacks and a record.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.fresh_process import NoAnswerError, ask, serve

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

STEPS, SECONDS, LIMIT = 20, 2.0, 30.0
WARM_UP = 4  # executions that `StepClock` leaves out: the first one, and its warm-up
LEAST = WARM_UP + 2
_ENDLESS = 10**6  # epochs, of a data set that may have a single batch; the callback stops the training


@dataclass(frozen=True)
class Timing:
    """Steps under one precision.

    Attributes:
        step_ms: median milliseconds of a steady training step; None where it could not be measured.
        steps: steady steps that were timed.
        problem: why there is no figure; None where there is one.
    """

    step_ms: float | None
    steps: int = 0
    problem: str | None = None


def measure(config: Mapping[str, Any], *, directory: Path) -> Timing:
    """Time steps of the model that a resolved config describes; its precision must be settled.

    Args:
        config: a resolved config.
        directory: what a relative `resume` refers to.
    """
    try:
        return Timing(**ask("mp_hydra.step_timing", (dict(config), str(directory))))
    except NoAnswerError as error:  # whatever it is, the run itself will meet it and report it in full
        return Timing(None, problem=str(error))


def answered(request: tuple[Mapping[str, Any], str], _say: Callable[[Any], None]) -> dict[str, Any]:
    """The answer to a request of `measure`, in the fresh process."""
    config, directory = request
    return asdict(timed(config, directory=Path(directory)))


def timed(config: Mapping[str, Any], *, directory: Path) -> Timing:
    """Time steps in this process."""
    import keras

    from mp_hydra.fitting import fit
    from mp_hydra.float32_losses import float32_losses
    from mp_hydra.precision import scoped_policy
    from mp_hydra.preparation import load_data, prepare
    from mp_hydra.startup import start_tensorflow

    start_tensorflow()
    precision = config["precision"]
    config = {
        **config,
        "epochs": _ENDLESS,
        "objective": "time/step_ms",
        "log_every_batches": 0,
        "callbacks": {"stop": {"_target_": "mp_hydra.step_timing.stopping"}},
    }
    with scoped_policy(precision["policy"], tf32=precision["tf32"]) as scope:
        keras.utils.set_random_seed(config["seed"])
        data = replace(load_data(config), validation=None)
        prepared = prepare(config, data, scope, directory=directory)
        with float32_losses(prepared.model):
            fitted = fit(config, prepared, lambda *_, **__: None)
    step_ms = fitted.metrics.get("time/step_ms")
    return Timing(step_ms, len(fitted.step_ms), fitted.absent.get("time/step_ms") if step_ms is None else None)


def stopping() -> Any:
    """A Keras callback that ends the training once there are enough steps: `STEPS` of them and `SECONDS`, or `LIMIT` seconds."""
    import keras

    class Stopping(keras.callbacks.Callback):
        """Counts executions; a callback without `on_train_batch_end` lets the device run on."""

        def __init__(self) -> None:
            super().__init__()
            self.begun = 0
            self.since = 0.0

        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            """Stop at this one, if it is enough."""
            self.begun += 1
            if self.begun <= WARM_UP:
                self.since = time.perf_counter()
            self.model.stop_training = enough(self.begun, time.perf_counter() - self.since)

    return Stopping()


def enough(begun: int, seconds: float) -> bool:
    """Whether the execution that begins is the last one.

    >>> [enough(begun, seconds) for begun, seconds in ((30, 1.9), (24, 2.0), (8, 31.0), (5, 31.0))]
    [False, True, True, False]
    """
    return begun >= LEAST and ((begun >= WARM_UP + STEPS and seconds >= SECONDS) or seconds >= LIMIT)


if __name__ == "__main__":
    serve(answered)
