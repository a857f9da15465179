"""A real MLflow server in a thread, which can be made to fail, and what a run does meanwhile."""

from __future__ import annotations

import json
import logging
import socket
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest

import mp_hydra.tracking.run as run_module
from mp_hydra.errors import TrackingError
from mp_hydra.tracking import Outcome, Run, Settings, open_client, open_run, sync
from mp_hydra.tracking.store import sqlite_uri

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

HEADER = '{"format": "mp_hydra spool 1", "uri": "u", "experiment_id": "1", "run_id": "r", "run_name": "n"}'


@dataclass
class Server:
    uri: str
    down: bool = False
    requests: int = 0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("server")
    database = sqlite_uri(folder / "mlflow.db")
    open_client(database)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NO_PROXY", "127.0.0.1")
        patch.setenv("_MLFLOW_SERVER_FILE_STORE", database)
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_ROOT", "mlflow-artifacts:/")
        patch.setenv("_MLFLOW_SERVER_ARTIFACT_DESTINATION", (folder / "artifacts").as_uri())
        patch.setenv("_MLFLOW_SERVER_SERVE_ARTIFACTS", "true")
        from mlflow.server import app
        from werkzeug.serving import make_server

        logging.getLogger("werkzeug").setLevel(logging.CRITICAL)

        state = Server("")

        def switchable(environ: dict[str, Any], start_response: Callable[..., Any]) -> Any:
            state.requests += 1
            if state.down:
                start_response("500 Internal Server Error", [("Content-Type", "text/plain"), ("Retry-After", "3600")])
                return [b"broken"]
            return app(environ, start_response)

        listening = make_server("127.0.0.1", 0, switchable, threaded=True)
        state.uri = f"http://127.0.0.1:{listening.server_port}"
        thread = threading.Thread(target=listening.serve_forever, daemon=True)
        thread.start()
        yield state
        listening.shutdown()
        thread.join()
    import mlflow

    mlflow.set_tracking_uri(None)  # MLflow's server sets it, and with it the environment of every later test


@pytest.fixture
def server(running: Server, monkeypatch: pytest.MonkeyPatch) -> Server:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "5")
    running.down = False
    return running


