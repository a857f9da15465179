"""Loss, metrics, optimizer, schedule and callbacks from the config, and a model compiled with them."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException

from mp_hydra.errors import ConfigError
from mp_hydra.loss_scale import Rule

if TYPE_CHECKING:
    from mp_hydra.datasets import Data

log = logging.getLogger(__name__)


def compile_model(model: Any, config: Mapping[str, Any], data: Data, mode: str) -> None:
    """Compile with an explicit scaler; a model that comes compiled keeps its loss, metrics and optimizer.

    Args:
        model: a built Keras model; its optimizer is a `ScaledOptimizer` afterwards.
        config: a resolved config.
        data: what it will be trained on: gives the default loss and the length of a schedule.
        mode: of the loss scaling: "dynamic", "fixed" or "none".

    Raises:
        ConfigError: for optimizer, loss or metric settings that Keras rejects.
    """
    settings = config["compile"]
    if model.compiled and not settings["replace"]:
        log.info(
            "the model comes compiled: its own optimizer, loss and metrics are kept (compile.replace=true replaces them)"
        )
        _exchange_optimizer(model, config, mode)
        set_execution(model, settings)
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


def set_execution(model: Any, settings: Mapping[str, Any]) -> None:
    """How a model that is compiled already is to be executed, as far as `compile` in the config says so."""
    if settings["steps_per_execution"] > 1:
        model.steps_per_execution = settings["steps_per_execution"]
    if settings["jit_compile"] != "auto":
        model.jit_compile = settings["jit_compile"]


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


def _defaults(data: Data) -> tuple[Any, list[str]]:
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


def _optimizer(config: Mapping[str, Any], data: Data) -> Any:
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


def _schedule(config: Mapping[str, Any], data: Data) -> Any:
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
