"""The rule of dynamic loss scaling as a pure function.

>>> rule = Rule(growth_interval=2, minimum=1.0, maximum=8.0)
>>> state = State(scale=4.0, finite_in_a_row=0)
>>> for finite in (True, True, True, False):
...     state = next_state(rule, state, finite)
...     print(float(state.scale), int(state.finite_in_a_row))
4.0 1
8.0 0
8.0 1
4.0 0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


@dataclass(frozen=True)
class Rule:
    """The numbers of the rule.

    Attributes:
        growth_interval: finite steps in a row after which the scale grows.
        growth_factor: what it is multiplied by then; above 1.
        backoff_factor: what it is multiplied by after a non-finite step; between 0 and 1.
        minimum: the floor; above 0, since a scale of 0 turns every gradient into 0/0.
        maximum: the ceiling; finite, since a scale of inf never comes back.

    Raises:
        ValueError: for a number out of these ranges.
    """

    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    minimum: float = 1.0
    maximum: float = 2.0**32

    def __post_init__(self) -> None:
        """Check the numbers."""
        right = {
            "growth_interval": self.growth_interval >= 1,
            "growth_factor": 1 < self.growth_factor < math.inf,
            "backoff_factor": 0 < self.backoff_factor < 1,
            "minimum": 0 < self.minimum <= self.maximum,
            "maximum": self.maximum < math.inf,
        }
        for name, holds in right.items():
            if not holds:
                raise ValueError(f"{name}={getattr(self, name)} is out of range; see mp_hydra.loss_scale.Rule")


class State(NamedTuple):
    """The scale of the next step, and how many finite steps in a row led to it."""

    scale: Any
    finite_in_a_row: Any


def next_state(rule: Rule, state: State, finite: Any, *, xp: Any = np) -> State:
    """The state after a step.

        if the gradients were finite:
            finite_in_a_row += 1
            if finite_in_a_row >= growth_interval:
                scale = min(scale * growth_factor, maximum); finite_in_a_row = 0
        else:
            scale = max(scale * backoff_factor, minimum); finite_in_a_row = 0

    Source: Micikevicius et al., "Mixed Precision Training", ICLR 2018, section 3.2, with the growth interval of 2000
    that the frameworks settled on; floor and ceiling are added.

    Args:
        rule: the numbers.
        state: scale (float) and count (int) before the step: Python numbers, arrays or tensors.
        finite: whether the step's unscaled gradients were all finite; bool or boolean tensor.
        xp: the namespace of `where`, `minimum` and `maximum`: numpy, or `keras.ops` for tensors.
    """
    counted = state.finite_in_a_row + 1
    grows = counted >= rule.growth_interval
    grown = xp.minimum(state.scale * rule.growth_factor, rule.maximum)
    reduced = xp.maximum(state.scale * rule.backoff_factor, rule.minimum)
    return State(
        scale=xp.where(finite, xp.where(grows, grown, state.scale), reduced),
        finite_in_a_row=xp.where(finite, xp.where(grows, 0, counted), 0),
    )


def effective_mode(mode: str, *, float16: bool) -> str:
    """What "auto" comes to: dynamic scaling exactly when some layer computes in float16; other modes are themselves."""
    if mode != "auto":
        return mode
    return "dynamic" if float16 else "none"
