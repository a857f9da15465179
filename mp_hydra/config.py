"""The typed schema of conf/, and from a composed config to plain values that have passed every check.

Types are checked by OmegaConf while Hydra composes; the rest by `resolve`, before anything heavy is imported.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mp_hydra.checks import TARGET_CURE, advice, problems, suggestion, with_floats
from mp_hydra.dotted_keys import leaves
from mp_hydra.errors import ConfigError

__all__ = ["GROUPS", "InvalidConfigError", "RunConfig", "advice", "problems", "register", "resolve", "suggestion"]

GROUPS = (
    "precision",
    "loss_scale",
    "memory",
    "model",
    "dataset",
    "optimizer",
    "schedule",
    "callbacks",
    "tracking",
    "experiment",
)
SCHEMA = "mp_hydra_schema"


@dataclass
class PrecisionConfig:
    """What layers compute in: a Keras dtype policy, the TF32 switch, and layers that may differ from the policy.

    `by` and `resolved` belong to precision=auto: how it is decided, and what was decided; a run records the latter, and given in
    a config it is taken as it is.
    """

    name: str = MISSING
    policy: str = MISSING
    tf32: bool = MISSING
    pinned: list[str] = field(default_factory=list)
    float32_head: bool = False
    overrides: Any = (
        None  # a mapping of patterns to dtypes; were it {} by default, only +precision.overrides could set it
    )
    by: str | None = None
    resolved: str | None = None


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
    max_skipped_in_a_row: int | None = 100
    force: bool = False


@dataclass
class MemoryConfig:
    """What a training step keeps for its backward pass, and how much memory `batch_size=max` may fill.

    Attributes:
        mode: "auto", "stock", "lean" or "recompute"; auto is lean under a mixed policy and stock under float32.
        recompute: with mode "recompute", where: "block", an integer k for every k-th point where the model is narrow, or a list
            of regular expressions on layer paths.
        limit: of `batch_size=max`: bytes, as text with a unit; None for what the device has.
    """

    mode: str = MISSING
    recompute: Any = None
    limit: str | None = None


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
class SweepConfig:
    """How a sweep is run (`--multirun`).

    Attributes:
        resume: an earlier sweep to go on with: its directory, the id of its parent run, or "last".
        interleave: whether precisions take turns; None: where there is more than one seed.
        baseline: the precision that the comparison at the end compares with.
        margin: accuracy counts as equivalent within so many percentage points.
    """

    resume: str | None = None
    interleave: bool | None = None
    baseline: str = "fp32"
    margin: float = 0.1


@dataclass
class RunConfig:
    """The whole config of one run. Model, dataset, optimizer, schedule and callbacks are open: users bring theirs."""

    precision: PrecisionConfig = MISSING
    loss_scale: LossScaleConfig = MISSING
    memory: MemoryConfig = MISSING
    model: Any = MISSING
    dataset: Any = MISSING
    optimizer: Any = MISSING
    schedule: Any = MISSING
    callbacks: Any = field(default_factory=dict)
    tracking: TrackingConfig = MISSING
    compile: CompileConfig = field(default_factory=CompileConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    epochs: int = MISSING
    batch_size: Any = MISSING
    seed: int = MISSING
    objective: str = MISSING
    log_every_batches: int = MISSING
    resume: str | None = None


def register() -> None:
    """Store the schema where config.yaml finds it, outside every group: `precision=glob(*)` is to sweep options only."""
    ConfigStore.instance().store(name=SCHEMA, node=RunConfig, provider="mp_hydra")


def resolve(config: DictConfig) -> dict[str, Any]:
    """Check a composed config and return it as plain containers: interpolations resolved, `learning_rate=1` as 1.0.

    Raises:
        InvalidConfigError: one line for every value that cannot be used.
    """
    try:
        plain = OmegaConf.to_container(config, resolve=True)
    except OmegaConfBaseException as error:
        reason = str(error.msg or error).split("\n", maxsplit=1)[0]
        raise InvalidConfigError([ConfigError(str(error.full_key), "${...}", reason)]) from error
    resolved = with_floats({str(key): value for key, value in dict(plain).items()})  # type: ignore[arg-type]
    found = [*_missing(resolved), *_unknown(resolved)] or problems(resolved)
    if found:
        raise InvalidConfigError(found)
    return resolved


class InvalidConfigError(Exception):
    """Every problem found in one config; `str` gives one line each."""

    def __init__(self, errors: list[ConfigError]) -> None:
        self.errors = errors
        super().__init__("\n".join(str(error) for error in errors))

    def __reduce__(self) -> tuple[type[InvalidConfigError], tuple[list[ConfigError]]]:
        return type(self), (self.errors,)


_SECTIONS = {
    "precision": PrecisionConfig,
    "loss_scale": LossScaleConfig,
    "memory": MemoryConfig,
    "compile": CompileConfig,
    "tracking": TrackingConfig,
    "sweep": SweepConfig,
}


def _missing(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Keys without a value: `???` in a file, or taken out with ~ on the command line."""
    for key in [key for key, value in leaves(config) if value == MISSING]:
        yield ConfigError(key, MISSING, _cure(key))
    for key in _names(RunConfig):
        if key not in config:
            yield ConfigError(key, MISSING, _cure(key))
    for section, schema in _SECTIONS.items():
        node = config.get(section)
        if isinstance(node, Mapping):
            for key in _names(schema):
                if key not in node:
                    yield ConfigError(f"{section}.{key}", MISSING, _cure(key))


def _cure(key: str) -> str:
    if key in GROUPS:
        return f"choose one of the options of the group, {key}=..."
    return TARGET_CURE if key.endswith("_target_") else "give a value"


def _unknown(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """Keys that nothing reads: any in a section of ours; at the top, where + adds keys of one's own, misspelt ones."""
    for section, schema in _SECTIONS.items():
        node = config.get(section)
        if isinstance(node, Mapping):
            for key in sorted(node.keys() - set(_names(schema))):
                hint = suggestion(str(key), _names(schema))
                yield ConfigError(f"{section}.{key}", node[key], f"no such key; {hint}")
    for key in sorted(config.keys() - set(_names(RunConfig))):
        hint = suggestion(key, _names(RunConfig))
        if hint.startswith("did you mean"):
            yield ConfigError(key, config[key], f"no such key; {hint}")


def _names(schema: type[Any]) -> list[str]:
    return [item.name for item in fields(schema)]
