"""What makes a job the same job in another sweep: its resolved config, wherever and as whichever number it runs."""

from __future__ import annotations

import copy
import hashlib
import json
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from mp_hydra.checks import with_floats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from omegaconf import DictConfig

# Where a run is recorded and how a sweep is organised do not change what is trained.
NOT_IDENTITY = ("sweep", "tracking")
_OF_THE_PLACE = {"job.num": 0, "job.id": "0", "runtime.output_dir": ".", "sweep.dir": ".", "sweep.subdir": "."}


@contextmanager
def out_of_place(config: DictConfig) -> Iterator[DictConfig]:
    """The task's part of a composed config, with interpolations to the job's number, id and directories made the same.

    Args:
        config: a composed config with its `hydra` node; it is left as it is.
    """
    masked = copy.deepcopy(config)
    with read_write(masked.hydra), open_dict(masked.hydra):
        for place, value in _OF_THE_PLACE.items():
            OmegaConf.update(masked.hydra, place, value)
    before = HydraConfig.instance().cfg
    try:
        HydraConfig.instance().set_config(masked)
        task = copy.copy(masked)
        with read_write(task), open_dict(task):
            del task["hydra"]
        yield task
    finally:
        HydraConfig.instance().cfg = before


def job_key(config: DictConfig) -> str:
    """Sixteen hexadecimal digits that are equal for equal jobs.

    Args:
        config: a composed config with its `hydra` node; one that cannot be resolved counts as it is written.
    """
    with out_of_place(config) as task:
        return key_of_task(task)


def key_of_task(task: DictConfig) -> str:
    """The key of a job's config as `out_of_place` gives it."""
    try:
        plain = OmegaConf.to_container(task, resolve=True)
    except OmegaConfBaseException:
        plain = OmegaConf.to_container(task, resolve=False)
    return key_of({str(name): value for name, value in dict(plain).items()})  # type: ignore[arg-type]


def key_of(plain: dict[str, Any]) -> str:
    """The key of a resolved config in plain containers.

    >>> key_of({"epochs": 3, "tracking": {"kind": "off"}}) == key_of({"epochs": 3})
    True
    """
    counted = with_floats({name: value for name, value in plain.items() if name not in NOT_IDENTITY})
    text = json.dumps(counted, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
