"""From a checked config to data, model and optimizer that are ready to train, each checked before a step is taken."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hydra.errors import InstantiationException

from mp_hydra import datasets
from mp_hydra.config import suggestion
from mp_hydra.errors import ConfigError, DataError, ModelError
from mp_hydra.loss_scale import Rule, effective_mode
from mp_hydra.models.build import DataSpec, build
from mp_hydra.precision import LayerRecord, Scope, census, needs_loss_scaling, probe, require

log = logging.getLogger(__name__)

FLOAT16_OVERFLOW = 65520.0  # from here on numbers round to inf


@dataclass(frozen=True)
class Prepared:
    """What `fit` needs.

    Attributes:
        data: the three splits.
        model: compiled, built, every layer in the precision asked for.
        optimizer: the model's optimizer, a `mp_hydra.scaled_optimizer.ScaledOptimizer`.
        layers: the census of the model.
        warnings: one line each, what the user should know.
    """

    data: datasets.Data
    model: Any
    optimizer: Any
    layers: list[LayerRecord]
    warnings: list[str]


def load_data(config: Mapping[str, Any]) -> datasets.Data:
    """Load the dataset of a resolved config and check it against batch size and precision.

    Raises:
        DataError: for data that cannot be read or trained on.
        ConfigError: for a batch size above the number of training samples.
    """
    data = datasets.load(config["dataset"], seed=config["seed"])
    if config["batch_size"] > data.train.size:
        raise ConfigError("batch_size", config["batch_size"], f"there are only {data.train.size} training samples")
    if (
        config["precision"]["policy"] == "mixed_float16"
        and data.peak_input is not None
        and data.peak_input >= FLOAT16_OVERFLOW
    ):
        raise DataError(
            f"dataset {data.name}: inputs reach {data.peak_input:g}, which float16 (largest 65504) turns into inf; "
            f"give dataset.scale, such as dataset.scale={1 / data.peak_input:.1e}"
        )
    return data


def prepare(config: Mapping[str, Any], data: datasets.Data, scope: Scope) -> Prepared:
    """Build, check and compile the model; call it with the policy in force.

    Raises:
        PrecisionError: for a model that does not compute in what was asked.
        ModelError: for a model that does not fit the data.
        ConfigError: for optimizer, loss or metric settings that Keras rejects.
    """
    spec = DataSpec(data.input_shape, data.input_dtype, data.outputs, data.classes, data.vocabulary)
    model = build(config["model"], spec)
    batch = next(iter(data.train.batches(min(2, data.train.size))))
    outputs = _forward(model, batch)
    layers = census(model, scope)
    warnings = require(layers, scope.policy, pinned=config["precision"]["pinned"])
    mode = effective_mode(config["loss_scale"]["mode"], float16=needs_loss_scaling(layers))
    if mode == "none" and needs_loss_scaling(layers):
        warnings.append("layers compute in float16 without loss scaling: gradients below 6e-8 become zero")
    _compile(model, config, data, mode)
    _check_outputs(config, model, data, outputs)
    _build_compiled(config["compile"], model, batch)
    _check_objective(config["objective"], model, has_validation=data.validation is not None)
    return Prepared(data, model, model.optimizer, layers, warnings)


def _forward(model: Any, batch: Any) -> Any:
    try:
        return probe(model, batch[0])
    except ValueError as error:
        shapes = [tuple(part.shape[1:]) for part in _flat(batch[0])]
        raise ModelError(
            f"the model does not accept samples of shape {', '.join(map(str, shapes))}: {error}"
        ) from error


def _flat(structure: Any) -> list[Any]:
    import keras

    return list(keras.tree.flatten(structure))


def _check_outputs(config: Mapping[str, Any], model: Any, data: datasets.Data, outputs: Any) -> None:
    """Catch, for the losses that are ours by default, a head of the wrong width before it shows as a broken loss."""
    default = "MeanSquaredError" if data.classes is None else "SparseCategoricalCrossentropy"
    ours = config["compile"]["loss"] is None and type(model.loss).__name__ == default
    flat = _flat(outputs)
    if not ours or len(flat) != 1:
        return
    width = flat[0].shape[-1] if len(flat[0].shape) > 1 else 1
    if width != data.outputs:
        each, what = ("output", "target") if data.classes is None else ("logit", "class")
        raise ModelError(
            f"the model gives {width} outputs for {data.outputs} {'targets' if data.classes is None else 'classes'}; "
            f"give it one {each} for each {what}, or set compile.loss to the loss that fits"
        )


def _build_compiled(settings: Mapping[str, Any], model: Any, batch: Any) -> None:
    """Create metric and optimizer variables before memory is measured; a first call of loss and metrics, too."""
    try:
        model._symbolic_build(data_batch=batch)  # noqa: SLF001 - compile() defers it to the first training step
    except (ValueError, TypeError) as error:
        named = {key: settings[key] for key in ("loss", "metrics") if settings[key] is not None}
        if not named:
            raise
        key = f"compile.{next(iter(named))}" if len(named) == 1 else "compile"
        value = next(iter(named.values())) if len(named) == 1 else named
        why = " ".join(str(error).split())
        raise ConfigError(
            key, value, f"it does not fit the model's outputs and the dataset's targets: {why}"
        ) from error


def _compile(model: Any, config: Mapping[str, Any], data: datasets.Data, mode: str) -> None:
    """Compile with an explicit scaler; a model that comes compiled keeps its loss, metrics and optimizer."""
    settings = config["compile"]
    if model.compiled and not settings["replace"]:
        log.info(
            "the model comes compiled: its own optimizer, loss and metrics are kept (compile.replace=true replaces them)"
        )
        _exchange_optimizer(model, config, mode)
        if settings["steps_per_execution"] > 1:
            model.steps_per_execution = settings["steps_per_execution"]
        if settings["jit_compile"] != "auto":
            model.jit_compile = settings["jit_compile"]
        return
    default_loss, default_metrics = _defaults(data)
    loss = default_loss if settings["loss"] is None else _keras_objects("loss", settings["loss"])
    metrics = default_metrics if settings["metrics"] is None else _keras_objects("metrics", settings["metrics"])
    if not isinstance(metrics, (list, dict)):
        metrics = [metrics]
    inner = _optimizer(config, data)
    try:
        # Keras records what compile was given: with the inner optimizer there, what is saved names no class of ours.
        model.compile(
            optimizer=inner,
            loss=loss,
            metrics=metrics,
            jit_compile=settings["jit_compile"],
            steps_per_execution=settings["steps_per_execution"],
            auto_scale_loss=False,
        )
    except (ValueError, TypeError) as error:
        raise ConfigError("compile", "{...}", f"Keras rejects it: {error}") from error
    model.optimizer = _scaled(inner, config, mode)


# Keras finds out from the outputs what these mean.
_METRICS_BY_OUTPUT = ("accuracy", "acc", "crossentropy", "ce")


def _keras_objects(kind: str, node: Any) -> Any:
    """`compile.loss` or `compile.metrics`: a name, a node with `_target_`, or a list or mapping by output of these."""
    import keras

    if isinstance(node, list):
        return [_keras_objects(kind, item) for item in node]
    if isinstance(node, Mapping):
        if "_target_" in node:
            return _instantiated(f"compile.{kind}", node)
        return {output: _keras_objects(kind, item) for output, item in node.items()}
    if isinstance(node, str) and not (kind == "metrics" and node in _METRICS_BY_OUTPUT):
        try:
            (keras.losses if kind == "loss" else keras.metrics).get(node)
        except ValueError as error:
            cure = "no such name in Keras; write it as in keras.losses or keras.metrics, or give its _target_"
            raise ConfigError(f"compile.{kind}", node, cure) from error
    return node


def _defaults(data: datasets.Data) -> tuple[Any, list[str]]:
    import keras

    if data.classes is None:
        return keras.losses.MeanSquaredError(), ["mae"]
    return keras.losses.SparseCategoricalCrossentropy(from_logits=True), ["accuracy"]


def _exchange_optimizer(model: Any, config: Mapping[str, Any], mode: str) -> None:
    """Put a scaled copy in place of a compiled model's optimizer: with its state, without loss scaling of its own."""
    import keras

    theirs = model.optimizer
    if isinstance(theirs, keras.optimizers.LossScaleOptimizer):
        theirs = theirs.inner_optimizer
    copy = type(theirs).from_config(theirs.get_config())
    model.optimizer = _scaled(copy, config, mode)
    if not theirs.built:
        return
    model.optimizer.build(model.trainable_variables)
    if [v.shape for v in copy.variables] != [v.shape for v in theirs.variables]:
        log.warning("the state of the model's optimizer does not fit the variables that train now, so it starts anew")
        return
    for variable, value in zip(copy.variables, theirs.variables, strict=True):
        variable.assign(value)


