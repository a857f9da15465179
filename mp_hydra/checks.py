"""What the values of a config may be, as pure functions over plain containers: ranges, kinds, and what goes together.

>>> problems({"batch_size": 0, "epochs": 1, "seed": 0})[0].args[0]
'batch_size=0: give an integer of at least 1, or max'
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from mp_hydra import sizes
from mp_hydra.errors import ConfigError

POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
AUTO_BY = ("hardware", "measurement")
AUTO_SETTINGS = {  # what precision=auto may come to: policy and tf32, as in the options of the same names
    "fp32": ("float32", False),
    "mixed_float16": ("mixed_float16", True),
    "mixed_bfloat16": ("mixed_bfloat16", True),
}
COMPUTE_DTYPES = ("float32", "float16", "bfloat16")
LOSS_SCALE_MODES = ("auto", "dynamic", "fixed", "none")
MEMORY_MODES = ("auto", "stock", "lean", "recompute")
TARGET_CURE = "give a dotted path such as my_module.my_function"
_GROUP_CURE = "choose an option of the group; --help lists them"

# Those that a class of Keras or a function of ours reads; the same key of a user's own target may mean something else.
_OURS = ("keras.", "mp_hydra.")
_ABSENT = object()


def problems(config: Mapping[str, Any]) -> list[ConfigError]:
    """Every value of a resolved config that cannot be used; absent keys are not judged."""
    found = [
        ConfigError(key, value, "give a finite number")
        for key, value in leaves(config)
        if isinstance(value, float) and not math.isfinite(value)
    ]
    broken = {error.key for error in found}
    for key, check in _CHECKS.items():
        value = _find(config, key)
        if value is _ABSENT or key in broken or not _ours(config, key):
            continue
        problem = check(value)
        if problem:
            found.append(ConfigError(key, value, problem))
    found.extend(_wrong_nodes(config))
    return found or _inconsistencies(config)


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
    close = difflib.get_close_matches(word, known, n=2)
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


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; the elements of lists count as `key.0`, `key.1`, ....

    >>> list(leaves({"a": {"b": 1}, "c": [2, {"d": 3}]}))
    [('a.b', 1), ('c.0', 2), ('c.1.d', 3)]
    """
    if isinstance(node, Mapping):
        items: Iterable[tuple[Any, Any]] = node.items()
    elif isinstance(node, (list, tuple)):
        items = enumerate(node)
    else:
        yield prefix, node
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


Check = Callable[[Any], "str | None"]


@dataclass(frozen=True)
class Integer:
    """An integer within limits, or null where that is allowed."""

    least: int
    most: int | None = None
    null: bool = False

    def __call__(self, value: Any) -> str | None:
        """What would be right, or None for a value that is."""
        if value is None and self.null:
            return None
        good = isinstance(value, int) and not isinstance(value, bool)
        if good and value >= self.least and (self.most is None or value <= self.most):
            return None
        limits = f"of at least {self.least}" if self.most is None else f"from {self.least} to {self.most}"
        return f"give an integer {limits}{' or null' if self.null else ''}{_if_text(value)}"


@dataclass(frozen=True)
class Number:
    """A number within limits, or null where that is allowed."""

    above: float | None = None
    least: float | None = None
    below: float | None = None
    null: bool = False

    def __call__(self, value: Any) -> str | None:
        """What would be right, or None for a value that is."""
        if value is None and self.null:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = good and (self.above is None or value > self.above) and (self.least is None or value >= self.least)
        if good and (self.below is None or value < self.below):
            return None
        bounds = [f"above {self.above:g}"] if self.above is not None else []
        bounds += [f"of at least {self.least:g}"] if self.least is not None else []
        bounds += [f"below {self.below:g}"] if self.below is not None else []
        return f"give a number {' and '.join(bounds)}{' or null' if self.null else ''}{_if_text(value)}"


@dataclass(frozen=True)
class Rate(Number):
    """A number, or a learning-rate schedule in its place."""

    def __call__(self, value: Any) -> str | None:
        """What would be right, or None for a value that is."""
        if isinstance(value, Mapping):
            return None if isinstance(value.get("_target_"), str) else "give a number, or a schedule with its _target_"
        return super().__call__(value)


def _if_text(value: Any) -> str:
    return f"; write it as a plain number, not as the text {value!r}" if isinstance(value, str) else ""


def _one_of(*options: Any) -> Check:
    words = {True: "true", False: "false", None: "null"}
    shown = ", ".join(option if isinstance(option, str) else words[option] for option in options)

    def check(value: Any) -> str | None:
        if any(value is option or (isinstance(value, str) and value == option) for option in options):
            return None
        return f"choose one of {shown}"

    return check


_BOOLEAN = _one_of(True, False)


def _batch_size(value: Any) -> str | None:
    if value == "max" or Integer(1)(value) is None:
        return None
    return f"give an integer of at least 1, or max{_if_text(value)}"


