"""`precision=auto`: from the request to a named precision, with the reason.

settled = settle(config, directory=Path.cwd())
settled.name      # "mixed_bfloat16"
settled.reason    # "AMD EPYC 9B14: oneDNN computes bfloat16 with AVX512_BF16"
settled.config    # with precision.policy, precision.tf32 and precision.resolved filled in

A run records `settled.config`. Given that config, or `precision=auto precision.resolved=mixed_bfloat16`, or
`precision=mixed_bfloat16`, another run is the same on any machine.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from mp_hydra import step_timing
from mp_hydra.capabilities import Choice, candidates, choose, training_devices
from mp_hydra.checks import problems
from mp_hydra.consistency import AUTO_SETTINGS
from mp_hydra.precision import resolved_name

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from mp_hydra.capabilities import Device
    from mp_hydra.step_timing import Timing

log = logging.getLogger(__name__)

MARGIN = 0.05  # the share of the time of a step that another precision has to save
FILE = "auto_precision.json"


@dataclass(frozen=True)
class Settled:
    """What a run computes in.

    Attributes:
        config: the resolved config, with the precision settled.
        requested: the option that was asked for.
        name: what it came to: "fp32", "tf32", "mixed_float16" or "mixed_bfloat16", or the user's own name.
        reason: why it is not what was asked for; None where it is.
        timings: what was measured, by precision.
    """

    config: Mapping[str, Any]
    requested: str
    name: str
    reason: str | None = None
    timings: Mapping[str, Timing] = field(default_factory=dict)

    def tags(self) -> dict[str, str]:
        """Request, result and reason, as a run records them."""
        tags = {"mp_hydra.precision": self.requested, "mp_hydra.precision_resolved": self.name}
        return tags if self.reason is None else {**tags, "mp_hydra.precision_reason": self.reason}

    def save(self, directory: Path) -> None:
        """Write auto_precision.json, if the precision was asked for as auto."""
        if self.requested != "auto":
            return
        record = {
            "requested": self.requested,
            "by": self.config["precision"].get("by"),
            "resolved": self.name,
            "reason": self.reason,
            "margin": MARGIN if self.timings else None,
            "timings": {name: asdict(timing) for name, timing in self.timings.items()},
        }
        (directory / FILE).write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def settle(
    config: Mapping[str, Any],
    *,
    directory: Path,
    devices: Callable[[], list[Device]] | None = None,
    measure: Callable[..., Timing] = step_timing.measure,
) -> Settled:
    """Settle the precision of a resolved config, and say in the log what it came to where that is not its name.

    Asking for the devices initialises TensorFlow's: call `mp_hydra.startup.start_tensorflow` first.

    Args:
        config: a resolved config.
        directory: what a relative `resume` refers to.
        devices: gives the devices of this machine; None for those that TensorFlow sees.
        measure: times one precision, as `mp_hydra.step_timing.measure`.

    Raises:
        ConfigError: if another part of the config does not go with what auto came to.
    """
    from mp_hydra import hardware

    asked = config["precision"]
    if asked["name"] != "auto":
        name, remark = resolved_name(asked["name"], hardware.devices())
        if remark:
            log.warning(remark)
        return Settled(config, asked["name"], name, remark)
    timings: dict[str, Timing] = {}
    if asked.get("resolved") is not None:
        choice = Choice(asked["resolved"], "fixed by precision.resolved")
    elif asked.get("by") == "measurement":
        choice = _measured(config, (devices or hardware.rated_devices)(), directory, measure, timings)
    else:
        choice = choose((devices or hardware.rated_devices)())
    log.info("precision=auto comes to %s: %s", choice.name, choice.reason)
    return Settled(pinned(config, choice.name), "auto", choice.name, choice.reason, timings)


def pinned(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config with what `precision=auto` came to.

    Raises:
        ConfigError: if another part of the config does not go with it.
    """
    policy, tf32 = AUTO_SETTINGS[name]
    precision = {**config["precision"], "policy": policy, "tf32": tf32, "resolved": name}
    filled = {**config, "precision": precision}
    for problem in problems(filled):
        raise problem
    return filled


def _measured(
    config: Mapping[str, Any],
    devices: list[Device],
    directory: Path,
    measure: Callable[..., Timing],
    timings: dict[str, Timing],
) -> Choice:
    names = candidates(devices)
    if len(names) == 1:
        device = training_devices(devices)[0].shown
        return Choice(
            "fp32", f"nothing was measured, as {device} is slow in every 16-bit format; {choose(devices).reason}"
        )
    log.info("precision=auto: timing a few steps under %s", ", ".join(names))
    for name in names:
        timings[name] = measure(_timeable(config, name), directory=directory)
        if timings[name].problem:
            log.warning("precision=auto: %s is out: %s", name, timings[name].problem)
    return fastest(timings)


def _timeable(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The config under one precision; scaling that was asked for whatever comes does not keep fp32 from being timed."""
    if name == "fp32" and config["loss_scale"]["mode"] in ("dynamic", "fixed"):
        config = {**config, "loss_scale": {**config["loss_scale"], "mode": "none", "value": None}}
    return pinned(config, name)


def fastest(timings: Mapping[str, Timing], margin: float = MARGIN) -> Choice:
    """The precision whose steps take least time; fp32 unless another one saves `margin` of its time.

    float16 has to beat bfloat16 by the margin, too, since it needs loss scaling. A precision that could not be timed is out;
    where none could, it is fp32, and the run itself will meet the error.

    >>> from mp_hydra.step_timing import Timing
    >>> fastest({"fp32": Timing(10.0), "mixed_bfloat16": Timing(9.6)}).name
    'fp32'
    """
    times = {name: timing.step_ms for name, timing in timings.items() if timing.step_ms is not None}
    chosen: str | None = None
    for name in ("fp32", "mixed_bfloat16", "mixed_float16"):
        if name in times and (chosen is None or times[name] < (1 - margin) * times[chosen]):
            chosen = name
    out = [
        f"{name} could not be timed ({timing.problem})" for name, timing in timings.items() if timing.step_ms is None
    ]
    figures = [f"{name} {time:.3g} ms" for name, time in times.items()]
    said = "; ".join([f"measured, a training step: {', '.join(figures)}"] * bool(figures) + out)
    if chosen is None:
        return Choice("fp32", said)
    if chosen == "fp32" and len(times) > 1:
        said += f"; no other saves {margin:.0%} of fp32's time"
    return Choice(chosen, said)
