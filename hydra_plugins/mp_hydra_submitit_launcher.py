"""Hydra plugin: the launchers of hydra-submitit-launcher, with the results of the other jobs when one of them dies.

Their names are `slurm` and `slurm_local`, and their settings those of the stock `submitit_slurm` and `submitit_local`. Hydra
imports this module at every start of every app, so it imports nothing heavy; submitit need not be installed.
"""

# No `from __future__ import annotations`: Hydra executes this before it stands in sys.modules, where dataclasses look
# text annotations up.

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

try:
    from hydra_plugins.hydra_submitit_launcher.config import (  # type: ignore[import-untyped]
        LocalQueueConf,
        SlurmQueueConf,
    )
    from hydra_plugins.hydra_submitit_launcher.submitit_launcher import (  # type: ignore[import-untyped]
        BaseSubmititLauncher,
    )
except ImportError:

    class _Absent(Launcher):
        """Says what to install."""

        def __init__(self, **_: Any) -> None:
            pass

        def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
            """Nothing to keep."""

        def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
            """Raise `UserError`."""
            from mp_hydra.errors import UserError

            raise UserError("hydra/launcher=slurm needs submitit: pip install 'mp_hydra[slurm]'")

    BaseSubmititLauncher, LocalQueueConf, SlurmQueueConf = _Absent, object, object


@dataclass
class SubmititLocalConf(LocalQueueConf):
    """The settings of the stock launcher `submitit_local`."""

    _target_: str = "hydra_plugins.mp_hydra_submitit_launcher.SubmititLocalLauncher"


@dataclass
class SubmititSlurmConf(SlurmQueueConf):
    """The settings of the stock launcher `submitit_slurm`."""

    _target_: str = "hydra_plugins.mp_hydra_submitit_launcher.SubmititSlurmLauncher"


for name, node in {"slurm_local": SubmititLocalConf, "slurm": SubmititSlurmConf}.items():
    ConfigStore.instance().store(group="hydra/launcher", name=name, node=node, provider="mp_hydra")


class _Collecting(BaseSubmititLauncher):
    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs; one that dies gives a JobReturn that says so, and the results of the others are kept."""
        if not hasattr(self, "params"):
            return super().launch(job_overrides, initial_job_idx)  # type: ignore[no-any-return]
        from mp_hydra.isolation.plan import Sweep
        from mp_hydra.remote.submitit_jobs import launch

        sweep = Sweep(self.hydra_context, self.task_function, self.config)
        return launch(self._submit, sweep, job_overrides, initial_job_idx)

    def _submit(self, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Submit as the stock launcher does, and return submitit's jobs without waiting for them."""
        import submitit

        own = {"submitit_folder", "max_num_timeout"}
        limit = {} if "max_num_timeout" not in self.params else {"max_num_timeout": self.params["max_num_timeout"]}
        executor = submitit.AutoExecutor(
            cluster=self._EXECUTOR,
            folder=self.params["submitit_folder"],
            **{f"{self._EXECUTOR}_{key}": value for key, value in limit.items()},
        )
        shared = submitit.AutoExecutor._typed_parameters()  # noqa: SLF001 - those that need no prefix
        executor.update_parameters(
            **{
                key if key in shared else f"{self._EXECUTOR}_{key}": value
                for key, value in self.params.items()
                if key not in own
            }
        )
        return list(executor.map_array(self, *zip(*arguments, strict=True)))


class SubmititLocalLauncher(_Collecting):
    """Processes on this machine, all at once: to try out what is meant for a cluster."""

    _EXECUTOR = "local"


class SubmititSlurmLauncher(_Collecting):
    """Jobs of a SLURM cluster."""

    _EXECUTOR = "slurm"
