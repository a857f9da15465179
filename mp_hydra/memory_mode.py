"""`memory` in the config: which of stock, lean and recompute a run trains with, and a model made so."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from mp_hydra.activation_memory.install import LeanReport
    from mp_hydra.activation_memory.recompute import RecomputeReport

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Applied:
    """What was done to a model.

    Attributes:
        mode: "stock", "lean" or "recompute".
        lean: of `lean` and `recompute`; None for stock.
        recompute: of `recompute`; None for the others.
    """

    mode: str
    lean: LeanReport | None = None
    recompute: RecomputeReport | None = None


def resolved_mode(config: Mapping[str, Any]) -> str:
    """The mode that a resolved config comes to, its precision settled: "stock", "lean" or "recompute".

    >>> resolved_mode({"memory": {"mode": "auto"}, "precision": {"policy": "mixed_bfloat16"}})
    'lean'
    >>> resolved_mode({"memory": {"mode": "auto"}, "precision": {"policy": "float32"}})
    'stock'
    """
    asked = str((config.get("memory") or {}).get("mode", "auto"))
    if asked != "auto":
        return asked
    return "stock" if config["precision"]["policy"] == "float32" else "lean"


def apply(model: Any, config: Mapping[str, Any]) -> Applied:
    """Make a built model what the config asks for.

    Raises:
        ConfigError: for `memory.recompute` that names no layer of the model.
    """
    mode = resolved_mode(config)
    if mode == "stock":
        return Applied(mode)
    from mp_hydra.activation_memory.install import lean

    report = lean(model)
    if report.missing:
        log.warning(
            "memory=%s: this Keras has no %s: what goes through it stays as it is", mode, ", ".join(report.missing)
        )
    if mode == "lean":
        return Applied(mode, report)
    from mp_hydra.activation_memory.recompute import recompute

    parts = recompute(model, config["memory"]["recompute"])
    log.info("memory=recompute: %s", parts)
    return Applied(mode, report, parts)