def _recompute(value: Any) -> str | None:
    if value is None or value == "block" or Integer(1)(value) is None:
        return None
    if isinstance(value, list) and value:
        return _patterns(value)
    return "give block, a positive integer k for every k-th block, or a list of regular expressions on layer paths"


def _size(value: Any) -> str | None:
    if value is None:
        return None
    try:
        sizes.parse(value)
    except ConfigError as error:
        return error.problem
    return None


def _policy(value: Any) -> str | None:
    return (
        None if value == "auto" else _one_of(*POLICIES)(value)
    )  # auto goes with the option auto, whose check comes later


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else "give a name"


def _mapping(value: Any) -> str | None:
    return None if isinstance(value, Mapping) else "give a mapping of names to values"


def _patterns(value: Any) -> str | None:
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        return "give a list of regular expressions on layer paths, such as [head]"
    return next(filter(None, map(_pattern, value)), None)


def _dtypes_by_pattern(value: Any) -> str | None:
    if value is None:
        return None
    if not isinstance(value, Mapping):
        return "give a mapping of regular expressions on layer paths to dtypes, such as {encoder/.*: float32}"
    strange = [f"{key}: {dtype}" for key, dtype in value.items() if dtype not in COMPUTE_DTYPES]
    if strange:
        return f"choose one of {', '.join(COMPUTE_DTYPES)} in place of {strange[0]}"
    return next(filter(None, map(_pattern, map(str, value))), None)


def _pattern(text: str) -> str | None:
    try:
        re.compile(text)
    except re.error as error:
        return f"{text!r} is not a regular expression: {error}"
    return None


def _keras_objects(kind: str, example: str) -> Check:
    def check(value: Any) -> str | None:
        strange = [leaf for leaf in _elements(value) if not isinstance(leaf, (str, Mapping, type(None)))]
        return f"name {kind}, such as {example}, or give its _target_" if strange else None

    return check


