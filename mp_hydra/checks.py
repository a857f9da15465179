"""What the values of a config may be, key by key, as pure functions over plain containers.

>>> problems({"batch_size": 0, "epochs": 1, "seed": 0})[0].args[0]
'batch_size=0: give an integer of at least 1, or max'
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import Any

from mp_hydra.check_kinds import (
    BOOLEAN,
    Check,
    Integer,
    Number,
    Rate,
    dtypes_by_pattern,
    if_text,
    keras_objects,
    mapping,
    one_of,
    patterns,
    size,
    text,
)
from mp_hydra.consistency import AUTO_BY, AUTO_SETTINGS, inconsistencies
from mp_hydra.dotted_keys import ABSENT, find, leaves
from mp_hydra.errors import ConfigError

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
LOSS_SCALE_MODES = ("auto", "dynamic", "fixed", "none")
MEMORY_MODES = ("auto", "stock", "lean", "recompute")
TARGET_CURE = "give a dotted path such as my_module.my_function"
_GROUP_CURE = "choose an option of the group; --help lists them"

# Those that a class of Keras or a function of ours reads; the same key of a user's own target may mean something else.
_OURS = ("keras.", "mp_hydra.")


def problems(config: Mapping[str, Any]) -> list[ConfigError]:
    """Every value of a resolved config that cannot be used; absent keys are not judged."""
    found = [
        ConfigError(key, value, "give a finite number")
        for key, value in leaves(config)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    broken = {error.key for error in found}
    for key, check in _CHECKS.items():
        value = find(config, key)
        if value is ABSENT or key in broken or not _ours(config, key):
            continue
        problem = check(value)
        if problem:
            found.append(ConfigError(key, value, problem))
    found.extend(_wrong_nodes(config))
    return found or inconsistencies(config)


def with_floats(config: Mapping[str, Any]) -> dict[str, Any]:
    """A copy in which `1` is `1.0` wherever a number need not be an integer: Keras rejects `learning_rate: 1`.

    >>> with_floats({"epochs": 1, "optimizer": {"learning_rate": 1}})
    {'epochs': 1, 'optimizer': {'learning_rate': 1.0}}
    """

    def copied(node: Mapping[str, Any], prefix: str) -> dict[str, Any]:
        return {key: converted(value, f"{prefix}{key}") for key, value in node.items()}

    def converted(value: Any, key: str) -> Any:
        if isinstance(value, Mapping):
            return copied(value, f"{key}.")
        whole = isinstance(value, int) and not isinstance(value, bool)
        return float(value) if whole and isinstance(_CHECKS.get(key), Number) and _ours(config, key) else value

    return copied(config, "")


def suggestion(word: str, known: Iterable[str]) -> str:
    """A hint at the known words that look like `word`, or the known words where none does.

    >>> suggestion("precison", ["precision", "model"])
    'did you mean precision?'
    >>> suggestion("x", ["a", "b"])
    'known here: a, b'
    """
    known = sorted(known)
    # difflib may take a wrong run of letters first, and then not see that one is missing.
    lacking = [name for name in known if word in {name[:i] + name[i + 1 :] for i in range(len(name))}]
    close = list(dict.fromkeys([*lacking, *difflib.get_close_matches(word, known, n=2)]))[:2]
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known here: {', '.join(known) or 'none'}"


def advice(key: str, value: Any) -> str | None:
    """What would be right at a key whose value is of a wrong type; None where nothing is known about it.

    >>> advice("batch_size", "2**15")
    "give an integer of at least 1, or max; write it as a plain number, not as the text '2**15'"
    """
    check = _CHECKS.get(key)
    return check(value) if check else None


def _batch_size(value: Any) -> str | None:
    if value == "max" or Integer(1)(value) is None:
        return None
    return f"give an integer of at least 1, or max{if_text(value)}"


def _recompute(value: Any) -> str | None:
    if value is None or value == "block" or Integer(1)(value) is None:
        return None
    if isinstance(value, list) and value:
        return patterns(value)
    return "give block, a positive integer k for every k-th block, or a list of regular expressions on layer paths"


def _policy(value: Any) -> str | None:
    # auto goes with the option auto, whose check comes later
    return None if value == "auto" else one_of(*POLICIES)(value)


_MOMENTUM = Number(least=0, below=1)
_CHECKS: dict[str, Check] = {
    "epochs": Integer(1),
    "batch_size": _batch_size,
    "seed": Integer(0, 2**32 - 1),
    "objective": text,
    "log_every_batches": Integer(0),
    "sweep.baseline": text,
    "sweep.margin": Number(above=0, below=100),
    "precision.name": text,
    "precision.policy": _policy,
    "precision.tf32": BOOLEAN,
    "precision.by": one_of(*AUTO_BY, None),
    "precision.resolved": one_of(*AUTO_SETTINGS, None),
    "precision.pinned": patterns,
    "precision.overrides": dtypes_by_pattern,
    "loss_scale.mode": one_of(*LOSS_SCALE_MODES),
    "loss_scale.max_skipped_in_a_row": Integer(1, null=True),
    "loss_scale.value": Number(above=0, null=True),
    "loss_scale.initial": Number(above=0),
    "loss_scale.growth_interval": Integer(1),
    "loss_scale.growth_factor": Number(above=1),
    "loss_scale.backoff_factor": Number(above=0, below=1),
    "loss_scale.minimum": Number(above=0),
    "loss_scale.maximum": Number(above=0),
    "loss_scale.force": BOOLEAN,
    "memory.mode": one_of(*MEMORY_MODES),
    "memory.recompute": _recompute,
    "memory.limit": size,
    "compile.loss": keras_objects("a Keras loss", "mse"),
    "compile.metrics": keras_objects("Keras metrics", "[accuracy]"),
    "compile.jit_compile": one_of("auto", True, False),
    "compile.steps_per_execution": Integer(1),
    "compile.replace": BOOLEAN,
    "tracking.kind": one_of("local", "server", "off"),
    "tracking.experiment": text,
    "tracking.log_model": BOOLEAN,
    "tracking.tags": mapping,
    "optimizer.learning_rate": Rate(above=0),
    "optimizer.weight_decay": Number(least=0, null=True),
    "optimizer.clipnorm": Number(above=0, null=True),
    "optimizer.global_clipnorm": Number(above=0, null=True),
    "optimizer.clipvalue": Number(above=0, null=True),
    "optimizer.gradient_accumulation_steps": Integer(2, null=True),
    "optimizer.momentum": _MOMENTUM,
    "optimizer.beta_1": _MOMENTUM,
    "optimizer.beta_2": _MOMENTUM,
    "optimizer.epsilon": Number(above=0),
    "optimizer.nesterov": BOOLEAN,
    "optimizer.use_ema": BOOLEAN,
    "schedule.initial_learning_rate": Rate(least=0),
    "schedule.warmup_target": Rate(above=0, null=True),
    "schedule.warmup_steps": Integer(0),
    "schedule.decay_steps": Integer(1, null=True),
    "schedule.decay_rate": Number(above=0),
    "schedule.alpha": Number(least=0),
    "schedule.staircase": BOOLEAN,
    "callbacks.early_stopping.patience": Integer(0),
    "callbacks.reduce_lr.patience": Integer(0),
    "callbacks.reduce_lr.factor": Number(above=0, below=1),
    "dataset.validation_fraction": _MOMENTUM,
    "dataset.split_seed": Integer(0, null=True),
    "dataset.classes": Integer(2, null=True),
    "dataset.size": Integer(1),
    "model.momentum": _MOMENTUM,
    "model.dropout": _MOMENTUM,
}
_WHATEVER_THE_TARGET = frozenset(
    {"optimizer.learning_rate", "dataset.validation_fraction", "dataset.split_seed", "dataset.classes"}
)


def _ours(config: Mapping[str, Any], key: str) -> bool:
    target = find(config, f"{key.rpartition('.')[0]}._target_")
    return key in _WHATEVER_THE_TARGET or not isinstance(target, str) or target.startswith(_OURS)


def _wrong_nodes(config: Mapping[str, Any]) -> list[ConfigError]:
    """Groups that are no mappings, and nodes without the `_target_` that they need."""
    found = []
    for group in ("model", "dataset", "optimizer", "schedule"):
        node = config.get(group, {"_target_": ""})
        if not isinstance(node, Mapping):
            found.append(ConfigError(group, node, _GROUP_CURE))
            continue
        target = node.get("_target_")
        if not isinstance(target, str) and not (group == "schedule" and target is None):
            found.append(ConfigError(f"{group}._target_", target, TARGET_CURE))
    callbacks = config.get("callbacks", {})
    if not isinstance(callbacks, Mapping):
        return [*found, ConfigError("callbacks", callbacks, _GROUP_CURE)]
    for name, node in callbacks.items():
        if node is not None and not (isinstance(node, Mapping) and isinstance(node.get("_target_"), str)):
            found.append(ConfigError(f"callbacks.{name}", node, "name a Keras callback by its _target_"))
    return found
