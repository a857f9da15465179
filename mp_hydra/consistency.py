"""What goes together in a config whose single values are right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mp_hydra.dotted_keys import ABSENT, find
from mp_hydra.errors import ConfigError

AUTO_BY = ("hardware", "measurement")
AUTO_SETTINGS = {  # what precision=auto may come to: policy and tf32, as in the options of the same names
    "fp32": ("float32", False),
    "mixed_float16": ("mixed_float16", True),
    "mixed_bfloat16": ("mixed_bfloat16", True),
}


def inconsistencies(config: Mapping[str, Any]) -> list[ConfigError]:
    """What cannot stand together, in a config whose single values are right."""
    return [*_precision(config), *_loss_scale(config), *_memory(config), *_optimizer(config)]


NAMED = {  # precisions by the names of the group's options: policy and tf32, None where a run may choose
    "fp32": ("float32", False),
    "tf32": ("float32", True),
    "mixed_float16": ("mixed_float16", None),
    "mixed_bfloat16": ("mixed_bfloat16", None),
}


def _precision(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """A run must not go by the name of a precision that it does not have."""
    name, policy, by, resolved = (find(config, f"precision.{key}") for key in ("name", "policy", "by", "resolved"))
    if name == "auto" or policy == "auto":
        yield from _automatic(config)
        return
    for key, value in (("by", by), ("resolved", resolved)):
        if value not in (None, ABSENT):
            yield ConfigError(f"precision.{key}", value, f"goes with precision=auto, not with precision={name}")
    for key, meant in zip(("policy", "tf32"), NAMED.get(name, ()), strict=False):
        value = find(config, f"precision.{key}")
        if meant is not None and value not in (meant, ABSENT):
            cure = f"precision={name} means {key}={str(meant).lower()}; choose another option of the group, or a precision.name"
            yield ConfigError(f"precision.{key}", value, f"{cure} of your own")


def _automatic(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    """precision=auto is open, or carries what it came to in the run whose record this is."""
    name, policy, tf32, by, resolved = (
        find(config, f"precision.{key}") for key in ("name", "policy", "tf32", "by", "resolved")
    )
    if name != "auto":
        yield ConfigError("precision.policy", policy, f"goes with precision=auto, not with precision={name}")
    elif by is None:
        yield ConfigError("precision.by", by, f"choose one of {', '.join(AUTO_BY)}")
    elif policy != "auto" and (policy, tf32) != AUTO_SETTINGS.get(resolved):
        cure = "precision=auto means policy=auto; to fix what it comes to, give precision.resolved or choose that option instead"
        yield ConfigError("precision.policy", policy, cure)


def _loss_scale(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    mode, value = (find(config, f"loss_scale.{key}") for key in ("mode", "value"))
    precision, policy = (find(config, f"precision.{key}") for key in ("name", "policy"))
    overrides = find(config, "precision.overrides")
    scalable = policy != "float32" or (isinstance(overrides, Mapping) and "float16" in overrides.values())
    if mode in ("dynamic", "fixed") and not scalable and find(config, "loss_scale.force") is not True:
        if precision == "auto":
            precision = f"auto, which came to {find(config, 'precision.resolved')}"
        cure = "use loss_scale=auto, or loss_scale.force=true if it is meant"
        yield ConfigError("loss_scale", mode, f"scaling has no purpose with precision={precision}; {cure}")
    elif mode == "fixed" and value is None:
        yield ConfigError("loss_scale.value", value, "loss_scale=fixed needs one, such as loss_scale.value=1024")
    if mode in ("auto", "dynamic", "none") and value not in (None, ABSENT):
        yield ConfigError("loss_scale.value", value, f"goes with loss_scale=fixed, not with loss_scale={mode}")
    low, first, high = (find(config, f"loss_scale.{key}") for key in ("minimum", "initial", "maximum"))
    if ABSENT not in (low, first, high):
        if low > high:
            yield ConfigError("loss_scale.minimum", low, f"give a number up to maximum={high:.12g}")
        elif not low <= first <= high:
            cure = f"give a number from minimum={low:.12g} to maximum={high:.12g}"
            yield ConfigError("loss_scale.initial", first, cure)


def _memory(config: Mapping[str, Any]) -> Iterator[ConfigError]:
    mode, recompute = (find(config, f"memory.{key}") for key in ("mode", "recompute"))
    if mode == "recompute" and recompute is None:
        yield ConfigError("memory.recompute", recompute, "memory=recompute needs to know where, such as block")
    elif mode != "recompute" and recompute not in (None, ABSENT):
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
    schedule = find(config, "schedule._target_")
    if isinstance(node.get("learning_rate"), Mapping) and schedule not in (None, ABSENT):
        rate = node["learning_rate"]
        yield ConfigError(
            "optimizer.learning_rate", rate, "this is a schedule of its own; it goes with schedule=constant"
        )