@pytest.fixture
def client(server: Server) -> Any:
    return open_client(server.uri)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time that the run sees; assign to the only element."""
    now = [0.0]
    monkeypatch.setattr(run_module, "monotonic", lambda: now[0])
    return now


def _open(server: Server, tmp_path: Path) -> Run:
    settings = Settings("server", uri=server.uri)
    return open_run(settings, name="n", params={"seed": 1}, tags={}, spool=tmp_path / "spool", cwd=tmp_path)


def _spool(run: Run, tmp_path: Path) -> Path:
    return tmp_path / "spool" / f"mlflow-spool-{run.run_id}.jsonl"


def _closed_while_down(server: Server, tmp_path: Path) -> Run:
    """A run with two values, one tag and one artifact, none of which reached the server."""
    run = _open(server, tmp_path)
    artifact = tmp_path / "a.txt"
    artifact.write_text("text")
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.log_metrics({"loss": 0.25}, step=2)
    run.set_tags({"colour": "red"})
    run.log_artifacts(artifact, "deep")
    run.close(Outcome.out_of_memory)
    server.down = False
    return run


def test_a_run_on_a_server_arrives_complete_and_gives_its_web_address(
    server: Server, client: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run = _open(server, tmp_path)
    (tmp_path / "a.txt").write_text("text")
    run.log_metrics({"loss": 0.5}, step=3)
    run.log_artifacts(tmp_path / "a.txt")
    run.close(Outcome.ok)
    stored = client.get_run(run.run_id)
    assert (stored.info.status, stored.data.metrics, stored.data.params) == ("FINISHED", {"loss": 0.5}, {"seed": "1"})
    assert [item.path for item in client.list_artifacts(run.run_id)] == ["a.txt"]
    assert run.url() == run.ui_command() == f"{server.uri}/#/experiments/{run.experiment_id}/runs/{run.run_id}"
    assert not (tmp_path / "spool").exists()
    assert capfd.readouterr() == ("", "")


def test_opening_on_a_closed_port_is_one_line_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(TrackingError, match=rf"the MLflow store http://127.0.0.1:{port} cannot be used: .*refused"):
        _open(Server(f"http://127.0.0.1:{port}"), tmp_path)


def test_opening_on_a_server_that_never_answers_is_given_up_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        before = time.monotonic()
        with pytest.raises(TrackingError, match="timed out"):
            _open(Server(f"http://127.0.0.1:{silent.getsockname()[1]}"), tmp_path)
        # One repeat of 1 s and MLflow's jitter of up to 1 s: with the default of 6 s that is 13 s.
        assert time.monotonic() - before < 4


def test_opening_on_a_server_that_answers_500_does_not_wait_as_long_as_it_asks(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    server.down = True
    before = time.monotonic()
    with pytest.raises(TrackingError, match="500"):
        _open(server, tmp_path)
    assert time.monotonic() - before < 4


def test_an_outage_does_not_reach_the_training_and_is_warned_of_once(
    server: Server, client: Any, tmp_path: Path, clock: list[float], caplog: pytest.LogCaptureFixture
) -> None:
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    lines = [json.loads(line) for line in _spool(run, tmp_path).read_text().splitlines()]
    assert lines[0]["run_id"] == run.run_id
    assert [line["metrics"][0][:2] for line in lines[1:]] == [["loss", 0.5]]

    tried = server.requests
    clock[0] = 29.0
    run.log_metrics({"loss": 0.25}, step=2)
    assert server.requests == tried, "no attempt before 30 s have passed"
    assert len(_spool(run, tmp_path).read_text().splitlines()) == 3, "but the value is on the disk"

    clock[0] = 31.0
    run.flush()
    assert server.requests > tried
    tried = server.requests
    clock[0] = 31.0 + 59.0
    run.flush()
    assert server.requests == tried, "the wait doubles"
    assert len(caplog.records) == 1
    assert "training goes on" in caplog.text

    server.down = False
    clock[0] = 31.0 + 60.0
    run.flush()
    assert [(item.step, item.value) for item in client.get_metric_history(run.run_id, "loss")] == [(1, 0.5), (2, 0.25)]
    assert list((tmp_path / "spool").iterdir()) == []
    run.close(Outcome.ok)
    assert client.get_run(run.run_id).info.status == "FINISHED"


def test_close_tries_once_more_even_if_the_last_attempt_has_just_failed(
    server: Server, client: Any, tmp_path: Path
) -> None:
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    server.down = False
    run.close(Outcome.ok)
    stored = client.get_run(run.run_id)
    assert (stored.info.status, stored.data.metrics) == ("FINISHED", {"loss": 0.5})
    assert list((tmp_path / "spool").iterdir()) == []


def test_what_cannot_be_sent_at_the_end_stays_in_the_spool_and_the_warning_gives_the_command(
    server: Server, client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _closed_while_down(server, tmp_path)
    assert f"mp-hydra sync {_spool(run, tmp_path)}" in caplog.records[-1].getMessage()
    assert client.get_run(run.run_id).info.status == "RUNNING"
    assert _spool(run, tmp_path).stat().st_mode & 0o077 == 0, "an address may hold a password"


def test_sync_sends_everything_and_removes_the_spool(server: Server, client: Any, tmp_path: Path) -> None:
    run = _closed_while_down(server, tmp_path)
    ended = time.time() * 1000
    report = sync(_spool(run, tmp_path))
    stored = client.get_run(run.run_id)
    assert stored.info.status == report.status == "FAILED"
    assert stored.info.end_time <= ended
    assert stored.data.tags["mp_hydra.outcome"] == "out_of_memory"
    assert stored.data.tags["colour"] == "red"
    assert len(client.get_metric_history(run.run_id, "loss")) == report.metrics == 2
    assert [item.path for item in client.list_artifacts(run.run_id, "deep")] == ["deep/a.txt"]
    assert (report.run_id, report.uri, report.artifacts, report.missing) == (run.run_id, server.uri, 1, ())
    assert list((tmp_path / "spool").iterdir()) == []


def test_a_sync_that_fails_keeps_the_spool_and_a_repeated_one_duplicates_nothing(
    server: Server, client: Any, tmp_path: Path
) -> None:
    run = _closed_while_down(server, tmp_path)
    spool = _spool(run, tmp_path)
    content = spool.read_bytes()
    server.down = True
    with pytest.raises(TrackingError, match="cannot be used"):
        sync(spool)
    assert spool.read_bytes() == content
    server.down = False
    sync(spool)
    spool.write_bytes(content)  # as if the process had been killed just before it removed the file
    sync(spool)
    assert [(item.step, item.value) for item in client.get_metric_history(run.run_id, "loss")] == [(1, 0.5), (2, 0.25)]


def test_sync_names_artifacts_that_are_gone_and_sends_the_others(server: Server, client: Any, tmp_path: Path) -> None:
    run = _closed_while_down(server, tmp_path)
    (tmp_path / "a.txt").unlink()
    report = sync(_spool(run, tmp_path))
    assert (report.artifacts, report.missing) == (0, (tmp_path / "a.txt",))
    assert client.get_run(run.run_id).info.status == "FAILED"


def test_sync_leaves_the_spool_of_a_living_run_alone(server: Server, tmp_path: Path) -> None:
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    with pytest.raises(TrackingError, match="its run is still going"):
        sync(_spool(run, tmp_path))
    server.down = False
    run.close(Outcome.ok)


def test_sync_marks_a_run_whose_process_was_killed_and_forgives_a_torn_last_line(
    server: Server, client: Any, tmp_path: Path
) -> None:
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    server.down = False
    run._spool.release()  # as the operating system does when a process ends
    with _spool(run, tmp_path).open("a") as file:
        file.write('{"metrics": [["lo')
    report = sync(_spool(run, tmp_path))
    stored = client.get_run(run.run_id)
    assert (stored.info.status, stored.data.metrics) == ("KILLED", {"loss": 0.5})
    assert (report.torn, report.status) == (True, "KILLED")


def test_sync_does_not_change_the_status_that_another_process_gave_a_dead_run(
    server: Server, client: Any, tmp_path: Path
) -> None:
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    run._spool.release()
    server.down = False
    client.set_terminated(run.run_id, "FAILED")
    assert sync(_spool(run, tmp_path)).status is None
    assert client.get_run(run.run_id).info.status == "FAILED"


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (None, "there is no such spool file"),
        ("", "this is not a spool file"),
        ("hello\n", "this is not a spool file"),
        ('{"format": "other"}\n', "this is not a spool file"),
        (
            f"{HEADER}\n" + '{"metrics": [[1]]}\n{}\n',
            "line 2: damaged",
        ),
    ],
)
def test_sync_of_a_file_that_is_no_spool_is_one_line(content: str | None, line: str, tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(TrackingError, match=line):
        sync(path)
    assert path.exists() == (content is not None)


def test_a_run_deleted_meanwhile_does_not_reach_the_training(
    server: Server, client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _open(server, tmp_path)
    client.delete_run(run.run_id)
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    run.close(Outcome.ok)
    assert "must be in the 'active' state" in caplog.text
    with pytest.raises(TrackingError, match="must be in the 'active' state"):
        sync(_spool(run, tmp_path))


def test_an_artifact_that_is_not_there_does_not_keep_the_status_back(
    server: Server, client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = _open(server, tmp_path)
    run.log_artifacts(tmp_path / "nowhere.txt")
    run.log_metrics({"loss": 0.5}, step=1)
    run.close(Outcome.ok)
    stored = client.get_run(run.run_id)
    assert (stored.info.status, stored.data.metrics) == ("FINISHED", {"loss": 0.5})
    assert "nowhere.txt" in caplog.text


def test_a_disk_too_full_for_the_spool_is_said_and_the_values_wait_in_memory(
    server: Server, client: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    run.flush()
    assert sum("cannot be written" in record.getMessage() for record in caplog.records) == 1
    server.down = False
    run.close(Outcome.ok)
    assert client.get_run(run.run_id).data.metrics == {"loss": 0.5}


def test_values_that_can_neither_be_sent_nor_spooled_are_called_lost(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "spool").write_text("a file where the folder should be")
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.close(Outcome.ok)
    assert "is lost" in caplog.records[-1].getMessage()


def test_a_half_written_spool_line_is_taken_back(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _open(server, tmp_path)
    server.down = True
    run.log_metrics({"loss": 0.5}, step=1)
    run.flush()
    before = _spool(run, tmp_path).read_bytes()
    run.log_metrics({"loss": 0.25}, step=2)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("mp_hydra.tracking.spool.os.fsync", full)
        run.flush()
    assert _spool(run, tmp_path).read_bytes() == before
    run.flush()
    assert len(_spool(run, tmp_path).read_bytes().splitlines()) == 3
    server.down = False
    run.close(Outcome.ok)
