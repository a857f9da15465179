"""Hydra plugin: offers the groups `precision` and `loss_scale` to any Hydra app, and nothing else of mp_hydra's conf/.

Hydra imports this module at every start of every app, so it imports nothing heavy.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin

from mp_hydra.paths import conf_dir

if TYPE_CHECKING:
    from hydra.core.config_search_path import ConfigSearchPath
    from hydra.core.object_type import ObjectType

GROUPS = ("precision", "loss_scale")
SCHEME = "mp-hydra"


class MpHydraGroups(FileConfigSource):
    """The config files below a directory, as far as they belong to `GROUPS`."""

    @staticmethod
    def scheme() -> str:
        """What the search path calls this kind of source."""
        return SCHEME

    def available(self) -> bool:
        """Whether the directory is there."""
        return super().is_group("")

    def is_group(self, config_path: str) -> bool:
        """Whether the path is one of the groups; the root counts, for listings."""
        return (not config_path or _offered(config_path)) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Whether the path is an option of one of the groups."""
        return _offered(config_path) and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The options of a group; at the root, the groups."""
        found: list[str] = super().list(config_path, results_filter)
        return found if config_path else [name for name in found if name in GROUPS]


class MpHydraSearchPath(SearchPathPlugin):
    """Appends mp_hydra's groups to the search path: an app's own options of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the source."""
        search_path.append(provider="mp_hydra", path=f"{SCHEME}://{conf_dir()}")


def _offered(config_path: str) -> bool:
    return config_path.split("/", maxsplit=1)[0] in GROUPS
