"""Where runs go: the address of the MLflow store, and how it is opened.

The embedded store is one sqlite file in ``~/.mp_hydra``, whatever the working directory is. Its tables and the
experiment are created under a file lock, because MLflow's own creation is not safe against a second process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import sqlite3
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, unquote, urlsplit, urlunsplit

from mp_hydra.errors import ConfigError, TrackingError
from mp_hydra.heavy_imports import heavy_imports

if TYPE_CHECKING:
    from collections.abc import Iterator

KINDS = ("local", "server", "off")
LOCK_TIMEOUT_SECONDS = 120.0
_SQLITE = "sqlite:///"
_HTTP = ("http://", "https://")
_MAX_EXPERIMENT_NAME = 500

# MLflow's own figures make a dead server cost four minutes a call. One repeat after 6 s bounds a call to about 13 s.
_ENVIRONMENT_DEFAULTS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "6",
    "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "GIT_PYTHON_REFRESH": "quiet",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}


@dataclass(frozen=True)
class Settings:
    """The ``tracking`` group of the config, key by key.

    Attributes:
        kind: ``local`` (a sqlite file), ``server`` or ``off``.
        uri: the store; None for the default of the kind.
        experiment: the name of the MLflow experiment; created if it does not exist.
        run_name: a name for the run; None for a generated one.
        log_model: whether the trained model is to be logged as an MLflow model.
        tags: the user's own tags.

    Raises:
        ConfigError: a value that no store could take.
    """

    kind: str = "local"
    uri: str | None = None
    experiment: str = "mp_hydra"
    run_name: str | None = None
    log_model: bool = False
    tags: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ConfigError("tracking.kind", self.kind, f"give one of {', '.join(KINDS)}")
        if not isinstance(self.experiment, str) or not self.experiment.strip():
            raise ConfigError("tracking.experiment", self.experiment, "give the experiment a name")
        if len(self.experiment) > _MAX_EXPERIMENT_NAME:
            raise ConfigError(
                "tracking.experiment", self.experiment, f"give a name of at most {_MAX_EXPERIMENT_NAME} characters"
            )
        if not isinstance(self.tags, Mapping):
            raise ConfigError("tracking.tags", self.tags, "give a mapping of names to values")


def home() -> Path:
    """The directory of the embedded store: ``$MP_HYDRA_HOME``, or ``~/.mp_hydra``. It need not exist yet.

    Raises:
        ConfigError: ``MP_HYDRA_HOME`` is relative, and so would move with the working directory.
    """
    given = os.environ.get("MP_HYDRA_HOME")
    if not given:
        return Path.home() / ".mp_hydra"
    path = Path(given).expanduser()
    if not path.is_absolute():
        raise ConfigError("MP_HYDRA_HOME", given, "give an absolute directory")
    return path


def store_uri(settings: Settings, cwd: Path | None = None) -> str:
    """The absolute address of the store that ``settings`` mean.

    Args:
        settings: of kind ``local`` or ``server``.
        cwd: where a relative ``sqlite:///`` file starts: the directory in which the user typed the command. None
            stands for the current working directory.

    Raises:
        ConfigError: there is no address, or it is none that MLflow keeps runs in.
    """
    if settings.kind == "off":
        raise ConfigError("tracking.kind", "off", "there is no store; give local or server")
    key, uri = "tracking.uri", settings.uri
    if not uri and (inherited := os.environ.get("MLFLOW_TRACKING_URI")):
        key, uri = "MLFLOW_TRACKING_URI", inherited
    if uri and uri.startswith(_HTTP):
        if not urlsplit(uri).hostname:
            raise ConfigError(key, public(uri), "the host is missing; give http(s)://<server>")
        return uri.rstrip("/")
    if settings.kind == "server":
        problem = "tracking=server needs the address of an MLflow server: give http(s)://<server>"
        raise ConfigError(key, uri and public(uri), f"{problem}, or choose tracking=local")
    if not uri:
        return sqlite_uri(home() / "mlflow.db")
    if not uri.startswith(_SQLITE):
        problem = "runs cannot be kept there (MLflow has given up file stores): give sqlite:///<file> or"
        raise ConfigError(key, public(uri), f"{problem} http(s)://<server>")
    database = sqlite_path(uri)
    if database is None:
        raise ConfigError(key, uri, "a database in memory is lost at the end; give sqlite:///<file>")
    return sqlite_uri((cwd or Path.cwd()) / database)


def sqlite_uri(path: Path) -> str:
    """The address of a sqlite file, made absolute, with the characters escaped that would end or change the path."""
    plain = os.path.abspath(path)  # noqa: PTH100 - Path has no way to take out '..' without following links
    if ("%" in plain or "?" in plain) and _sqlalchemy_decodes():
        plain = plain.replace("%", "%25").replace("?", "%3F")
    return _SQLITE + plain


def sqlite_path(uri: str) -> Path | None:
    """The file behind a ``sqlite:///`` address; None for any other address and for a database in memory."""
    if not uri.startswith(_SQLITE):
        return None
    path = uri.removeprefix(_SQLITE).partition("?")[0]
    if "%" in path and _sqlalchemy_decodes():
        path = unquote(path)
    return None if path in ("", ":memory:") else Path(path)


