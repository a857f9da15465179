"""The job servers of a launcher's process: kept for later launches, dismissed when the process ends."""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING

from mp_hydra.isolation.client import Server, ServerLostError, search_path
from mp_hydra.isolation.environment import read_at_import

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from mp_hydra.isolation.request import Will


class Servers:
    """The servers of this process; each serves one launch at a time, and is kept for the next one that wants the same."""

    def __init__(self) -> None:
        self._servers: list[Server] = []
        self._unsafe: dict[Hashable, str] = {}
        self._owner: int | None = None
        self._lock = threading.Lock()

    def get(
        self, preload: Sequence[str] | None, preload_env: Mapping[str, str], will: Will | None = None
    ) -> Server | str:
        """A server that is ready, for this thread until `release`; a string says why none can be that has preloaded this.

        Args:
            preload: as for `Server`.
            preload_env: variables of its environment beside those of this process.
            will: what it is to call if this process is killed.
        """
        with self._lock:
            self._forget_those_of_another_process()
            environ = {**os.environ, **preload_env}
            key = _key(preload, preload_env, environ)
            if key in self._unsafe:
                return self._unsafe[key]
            server = self._kept(key)
            if server is None:
                self._dismiss_idle(forking=preload is not None)
                server = Server(preload, environ, key)
                self._servers.append(server)
                server.set_will(will)  # for it may be needed before the preload is done
                self._make_ready(server)
                if server.unsafe is not None:
                    return self._unsafe.setdefault(key, server.unsafe)
            server.user = threading.get_ident()
            for other in self._servers:
                if other is server or (other.user is None and other.alive):
                    other.set_will(will if other is server else None)
            return server

    def release(self) -> None:
        """This thread needs its servers no more."""
        for server in self._servers:
            if server.user == threading.get_ident():
                server.user = None
                if server.busy:  # it was left in haste, and would tell the next user of jobs that this one started
                    server.close()

    def close(self) -> None:
        """Dismiss all of them."""
        if self._owner == os.getpid():
            for server in self._servers:
                server.close()
            self._servers.clear()

    def _forget_those_of_another_process(self) -> None:
        if self._owner != os.getpid():  # the first call, or one in a forked copy of a launcher
            self._servers.clear()
            self._owner = os.getpid()
            atexit.register(self.close)

    def _kept(self, key: Hashable) -> Server | None:
        for server in self._servers:
            if not server.alive:
                server.bury()
        self._servers = [server for server in self._servers if server.alive]
        return next((server for server in self._servers if server.key == key and server.user is None), None)

    def _dismiss_idle(self, *, forking: bool) -> None:
        """Have one idle server of a kind at the most: each that forks holds all that it has imported."""
        for server in self._servers:
            if server.user is None and server.forking == forking:
                server.close()

    def _make_ready(self, server: Server) -> None:
        try:
            server.wait_until_ready()
        except ServerLostError as error:
            server.unsafe = f"its preload {error}" if server.forking else f"the server {error}"
        else:
            if server.unsafe is not None:
                server.close()


servers = Servers()


def _key(preload: Sequence[str] | None, preload_env: Mapping[str, str], environ: Mapping[str, str]) -> Hashable:
    if preload is None:
        return None
    read = sorted((name, value) for name, value in environ.items() if read_at_import(name))
    return tuple(preload), tuple(sorted(preload_env.items())), tuple(read), tuple(search_path())
