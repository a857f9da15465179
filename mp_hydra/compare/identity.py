"""What a run is, as far as comparing goes: its precision, its config, its recipe, and the circumstances that it ran in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from mp_hydra.compare.records import RunRecord

# Parameters in which two runs may differ and still be compared, by name or by section, and why.
IRRELEVANT = {
    "tracking.": "where a run is recorded, and under which name",
    "hydra.": "where its files are written",
    "objective": "which of its metrics is given to a sweeper",
    "log_every_batches": "how often it reports",
    "output_dir": "where its files are written",
    "seed": "seeds are replicates: runs are paired by it",
}
# What a precision consists of; different by nature from run to run, and what tells rows from each other.
RECIPE = ("precision.", "loss_scale.", "memory.mode", "memory.recompute")
REQUESTED_BATCH = "mp_hydra.batch_size_requested"  # "max" where the batch size was found, and not given
# Numbers of the recipe that decide nothing about a run that comes to its end.
_LIMITS = ("loss_scale.max_skipped_in_a_row", "loss_scale.force")
_ABSENT = "not set"


def precision_of(record: RunRecord) -> str:
    """The precision of a run: as it was asked for, "auto" as what it came to; empty if nothing tells."""
    asked = record.params.get("precision.name") or record.tags.get("mp_hydra.precision") or ""
    resolved = record.tags.get("mp_hydra.precision_resolved") or ""
    return resolved if resolved and asked in ("", "auto") else asked


def config_of(params: Mapping[str, str], tags: Mapping[str, str] | None = None) -> dict[str, str]:
    """The parameters that decide which group a run belongs to; the batch size is the one that was asked for.

    >>> config_of({"batch_size": "72", "epochs": "3"}, {"mp_hydra.batch_size_requested": "max"})
    {'batch_size': 'max', 'epochs': '3'}
    >>> config_of({"batch_size": "64", "seed": "1", "precision.name": "fp32", "tracking.kind": "local", "resume": "a.keras"})
    {'batch_size': '64', 'resume': 'a checkpoint'}
    """
    config = {}
    for key, value in params.items():
        if any(key == name or (name.endswith(".") and key.startswith(name)) for name in (*IRRELEVANT, *RECIPE)):
            continue
        if key.startswith("callbacks.") and _is_absolute(value):
            continue  # the run's own output directory
        if key == "memory.limit" and value == "null":
            continue  # as in runs that were recorded before there was a limit
        # Each is resumed from a checkpoint of its own; that it was resumed matters, since it trained for fewer steps.
        config[key] = "a checkpoint" if key == "resume" and value != "null" else value
    requested = (tags or {}).get(REQUESTED_BATCH)
    return {**config, "batch_size": requested} if requested else config


def batch_size_of(record: RunRecord) -> int | None:
    """The samples of a step; None if that is not known, as of a run that died while it looked for the largest batch."""
    value = record.params.get("batch_size", "")
    return int(value) if value.isdecimal() else None


def memory_of(record: RunRecord) -> str:
    """What the run kept for its backward pass: stock, lean, recompute; empty if "auto" was asked and it came to nothing."""
    asked = record.params.get("memory.mode", "stock")
    return record.tags.get("mp_hydra.memory_resolved") or ("" if asked == "auto" else asked)


def titled(settings: Mapping[str, str]) -> str:
    """Settings as they are typed, such as "model=cnn dataset=digits memory=lean"; "all runs" where there are none."""
    return " ".join(f"{shortened(key)}={value}" for key, value in settings.items()) or "all runs"


def shortened(key: str) -> str:
    """The name under which an option of a group is chosen: "model" for "model.name"."""
    section, _, last = key.rpartition(".")
    return section if last == "name" or key == "memory.mode" else key


def recipe_of(params: Mapping[str, str]) -> dict[str, str]:
    """What tells the run from others of the same precision: the settings that have an effect.

    >>> recipe_of({"precision.name": "fp32", "precision.policy": "float32", "loss_scale.mode": "auto", "loss_scale.initial": "1"})
    {'memory.mode': 'stock', 'loss_scale.mode': 'none'}
    """
    own = ("precision.name", "precision.policy", "precision.tf32", "precision.by", "precision.resolved")
    recipe = {
        key: value for key, value in params.items() if key.startswith(RECIPE) and key not in own and key not in _LIMITS
    }
    memory = recipe.pop("memory.mode", "stock")  # runs recorded before there was a choice
    if memory != "recompute":
        recipe = {key: value for key, value in recipe.items() if not key.startswith("memory.")}
    recipe = {"memory.mode": memory, **recipe}
    mode = recipe.get("loss_scale.mode")
    policy = params.get("precision.policy") or params.get("precision.name")
    if mode == "auto" and policy == "mixed_float16":
        mode = "dynamic"
    elif mode == "auto" and params.get("precision.pinned", "[]") == "[]":
        mode = "none"  # nothing computes in float16
    if mode is None:
        return recipe
    acting: Callable[[str], bool] = {
        "none": lambda _: False,
        "fixed": lambda key: key == "loss_scale.value",
        "dynamic": lambda key: key != "loss_scale.value",
    }.get(mode, lambda _: True)
    scaling = {key: value for key, value in recipe.items() if key.startswith("loss_scale.") and acting(key)}
    rest = {key: value for key, value in recipe.items() if not key.startswith("loss_scale.")}
    return {**rest, **scaling, "loss_scale.mode": mode}


def circumstances_of(record: RunRecord) -> dict[str, str]:
    """What a run depends on beside its config, as far as it is known: data, device, libraries, XLA."""
    known = {} if record.dataset is None else {"data digest": record.dataset[1]}
    environment = record.environment
    versions = mapping(environment.get("versions"))
    known |= {name: str(versions[name]) for name in ("tensorflow", "keras") if versions.get(name)}
    devices = environment.get("devices")
    found = [mapping(device) for device in devices] if isinstance(devices, (list, tuple)) else []
    device = next((one for one in found if one.get("kind") == "GPU"), found[0] if found else {})
    if device.get("name"):
        known["device"] = str(device["name"])
    cores = mapping(environment.get("cpu")).get("usable_cores")
    if device.get("kind") == "CPU" and cores is not None:
        known["usable CPU cores"] = str(cores)
    switches = {
        "XLA (jit_compile)": environment.get("jit_compile"),
        "XLA (auto_jit)": mapping(environment.get("xla")).get("auto_jit"),
        "oneDNN": environment.get("onednn"),
    }
    names = {True: "on", False: "off"}
    return known | {
        name: names[value] if isinstance(value, bool) else str(value)
        for name, value in switches.items()
        if value is not None
    }


def conflicts(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """Known circumstances that differ. A digest is shown by its beginning."""
    keys = [key for key in mine if key in theirs and mine[key] != theirs[key]]
    shown = [
        (key, *(value[:8] if key == "data digest" else value for value in (mine[key], theirs[key]))) for key in keys
    ]
    return [f"{key} {ours}, not {other}" for key, ours, other in shown]


def differences(mine: Mapping[str, str], theirs: Mapping[str, str]) -> list[str]:
    """What differs between two configs; of two different models, data sets ... only that they are.

    >>> differences({"model.name": "cnn", "model.dense": "9", "epochs": "3"}, {"model.name": "mlp", "epochs": "5"})
    ['model cnn, not mlp', 'epochs 3, not 5']
    """
    keys = [key for key in {**mine, **theirs} if mine.get(key) != theirs.get(key)]
    titles: dict[str, str] = {}  # section -> the key that names it
    for title in ("name", "_target_"):
        for key in keys:
            section, _, last = key.rpartition(".")
            if section and last == title:
                titles.setdefault(section, key)
    lines = []
    for key in keys:
        section = key.partition(".")[0]
        if titles.get(section, key) == key:
            shown = section if key.endswith(".name") else key
            lines.append(f"{shown} {mine.get(key, _ABSENT)}, not {theirs.get(key, _ABSENT)}")
    return lines


def _is_absolute(value: str) -> bool:
    return PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()


def mapping(value: object) -> Mapping[str, object]:
    """The value if it is a mapping, else an empty one."""
    return value if isinstance(value, Mapping) else {}
