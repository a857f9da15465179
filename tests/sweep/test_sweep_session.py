"""The parent run of a sweep in a real store: opened once, ended on every way out, taken up again."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import cloudpickle
import pytest

from mp_hydra import tracking
from mp_hydra.errors import ConfigError
from mp_hydra.isolation.jobs import Cause, End
from mp_hydra.sweep.membership import Membership
from mp_hydra.sweep.session import Session, open_session
from mp_hydra.tracking import Outcome

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True)
class Store:
    """A store of the test's own, and the sweeps in it."""

    directory: Path

    @property
    def settings(self) -> tracking.Settings:
        return tracking.Settings(uri=f"sqlite:///{self.directory}/store.db", experiment="sweeps")

    @property
    def client(self) -> Any:
        return tracking.open_client(tracking.store_uri(self.settings))

    def sweep(self, name: str = "sweep", *, resume: str | None = None) -> Session:
        return open_session(
            self.settings, directory=self.directory / name, cwd=self.directory, overrides=["seed=0,1"], resume=resume
        )

    def job(self, session: Session, key: str, *, accuracy: float | None = None) -> tracking.Run:
        """A run of a job, as the application opens it."""
        belongs = Membership(str(self.directory), key, session.uri, session.parent_run_id)
        run = tracking.open_run(
            self.settings,
            name=key,
            params={"objective": "test/accuracy"},
            tags=belongs.tags(session.uri),
            spool=self.directory,
            cwd=self.directory,
        )
        if accuracy is not None:
            run.log_metrics({"test/accuracy": accuracy}, step=1)
        return run

    def ended(self, run_id: str | None) -> tuple[str, str | None, str | None]:
        """Status, outcome and reason."""
        run = self.client.get_run(run_id)
        return run.info.status, run.data.tags.get("mp_hydra.outcome"), run.data.tags.get("mp_hydra.reason")


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """An empty store; making one takes seconds."""
    directory = tmp_path_factory.mktemp("template")
    tracking.open_client(f"sqlite:///{directory}/store.db")
    return (directory / "store.db").read_bytes()


@pytest.fixture
def store(tmp_path: Path, template: bytes) -> Store:
    (tmp_path / "store.db").write_bytes(template)
    return Store(tmp_path)


def test_parent_is_running_until_the_sweep_is_closed_and_names_it(store: Store) -> None:
    session = store.sweep()
    run = store.client.get_run(session.parent_run_id)
    assert run.info.status == "RUNNING"
    assert run.info.run_name == "seed=0,1"
    assert run.data.tags["mp_hydra.kind"] == "sweep"
    assert run.data.tags["mp_hydra.sweep"] == str(store.directory / "sweep")
    session.close(Outcome.ok)
    assert store.ended(session.parent_run_id) == ("FINISHED", "ok", None)


