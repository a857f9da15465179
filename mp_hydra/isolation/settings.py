"""The settings of the launcher `isolated`, checked."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping

KEY = "hydra.launcher"


class Start(str, Enum):
    """How a job's process comes into being."""

    auto = "auto"
    fork = "fork"
    fresh = "exec"


@dataclass(frozen=True)
class Settings:
    """What `hydra_plugins.mp_hydra_isolated_launcher.IsolatedLauncherConf` describes."""

    n_jobs: int
    start: Start
    preload: tuple[str, ...]
    timeout: float | None
    grace: float
    env: Mapping[str, str]
    preload_env: Mapping[str, str]
    to_file: bool
    import_main: bool

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> Settings:
        """The settings as the config gives them.

        Raises:
            ConfigError: a value that cannot be used.
        """
        settings = cls(
            n_jobs=_positive("n_jobs", given["n_jobs"], "give a whole number of jobs to run at a time, at least 1"),
            start=Start(_one_of("start", given["start"], [start.value for start in Start])),
            preload=tuple(_module(name) for name in given["preload"] or ()),
            timeout=None if given["timeout"] is None else _seconds("timeout", given["timeout"], above_zero=True),
            grace=_seconds("grace", given["grace"]),
            env=_variables("env", given["env"]),
            preload_env=_variables("preload_env", given["preload_env"]),
            to_file=_one_of("output", given["output"], ["file", "inherit"]) == "file",
            import_main=_one_of("main", given["main"], ["value", "import"]) == "import",
        )
        if settings.n_jobs > 1 and not settings.to_file:
            raise ConfigError(f"{KEY}.output", "inherit", f"{KEY}.n_jobs must be 1, or what the jobs print would mix")
        return settings


def _positive(name: str, value: Any, problem: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{KEY}.{name}", value, problem)
    return value


def _seconds(name: str, value: Any, *, above_zero: bool = False) -> float:
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not number or value < 0 or (above_zero and value == 0):
        expected = (
            "a number of seconds above 0, or null for no limit" if above_zero else "a number of seconds, 0 or more"
        )
        raise ConfigError(f"{KEY}.{name}", value, f"give {expected}")
    return float(value)


def _one_of(name: str, value: Any, choices: list[str]) -> str:
    if value not in choices:
        raise ConfigError(f"{KEY}.{name}", value, f"choose {', '.join(choices[:-1])} or {choices[-1]}")
    return str(value)


def _module(name: Any) -> str:
    if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
        raise ConfigError(f"{KEY}.preload", name, "give names of modules, such as [tensorflow, keras]")
    return name


def _variables(name: str, given: Mapping[str, Any] | None) -> dict[str, str]:
    variables: dict[str, str] = {}
    for variable, value in (given or {}).items():
        text = str(value)
        if not str(variable) or "=" in str(variable) or "\0" in str(variable) + text or value is None:
            raise ConfigError(f"{KEY}.{name}.{variable}", value, "no environment variable can have this name or value")
        variables[str(variable)] = text
    return variables