def _elements(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


_MOMENTUM = Number(least=0, below=1)
_CHECKS: dict[str, Check] = {
    "epochs": Integer(1),
    "batch_size": _batch_size,
    "seed": Integer(0, 2**32 - 1),
    "objective": _text,
    "log_every_batches": Integer(0),
    "sweep.baseline": _text,
    "sweep.margin": Number(above=0, below=100),
    "precision.name": _text,
    "precision.policy": _policy,
    "precision.tf32": _BOOLEAN,
    "precision.by": _one_of(*AUTO_BY, None),
    "precision.resolved": _one_of(*AUTO_SETTINGS, None),
    "precision.pinned": _patterns,
    "precision.overrides": _dtypes_by_pattern,
    "loss_scale.mode": _one_of(*LOSS_SCALE_MODES),
    "loss_scale.max_skipped_in_a_row": Integer(1, null=True),
    "loss_scale.value": Number(above=0, null=True),
    "loss_scale.initial": Number(above=0),
    "loss_scale.growth_interval": Integer(1),
    "loss_scale.growth_factor": Number(above=1),
    "loss_scale.backoff_factor": Number(above=0, below=1),
    "loss_scale.minimum": Number(above=0),
    "loss_scale.maximum": Number(above=0),
    "loss_scale.force": _BOOLEAN,
    "memory.mode": _one_of(*MEMORY_MODES),
    "memory.recompute": _recompute,
    "memory.limit": _size,
    "compile.loss": _keras_objects("a Keras loss", "mse"),
    "compile.metrics": _keras_objects("Keras metrics", "[accuracy]"),
    "compile.jit_compile": _one_of("auto", True, False),
    "compile.steps_per_execution": Integer(1),
    "compile.replace": _BOOLEAN,
    "tracking.kind": _one_of("local", "server", "off"),
    "tracking.experiment": _text,
    "tracking.log_model": _BOOLEAN,
    "tracking.tags": _mapping,
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
    "optimizer.nesterov": _BOOLEAN,
    "optimizer.use_ema": _BOOLEAN,
    "schedule.initial_learning_rate": Rate(least=0),
    "schedule.warmup_target": Rate(above=0, null=True),
    "schedule.warmup_steps": Integer(0),
    "schedule.decay_steps": Integer(1, null=True),
    "schedule.decay_rate": Number(above=0),
    "schedule.alpha": Number(least=0),
    "schedule.staircase": _BOOLEAN,
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


def _find(config: Mapping[str, Any], key: str) -> Any:
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return _ABSENT
        node = node[part]
    return node


def _ours(config: Mapping[str, Any], key: str) -> bool:
    target = _find(config, f"{key.rpartition('.')[0]}._target_")
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


def _inconsistencies(config: Mapping[str, Any]) -> list[ConfigError]:
    """What cannot stand together, in a config whose single values are right."""
    return [*_precision(config), *_loss_scale(config), *_memory(config), *_optimizer(config)]


_MEANING = {
    "fp32": ("float32", False),
    "tf32": ("float32", True),
    "mixed_float16": ("mixed_float16", None),
    "mixed_bfloat16": ("mixed_bfloat16", None),
}


def _precision(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """A run must not go by the name of a precision that it does not have."""
    name, policy, by, resolved = (_find(config, f"precision.{key}") for key in ("name", "policy", "by", "resolved"))
    if name == "auto" or policy == "auto":
        yield from _automatic(config)
        return
    for key, value in (("by", by), ("resolved", resolved)):
        if value not in (None, _ABSENT):
            yield ConfigError(f"precision.{key}", value, f"goes with precision=auto, not with precision={name}")
    for key, meant in zip(("policy", "tf32"), _MEANING.get(name, ()), strict=False):
        value = _find(config, f"precision.{key}")
        if meant is not None and value not in (meant, _ABSENT):
            cure = f"precision={name} means {key}={str(meant).lower()}; choose another option of the group, or a precision.name"
            yield ConfigError(f"precision.{key}", value, f"{cure} of your own")


def _automatic(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """precision=auto is open, or carries what it came to in the run whose record this is."""
    name, policy, tf32, by, resolved = (
        _find(config, f"precision.{key}") for key in ("name", "policy", "tf32", "by", "resolved")
    )
    if name != "auto":
        yield ConfigError("precision.policy", policy, f"goes with precision=auto, not with precision={name}")
    elif by is None:
        yield ConfigError("precision.by", by, f"choose one of {', '.join(AUTO_BY)}")
    elif policy != "auto" and (policy, tf32) != AUTO_SETTINGS.get(resolved):
        cure = "precision=auto means policy=auto; to fix what it comes to, give precision.resolved or choose that option instead"
        yield ConfigError("precision.policy", policy, cure)


def _loss_scale(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    mode, value = (_find(config, f"loss_scale.{key}") for key in ("mode", "value"))
    precision, policy = (_find(config, f"precision.{key}") for key in ("name", "policy"))
    overrides = _find(config, "precision.overrides")
    scalable = policy != "float32" or (isinstance(overrides, Mapping) and "float16" in overrides.values())
    if mode in ("dynamic", "fixed") and not scalable and _find(config, "loss_scale.force") is not True:
        if precision == "auto":
            precision = f"auto, which came to {_find(config, 'precision.resolved')}"
        cure = "use loss_scale=auto, or loss_scale.force=true if it is meant"
        yield ConfigError("loss_scale", mode, f"scaling has no purpose with precision={precision}; {cure}")
    elif mode == "fixed" and value is None:
        yield ConfigError("loss_scale.value", value, "loss_scale=fixed needs one, such as loss_scale.value=1024")
    if mode in ("auto", "dynamic", "none") and value not in (None, _ABSENT):
        yield ConfigError("loss_scale.value", value, f"goes with loss_scale=fixed, not with loss_scale={mode}")
    low, first, high = (_find(config, f"loss_scale.{key}") for key in ("minimum", "initial", "maximum"))
    if _ABSENT not in (low, first, high):
        if low > high:
            yield ConfigError("loss_scale.minimum", low, f"give a number up to maximum={high:.12g}")
        elif not low <= first <= high:
            cure = f"give a number from minimum={low:.12g} to maximum={high:.12g}"
            yield ConfigError("loss_scale.initial", first, cure)


def _memory(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    mode, recompute = (_find(config, f"memory.{key}") for key in ("mode", "recompute"))
    if mode == "recompute" and recompute is None:
        yield ConfigError("memory.recompute", recompute, "memory=recompute needs to know where, such as block")
    elif mode != "recompute" and recompute not in (None, _ABSENT):
        yield ConfigError("memory.recompute", recompute, f"goes with memory=recompute, not with memory={mode}")
    if config.get("batch_size") == "max" and config.get("resume") is not None:
        yield ConfigError("batch_size", "max", "a resumed run needs the batch size of the one that it goes on from")


def _optimizer(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    node = config.get("optimizer", {})
    clips = [key for key in ("clipnorm", "global_clipnorm", "clipvalue") if node.get(key) is not None]
    if len(clips) > 1:
        yield ConfigError(f"optimizer.{clips[1]}", node[clips[1]], f"give only one of {' and '.join(clips)}")
    factor = node.get("loss_scale_factor")
    if factor is not None:
        cure = f"use loss_scale=fixed loss_scale.value={factor}, which checks for overflow"
        yield ConfigError("optimizer.loss_scale_factor", factor, cure)
    if str(node.get("_target_")).endswith("LossScaleOptimizer"):
        cure = "name the inner optimizer; loss scaling comes from the group loss_scale"
        yield ConfigError("optimizer._target_", node["_target_"], cure)
    schedule = _find(config, "schedule._target_")
    if isinstance(node.get("learning_rate"), Mapping) and schedule not in (None, _ABSENT):
        rate = node["learning_rate"]
        yield ConfigError(
            "optimizer.learning_rate", rate, "this is a schedule of its own; it goes with schedule=constant"
        )
