"""The typed schema of conf/, and the checks that a composed config must pass before anything heavy is imported.

Types are checked by OmegaConf while Hydra composes; ranges and consistency by `problems`, a pure function.

>>> problems({"batch_size": 0, "epochs": 1, "seed": 0})[0].args[0]
'batch_size=0: give an integer of at least 1'
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError

from mp_hydra.errors import ConfigError

PRECISIONS = ("fp32", "tf32", "mixed_float16", "mixed_bfloat16")
POLICIES = ("float32", "mixed_float16", "mixed_bfloat16")
LOSS_SCALE_MODES = ("auto", "dynamic", "fixed", "none")
GROUPS = ("precision", "loss_scale", "model", "dataset", "optimizer", "schedule", "callbacks", "tracking")
SCHEMA = "mp_hydra_schema"


@dataclass
class PrecisionConfig:
    """What layers compute in: a Keras dtype policy, the TF32 switch, and layers that may differ from the policy."""

    name: str = MISSING
    policy: str = MISSING
    tf32: bool = MISSING
    pinned: list[str] = field(default_factory=list)


@dataclass
class LossScaleConfig:
    """How the loss is scaled; `mp_hydra.loss_scale.Rule` gives the meaning of the numbers."""

    mode: str = MISSING
    value: float | None = None
    initial: float = 2.0**15
    growth_interval: int = 2000
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    minimum: float = 1.0
    maximum: float = 2.0**32
    force: bool = False


@dataclass
class CompileConfig:
    """What goes to `keras.Model.compile` beside the optimizer."""

    loss: Any = None
    metrics: Any = None
    jit_compile: Any = "auto"
    steps_per_execution: int = 1
    replace: bool = False


@dataclass
class TrackingConfig:
    """Where a run is recorded; `mp_hydra.tracking.Settings` acts on it."""

    kind: str = MISSING
    uri: str | None = None
    experiment: str = "mp_hydra"
    run_name: str | None = None
    log_model: bool = False
    tags: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunConfig:
    """The whole config of one run. Model, dataset, optimizer, schedule and callbacks are open: users bring theirs."""

    precision: PrecisionConfig = MISSING
    loss_scale: LossScaleConfig = MISSING
    model: Any = MISSING
    dataset: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    callbacks: Any = MISSING
    tracking: TrackingConfig = MISSING
    compile: CompileConfig = field(default_factory=CompileConfig)
    epochs: int = MISSING
    batch_size: int = MISSING
    seed: int = MISSING
    objective: str = MISSING
    log_every_batches: int = MISSING


def register() -> None:
    """Store the schema where config.yaml finds it, outside every group: `precision=glob(*)` is to sweep options only."""
    ConfigStore.instance().store(name=SCHEMA, node=RunConfig, provider="mp_hydra")


def resolve(config: DictConfig) -> dict[str, Any]:
    """Check a composed config and return it as plain containers with every interpolation resolved.

    Raises:
        InvalidConfigError: one line for every value that cannot be used.
    """
    for key in sorted(OmegaConf.missing_keys(config)):
        group = key.split(".", maxsplit=1)[0]
        cure = f"choose one of the options of the group, {group}=..." if group in GROUPS else "give a value"
        raise InvalidConfigError([ConfigError(key, None, cure)])
    try:
        plain = OmegaConf.to_container(config, resolve=True, throw_on_missing=True, enum_to_str=True)
    except InterpolationResolutionError as error:
        raise InvalidConfigError(
            [ConfigError(str(error.full_key), "${...}", str(error.msg).split("\n", maxsplit=1)[0])]
        ) from error
    resolved = {str(key): value for key, value in dict(plain).items()}  # type: ignore[arg-type]
    found = problems(resolved)
    if found:
        raise InvalidConfigError(found)
    return resolved


class InvalidConfigError(Exception):
    """Every problem found in one config; `str` gives one line each."""

    def __init__(self, errors: list[ConfigError]) -> None:
        self.errors = errors
        super().__init__("\n".join(str(error) for error in errors))


def problems(config: Mapping[str, Any]) -> list[ConfigError]:
    """Every value of a resolved config that cannot be used, in the order of the config; absent keys are not judged."""
    flat = dict(_leaves(config))
    found = [
        ConfigError(key, value, "give a finite number")
        for key, value in flat.items()
        if isinstance(value, float) and not math.isfinite(value)
    ]
    broken = {error.key for error in found}
    for key, check in _CHECKS.items():
        if key in flat and key not in broken:
            problem = check(flat[key])
            if problem:
                found.append(ConfigError(key, flat[key], problem))
    found.extend(_missing_targets(config))
    if not found:
        found.extend(_inconsistencies(flat))
    return found


def suggestion(word: str, known: Iterable[str]) -> str:
    """A hint at the known words that look like `word`, or the known words where there are few.

    >>> suggestion("precison", ["precision", "model"])
    'did you mean precision?'
    >>> suggestion("x", ["a", "b"])
    'known here: a, b'
    """
    known = sorted(known)
    close = difflib.get_close_matches(word, known, n=2)
    if close:
        return f"did you mean {' or '.join(close)}?"
    return f"known here: {', '.join(known)}"


def advice(key: str, value: Any) -> str | None:
    """What would be right at a key whose value is of a wrong type; None where nothing is known about it.

    >>> advice("batch_size", "2**15")
    "give an integer of at least 1; write it as a plain number, not as the text '2**15'"
    """
    check = _CHECKS.get(key)
    return check(value) if check else None


def _leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _leaves(value, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, node


Check = Callable[[Any], str | None]


def _integer(minimum: int, maximum: int | None = None) -> Check:
    limits = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"

    def check(value: Any) -> str | None:
        good = isinstance(value, int) and not isinstance(value, bool)
        if good and value >= minimum and (maximum is None or value <= maximum):
            return None
        return f"give an integer {limits}{_if_text(value)}"

    return check


def _if_text(value: Any) -> str:
    return f"; write it as a plain number, not as the text {value!r}" if isinstance(value, str) else ""


def _number(
    *, above: float | None = None, least: float | None = None, below: float | None = None, null: bool = False
) -> Check:
    bounds = [f"above {above:g}"] if above is not None else []
    bounds += [f"of at least {least:g}"] if least is not None else []
    bounds += [f"below {below:g}"] if below is not None else []

    def check(value: Any) -> str | None:
        if value is None and null:
            return None
        good = isinstance(value, (int, float)) and not isinstance(value, bool)
        good = good and (above is None or value > above) and (least is None or value >= least)
        if good and (below is None or value < below):
            return None
        return f"give a number {' and '.join(bounds)}{' or null' if null else ''}{_if_text(value)}"

    return check


def _one_of(*options: Any) -> Check:
    shown = ", ".join({True: "true", False: "false"}.get(o, str(o)) if isinstance(o, bool) else str(o) for o in options)

    def check(value: Any) -> str | None:
        if any(value is option or (isinstance(value, str) and value == option) for option in options):
            return None
        return f"choose one of {shown}"

    return check


def _text(value: Any) -> str | None:
    return None if isinstance(value, str) and value.strip() else "give a name"


_CHECKS: dict[str, Check] = {
    "epochs": _integer(1),
    "batch_size": _integer(1),
    "seed": _integer(0, 2**32 - 1),
    "objective": _text,
    "log_every_batches": _integer(0),
    "precision.name": _text,
    "precision.policy": _one_of(*POLICIES),
    "loss_scale.mode": _one_of(*LOSS_SCALE_MODES),
    "loss_scale.value": _number(above=0, null=True),
    "loss_scale.initial": _number(above=0),
    "loss_scale.growth_interval": _integer(1),
    "loss_scale.growth_factor": _number(above=1),
    "loss_scale.backoff_factor": _number(above=0, below=1),
    "loss_scale.minimum": _number(above=0),
    "loss_scale.maximum": _number(above=0),
    "compile.jit_compile": _one_of("auto", True, False),
    "compile.steps_per_execution": _integer(1),
    "tracking.kind": _one_of("local", "server", "off"),
    "tracking.experiment": _text,
    "optimizer.learning_rate": _number(above=0),
    "optimizer.weight_decay": _number(least=0, null=True),
    "optimizer.clipnorm": _number(above=0, null=True),
    "optimizer.global_clipnorm": _number(above=0, null=True),
    "optimizer.clipvalue": _number(above=0, null=True),
    "optimizer.gradient_accumulation_steps": lambda value: None if value is None else _integer(2)(value),
    "optimizer.momentum": _number(least=0, below=1),
    "optimizer.beta_1": _number(least=0, below=1),
    "optimizer.beta_2": _number(least=0, below=1),
    "optimizer.epsilon": _number(above=0),
    "schedule.warmup_steps": _integer(0),
    "schedule.decay_steps": lambda value: None if value is None else _integer(1)(value),
    "dataset.validation_fraction": _number(least=0, below=1),
    "dataset.size": _integer(1),
    "dataset.classes": lambda value: None if value is None else _integer(2)(value),
    "model.momentum": _number(least=0, below=1),
    "model.dropout": _number(least=0, below=1),
}


def _missing_targets(config: Mapping[str, Any]) -> list[ConfigError]:
    found = []
    for group in ("model", "dataset", "optimizer"):
        node = config.get(group)
        if group in config and not isinstance(node, Mapping):
            found.append(ConfigError(group, node, "choose one of the options of the group; --help lists them"))
        elif isinstance(node, Mapping) and not isinstance(node.get("_target_"), str):
            found.append(
                ConfigError(
                    f"{group}._target_", node.get("_target_"), "give a dotted path such as my_module.my_function"
                )
            )
    return found


def _inconsistencies(flat: Mapping[str, Any]) -> list[ConfigError]:
    found = []
    mode, value = flat.get("loss_scale.mode"), flat.get("loss_scale.value")
    scaled = mode in ("dynamic", "fixed")
    if scaled and flat.get("precision.policy") == "float32" and not flat.get("loss_scale.force"):
        cure = (
            f"scaling has no purpose with precision={flat.get('precision.name')}; use loss_scale=auto, "
            "or loss_scale.force=true if it is meant"
        )
        found.append(ConfigError("loss_scale", mode, cure))
    if mode == "fixed" and value is None:
        found.append(
            ConfigError("loss_scale.value", value, "loss_scale=fixed needs one, such as loss_scale.value=1024")
        )
    if mode in ("auto", "dynamic", "none") and value is not None:
        found.append(ConfigError("loss_scale.value", value, f"goes with loss_scale=fixed, not with loss_scale={mode}"))
    low, first, high = (flat.get(f"loss_scale.{key}") for key in ("minimum", "initial", "maximum"))
    if None not in (low, first, high) and not low <= first <= high:
        found.append(
            ConfigError("loss_scale.initial", first, f"give a number from minimum={low:g} to maximum={high:g}")
        )
    clips = [key for key in ("clipnorm", "global_clipnorm", "clipvalue") if flat.get(f"optimizer.{key}") is not None]
    if len(clips) > 1:
        found.append(
            ConfigError(
                f"optimizer.{clips[1]}", flat[f"optimizer.{clips[1]}"], f"give only one of {' and '.join(clips)}"
            )
        )
    if flat.get("optimizer.loss_scale_factor") is not None:
        factor = flat["optimizer.loss_scale_factor"]
        found.append(
            ConfigError(
                "optimizer.loss_scale_factor",
                factor,
                f"use loss_scale=fixed loss_scale.value={factor}, which checks for overflow",
            )
        )
    if str(flat.get("optimizer._target_", "")).endswith("LossScaleOptimizer"):
        found.append(
            ConfigError(
                "optimizer._target_",
                flat["optimizer._target_"],
                "name the inner optimizer; loss scaling comes from the group loss_scale",
            )
        )
    return found
