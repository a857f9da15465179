"""The command: what needs no TensorFlow is answered at once, the rest when it has been imported."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING

from mp_hydra.capabilities import training_devices
from mp_hydra.doctor import judge, show
from mp_hydra.doctor.facts import ask_tensorflow, gather

if TYPE_CHECKING:
    from rich.console import Console

    from mp_hydra.doctor.facts import Facts
    from mp_hydra.doctor.measure import Measured


def examine(console: Console, *, quick: bool, measure: bool, as_json: bool, uri: str | None) -> int:
    """Examine this machine and print the answer.

    Args:
        console: where it goes.
        quick: leave TensorFlow alone: what is installed and what the driver says, in a fraction of a second.
        measure: time operations, too.
        as_json: print JSON instead of tables.
        uri: the MLflow store; None for that of a run.

    Returns:
        The exit code: 1 if a GPU that is there cannot be used, else 0.
    """
    facts = gather(uri=uri)
    if not as_json:
        show.machine(facts, console)
    measured: list[Measured] = []
    if not quick:
        with console.status("importing TensorFlow") if not as_json else nullcontext():
            facts = replace(facts, tensorflow=ask_tensorflow())
            if measure:
                measured = _measured(facts)
    if as_json:
        console.file.write(json.dumps(show.as_json(facts, measured), indent=2) + "\n")
    else:
        show.verdicts(facts, measured, console)
    return judge.exit_code(judge.findings(facts))


def _measured(facts: Facts) -> list[Measured]:
    if facts.tensorflow is None or facts.tensorflow.problem:
        return []
    from mp_hydra.doctor.measure import measure
    from mp_hydra.startup import _stderr_kept, start_tensorflow

    device = training_devices(judge.devices(facts))[0]
    capability = device.compute_capability
    start_tensorflow()  # without it TensorFlow takes all of a GPU's memory
    with _stderr_kept():  # TensorFlow says which kernels it falls back from
        return measure(
            "GPU:0" if device.kind == "GPU" else "CPU:0", tf32=capability is not None and capability >= (8, 0)
        )
