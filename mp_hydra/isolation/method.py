"""Chooses how the processes of jobs come into being, and says why."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra.errors import ConfigError, UserError
from mp_hydra.isolation.client import Server
from mp_hydra.isolation.processes import LINUX
from mp_hydra.isolation.servers import servers
from mp_hydra.isolation.settings import KEY, Settings, Start

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from mp_hydra.isolation.request import Will

log = logging.getLogger(__name__)

_SHOWN = 3


@dataclass(frozen=True)
class Method:
    """A server, and what it does.

    Attributes:
        server: ready.
        fork: whether it forks jobs; where not, each is a fresh interpreter.
        text: in words, with the reason.
    """

    server: Server
    fork: bool
    text: str


def choose(settings: Settings, will: Will | None) -> Method:
    """Start a server, or take the one that there is.

    Args:
        settings: of the launcher.
        will: what the server is to call if this process is killed.

    Raises:
        ConfigError: `start=fork` where forking is not safe.
        UserError: no server can be started.
    """
    why_not = _why_not_fork(settings)
    if why_not is None:
        server = servers.get(settings.preload, settings.preload_env, will)
        if isinstance(server, Server):
            for failure in server.failures:
                log.warning("%s", failure)
            return Method(server, fork=True, text=f"forked from a server ({_imported(settings.preload)})")
        why_not = server
    if settings.start is Start.fork:
        raise ConfigError(f"{KEY}.start", "fork", f"{why_not}; use auto or exec")
    server = servers.get(None, {}, will)
    if isinstance(server, str):
        raise UserError(f"no process for jobs could be started: {server}")
    return Method(server, fork=False, text=f"a fresh interpreter for each, because {why_not}")


def forked(settings: Settings, method: Method, jobs: Mapping[int, Sequence[str]]) -> set[int]:
    """Which jobs to fork.

    Args:
        settings: of the launcher.
        method: in use.
        jobs: by number, the variables that a fork would get too late.

    Raises:
        ConfigError: `start=fork`, and some job has such variables.
    """
    if not method.fork:
        return set()
    late = {number: names for number, names in jobs.items() if names}
    if late:
        number, names = next(iter(late.items()))
        problem = f"{', '.join(names)} of job {number} is read before it starts"
        if settings.start is Start.fork:
            raise ConfigError(f"{KEY}.start", "fork", f"{problem}; set it in {KEY}.preload_env, or use auto")
        log.warning("%d of the jobs get a fresh interpreter, because %s", len(late), problem)
    return set(jobs) - set(late)


def _why_not_fork(settings: Settings) -> str | None:
    if settings.start is Start.fresh:
        return f"{KEY}.start=exec"
    return None if LINUX else "forking is safe on Linux only"


def _imported(preload: Sequence[str]) -> str:
    if not preload:
        return "nothing preloaded"
    more = f" and {len(preload) - _SHOWN} more" if len(preload) > _SHOWN else ""
    return f"{', '.join(preload[:_SHOWN])}{more} imported once"
