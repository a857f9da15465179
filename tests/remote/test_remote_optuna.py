"""The sweeper `optuna` with a launcher that only notes what it is given: the space, failed trials, and the report."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import pytest
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import OmegaConf

from mp_hydra.errors import ConfigError, SweepFailedError, UserError

optuna = pytest.importorskip(
    "optuna", minversion="4", reason="Optuna 4 is not installed: pip install 'mp_hydra[optuna]'"
)

from mp_hydra.remote import optuna_search  # noqa: E402
from mp_hydra.remote.optuna_search import Settings, search  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

DEFAULTS: dict[str, Any] = {
    "n_trials": 8,
    "n_jobs": 1,
    "direction": "minimize",
    "sampler": "TPESampler",
    "sampler_args": {"seed": 0},
    "storage": None,
    "study_name": None,
    "params": {},
}


class Launcher:
    """Runs `objective` on the overrides of each job."""

    def __init__(self, objective: Callable[[dict[str, Any]], Any]) -> None:
        self.objective = objective
        self.batches: list[list[dict[str, Any]]] = []

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> list[JobReturn]:
        assert initial_job_idx == sum(len(batch) for batch in self.batches)
        self.batches.append([OmegaConf.to_container(OmegaConf.from_dotlist(list(job))) for job in job_overrides])  # type: ignore[misc]
        return [self._run(job) for job in self.batches[-1]]

    def _run(self, job: dict[str, Any]) -> JobReturn:
        try:
            return JobReturn(status=JobStatus.COMPLETED, _return_value=self.objective(job))
        except Exception as error:  # noqa: BLE001
            return JobReturn(status=JobStatus.FAILED, _return_value=error)

    @property
    def jobs(self) -> list[dict[str, Any]]:
        return [job for batch in self.batches for job in batch]


def run(objective: Callable[[dict[str, Any]], Any], *typed: str, where: Path, **settings: Any) -> Launcher:
    launcher = Launcher(objective)
    config = OmegaConf.create({"hydra": {"sweep": {"dir": str(where)}}})
    search(Settings.checked({**DEFAULTS, **settings}), config, launcher, typed)  # type: ignore[arg-type]
    return launcher


def test_values_come_from_what_was_typed_and_what_has_one_value_keeps_it(tmp_path: Path) -> None:
    typed = ("a=choice(2,4)", "b=range(1,10,4)", "c=tag(log,interval(1,32768))", "d=int(interval(3,5))", "e=7")
    jobs = run(lambda _: 0.0, *typed, where=tmp_path, n_trials=20).jobs
    assert {job["a"] for job in jobs} == {2, 4}
    assert {job["b"] for job in jobs} <= {1, 5, 9}
    assert all(1 <= job["c"] <= 32768 for job in jobs)
    assert {job["d"] for job in jobs} <= {3, 4, 5}
    assert {job["e"] for job in jobs} == {7}


def test_of_two_words_for_one_key_the_last_counts(tmp_path: Path) -> None:
    assert {job["a"] for job in run(lambda _: 0.0, "a=choice(1,2)", "a=choice(3,4)", where=tmp_path).jobs} <= {3, 4}


@pytest.mark.parametrize(("direction", "best"), [("minimize", 1), ("maximize", 3)])
def test_the_best_trial_is_written_down(tmp_path: Path, direction: str, best: int) -> None:
    run(lambda job: job["a"], "a=choice(1,2,3)", where=tmp_path, direction=direction, n_trials=12)
    written = OmegaConf.load(tmp_path / optuna_search.RESULTS)
    assert written == {"name": "optuna", "best_params": {"a": best}, "best_value": best}


def test_an_objective_of_nan_is_a_failed_trial_and_the_search_goes_on(tmp_path: Path) -> None:
    jobs = run(lambda job: math.nan if job["a"] == 1 else job["a"], "a=choice(1,2)", where=tmp_path, n_trials=12).jobs
    assert len(jobs) == 12
    assert {job["a"] for job in jobs} == {1, 2}
    assert OmegaConf.load(tmp_path / optuna_search.RESULTS).best_value == 2


def test_a_failed_job_does_not_end_the_search_and_is_named_at_its_end(tmp_path: Path) -> None:
    with pytest.raises(
        SweepFailedError, match=r"(?s)^\d+ of 12 jobs failed\njob \d+ \(a=1\): ZeroDivisionError"
    ) as caught:
        run(lambda job: 1 / (job["a"] - 1), "a=choice(1,2)", where=tmp_path, n_trials=12)
    assert "a=2" not in str(caught.value)
    assert OmegaConf.load(tmp_path / optuna_search.RESULTS).best_params == {"a": 2}


def test_a_search_without_any_number_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no trial of the search gave a number"):
        run(lambda _: None, "a=choice(1,2)", where=tmp_path, n_trials=2)


def test_a_study_in_a_database_goes_on(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/search.db"
    for _ in range(2):
        run(lambda job: job["a"], "a=choice(1,2)", where=tmp_path, n_trials=3, storage=store, study_name="mine")
    assert len(optuna.load_study(study_name="mine", storage=store).trials) == 6


def test_n_jobs_trials_are_launched_at_a_time(tmp_path: Path) -> None:
    launcher = run(lambda _: 0.0, "a=choice(1,2)", where=tmp_path, n_trials=5, n_jobs=2)
    assert [len(batch) for batch in launcher.batches] == [2, 2, 1]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"n_trials": 0}, "hydra.sweeper.n_trials=0"),
        ({"direction": "up"}, "hydra.sweeper.direction=up: choose minimize or maximize"),
        ({"sampler": "Nobody"}, "hydra.sweeper.sampler=Nobody: give a class of optuna.samplers"),
        ({"sampler_args": {"nothing": 1}}, "hydra.sweeper.sampler_args={nothing: 1}: Optuna says"),
        ({"storage": "nowhere"}, "hydra.sweeper.storage=nowhere: Optuna says"),
    ],
)
def test_settings_that_cannot_be_used_are_one_line(tmp_path: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        run(lambda _: 0.0, "a=choice(1,2)", where=tmp_path, **settings)
    assert words in str(caught.value)


def test_nothing_to_search_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="nothing to search"):
        run(lambda _: 0.0, "a=1", where=tmp_path)
