"""A job is the same job in another sweep if its config is the same, wherever it runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from mp_hydra.sweep.identity import job_key, key_of, out_of_place

setup_globals()  # the resolver ${hydra:...}, which Hydra's own entry point registers


def composed(number: int = 0, **changes: Any) -> DictConfig:
    """A config as Hydra composes one for a job."""
    config = {
        "epochs": 3,
        "optimizer": {"learning_rate": 0.001},
        "file": "${hydra:runtime.output_dir}/checkpoint.keras",
        "note": "job ${hydra:job.num}",
        "tracking": {"kind": "local", "experiment": "a"},
        "sweep": {"resume": None},
        "hydra": OmegaConf.structured(HydraConf),
    }
    made = OmegaConf.create(config)
    made.hydra.job.num, made.hydra.job.id = number, f"job_{number}"
    made.hydra.runtime.output_dir = f"/somewhere/{number}"
    made.hydra.sweep.dir, made.hydra.sweep.subdir = "/somewhere", "${hydra.job.num}"
    for key, value in changes.items():
        OmegaConf.update(made, key.replace("__", "."), value)
    OmegaConf.set_readonly(made.hydra, True)
    return made


def test_number_and_directory_of_a_job_do_not_count() -> None:
    assert job_key(composed(0)) == job_key(composed(7))


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"tracking__experiment": "b"}, id="where it is recorded"),
        pytest.param({"sweep__resume": "last"}, id="that a sweep goes on"),
        pytest.param({"optimizer__learning_rate": 1e-3}, id="how a number is written"),
    ],
)
def test_what_does_not_change_the_training_does_not_change_the_key(change: dict[str, Any]) -> None:
    assert job_key(composed(**change)) == job_key(composed())


@pytest.mark.parametrize("change", [{"epochs": 4}, {"optimizer__learning_rate": 0.01}, {"note": "another"}])
def test_any_other_change_changes_the_key(change: dict[str, Any]) -> None:
    assert job_key(composed(**change)) != job_key(composed())


def test_the_environment_counts_where_the_config_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = set()
    for value in ("1", "2", "2"):
        monkeypatch.setenv("MY_RATE", value)
        keys.add(job_key(composed(note="${oc.env:MY_RATE}")))
    assert len(keys) == 2


def test_a_config_that_cannot_be_resolved_counts_as_it_is_written() -> None:
    assert job_key(composed(note="${nowhere}")) == job_key(composed(5, note="${nowhere}"))
    assert job_key(composed(note="${nowhere}")) != job_key(composed(note="${nowhere_else}"))


def test_an_integer_where_a_float_is_meant_counts_as_the_float() -> None:
    config = {"optimizer": {"learning_rate": 1, "_target_": "keras.optimizers.Adam"}}
    assert key_of(config) == key_of({"optimizer": {"learning_rate": 1.0, "_target_": "keras.optimizers.Adam"}})


def test_the_config_and_hydras_own_are_left_as_they_were() -> None:
    mine = composed(3)
    before, hydras = copy.deepcopy(mine), HydraConfig.instance().cfg
    with out_of_place(mine) as task:
        assert "hydra" not in task
        assert task.file == "./checkpoint.keras"
    job_key(mine)
    assert mine == before
    assert HydraConfig.instance().cfg is hydras
    with pytest.raises(Exception, match="read-only"):
        mine.hydra.job.num = 4
    with open_dict(mine):
        mine.new = 1