def public(uri: str) -> str:
    """The address without a user name and password, fit for messages and links.

    >>> public("https://me:secret@tracking.example.org/x")
    'https://tracking.example.org/x'
    """
    if not uri.startswith(_HTTP):
        return uri
    parts = urlsplit(uri)
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def open_client(uri: str) -> Any:
    """An MlflowClient on ``uri``; a sqlite store is created, under a lock, if it is not there.

    Raises:
        TrackingError: the store cannot be opened.
    """
    for name, value in _ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    if "mlflow" not in sys.modules:
        with heavy_imports():
            import mlflow.store.tracking.sqlalchemy_store  # noqa: F401 - what opens a database
    from mlflow import MlflowClient

    database = sqlite_path(uri)
    with _store_lock(database), quiet():
        try:
            if database is not None:
                _check_sqlite(database)
            return MlflowClient(tracking_uri=uri, registry_uri=uri)
        except Exception as error:
            raise unusable(uri, error) from error


def find_experiment(client: Any, uri: str, name: str) -> str:
    """The id of the experiment called ``name``, which is created if it does not exist.

    On a sqlite store its artifacts go to ``artifacts/<name>`` beside the database.

    Raises:
        TrackingError: the store does not answer, or the experiment has been deleted.
    """
    database = sqlite_path(uri)
    with _store_lock(database), quiet():
        try:
            experiment = client.get_experiment_by_name(name)
            if experiment is None:
                experiment = _create_experiment(client, name, database)
        except Exception as error:
            raise unusable(uri, error) from error
    if experiment.lifecycle_stage != "active":
        raise TrackingError(
            f"tracking.experiment={name}: this experiment has been deleted from {public(uri)}; bring it back with "
            f"MLFLOW_TRACKING_URI='{public(uri)}' mlflow experiments restore --experiment-id "
            f"{experiment.experiment_id}, or choose another name"
        )
    return str(experiment.experiment_id)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the log lines of MLflow, its database layer and its HTTP client off the screen.

    What fails arrives as an exception, and is reported once, by mp_hydra.
    """
    loggers = [logging.getLogger(name) for name in ("mlflow", "alembic", "sqlalchemy", "urllib3", "git")]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def unusable(uri: str, error: Exception) -> TrackingError:
    """The one line for a store that cannot be used."""
    why = explain(error)
    if "out-of-date database schema" in str(error):
        why = f"it was written by another version of MLflow; back it up, then run: mlflow db upgrade '{uri}'"
    return TrackingError(f"the MLflow store {public(uri)} cannot be used: {why}")


def explain(error: BaseException) -> str:
    """The innermost cause of a failed MLflow call, in one line of at most 300 characters."""
    while (inner := error.__cause__ or error.__context__) is not None and _of_the_store(inner):
        error = inner
    said = " ".join(str(error).split()) or type(error).__name__
    said = re.sub(r"<(\w+\.)*\w+ object at 0x\w+>:?\s*", "", said)
    return re.sub(r"://[^/@\s]+@", "://", said)[:300]


def _of_the_store(error: BaseException) -> bool:
    package = type(error).__module__.partition(".")[0]
    return package in {"mlflow", "requests", "urllib3", "sqlalchemy", "sqlite3"} or isinstance(error, OSError)


def _create_experiment(client: Any, name: str, database: Path | None) -> Any:
    from mlflow.exceptions import MlflowException

    location = None if database is None else (database.parent / "artifacts" / _folder(name)).as_uri()
    try:
        return client.get_experiment(client.create_experiment(name, artifact_location=location))
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
        return client.get_experiment_by_name(name)  # another process on a server was faster


def _folder(name: str) -> str:
    """A file name for an experiment's name: no separators, no dots at the start, and short enough to be one."""
    folder = quote(name, safe=" ")
    folder = re.sub(r"^\.+", lambda dots: "%2E" * len(dots[0]), folder)
    if len(folder) > 150:  # noqa: PLR2004 - file systems take 255 bytes
        folder = f"{folder[:150]}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"
    return folder


@contextlib.contextmanager
def _store_lock(database: Path | None) -> Iterator[None]:
    """Hold the lock file beside a sqlite database; a server needs none."""
    if database is None:
        yield
        return
    from filelock import FileLock, Timeout

    lock = FileLock(f"{database}.lock", timeout=LOCK_TIMEOUT_SECONDS)
    try:
        database.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise TrackingError(
            f"another process has held {lock.lock_file} for {LOCK_TIMEOUT_SECONDS:g} s; end it, or choose another "
            "tracking.uri"
        ) from None
    except OSError as error:
        raise TrackingError(
            f"the MLflow store {database} cannot be opened: {error.strerror}; set tracking.uri or MP_HYDRA_HOME to a "
            "place that you may write to"
        ) from error
    try:
        yield
    finally:
        lock.release()


def _check_sqlite(database: Path) -> None:
    """Find in milliseconds what MLflow would retry for minutes."""
    with contextlib.closing(sqlite3.connect(database, timeout=20)) as connection:
        connection.execute("PRAGMA user_version").fetchone()
        connection.execute("BEGIN IMMEDIATE")
        connection.rollback()


def _sqlalchemy_decodes() -> bool:
    """Whether the SQLAlchemy at hand decodes %xx in the path of a database: 2.1 does, 2.0 does not."""
    from sqlalchemy.engine import make_url

    return make_url(f"{_SQLITE}a%20b").database == "a b"
