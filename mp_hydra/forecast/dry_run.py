"""Training steps at a few batch sizes in a process of its own, and the memory that each of them took.

    measured = measure(config, Goal(batch_sizes=(256,)), directory=Path.cwd())  # config: resolved, its precision settled

The steps are those of a run: the same preparation, optimizer, losses and `fit`, without the user's callbacks. The batches lie
ready in memory, so that data set and input pipeline do not count; samples are repeated where there are fewer than a batch needs.
"""

from __future__ import annotations

import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import UserError
from mp_hydra.forecast.ladder import FIRST, Goal, following
from mp_hydra.forecast.points import Kept, Measured, Point, line_through
from mp_hydra.forecast.trial import STEPS, Trial
from mp_hydra.fresh_process import NoAnswerError, ask, serve
from mp_hydra.host_memory import available_bytes
from mp_hydra.outcome import MemoryExhaustedError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_MODULE = "mp_hydra.forecast.dry_run"


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
    config = {**config, "batch_size": 1}  # the preparation refuses a data set that is smaller than a batch
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
        trial = Trial(prepared.model, data, allocator, on_host=on_host)
        with float32_losses(prepared.model), finite_steps(prepared.model, prepared.optimizer):
            return _climb(trial, replace(goal, samples=data.train.size), device_bytes, say)


def _limit(device: str) -> int | None:
    from mp_hydra import hardware

    found = (entry["memory_limit_bytes"] for entry in hardware.devices() if entry["device"] == device)
    return next(found, None)


def _climb(trial: Trial, goal: Goal, device_bytes: int | None, say: Callable[[Any], None]) -> dict[str, Any]:
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


if __name__ == "__main__":
    serve(answered)
