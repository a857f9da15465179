"""Hydra plugin: the launcher `isolated` runs each job of a sweep in a pristine process, in any Hydra app.

Hydra imports this module at every start of every app, so it imports nothing heavy.
"""

# No `from __future__ import annotations`: Hydra executes this before it stands in sys.modules, where dataclasses look
# text annotations up.

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig


@dataclass
class IsolatedLauncherConf:
    """The settings of `hydra/launcher=isolated`.

    Attributes:
        n_jobs: how many jobs run at a time.
        start: "fork" from a server that has done the imports, "exec" of a fresh interpreter, or "auto": fork where it is safe.
        preload: what the server imports; it must not initialise a device.
        timeout: seconds that a job may take; None for no limit.
        grace: seconds between SIGTERM and SIGKILL.
        env: environment variables of the jobs.
        preload_env: environment variables of the server, and so of the jobs.
        output: "file", output.log in the job's directory, or "inherit", the terminal.
        main: how a job gets at what the script itself defines: as a "value", or by an "import" of the script.
    """

    _target_: str = "hydra_plugins.mp_hydra_isolated_launcher.IsolatedLauncher"
    n_jobs: int = 1
    start: str = "auto"
    preload: list[str] = field(
        default_factory=lambda: [
            "tensorflow",
            "keras",
            "mlflow",
            "mlflow.store.tracking.sqlalchemy_store",
            "sklearn.datasets",
            "mp_hydra.preload",
        ]
    )
    timeout: float | None = None
    grace: float = 5.0
    env: dict[str, str] = field(default_factory=dict)
    preload_env: dict[str, str] = field(default_factory=dict)
    output: str = "file"
    main: str = "value"


ConfigStore.instance().store(group="hydra/launcher", name="isolated", node=IsolatedLauncherConf, provider="mp_hydra")


class IsolatedLauncher(Launcher):
    """Runs each job in a process of its own; `IsolatedLauncherConf` describes the settings."""

    def __init__(self, **settings: Any) -> None:
        self._given = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Check the settings.

        Raises:
            ConfigError: one of them cannot be used.
        """
        from mp_hydra.isolation.settings import Settings

        self._settings = Settings.checked(self._given)
        self._context, self._task_function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; one that fails gives a JobReturn with its exception, and the others go on."""
        from mp_hydra.isolation.launch import launch
        from mp_hydra.isolation.plan import Sweep

        sweep = Sweep(self._context, self._task_function, self._config)
        return launch(sweep, self._settings, job_overrides, initial_job_idx)
