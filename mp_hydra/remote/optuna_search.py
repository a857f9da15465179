"""What the sweeper `optuna` does: ask Optuna for values, let the launcher run jobs with them, and tell Optuna what came of it.

The stock plugin, hydra-optuna-sweeper 1.3.0, needs Optuna 2, whose storages do not work with SQLAlchemy 2.1, and ends the
search with the first job that fails. What is typed is the same: `a=choice(1,2)`, `b=range(1,9)`, `c=interval(0,1)`,
`d=tag(log,interval(1e-4,1))`, `e=int(interval(1,64))`.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, RangeSweep, Transformer
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from mp_hydra.errors import ConfigError, SweepFailedError, UserError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from hydra.core.override_parser.types import Override
    from hydra.core.utils import JobReturn
    from hydra.plugins.launcher import Launcher
    from omegaconf import DictConfig

log = logging.getLogger(__name__)

KEY = "hydra.sweeper"
OLDEST = 4
RESULTS = "optimization_results.yaml"


@dataclass(frozen=True)
class Settings:
    """What `hydra_plugins.mp_hydra_optuna_sweeper.OptunaSweeperConf` describes."""

    n_trials: int
    n_jobs: int
    direction: str
    sampler: str
    sampler_args: Mapping[str, Any]
    storage: str | None
    study_name: str | None
    params: Mapping[str, Any]

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> Settings:
        """The settings as the config gives them.

        Raises:
            ConfigError: a value that cannot be used.
        """
        settings = cls(**given)
        for key in ("n_trials", "n_jobs"):
            if getattr(settings, key) < 1:
                raise ConfigError(f"{KEY}.{key}", getattr(settings, key), "give a whole number, at least 1")
        if settings.direction not in {"minimize", "maximize"}:
            raise ConfigError(f"{KEY}.direction", settings.direction, "choose minimize or maximize")
        return settings


def search(
    settings: Settings, config: DictConfig, launcher: Launcher, arguments: Sequence[str]
) -> list[Sequence[JobReturn]]:
    """Run a search, and write the best trial to `optimization_results.yaml` in the sweep's directory.

    A job that fails, or whose objective is no number, as when memory runs out, is a failed trial: the search goes on.

    Returns:
        What the jobs returned, by batch.

    Raises:
        UserError: Optuna is not installed, there is nothing to search, or no trial gave a number.
        SweepFailedError: jobs failed; the search is complete.
    """
    optuna = _optuna()
    if int(optuna.__version__.split(".")[0]) < OLDEST:
        raise UserError(
            f"this sweeper needs Optuna {OLDEST} or later, not {optuna.__version__}: pip install 'mp_hydra[optuna]'"
        )
    space, fixed = _space([*(f"{key}={value}" for key, value in settings.params.items()), *arguments], optuna)
    directory = Path(str(config.hydra.sweep.dir))
    directory.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(config, directory / "multirun.yaml")
    study = _study(settings, optuna)
    returns: list[Sequence[JobReturn]] = []
    failures: list[str] = []
    for start in range(0, settings.n_trials, settings.n_jobs):
        trials = [study.ask(space) for _ in range(min(settings.n_jobs, settings.n_trials - start))]
        jobs = [[*fixed, *(f"{key}={_typed(trial.params[key])}" for key in space)] for trial in trials]
        batch = launcher.launch(jobs, initial_job_idx=start)
        returns.append(batch)
        for place, (trial, returned) in enumerate(zip(trials, batch, strict=True)):
            value, reason = _objective(returned)
            if value is None:
                log.warning("trial %d has no value: %s", start + place, reason)
                study.tell(trial, state=optuna.trial.TrialState.FAIL)
                if returned.status is not JobStatus.COMPLETED:
                    failures.append(f"job {start + place} ({' '.join(jobs[place])}): {reason}")
            else:
                study.tell(trial, value)
    _report(study, directory, optuna)
    if failures:
        raise SweepFailedError("\n".join([f"{len(failures)} of {settings.n_trials} jobs failed", *failures]))
    return returns


def _optuna() -> Any:
    try:
        import optuna
    except ImportError as error:
        raise UserError("hydra/sweeper=optuna needs Optuna: pip install 'mp_hydra[optuna]'") from error
    return optuna


def _study(settings: Settings, optuna: Any) -> Any:
    kind = getattr(optuna.samplers, settings.sampler, None)
    if not isinstance(kind, type):
        raise ConfigError(f"{KEY}.sampler", settings.sampler, "give a class of optuna.samplers, such as TPESampler")
    try:
        sampler = kind(**settings.sampler_args)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}.sampler_args", dict(settings.sampler_args), f"Optuna says: {error}") from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)  # what it would log is told here
    try:
        return optuna.create_study(
            study_name=settings.study_name,
            storage=settings.storage,
            sampler=sampler,
            direction=settings.direction,
            load_if_exists=True,
        )
    except Exception as error:
        line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ConfigError(f"{KEY}.storage", settings.storage, f"Optuna says: {line}") from error


def _space(typed: Sequence[str], optuna: Any) -> tuple[dict[str, Any], list[str]]:
    """What to search, by key, and the overrides that every job has; of several values for one key the last wins."""
    found = {override.get_key_element(): override for override in OverridesParser.create().parse_overrides(list(typed))}
    space = {key: _distribution(override, optuna) for key, override in found.items() if override.is_sweep_override()}
    if not space:
        raise UserError("nothing to search: give a key several values or a range, such as batch_size=choice(32,64,128)")
    return space, [str(override.input_line) for key, override in found.items() if key not in space]


def _distribution(override: Override, optuna: Any) -> Any:
    kinds, value = optuna.distributions, override.value()
    if isinstance(value, IntervalSweep):
        log_scale = "log" in value.tags
        if isinstance(value.start, int) and isinstance(value.end, int):
            return kinds.IntDistribution(value.start, value.end, log=log_scale)
        return kinds.FloatDistribution(float(value.start or 0), float(value.end or 0), log=log_scale)
    items: list[Any] = list(override.sweep_iterator(transformer=Transformer.encode))
    if isinstance(value, RangeSweep) and len(items) > 1 and all(isinstance(item, int) for item in items):
        return kinds.IntDistribution(min(items), max(items), step=abs(items[1] - items[0]))
    return kinds.CategoricalDistribution(items)


def _typed(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _objective(returned: JobReturn) -> tuple[float | None, str]:
    """What a job returned, as a number; None and the reason if it is none."""
    said = returned._return_value  # noqa: SLF001 - the property raises it, after a line of its own
    if returned.status is not JobStatus.COMPLETED:
        first = next((line for line in str(said).splitlines() if line.strip()), "")
        return None, first if isinstance(said, UserError) else f"{type(said).__name__}: {first}"
    try:
        value = float(said)
    except (TypeError, ValueError):
        return None, f"the job returned {said!r}, where a search needs a number"
    return (None, "its objective is nan") if math.isnan(value) else (value, "")


def _report(study: Any, directory: Path, optuna: Any) -> None:
    complete = study.get_trials(deepcopy=False, states=[optuna.trial.TrialState.COMPLETE])
    if not complete:
        raise UserError("no trial of the search gave a number")
    best = study.best_trial
    OmegaConf.save(
        OmegaConf.create({"name": "optuna", "best_params": best.params, "best_value": best.value}), directory / RESULTS
    )
    log.info(
        "best of %d trials: %s gave %g",
        len(complete),
        ", ".join(f"{k}={v}" for k, v in best.params.items()),
        best.value,
    )
