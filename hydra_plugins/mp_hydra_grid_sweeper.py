"""Hydra plugin: the sweeper `grid`, every combination of the values given, as Hydra's basic sweeper runs them, and more.

It checks all jobs before the first starts, orders them fairly, leaves out those that an earlier sweep has finished, and
names every job that failed. Hydra imports this module at every start of every app, so it imports nothing heavy.
"""

# No `from __future__ import annotations`: Hydra executes this before it stands in sys.modules, where dataclasses look
# text annotations up.

from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore


@dataclass
class GridSweeperConf:
    """The keys of `hydra.sweeper`: those of Hydra's basic sweeper."""

    _target_: str = "hydra_plugins.mp_hydra_grid_sweeper.GridSweeper"
    max_batch_size: int | None = None
    params: dict[str, Any] = field(default_factory=dict)


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridSweeperConf, provider="mp_hydra")


class GridSweeper(BasicSweeper):
    """Hydra's basic sweeper with the plan of `mp_hydra.sweep.grid`."""

    def sweep(self, arguments: list[str]) -> Any:
        """Run the sweep; see `mp_hydra.sweep.grid.sweep`."""
        from mp_hydra.sweep import grid

        return grid.sweep(self, arguments)
