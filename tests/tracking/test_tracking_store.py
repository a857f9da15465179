from __future__ import annotations

import logging
import os
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from omegaconf import OmegaConf

from mp_hydra.errors import ConfigError, TrackingError
from mp_hydra.tracking import Settings, home, open_client, store_uri
from mp_hydra.tracking.store import explain, find_experiment, sqlite_path, sqlite_uri

CONF = Path(__file__).parents[2] / "conf" / "tracking"


@pytest.fixture(autouse=True)
def _own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MP_HYDRA_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real store; making one takes seconds."""
    address = sqlite_uri(tmp_path_factory.mktemp("50% of räume & more") / "mlflow.db")
    open_client(address)
    return address


@pytest.mark.parametrize("kind", ["local", "server", "off"])
def test_each_file_of_conf_tracking_has_exactly_the_fields_of_settings(kind: str) -> None:
    config: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{kind}.yaml"))
    settings = Settings(**config)
    assert settings.kind == kind
    assert config.keys() == vars(Settings()).keys()


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ({"kind": "remote"}, "tracking.kind=remote: give one of local, server, off"),
        ({"experiment": " "}, "tracking.experiment= : give the experiment a name"),
        ({"experiment": None}, "tracking.experiment=null: give the experiment a name"),
        ({"tags": "a"}, "tracking.tags=a: give a mapping of names to values"),
    ],
)
def test_settings_that_no_store_could_take_are_one_line_with_the_key(arguments: dict[str, object], line: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Settings(**arguments)  # type: ignore[arg-type]
    assert str(caught.value) == line


def test_the_embedded_store_lies_in_home_whatever_the_working_directory_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = f"sqlite:///{tmp_path}/home/mlflow.db"
    assert store_uri(Settings(), tmp_path / "elsewhere") == expected
    monkeypatch.chdir(tmp_path)
    assert store_uri(Settings()) == expected


def test_without_mp_hydra_home_the_home_is_a_folder_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MP_HYDRA_HOME")
    assert home() == Path.home() / ".mp_hydra"


def test_a_relative_mp_hydra_home_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MP_HYDRA_HOME", "here")
    with pytest.raises(ConfigError, match="MP_HYDRA_HOME=here: give an absolute directory"):
        home()


def test_the_config_goes_before_the_environment_and_the_environment_before_the_embedded_store(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://env:5000/")
    assert store_uri(Settings()) == "http://env:5000"
    assert store_uri(Settings("server")) == "http://env:5000"
    assert store_uri(Settings("server", uri="https://config")) == "https://config"
    assert store_uri(Settings(uri="sqlite:////data/x.db")) == "sqlite:////data/x.db"


def test_a_relative_sqlite_file_starts_at_the_directory_passed_in(tmp_path: Path) -> None:
    assert store_uri(Settings(uri="sqlite:///runs/../x.db"), tmp_path) == f"sqlite:///{tmp_path}/x.db"


@pytest.mark.parametrize(
    "given",
    ["file:///tmp/mlruns", "mlruns", "./mlruns", "/tmp/mlruns", "sqlite://x.db", "postgresql://h/db"],  # noqa: S108
)
@pytest.mark.parametrize("by_environment", [False, True])
def test_an_address_that_is_neither_sqlite_nor_http_is_one_line_that_says_what_is(
    given: str, by_environment: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if by_environment:
        monkeypatch.setenv("MLFLOW_TRACKING_URI", given)
    with pytest.raises(ConfigError) as caught:
        store_uri(Settings(uri=None if by_environment else given))
    key = "MLFLOW_TRACKING_URI" if by_environment else "tracking.uri"
    assert str(caught.value).startswith(f"{key}={given}: ")
    assert "sqlite:///<file> or http(s)://<server>" in str(caught.value)


@pytest.mark.parametrize("given", ["sqlite:///", "sqlite:///:memory:"])
def test_a_database_in_memory_is_refused(given: str) -> None:
    with pytest.raises(ConfigError, match="in memory is lost"):
        store_uri(Settings(uri=given))


@pytest.mark.parametrize("given", [None, "sqlite:////data/x.db", "localhost:5000"])
def test_tracking_server_needs_the_address_of_a_server(given: str | None) -> None:
    with pytest.raises(ConfigError, match=r"tracking.uri=.*: tracking=server needs the address of an MLflow server"):
        store_uri(Settings("server", uri=given))


@pytest.mark.parametrize("name", ["plain", "with space", "grün", "50%", "a%20b", "who?", "no#1", "it's"])
def test_any_path_survives_the_way_into_an_address_and_back(tmp_path: Path, name: str) -> None:
    path = tmp_path / name / "mlflow.db"
    assert sqlite_path(sqlite_uri(path)) == path
    assert store_uri(Settings(uri=sqlite_uri(path))) == sqlite_uri(path)


def test_the_database_and_the_artifacts_of_an_awkward_folder_lie_in_that_folder(uri: str) -> None:
    database = sqlite_path(uri)
    assert database is not None
    assert database.is_file()
    client = open_client(uri)
    experiment = client.get_experiment(find_experiment(client, uri, "vision/../räume 100%"))
    folder = Path(unquote(experiment.artifact_location.removeprefix("file://")))
    assert folder.parent == database.parent / "artifacts"


def test_an_experiment_is_created_once_and_found_again(uri: str) -> None:
    client = open_client(uri)
    assert find_experiment(client, uri, "once") == find_experiment(client, uri, "once")


@pytest.mark.parametrize("name", ["..", "...", "/", "x" * 500])
def test_the_artifacts_of_an_awkwardly_named_experiment_get_a_folder_of_their_own(uri: str, name: str) -> None:
    client = open_client(uri)
    location = client.get_experiment(find_experiment(client, uri, name)).artifact_location
    folder = Path(unquote(location.removeprefix("file://")))
    assert folder.parent.name == "artifacts"
    folder.mkdir(parents=True)


def test_a_deleted_experiment_is_one_line_with_the_command_that_brings_it_back(uri: str) -> None:
    client = open_client(uri)
    experiment_id = find_experiment(client, uri, "gone")
    client.delete_experiment(experiment_id)
    with pytest.raises(TrackingError) as caught:
        find_experiment(client, uri, "gone")
    assert f"mlflow experiments restore --experiment-id {experiment_id}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_is_no_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.db").write_text("not a database at all " * 100)
    with pytest.raises(TrackingError, match=r"x\.db cannot be used: file is not a database"):
        open_client(sqlite_uri(tmp_path / "x.db"))


def test_a_folder_in_the_place_of_the_database_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "x.db").mkdir()
    with pytest.raises(TrackingError, match="unable to open database file"):
        open_client(sqlite_uri(tmp_path / "x.db"))


def test_a_file_in_the_place_of_the_folder_is_one_line_with_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(TrackingError, match=r"set tracking\.uri or MP_HYDRA_HOME to a place that you may write to"):
        open_client(sqlite_uri(tmp_path / "file" / "mlflow.db"))


def test_a_database_of_another_mlflow_version_is_one_line_with_the_upgrade_command(uri: str, tmp_path: Path) -> None:
    source, copy = sqlite_path(uri), tmp_path / "old.db"
    assert source is not None
    copy.write_bytes(source.read_bytes())
    with sqlite3.connect(copy) as connection:
        connection.execute("UPDATE alembic_version SET version_num = '451aebb31d03'")
    connection.close()
    with pytest.raises(TrackingError, match=rf"mlflow db upgrade 'sqlite:///{tmp_path}/old.db'"):
        open_client(sqlite_uri(copy))


def test_opening_a_store_leaves_the_log_levels_as_they_were(uri: str) -> None:
    before = [logging.getLogger(name).level for name in ("mlflow", "alembic")]
    open_client(uri)
    assert [logging.getLogger(name).level for name in ("mlflow", "alembic")] == before


def test_explain_gives_the_innermost_cause_without_passwords() -> None:
    outer = sqlite3.OperationalError("outer")
    outer.__cause__ = ConnectionRefusedError(111, "refused by http://me:secret@host/x")
    assert explain(outer) == "[Errno 111] refused by http://host/x"


def test_explain_leaves_out_the_exception_that_was_being_handled() -> None:
    error = sqlite3.OperationalError("database is locked")
    error.__context__ = KeyboardInterrupt()
    assert explain(error) == "database is locked"


CREATE = """
import sys
from pathlib import Path
from mp_hydra.tracking import Outcome, Settings, open_run
run = open_run(Settings(experiment="shared"), name="n", params={}, tags={}, spool=Path("s"), cwd=Path.cwd())
run.close(Outcome.ok)
print(run.experiment_id)
"""


@pytest.mark.process
def test_processes_that_create_the_store_at_once_all_get_the_same_experiment_in_silence(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    started = [
        subprocess.Popen(
            [sys.executable, "-c", CREATE],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            env=environment,
        )
        for _ in range(2)
    ]
    results = [process.communicate(timeout=120) for process in started]
    assert [process.returncode for process in started] == [0, 0], results
    assert len({out for out, _ in results}) == 1
    assert [err for _, err in results] == ["", ""]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["home"]
