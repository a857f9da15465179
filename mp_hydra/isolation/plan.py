"""Composes the jobs of a sweep in the launcher's process, so that all is known of them before the first one starts."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobRuntime, JobStatus
from omegaconf import OmegaConf, open_dict, read_write

from mp_hydra.isolation.jobs import OUTPUT_FILE, Job
from mp_hydra.isolation.observers import Observers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

    from mp_hydra.isolation.ending import Ending


@dataclass(frozen=True)
class Sweep:
    """What Hydra hands to a launcher."""

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig


@dataclass(frozen=True)
class Plan:
    """A job, and the variables that its config puts into the environment (`hydra.job.env_set`)."""

    job: Job
    environ: dict[str, str]


def plan(sweep: Sweep, job_overrides: Sequence[Sequence[str]], first_number: int, *, to_file: bool) -> list[Plan]:
    """Compose jobs, and make the sweep's directory.

    Args:
        sweep: what Hydra handed over.
        job_overrides: those of each job, as Hydra's sweepers give them.
        first_number: the first job's `hydra.job.num` and `hydra.job.id`; the others count on from it.
        to_file: whether what a job prints goes to a file.

    Raises:
        HydraException: a job's config cannot be composed.
    """
    Path(str(sweep.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
    return [
        _plan(sweep, overrides, number, to_file=to_file)
        for number, overrides in enumerate(job_overrides, start=first_number)
    ]


def _plan(sweep: Sweep, overrides: Sequence[str], number: int, *, to_file: bool) -> Plan:
    config = _composed(sweep, list(overrides))
    with open_dict(config):
        config.hydra.job.id = number
        config.hydra.job.num = number
    current = HydraConfig.instance()
    before = current.cfg
    try:
        current.set_config(config)  # for the resolver `hydra`
        directory = Path.cwd() / str(config.hydra.sweep.dir) / str(config.hydra.sweep.subdir)
        environ: Any = OmegaConf.to_container(config.hydra.job.env_set, resolve=True)
    finally:
        current.cfg = before
    with read_write(config.hydra.runtime), open_dict(config.hydra.runtime):
        config.hydra.runtime.output_dir = str(directory)
    job = Job(number, tuple(overrides), config, directory, directory / OUTPUT_FILE if to_file else None)
    return Plan(job, {str(name): str(value) for name, value in environ.items()})


def _composed(sweep: Sweep, overrides: list[str]) -> DictConfig:
    """The config of a job; composing it takes a tenth of a second, so a sweeper that has done so hands it over."""
    for config in Observers(sweep.context.callbacks.callbacks).tell("composed_config", overrides):
        if config is not None:
            return config  # type: ignore[no-any-return]
    return sweep.context.config_loader.load_sweep_config(sweep.config, overrides)


def job_return(job: Job, ending: Ending) -> JobReturn:
    """What Hydra's sweepers expect of a job that has ended."""
    result = ending.job_return if ending.end.ok and ending.job_return is not None else _blank(job)
    result.return_value = ending.value
    result.status = JobStatus.COMPLETED if ending.end.ok else JobStatus.FAILED
    return result  # type: ignore[no-any-return]


def _blank(job: Job) -> JobReturn:
    task = job.config.copy()
    with read_write(task), open_dict(task):
        del task["hydra"]
    return JobReturn(
        overrides=list(job.config.hydra.overrides.task),
        cfg=task,
        hydra_cfg=OmegaConf.masked_copy(job.config, "hydra"),
        working_dir=str(Path.cwd()),
        task_name=JobRuntime.instance().get("name"),
    )
