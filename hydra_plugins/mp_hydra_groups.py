"""Hydra plugin: offers groups of mp_hydra's conf/ to any Hydra app: `GROUPS`, and nothing else of it.

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

GROUPS = ("precision", "loss_scale", "hydra/callbacks")
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
        return (_leads_to_one(config_path) or _offered(config_path)) and super().is_group(config_path)

    def is_config(self, config_path: str) -> bool:
        """Whether the path is an option of one of the groups."""
        return _offered(config_path) and super().is_config(config_path)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """The options of a group; at the root, the groups."""
        found: list[str] = super().list(config_path, results_filter)
        paths = {name: f"{config_path}/{name}".lstrip("/") for name in found}
        return [name for name in found if _offered(paths[name]) or _leads_to_one(paths[name])]


class MpHydraSearchPath(SearchPathPlugin):
    """Appends mp_hydra's groups to the search path: an app's own options of the same name win."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Append the source."""
        search_path.append(provider="mp_hydra", path=f"{SCHEME}://{conf_dir()}")


def _offered(config_path: str) -> bool:
    return any(f"{config_path}/".startswith(f"{group}/") for group in GROUPS)


def _leads_to_one(config_path: str) -> bool:
    return not config_path or any(group.startswith(f"{config_path}/") for group in GROUPS)
