"""`batch_size=max` settled: the number, the record of how it came about, and a run that uses it."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.app import composed
from mp_hydra.errors import ConfigError
from mp_hydra.largest_batch import settle

if TYPE_CHECKING:
    from pathlib import Path

    from mp_hydra.forecast import LargestBatch


def test_a_number_is_taken_as_it_is_without_a_forecast(tmp_path: Path) -> None:
    def never(*_: Any, **__: Any) -> Any:
        raise AssertionError

    sized = settle({"batch_size": 24}, directory=tmp_path, find=never)
    sized.save(tmp_path)
    assert sized.config["batch_size"] == 24
    assert sized.tags() == {}
    assert list(tmp_path.iterdir()) == []


def test_resuming_with_max_is_refused_since_the_order_of_the_data_hangs_on_the_batch_size() -> None:
    from mp_hydra.checks import problems

    found = problems({"batch_size": "max", "resume": "a.keras"})
    assert [str(error) for error in found] == [
        "batch_size=max: a resumed run needs the batch size of the one that it goes on from"
    ]


def test_commands_that_do_not_look_for_the_batch_size_ask_for_a_number() -> None:
    from mp_hydra.preparation import load_data

    with pytest.raises(ConfigError, match="batch_size=max: only a run finds it"):
        load_data(composed(["batch_size=max", "tracking=off"]))


def test_forecast_is_asked_with_the_limit_in_bytes_and_its_answer_is_recorded(tmp_path: Path) -> None:
    from mp_hydra.forecast import LargestBatch

    asked: list[Any] = []

    def find(config: Any, **settings: Any) -> LargestBatch:
        asked.append((config["batch_size"], {key: settings[key] for key in ("memory", "directory")}))
        return answer(LargestBatch)

    config = {"batch_size": "max", "memory": {"limit": "2GiB"}}
    sized = settle(config, directory=tmp_path, find=find)
    sized.save(tmp_path)
    assert asked == [("max", {"memory": 2 * 1024**3, "directory": tmp_path})]
    assert sized.config["batch_size"] == 136
    assert sized.tags() == {"mp_hydra.batch_size_requested": "max", "mp_hydra.batch_size_reason": "it fits"}
    assert json.loads((tmp_path / "forecast.json").read_text())["batch_size"] == 136


def test_the_log_and_the_table_of_jobs_say_what_goes_on_meanwhile(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from mp_hydra.forecast import LargestBatch
    from mp_hydra.forecast.points import Point
    from mp_hydra.isolation import progress

    shown: list[Any] = []

    def find(_config: Any, *, heard: Any, trying: Any, **_: Any) -> LargestBatch:
        shown.append(progress.read(tmp_path / "progress"))
        heard(Point(8, (3 * 1024**2,), (1024,), 1024**2, 0, 0, input_apart=True, seconds=0.1))
        trying(136)
        return answer(LargestBatch)

    progress.report_to(tmp_path / "progress")
    caplog.set_level("INFO")
    try:
        settle({"batch_size": "max", "memory": {"limit": None}}, directory=tmp_path, find=find)
    finally:
        progress.report_to(None)
    assert [(report.fraction, report.text) for report in shown] == [(0.0, "starting a dry run in a process of its own")]
    assert caplog.messages == [
        "batch_size=max: starting a dry run in a process of its own",
        "batch_size=max: a batch of 8 took 4.00 MiB",
        "batch_size=max: trying out a batch of 136",
        "batch_size=max comes to 136: it fits",
    ]


def answer(kind: type[LargestBatch]) -> LargestBatch:
    """A forecast with the values that matter here, and something in the other fields."""
    from dataclasses import MISSING, fields

    values: dict[str, Any] = {"batch_size": 136, "reason": "it fits"}
    for item in fields(kind):
        if item.default is MISSING and item.default_factory is MISSING:
            values.setdefault(item.name, None)
    found: LargestBatch = kind(**values)
    return found