def test_sweep_directory_tells_which_parent_and_store_it_belongs_to(store: Store) -> None:
    session = store.sweep()
    session.close(Outcome.ok)
    told = json.loads((store.directory / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    assert told == {"parent_run_id": session.parent_run_id, "experiment_id": session.experiment_id, "uri": session.uri}


@pytest.mark.parametrize(
    ("outcome", "status"), [(Outcome.killed, "KILLED"), (Outcome.error, "FAILED"), (Outcome.ok, "FAILED")]
)
def test_children_that_still_run_are_ended_with_the_sweep(store: Store, outcome: Outcome, status: str) -> None:
    session = store.sweep()
    running, done = store.job(session, "a"), store.job(session, "b")
    done.close(Outcome.ok)
    session.close(outcome, "because")
    assert store.ended(running.run_id)[0] == status
    assert store.ended(done.run_id) == ("FINISHED", "ok", None)


@pytest.mark.parametrize(
    ("cause", "status", "outcome"),
    [
        (Cause.signalled, "FAILED", "error"),
        (Cause.exited, "FAILED", "error"),
        (Cause.timeout, "FAILED", "error"),
        (Cause.lost, "FAILED", "error"),
        (Cause.out_of_memory, "FAILED", "out_of_memory"),
        (Cause.stopped, "KILLED", "killed"),
    ],
)
@pytest.mark.parametrize("said_killed", [False, True], ids=["silent", "closed as killed"])
def test_run_of_a_dead_job_gets_outcome_and_reason(
    store: Store, cause: Cause, status: str, outcome: str, *, said_killed: bool
) -> None:
    session = store.sweep()
    dead, other = store.job(session, "dead"), store.job(session, "other")
    if said_killed:  # what a job does when SIGTERM reaches it
        dead.close(Outcome.killed, reason="Terminated")
    session.job_ended("dead", End(cause, "in these words"))
    assert store.ended(dead.run_id) == (status, outcome, "in these words")
    assert store.ended(other.run_id)[0] == "RUNNING"
    session.close(Outcome.error)


@pytest.mark.parametrize("cause", [Cause.completed, Cause.raised])
def test_a_job_that_ended_its_run_itself_has_the_last_word(store: Store, cause: Cause) -> None:
    session = store.sweep()
    run = store.job(session, "a")
    run.close(Outcome.out_of_memory, reason="no room")
    session.job_ended("a", End(cause, "something else"))
    assert store.ended(run.run_id) == ("FAILED", "out_of_memory", "no room")
    session.close(Outcome.ok)


def test_a_job_that_dies_after_its_run_finished_leaves_it_finished(store: Store) -> None:
    session = store.sweep()
    run = store.job(session, "a")
    run.close(Outcome.ok)
    session.job_ended("a", End(Cause.signalled, "killed by SIGKILL"))
    assert store.ended(run.run_id) == ("FINISHED", "ok", None)
    session.close(Outcome.ok)


@pytest.mark.parametrize("name", ["last", "directory", "relative directory", "id"])
def test_resume_goes_on_in_the_same_parent_and_knows_what_is_finished(store: Store, name: str) -> None:
    first = store.sweep()
    store.job(first, "done", accuracy=0.75).close(Outcome.ok)
    store.job(first, "failed").close(Outcome.error)
    first.close(Outcome.killed, "KeyboardInterrupt")
    wanted = {
        "last": "last",
        "directory": str(store.directory / "sweep"),
        "relative directory": "sweep",
        "id": first.parent_run_id,
    }[name]
    second = store.sweep("again", resume=wanted)
    assert second.parent_run_id == first.parent_run_id
    assert second.finished == {"done": 0.75}
    assert store.client.get_run(first.parent_run_id).info.status == "RUNNING"
    second.close(Outcome.ok)
    assert store.ended(first.parent_run_id)[:2] == ("FINISHED", "ok")
    assert len(second.children()) == 2


def test_resume_ends_what_a_sweep_that_was_killed_with_all_its_processes_left_running(store: Store) -> None:
    first = store.sweep()
    left = store.job(first, "a")
    first._lock.release()  # what the end of its process does
    second = store.sweep("again", resume="last")
    assert store.ended(left.run_id) == ("KILLED", "killed", "its sweep was interrupted")
    second.close(Outcome.ok)


def test_last_means_the_newest_sweep(store: Store) -> None:
    store.sweep("first").close(Outcome.ok)
    newest = store.sweep("second")
    newest.close(Outcome.ok)
    again = store.sweep("third", resume="last")
    assert again.parent_run_id == newest.parent_run_id
    again.close(Outcome.ok)


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ("last", "there is no sweep in this experiment"),
        ("nonsense", "no directory and no run"),
        (".", "has no sweep.json"),
        ("0" * 32, "no directory and no run"),
    ],
)
def test_resume_of_what_is_no_sweep_is_one_line(store: Store, wanted: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        store.sweep(resume=wanted)
    assert str(caught.value).startswith(f"sweep.resume={wanted}: ")
    assert "\n" not in str(caught.value)


def test_resume_of_a_run_that_is_no_parent_is_refused(store: Store) -> None:
    session = store.sweep()
    run = store.job(session, "a")
    session.close(Outcome.ok)
    with pytest.raises(ConfigError, match="not the parent run of a sweep"):
        store.sweep(resume=run.run_id)


def test_resume_of_a_sweep_whose_parent_was_deleted_says_so(store: Store) -> None:
    session = store.sweep()
    session.close(Outcome.ok)
    store.client.delete_run(session.parent_run_id)
    with pytest.raises(ConfigError, match="has been deleted"):
        store.sweep(resume="sweep")


def test_resume_of_a_sweep_in_another_store_names_that_store(store: Store, template: bytes) -> None:
    store.sweep().close(Outcome.ok)
    elsewhere = store.directory / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "store.db").write_bytes(template)
    with pytest.raises(ConfigError, match=r"its runs are in sqlite:///.*/store.db, not in .*elsewhere"):
        Store(elsewhere).sweep(resume=str(store.directory / "sweep"))


def test_resume_of_a_sweep_that_still_runs_is_refused(store: Store) -> None:
    session = store.sweep()
    with pytest.raises(ConfigError, match="still running"):
        store.sweep("again", resume="last")
    assert store.client.get_run(session.parent_run_id).info.status == "RUNNING"
    session.close(Outcome.ok)


def test_last_will_ends_parent_and_children_in_another_process(store: Store) -> None:
    session = store.sweep()
    child = store.job(session, "a")
    cloudpickle.loads(cloudpickle.dumps(session.last_will()))()
    reason = "the process that ran the sweep was killed"
    assert store.ended(child.run_id) == store.ended(session.parent_run_id) == ("KILLED", "killed", reason)
    session._lock.release()


def test_last_will_of_a_sweep_that_has_ended_changes_nothing(store: Store) -> None:
    session = store.sweep()
    will = session.last_will()
    session.close(Outcome.ok)
    will()
    assert store.ended(session.parent_run_id) == ("FINISHED", "ok", None)


def test_a_job_in_another_store_does_not_name_a_parent_that_is_not_there() -> None:
    belongs = Membership("/sweeps/1", "abc", "sqlite:////a.db", "parent")
    assert belongs.tags("sqlite:////b.db") == {"mp_hydra.sweep": "/sweeps/1", "mp_hydra.job_key": "abc"}
    assert belongs.tags("sqlite:////a.db")["mlflow.parentRunId"] == "parent"
