"""What the sweeper `grid` does: all jobs checked before the first one starts, in a fair order, without those that are done."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobStatus, filter_overrides
from omegaconf import OmegaConf

from mp_hydra.config import InvalidConfigError
from mp_hydra.consistency import NAMED
from mp_hydra.errors import ConfigError, SweepFailedError, UserError
from mp_hydra.isolation.jobs import OUTPUT_FILE
from mp_hydra.sweep.callback import SweepCallback
from mp_hydra.sweep.identity import key_of_task, out_of_place
from mp_hydra.sweep.order import interleaved, replicated

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.utils import JobReturn
    from omegaconf import DictConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Planned:
    """A job that is to run: its overrides, and its identity."""

    overrides: list[str]
    key: str


def sweep(sweeper: BasicSweeper, arguments: Sequence[str]) -> list[Sequence[JobReturn]]:
    """Run a whole sweep.

    Args:
        sweeper: a sweeper that has been set up.
        arguments: the task's overrides, as typed.

    Returns:
        What the jobs returned, by batch; jobs that an earlier sweep has finished are not among them.

    Raises:
        HydraException: a job's config cannot be composed; nothing has started.
        InvalidConfigError: a job's config has values that cannot be used; nothing has started.
        ConfigError: no job has the precision that the others are to be compared with; nothing has started.
        SweepFailedError: jobs failed; the others have been run.
    """
    config, context, launcher = sweeper.config, sweeper.hydra_context, sweeper.launcher
    if config is None or context is None or launcher is None:
        raise RuntimeError("call setup before sweep")
    callback = next((item for item in context.callbacks.callbacks if isinstance(item, SweepCallback)), None)
    jobs = _plan(sweeper, arguments, callback)
    directory = Path(str(config.hydra.sweep.dir))
    number = 0
    if callback:
        callback.open(config)
        jobs = _without_finished(jobs, callback)
        number = _first_number(directory) if callback.resuming else 0
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")
    returns: list[Sequence[JobReturn]] = []
    failed: list[str] = []
    step = sweeper.max_batch_size or max(len(jobs), 1)
    for start in range(0, len(jobs), step):
        batch = [job.overrides for job in jobs[start : start + step]]
        results = launcher.launch(batch, initial_job_idx=number + start)
        failed += [
            _line(number + start + place, batch[place], result)
            for place, result in enumerate(results)
            if result.status is not JobStatus.COMPLETED
        ]
        returns.append(results)
    if failed:
        raise SweepFailedError("\n".join([f"{len(failed)} of {len(jobs)} jobs failed", *failed]))
    return returns


def _plan(sweeper: Any, arguments: Sequence[str], callback: SweepCallback | None) -> list[Planned]:
    """Every job of the sweep, in the order in which they are to run, each composed and checked."""
    loader = sweeper.hydra_context.config_loader
    typed = [*(f"{key}={value}" for key, value in sweeper.params.items()), *arguments]
    overrides = OverridesParser.create(config_loader=loader).parse_overrides(typed)
    jobs = [list(job) for job in type(sweeper).split_arguments(overrides, None)[0]]
    wanted = OmegaConf.select(sweeper.config, "sweep.interleave")
    if wanted or (wanted is None and replicated(jobs)):
        jobs = [list(job) for job in interleaved(jobs)]
    configs = [loader.load_sweep_config(sweeper.config, job) for job in jobs]
    keys = _checked(configs, callback.check if callback else None)
    _check_baseline(OmegaConf.select(sweeper.config, "sweep.baseline"), configs)
    if callback:
        callback.composed = {tuple(job): config for job, config in zip(jobs, configs, strict=True)}
    return [Planned(job, key) for job, key in zip(jobs, keys, strict=True)]


def _checked(configs: Sequence[DictConfig], check: Callable[[DictConfig], object] | None) -> list[str]:
    """The key of each job; the application checks each config, and a problem is said once, whichever jobs have it."""
    problems: dict[str, ConfigError] = {}
    keys = []
    for config in configs:
        with out_of_place(config) as task:
            keys.append(key_of_task(task))
            try:
                if check is not None:
                    check(task)
            except InvalidConfigError as error:
                problems |= {str(problem): problem for problem in error.errors}
    if problems:
        raise InvalidConfigError(list(problems.values()))
    return keys


def _check_baseline(baseline: str | None, configs: Sequence[DictConfig]) -> None:
    """Refuse a baseline that the comparison at the end would not find."""
    names = list(dict.fromkeys(filter(None, (OmegaConf.select(config, "precision.name") for config in configs))))
    if baseline is not None and names and baseline not in (*names, *NAMED):
        raise ConfigError("sweep.baseline", baseline, f"no job has this precision; there is {', '.join(names)}")


def _without_finished(jobs: Sequence[Planned], callback: SweepCallback) -> list[Planned]:
    left = [job for job in jobs if job.key not in callback.finished]
    if callback.resuming:
        log.info("%d of %d jobs are finished; %d to run", len(jobs) - len(left), len(jobs), len(left))
    return left


def _first_number(directory: Path) -> int:
    """The first job number that no directory of an earlier sweep in the same place uses."""
    used = [int(item.name) for item in directory.glob("*") if item.name.isdecimal()]
    return max(used, default=-1) + 1


def _line(number: int, overrides: Sequence[str], result: JobReturn) -> str:
    """One line for a job that failed."""
    error = result._return_value  # noqa: SLF001 - the property raises it, after a line of Hydra's own on stderr
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    reason = said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
    line = f"job {number} ({' '.join(filter_overrides(list(overrides)))}): {reason}"
    runtime = OmegaConf.select(result.hydra_cfg, "hydra.runtime.output_dir") if result.hydra_cfg else None
    output = Path(str(runtime)) / OUTPUT_FILE
    return f"{line}; its output is in {output}" if runtime and output.exists() and str(output) not in line else line
