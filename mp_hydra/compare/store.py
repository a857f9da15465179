"""Reading a store of runs: what is there already, in pages, with one line when it cannot be read.

    store = Store.open("sqlite:////home/me/.mp_hydra/mlflow.db")
    store.runs("tags.`mlflow.parentRunId` = '5d1d...'")

Runs are `mlflow.entities.Run`.
"""

from __future__ import annotations

import contextlib
import gc
import re
import sqlite3
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from mp_hydra.errors import TrackingError
from mp_hydra.tracking import open_client
from mp_hydra.tracking.store import public, quiet, sqlite_path, unusable

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

# A run of ours is about 20 KB of JSON. A page must arrive within the 6 s that mp_hydra.tracking gives a server.
PAGE = 250
CONNECTIONS = 8  # calls to a server at a time


@dataclass(frozen=True)
class Store:
    """A store that exists.

    Attributes:
        client: an MlflowClient on it.
        uri: its absolute address, as `mp_hydra.tracking.store_uri` gives it.
    """

    client: Any
    uri: str

    @classmethod
    def open(cls, uri: str) -> Store:
        """Open a store, and make none where there is none.

        Raises:
            TrackingError: there is no store at this address, or it cannot be opened. Whether a server answers shows
                only when it is asked.
        """
        database = sqlite_path(uri)
        if database is not None:
            _check_is_store(database)
        return cls(open_client(uri), uri)

    @property
    def name(self) -> str:
        """The address as messages show it: without a password."""
        return public(self.uri)

    def run(self, run_id: str) -> Any | None:
        """The run of this id, deleted or not; None if there is none.

        Raises:
            TrackingError: the store cannot be read.
        """
        from mlflow.exceptions import MlflowException

        with _reading(self.uri):
            try:
                return self.client.get_run(run_id)
            except MlflowException as error:
                if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                    raise
                return None

    def runs(self, where: str = "", *, experiment_ids: Sequence[str] | None = None) -> list[Any]:
        """All runs that a filter of MLflow's lets through, deleted ones included, the oldest first.

        Raises:
            TrackingError: the store cannot be read.
        """
        found: list[Any] = []
        token = None
        with _reading(self.uri):
            # Oldest first: MLflow pages by offset, and runs that start meanwhile must not shift those to come.
            while page := self._page(where, experiment_ids, "ASC", PAGE, token):
                found += page
                token = page.token
                if not token:
                    break
        return found

    def newest(self, where: str, count: int = 1, *, experiment_ids: Sequence[str] | None = None) -> list[Any]:
        """The newest runs that a filter of MLflow's lets through, without deleted ones, the newest first.

        Raises:
            TrackingError: the store cannot be read.
        """
        from mlflow.entities import ViewType

        with _reading(self.uri):
            return list(self._page(where, experiment_ids, "DESC", count, None, view=ViewType.ACTIVE_ONLY))

    def experiments(self) -> tuple[Any, ...]:
        """All experiments, deleted ones included, the one that was changed last first.

        Raises:
            TrackingError: the store cannot be read.
        """
        from mlflow.entities import ViewType

        found: list[Any] = []
        token = None
        with _reading(self.uri):
            while page := self.client.search_experiments(view_type=ViewType.ALL, max_results=PAGE, page_token=token):
                found += page
                token = page.token
                if not token:
                    break
        return tuple(found)

    def _page(
        self,
        where: str,
        experiment_ids: Sequence[str] | None,
        order: str,
        size: int,
        token: str | None,
        *,
        view: int | None = None,
    ) -> Any:
        from mlflow.entities import ViewType

        if experiment_ids is None:
            experiment_ids = [experiment.experiment_id for experiment in self.experiments()]
        return self.client.search_runs(
            list(experiment_ids),
            filter_string=where,
            run_view_type=ViewType.ALL if view is None else view,
            max_results=size,
            order_by=[f"attributes.start_time {order}"],
            page_token=token,
        )


def has_tag(key: str, value: str) -> str:
    """MLflow's filter for runs with this value of a tag; the value holds no quotes.

    >>> has_tag("mp_hydra.kind", "sweep")
    "tags.`mp_hydra.kind` = 'sweep'"
    """
    return f"tags.`{key}` = '{value}'"


def like_tag(key: str, value: str | None = None) -> str:
    """MLflow's filter for runs whose value of a tag may be this one, whatever characters it holds; None: any value.

    MLflow has no way to escape a quote. Characters that could end the text stand for any character, so that a few
    others may come through.

    >>> like_tag("mp_hydra.sweep", "multirun/it's")
    "tags.`mp_hydra.sweep` LIKE 'multirun/it_s'"
    """
    pattern = "%" if value is None else re.sub(r"[^\w./ -]", "_", value)
    return f"tags.`{key}` LIKE '{pattern}'"


def has_id(run_ids: Sequence[str]) -> str:
    """MLflow's filter for runs by id."""
    return "attributes.run_id IN ({})".format(", ".join(f"'{run_id}'" for run_id in run_ids))


def read_only(database: Path) -> sqlite3.Connection:
    """A connection to a sqlite file that can neither change nor create it.

    Raises:
        sqlite3.Error: it cannot be opened.
    """
    return sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True, timeout=20)


def unreachable(error: BaseException | None) -> bool:
    """Whether a failed call says that the server is not there, so that further calls would wait in vain."""
    from requests.exceptions import ConnectionError as NoConnection
    from requests.exceptions import Timeout

    while error is not None:
        if isinstance(error, (NoConnection, Timeout)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _check_is_store(database: Path) -> None:
    if not database.is_file():
        raise TrackingError(
            f"there is no MLflow store {database}; train first, or name the store with tracking.uri, "
            "MLFLOW_TRACKING_URI or MP_HYDRA_HOME"
        )
    try:
        with contextlib.closing(read_only(database)) as connection:
            tables = {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    except sqlite3.Error as error:
        raise TrackingError(f"the MLflow store {database} cannot be read: {error}") from error
    if not {"runs", "experiments", "metrics"} <= tables:
        raise TrackingError(f"{database} is no MLflow store: it has no tables of runs")


@contextlib.contextmanager
def _reading(uri: str) -> Iterator[None]:
    # A page becomes some 10^5 objects that all stay: looking for garbage among them takes longer than reading them.
    with quiet(), garbage_collection_paused():
        try:
            yield
        except Exception as error:
            raise unusable(uri, error) from error


@contextlib.contextmanager
def garbage_collection_paused() -> Iterator[None]:
    """Keep the cyclic garbage collector from running in the block."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
