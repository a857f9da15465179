from __future__ import annotations

import math
import os
import shlex
import signal
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import mp_hydra.tracking.run as run_module
from mp_hydra.errors import TrackingError
from mp_hydra.tracking import OffRun, Outcome, Run, Settings, open_client, open_run
from mp_hydra.tracking.store import sqlite_uri

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A real store; making one takes seconds."""
    address = sqlite_uri(tmp_path_factory.mktemp("store") / "mlflow.db")
    open_client(address)
    return address


@pytest.fixture
def client(uri: str) -> Any:
    return open_client(uri)


@pytest.fixture
def settings(uri: str, request: pytest.FixtureRequest) -> Settings:
    return Settings(uri=uri, experiment=request.node.name)


def _open(settings: Settings, tmp_path: Path, params: Mapping[str, Any] | None = None, **tags: str) -> Run:
    return open_run(settings, name="a run", params=params or {}, tags=tags, spool=tmp_path / "spool", cwd=tmp_path)


def _stored(client: Any, run: Run) -> Any:
    return client.get_run(run.run_id)


def test_an_open_run_has_its_name_status_parameters_and_tags(settings: Settings, client: Any, tmp_path: Path) -> None:
    run = _open(settings, tmp_path, {"precision": {"policy": "mixed_float16"}, "a[0]": None}, colour="red")
    stored = _stored(client, run)
    assert stored.info.run_name == "a run"
    assert stored.info.status == "RUNNING"
    assert stored.data.params == {"precision.policy": "mixed_float16", "a_0_": "null"}
    assert stored.data.tags["colour"] == "red"
    assert stored.data.tags["mlflow.source.type"] == "LOCAL"
    assert stored.info.experiment_id == run.experiment_id
    run.close(Outcome.ok)


def test_the_settings_name_the_run_and_add_tags_that_do_not_replace_the_runs_own(
    uri: str, client: Any, tmp_path: Path
) -> None:
    settings = Settings(uri=uri, run_name="mine", tags={"owner": "me", "colour": "blue"})
    run = _open(settings, tmp_path, colour="red")
    run.close(Outcome.ok)
    stored = _stored(client, run)
    assert stored.info.run_name == "mine"
    assert (stored.data.tags["owner"], stored.data.tags["colour"]) == ("me", "red")


def test_hundreds_of_parameters_all_arrive(settings: Settings, client: Any, tmp_path: Path) -> None:
    params = {f"p{i}": str(i) for i in range(250)}
    run = _open(settings, tmp_path, params)
    run.close(Outcome.ok)
    assert _stored(client, run).data.params == params


@pytest.mark.parametrize(
    ("outcome", "status"),
    [
        ("ok", "FINISHED"),
        ("diverged", "FINISHED"),
        ("out_of_memory", "FAILED"),
        ("no_updates", "FAILED"),
        ("error", "FAILED"),
        ("killed", "KILLED"),
    ],
)
def test_each_outcome_ends_the_run_with_its_status_a_tag_and_the_reason(
    outcome: str, status: str, uri: str, client: Any, tmp_path: Path
) -> None:
    run = _open(Settings(uri=uri, experiment="outcomes"), tmp_path)
    run.close(Outcome(outcome), reason="because")
    stored = _stored(client, run)
    assert stored.info.status == status
    assert stored.info.end_time >= stored.info.start_time
    assert stored.data.tags["mp_hydra.outcome"] == outcome
    assert stored.data.tags["mp_hydra.reason"] == "because"


def test_a_second_close_changes_nothing(settings: Settings, client: Any, tmp_path: Path) -> None:
    run = _open(settings, tmp_path)
    run.close(Outcome.out_of_memory)
    run.close(Outcome.ok, reason="too late")
    stored = _stored(client, run)
    assert stored.info.status == "FAILED"
    assert "mp_hydra.reason" not in stored.data.tags


def test_a_closed_run_takes_nothing_more(settings: Settings, tmp_path: Path) -> None:
    run = _open(settings, tmp_path)
    run.close(Outcome.ok)
    with pytest.raises(RuntimeError, match="is closed"):
        run.log_metrics({"a": 1.0}, step=1)


def test_every_value_of_a_long_series_arrives_with_its_step(settings: Settings, client: Any, tmp_path: Path) -> None:
    run = _open(settings, tmp_path)
    for step in range(2500):
        run.log_metrics({"train/loss": step / 4}, step=step)
    run.close(Outcome.ok)
    history = client.get_metric_history(run.run_id, "train/loss")
    assert sorted((metric.step, metric.value) for metric in history) == [(step, step / 4) for step in range(2500)]


def test_values_wait_in_the_buffer_until_there_are_a_thousand_or_ten_seconds_have_passed(
    settings: Settings, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(run_module, "monotonic", lambda: now)
    run = _open(settings, tmp_path)
    run.log_metrics({"few": 1.0}, step=1)
    now = 9.9
    run.log_metrics({"few": 2.0}, step=2)
    assert _stored(client, run).data.metrics == {}
    now = 10.0
    run.log_metrics({"few": 3.0}, step=3)
    assert _stored(client, run).data.metrics == {"few": 3.0}
    run.log_metrics({f"many{i}": 1.0 for i in range(1001)}, step=4)
    assert len(_stored(client, run).data.metrics) == 1002
    run.log_metrics({"few": 4.0}, step=5)
    run.flush()
    assert _stored(client, run).data.metrics["few"] == 4.0
    run.close(Outcome.ok)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, None, "text"])
def test_a_value_that_is_no_finite_number_is_absent_with_the_reason_in_a_tag(
    value: Any, uri: str, client: Any, tmp_path: Path
) -> None:
    run = _open(Settings(uri=uri, experiment="absent"), tmp_path)
    run.log_metrics({"train/loss": value, "train/accuracy": 0.5}, step=7)
    run.close(Outcome.diverged)
    stored = _stored(client, run)
    assert stored.data.metrics == {"train/accuracy": 0.5}
    assert stored.data.tags["mp_hydra.absent.train/loss"] == f"not finite: {value} at step 7"


def test_awkward_metric_names_and_long_tags_do_not_lose_the_values_beside_them(
    settings: Settings, client: Any, tmp_path: Path
) -> None:
    run = _open(settings, tmp_path)
    run.log_metrics({"top@5": 0.75, "../x": 1.0, "loss": 2.0}, step=1)
    run.set_tags({"a=b": "x" * 9000, "flag": True})
    run.close(Outcome.ok)
    stored = _stored(client, run)
    assert sorted(stored.data.metrics.values()) == [0.75, 1.0, 2.0]
    assert stored.data.metrics["top_5"] == 0.75
    assert stored.data.tags["a_b"].endswith("[cut, 9000 characters]")
    assert stored.data.tags["flag"] == "true"


def test_a_dataset_is_recorded_with_digest_and_context(settings: Settings, client: Any, tmp_path: Path) -> None:
    run = _open(settings, tmp_path)
    run.log_dataset(
        name="digits", digest="a" * 64, source="sklearn", schema="{}", profile='{"rows": 3}', context="eval"
    )
    run.close(Outcome.ok)
    (item,) = _stored(client, run).inputs.dataset_inputs
    assert (item.dataset.name, item.dataset.digest, item.dataset.source) == ("digits", "a" * 36, "sklearn")
    assert (item.dataset.schema, item.dataset.profile) == ("{}", '{"rows": 3}')
    assert [(tag.key, tag.value) for tag in item.tags] == [("mlflow.data.context", "eval")]


def test_artifacts_are_copied_at_once_files_by_name_and_directories_as_directories(
    settings: Settings, client: Any, tmp_path: Path
) -> None:
    file, folder = tmp_path / "config.yaml", tmp_path / ".hydra"
    file.write_text("a: 1")
    folder.mkdir()
    (folder / "overrides.yaml").write_text("[]")
    run = _open(settings, tmp_path)
    run.log_artifacts(file)
    file.unlink()
    run.log_artifacts(folder)
    run.log_artifacts(folder, "deep/er")
    run.close(Outcome.ok)
    top = {item.path for item in client.list_artifacts(run.run_id)}
    assert top == {"config.yaml", ".hydra", "deep"}
    assert [item.path for item in client.list_artifacts(run.run_id, "deep/er/.hydra")] == [
        "deep/er/.hydra/overrides.yaml"
    ]


def test_a_relative_artifact_is_found_although_the_process_changes_directory_later(
    settings: Settings, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a.txt").write_text("a")
    monkeypatch.chdir(tmp_path)
    run = _open(settings, tmp_path)
    run.log_artifacts(Path("a.txt"))
    monkeypatch.chdir("/")
    run.log_metrics({"a": 1.0}, step=1)
    run.close(Outcome.ok)
    assert [item.path for item in client.list_artifacts(run.run_id)] == ["a.txt"]
    assert _stored(client, run).info.status == "FINISHED"


def test_no_active_run_leaks_into_the_process(settings: Settings, tmp_path: Path) -> None:
    import mlflow

    run = _open(settings, tmp_path)
    assert mlflow.active_run() is None
    run.close(Outcome.ok)


def test_values_are_sent_synchronously_whatever_the_environment_says(
    settings: Settings, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_ENABLE_ASYNC_LOGGING", "true")
    run = _open(settings, tmp_path)
    run.log_metrics({"a": 1.0}, step=1)
    run.flush()
    assert _stored(client, run).data.metrics == {"a": 1.0}
    assert not [thread for thread in threading.enumerate() if "AsyncLogging" in thread.name]
    run.close(Outcome.ok)


def test_a_run_whose_parameters_are_refused_is_an_error_and_does_not_stay_running(
    settings: Settings, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "flatten", lambda params: {"a=b": "1"})
    with pytest.raises(TrackingError, match="cannot be used"):
        _open(settings, tmp_path)
    experiment = client.get_experiment_by_name(settings.experiment)
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_ctrl_c_while_opening_leaves_no_run_running(
    settings: Settings, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = type(client).create_run

    def create_and_interrupt(*args: Any, **kwargs: Any) -> Any:
        created = create(*args, **kwargs)
        os.kill(os.getpid(), signal.SIGINT)
        return created

    monkeypatch.setattr(type(client), "create_run", create_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        _open(settings, tmp_path)
    experiment = client.get_experiment_by_name(settings.experiment)
    assert [run.info.status for run in client.search_runs([experiment.experiment_id])] == ["KILLED"]


@pytest.fixture
def interrupted_close(client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C arrives while the last values are being sent."""
    log_batch = type(client).log_batch

    def interrupt_and_log(self: Any, run_id: str, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("metrics"):
            os.kill(os.getpid(), signal.SIGINT)
        return log_batch(self, run_id, *args, **kwargs)

    monkeypatch.setattr(type(client), "log_batch", interrupt_and_log)


@pytest.mark.usefixtures("interrupted_close")
def test_a_second_ctrl_c_does_not_cut_the_closing_of_a_killed_run_in_half(
    settings: Settings, client: Any, tmp_path: Path
) -> None:
    run = _open(settings, tmp_path)
    run.log_metrics({"a": 1.0}, step=1)
    before = signal.getsignal(signal.SIGINT)
    run.close(Outcome.killed)
    assert signal.getsignal(signal.SIGINT) is before
    stored = _stored(client, run)
    assert (stored.info.status, stored.data.metrics) == ("KILLED", {"a": 1.0})


@pytest.mark.usefixtures("interrupted_close")
def test_ctrl_c_while_a_good_run_is_closed_acts_once_the_run_is_closed(
    settings: Settings, client: Any, tmp_path: Path
) -> None:
    run = _open(settings, tmp_path)
    run.log_metrics({"a": 1.0}, step=1)
    with pytest.raises(KeyboardInterrupt):
        run.close(Outcome.ok)
    stored = _stored(client, run)
    assert (stored.info.status, stored.data.metrics) == ("FINISHED", {"a": 1.0})


def test_a_run_can_be_closed_from_another_thread(settings: Settings, client: Any, tmp_path: Path) -> None:
    run = _open(settings, tmp_path)
    thread = threading.Thread(target=run.close, args=(Outcome.ok,))
    thread.start()
    thread.join()
    assert _stored(client, run).info.status == "FINISHED"


def test_values_interrupted_by_ctrl_c_are_sent_by_close(
    settings: Settings, client: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _open(settings, tmp_path)
    run.log_metrics({"a": 1.0}, step=1)

    def interrupt(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(client), "log_batch", interrupt)
        with pytest.raises(KeyboardInterrupt):
            run.flush()
    run.close(Outcome.killed)
    assert _stored(client, run).data.metrics == {"a": 1.0}


def test_the_ui_command_names_the_store_in_a_form_that_the_shell_takes(settings: Settings, tmp_path: Path) -> None:
    run = _open(settings, tmp_path)
    run.close(Outcome.ok)
    words = shlex.split(run.ui_command())
    assert words == [
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION=false",
        *("mlflow", "ui", "--workers", "1", "--backend-store-uri", settings.uri),
    ]
    assert run.url() is None


def test_tracking_off_takes_everything_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "home"
    monkeypatch.setenv("MP_HYDRA_HOME", str(home))
    monkeypatch.chdir(tmp_path)
    run = _open(Settings("off"), tmp_path, {"a": 1})
    assert isinstance(run, OffRun)
    run.log_metrics({"a": 1.0, "b": math.nan}, step=1)
    run.set_tags({"a": "b"})
    run.log_dataset(name="a", digest="b", source="c", schema=None, profile=None)
    run.log_artifacts(tmp_path / "nowhere")
    run.flush()
    run.close(Outcome.ok)
    run.close(Outcome.ok)
    assert (run.run_id, run.experiment_id, run.uri, run.url(), run.ui_command()) == (None, None, "", None, "")
    assert list(tmp_path.iterdir()) == []
    assert caplog.records == []
