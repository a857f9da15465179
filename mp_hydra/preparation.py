"""From a checked config to data, model and optimizer that are ready to train, each checked before a step is taken."""

from __future__ import annotations

import logging
import math
import re
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from typing import TYPE_CHECKING, Any

from mp_hydra import datasets, memory_mode
from mp_hydra.compiling import compile_model, set_execution
from mp_hydra.config import suggestion
from mp_hydra.errors import ConfigError, DataError, ModelError, PrecisionError
from mp_hydra.float32_losses import float32_losses
from mp_hydra.loss_scale import effective_mode
from mp_hydra.models._parts import one_line
from mp_hydra.models.build import DataSpec, build
from mp_hydra.precision import COMPUTE_DTYPES, LayerRecord, Scope, census, layers_of, needs_loss_scaling, require
from mp_hydra.probe import Observed, float32_head, observe, observe_graph, require_sound

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

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
        seen: what one batch showed.
        memory: whether the model is lean or recomputes.
    """

    data: datasets.Data
    model: Any
    optimizer: Any
    layers: list[LayerRecord]
    seen: Observed
    memory: memory_mode.Applied


def load_data(config: Mapping[str, Any], *, judge: bool = True) -> datasets.Data:
    """Load the dataset of a resolved config and check it against batch size and precision.

    Args:
        config: a resolved config.
        judge: False: leave it to the audit to say that inputs overflow.

    Raises:
        DataError: for data that cannot be read or trained on.
        ConfigError: for a batch size above the number of training samples, or one that is still "max".
    """
    data = datasets.load(config["dataset"], seed=config["seed"])
    if config["batch_size"] == "max":
        raise ConfigError("batch_size", "max", "only a run finds it; give a number here, or ask mp-hydra forecast")
    if config["batch_size"] > data.train.size:
        raise ConfigError("batch_size", config["batch_size"], f"there are only {data.train.size} training samples")
    if (
        judge
        and config["precision"]["policy"] == "mixed_float16"
        and data.peak_input is not None
        and data.peak_input >= FLOAT16_OVERFLOW
    ):
        raise DataError(
            f"dataset {data.name}: inputs reach {data.peak_input:g}, which float16 (largest 65504) turns into inf; "
            f"give dataset.scale, such as dataset.scale={1 / data.peak_input:.1e}"
        )
    return data


def prepare(
    config: Mapping[str, Any], data: datasets.Data, scope: Scope, *, directory: Path | None = None, judge: bool = True
) -> Prepared:
    """Build the model, or open the checkpoint to resume; check it and compile it. Call it with the policy in force.

    Args:
        config: a resolved config.
        data: what the model will be trained on.
        scope: of the policy in force.
        directory: what a relative `resume` refers to; None for the working directory.
        judge: False: leave it to the audit to say what is wrong with the model's precision.

    Raises:
        PrecisionError: for a model that does not compute in what was asked.
        ModelError: for a model that does not fit the data, or whose own `train_step` does not scale the loss.
        ConfigError: for optimizer, loss or metric settings that Keras rejects.
    """
    model = _resumed(config, directory) if config.get("resume") else _built(config, data)
    batch = next(iter(data.train.batches(min(2, data.train.size))))
    overrides = config["precision"].get("overrides") or {}
    if overrides:
        _override(model, batch, overrides, scope, resumed=bool(config.get("resume")))
    if config["precision"].get("float32_head"):
        for layer in float32_head(model, batch[0]):
            scope.dtype_given[layer] = True
            log.info("layer %s computes in float32 (precision.float32_head=true)", layer.path)
    seen = _observed(model, batch, judge=judge)
    if judge:
        require_sound(model, seen)
    layers = census(model, scope)
    if config.get("resume"):
        _require_saved_in(layers, config)
    else:
        if judge:
            require(layers, scope.policy, pinned=config["precision"]["pinned"])
        mode = effective_mode(config["loss_scale"]["mode"], float16=needs_loss_scaling(layers))
        compile_model(model, config, data, mode)
    optimizer = model.optimizer
    _check_outputs(config, model, data, seen.outputs)
    memory = memory_mode.apply(model, config)
    with float32_losses(model):
        _build_compiled(config["compile"], model, batch)
        optimizer.remember_seeds(model)
        _check_step(model, optimizer, batch)
    _check_objective(config["objective"], model, has_validation=data.validation is not None)
    return Prepared(data, model, optimizer, layers, seen, memory)


def _built(config: Mapping[str, Any], data: datasets.Data) -> Any:
    spec = DataSpec(data.input_shape, data.input_dtype, data.outputs, data.classes, data.vocabulary)
    return build(config["model"], spec)


def _resumed(config: Mapping[str, Any], directory: Path | None) -> Any:
    from mp_hydra.checkpoint import resume

    path = Path(config["resume"]).expanduser()
    model = resume(path if path.is_absolute() or directory is None else directory / path)
    log.info("resuming %s: its model, loss, metrics, optimizer and loss scaling are kept", path)
    set_execution(model, config["compile"])
    return model


def _require_saved_in(layers: Sequence[LayerRecord], config: Mapping[str, Any]) -> None:
    """Layers keep the precision that they were saved in, so a resumed run has to ask for just that."""
    asked = COMPUTE_DTYPES[config["precision"]["policy"]]
    overridden = any(layer.overridden for layer in layers)
    found = {layer.compute_dtype for layer in layers if not layer.overridden} - {"float32"} or {"float32"}
    if overridden and found == {"float32"}:  # a float32 head may be all that is left
        return
    if found != {asked}:
        saved = " or ".join(name for name, dtype in COMPUTE_DTYPES.items() if dtype in found)
        cure = (
            f"its layers compute in {' and '.join(sorted(found))}: resume it with the precision whose policy is {saved}"
        )
        raise ConfigError("resume", config["resume"], cure)


def epochs_done(config: Mapping[str, Any], prepared: Prepared) -> int:
    """Whole epochs that a resumed model has seen already; 0 for a new one.

    Raises:
        ConfigError: if there is nothing left to do.
    """
    steps = prepared.optimizer.counters().steps
    done = steps // math.ceil(prepared.data.train.size / config["batch_size"])
    if done >= config["epochs"]:
        raise ConfigError("epochs", config["epochs"], f"the checkpoint has seen {done} epochs already; give more")
    return int(done)


def _check_step(model: Any, optimizer: Any, batch: Any) -> None:
    from mp_hydra.scaling_check import overrides_train_step, require_scaled_loss

    if optimizer.mode != "none" and overrides_train_step(model):
        require_scaled_loss(model, optimizer, batch)


def _override(model: Any, batch: Any, overrides: Mapping[str, str], scope: Scope, *, resumed: bool) -> None:
    """Set the dtypes of `precision.overrides`, and see that the layers obey; a resumed model must have been saved so."""
    from mp_hydra import layer_overrides

    if not all(layer.built for layer in model._flatten_layers()):  # noqa: SLF001 - the one recursive walk that Keras has
        _observed(model, batch)  # paths are known only of what is built
    saved = {id(layer): layer.compute_dtype for layer in layers_of(model)}
    layers = layer_overrides.apply(model, overrides, scope)
    changed = [layer for layer in layers if saved.get(id(layer), layer.compute_dtype) != layer.compute_dtype]
    if resumed and changed:
        first = changed[0]
        what = f"layer {first.path} was saved computing in {saved[id(first)]}, and is to be resumed as it was saved"
        raise ConfigError("precision.overrides", overrides, what)
    layer_overrides.verify(model, batch[0], layers)


def _observed(model: Any, batch: Any, *, judge: bool = True) -> Observed:
    from tensorflow import errors

    try:
        return observe(model, batch[0])
    except errors.NotFoundError as error:
        if not judge and getattr(model, "outputs", None):
            return observe_graph(model)
        where = re.search(r"calling (\w+)\.call", str(error))
        raise PrecisionError(
            f"TensorFlow has no kernel for {where[1] if where else 'an operation of the model'} in this precision on this "
            f"device; mp-hydra audit names the layer, and precision.overrides lets it compute in float32"
        ) from error
    except ValueError as error:
        if _met_other_code(error):  # a user's own `call`: they need the traceback
            raise
        shapes = [tuple(part.shape[1:]) for part in _flat(batch[0])]
        raise ModelError(
            f"the model does not accept samples of shape {', '.join(map(str, shapes))}: {one_line(error)}"
        ) from error


def _met_other_code(error: BaseException) -> bool:
    """Whether the exception passed through code that is neither ours nor that of Keras and TensorFlow."""
    frames = [frame for frame, _ in walk_tb(error.__traceback__)]
    packages = {str(frame.f_globals.get("__name__", "")).partition(".")[0] for frame in frames}
    return not packages <= {"mp_hydra", "keras", "tensorflow", "contextlib"}


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