def _scaled(inner: Any, config: Mapping[str, Any], mode: str) -> Any:
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    settings = config["loss_scale"]
    rule = Rule(
        **{key: settings[key] for key in ("growth_interval", "growth_factor", "backoff_factor", "minimum", "maximum")}
    )
    scale = {"dynamic": settings["initial"], "fixed": settings["value"], "none": 1.0}[mode]
    try:
        return ScaledOptimizer(inner, mode=mode, scale=scale, rule=rule)
    except ValueError as error:
        raise ConfigError(
            "optimizer", type(inner).__name__, f"{error}; loss scaling comes from the group loss_scale"
        ) from error


def _optimizer(config: Mapping[str, Any], data: datasets.Data) -> Any:
    import keras

    node = dict(config["optimizer"])
    schedule = config.get("schedule") or {}
    if schedule.get("_target_"):
        node["learning_rate"] = _schedule(config, data)
        kind = type(node["learning_rate"])
        if not issubclass(kind, keras.optimizers.schedules.LearningRateSchedule):
            raise ConfigError(
                "schedule._target_", schedule["_target_"], f"gives a {kind.__name__}, not a Keras schedule"
            )
    optimizer = _instantiated("optimizer", node)
    if not isinstance(optimizer, keras.optimizers.Optimizer):
        raise ConfigError(
            "optimizer._target_", node["_target_"], f"gives a {type(optimizer).__name__}, not a Keras optimizer"
        )
    return optimizer


