"""Hydra plugin: the launcher `ray` runs each job of a sweep in a fresh worker of a Ray cluster, in any Hydra app.

A cluster that it starts on this machine is closed to other users of it: it gets a token of its own, which lives in the
environment of its processes alone. Ray by itself writes one into ~/.ray/auth_token, for good. A token that the user has given
(RAY_AUTH_TOKEN, RAY_AUTH_TOKEN_PATH, or that file) is used as it is, and is what Ray's dashboard and `ray status` ask for;
RAY_AUTH_MODE=disabled leaves the cluster open to everyone on the machine.

Jobs and cluster end with the sweep, on Ctrl-C, SIGTERM and SIGHUP too. After SIGKILL the kernel and Ray end them within seconds,
but for two agents of Ray's, which take up to a minute; MLflow runs of a tracked app stay RUNNING until the sweep is resumed.

Hydra imports this module at every start of every app, so it imports nothing heavy, and Ray need not be installed.
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
class RayLauncherConf:
    """The settings of `hydra/launcher=ray`.

    Attributes:
        init: arguments of `ray.init`. Without an `address`, here or in RAY_ADDRESS, a cluster is started on this machine, and
            stopped with the sweep.
        remote: what a job needs, as `ray.remote` takes it: num_cpus, num_gpus, memory, resources, ...; a GPU is seen only by
            jobs that ask for it.
        n_jobs: how many jobs run at a time; None for as many as the cluster has room for.
        timeout: seconds that a job may take, from its start; None for no limit.
        env: environment variables of the workers.
    """

    _target_: str = "hydra_plugins.mp_hydra_ray_launcher.RayLauncher"
    init: dict[str, Any] = field(default_factory=dict)
    remote: dict[str, Any] = field(default_factory=lambda: {"num_cpus": 1})
    n_jobs: int | None = None
    timeout: float | None = None
    env: dict[str, str] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/launcher", name="ray", node=RayLauncherConf, provider="mp_hydra")


class RayLauncher(Launcher):
    """Hands the jobs to `mp_hydra.remote.ray_jobs`."""

    def __init__(self, **settings: Any) -> None:
        self._settings = settings

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what the jobs need."""
        self._context, self._task_function, self._config = hydra_context, task_function, config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; one that fails gives a JobReturn with its exception, and the others go on."""
        from mp_hydra.isolation.plan import Sweep
        from mp_hydra.remote.ray_jobs import Settings, launch

        sweep = Sweep(self._context, self._task_function, self._config)
        return launch(sweep, Settings.checked(self._settings), job_overrides, initial_job_idx)
