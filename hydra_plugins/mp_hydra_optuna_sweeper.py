"""Hydra plugin: a sweeper that searches with current Optuna, in any Hydra app.

Its name is `optuna`; where hydra-optuna-sweeper is installed, which has that name and works with Optuna 2 alone, it is
`mp_hydra_optuna`. Hydra imports this module at every start of every app, so it imports nothing heavy; Optuna need not be
installed.
"""

# No `from __future__ import annotations`: Hydra executes this before it stands in sys.modules, where dataclasses look
# text annotations up.

from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class OptunaSweeperConf:
    """The keys of `hydra.sweeper`.

    Attributes:
        n_trials: how many jobs to run.
        n_jobs: how many of them to hand to the launcher at a time; the search learns from them together.
        direction: "minimize" or "maximize" what a job returns.
        sampler: the name of a class of `optuna.samplers`.
        sampler_args: its arguments, such as seed.
        storage: address of a database that keeps the study, such as sqlite:///search.db; None for memory.
        study_name: its name there; a study of this name goes on.
        params: ranges and values, as on the command line, which wins.
    """

    _target_: str = "hydra_plugins.mp_hydra_optuna_sweeper.OptunaSweeper"
    n_trials: int = 20
    n_jobs: int = 1
    direction: str = "minimize"
    sampler: str = "TPESampler"
    sampler_args: dict[str, Any] = field(default_factory=dict)
    storage: str | None = None
    study_name: str | None = None
    params: dict[str, Any] = field(default_factory=dict)


NAMES = ("mp_hydra_optuna", *(() if find_spec("hydra_plugins.hydra_optuna_sweeper") else ("optuna",)))
for name in NAMES:
    ConfigStore.instance().store(group="hydra/sweeper", name=name, node=OptunaSweeperConf, provider="mp_hydra")


class OptunaSweeper(Sweeper):
    """Hands the search to `mp_hydra.remote.optuna_search`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Make the launcher."""
        self.config, self.hydra_context = config, hydra_context
        self.launcher = Plugins.instance().instantiate_launcher(
            config=config, hydra_context=hydra_context, task_function=task_function
        )

    def sweep(self, arguments: list[str]) -> Any:
        """Run the search; see `mp_hydra.remote.optuna_search.search`."""
        from mp_hydra.remote.optuna_search import Settings, search

        assert self.config is not None  # noqa: S101 - Hydra has called setup
        assert self.launcher is not None  # noqa: S101
        return search(Settings.checked(self._settings), self.config, self.launcher, arguments)