def _schedule(config: Mapping[str, Any], data: datasets.Data) -> Any:
    """The learning-rate schedule, over what is left of the run where decay_steps is null.

    Keras asks a schedule for the rate by training batches, under gradient accumulation too.
    """
    node = dict(config["schedule"])
    if node.get("decay_steps", 0) is None:
        batches = config["epochs"] * math.ceil(data.train.size / config["batch_size"])
        rest = batches - node.get("warmup_steps", 0)
        if rest < 1:
            raise ConfigError("schedule.warmup_steps", node["warmup_steps"], f"the run has only {batches} batches")
        node["decay_steps"] = rest
    return _instantiated("schedule", node)


def _instantiated(key: str, node: Mapping[str, Any]) -> Any:
    """Hydra's instantiate on a node with `_target_`; one line for what fails."""
    from hydra.utils import instantiate

    try:
        return instantiate(node, _convert_="all")
    except InstantiationException as error:
        raise ConfigError(f"{key}._target_", node.get("_target_"), _why(error)) from error


def _why(error: InstantiationException) -> str:
    cause: BaseException = error.__cause__ or error
    if str(cause).startswith("Error loading"):
        reason = cause.__cause__ or cause
        return f"cannot be imported: {reason}; give a dotted path such as my_module.my_function"
    if isinstance(cause, (ValueError, TypeError)):
        return str(cause)
    return str(error)


def callbacks(config: Mapping[str, Any]) -> list[Any]:
    """The user's Keras callbacks, in the order of the config.

    Raises:
        ConfigError: for one that cannot be constructed or is no callback.
    """
    import keras

    nodes = config.get("callbacks") or {}
    found = []
    for name, node in nodes.items():
        if node is None:
            continue
        callback = _instantiated(f"callbacks.{name}", node)
        if not isinstance(callback, keras.callbacks.Callback):
            kind = type(callback).__name__
            raise ConfigError(f"callbacks.{name}._target_", node["_target_"], f"gives a {kind}, not a Keras callback")
        found.append(callback)
    return found


MEASURED = (
    "loss_scale/value", "loss_scale/skipped_steps", "loss_scale/applied_steps", "train/nonfinite_batches",
    "gradients/global_norm", "gradients/global_norm_max",
    "memory/peak_mib", "memory/baseline_mib", "memory/training_mib", "memory/state_mib",
    "memory/host_peak_mib", "memory/device_used_peak_mib",
    "time/first_step_seconds", "time/step_ms", "time/step_ms_p95", "time/samples_per_second",
    "time/epoch_seconds", "time/train_seconds", "energy/joules",
)  # fmt: skip


def _check_objective(objective: str, model: Any, *, has_validation: bool) -> None:
    names = [name for metric in model.metrics for name in _metric_names(metric)]
    splits = ("train", "val", "test") if has_validation else ("train", "test")
    learned = [f"{split}/{name}" for split in splits for name in names]
    if objective not in (*learned, *MEASURED):
        hint = suggestion(objective, [*learned, *MEASURED])
        if not hint.startswith("did you mean"):
            hint = f"choose {', '.join(learned)}, or a measurement such as time/step_ms"
        raise ConfigError("objective", objective, f"this run has no such metric; {hint}")


def _metric_names(metric: Any) -> list[str]:
    parts = getattr(metric, "metrics", None)
    return [metric.name] if parts is None else [part.name for part in parts]
