"""A few training steps of the configured model, timed under one precision in a process of its own.

    measure(config, directory=Path.cwd())  # config: resolved, with the policy to time

The process is fresh, so that nothing of the timing is left in the one that asked: no traced function, no variable, no random
state, no allocated memory. It trains as a run does, through `mp_hydra.fitting`, but without the user's callbacks and a record.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

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
    with tempfile.TemporaryDirectory(prefix="mp_hydra_timing_") as folder:
        request, answer = Path(folder) / "request.pickle", Path(folder) / "answer.json"
        request.write_bytes(pickle.dumps((dict(config), str(directory))))
        done = subprocess.run(
            [sys.executable, "-m", "mp_hydra.step_timing", str(request), str(answer)],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path)},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            check=False,
        )
        if answer.is_file():
            return Timing(**json.loads(answer.read_text(encoding="utf-8")))
    return Timing(None, problem=_death(done.returncode, done.stderr.decode(errors="replace")))


def _death(code: int, said: str) -> str:
    if code < 0:
        out_of_memory = ", as by the kernel when memory runs out" if -code == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{out_of_memory}"
    lines = [line for line in said.splitlines() if line.strip()]
    return f"its process ended with {code}: {lines[-1].strip() if lines else 'it said nothing'}"


def main(request: Path, answer: Path) -> None:
    """Answer a request of `measure`; an exception becomes the reason why there is no figure."""
    config, directory = pickle.loads(request.read_bytes())  # noqa: S301 - written by `measure`
    try:
        timing = timed(config, directory=Path(directory))
    except Exception as error:  # noqa: BLE001 - whatever it is, the run itself will meet it and report it in full
        timing = Timing(None, problem=_one_line(error))
    answer.write_text(json.dumps(asdict(timing)), encoding="utf-8")


def _one_line(error: Exception) -> str:
    from mp_hydra.errors import UserError

    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:500]
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"


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
    main(*map(Path, sys.argv[1:]))
