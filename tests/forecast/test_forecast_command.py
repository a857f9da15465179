"""`mp-hydra forecast`: what is typed, what comes out, and dry runs of a small model in processes of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from click.testing import CliRunner

from mp_hydra import cli
from mp_hydra.app import composed
from mp_hydra.errors import UserError
from mp_hydra.forecast import largest_batch, story
from mp_hydra.forecast.dry_run import measure
from mp_hydra.forecast.ladder import Goal
from mp_hydra.forecast.points import Measured, Point

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from click.testing import Result

TINY = ("dataset=digits", "model=cnn", "memory=stock", "tracking=off")
MIB = 2**20


def typed(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, ["forecast", *words], env={"COLUMNS": "80"})


def main(*words: str) -> int:
    """The exit code of the console script."""
    with mock.patch.object(sys, "argv", ["mp-hydra", "forecast", *words]), pytest.raises(SystemExit) as leaving:
        cli.main()
    return int(leaving.value.code or 0)


@pytest.fixture
def made_up(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Dry runs that take 100 MiB and 10 a sample, half of that under a mixed policy; mixed_float16 does not run at all."""
    asked: list[str] = []

    def measured(
        config: Mapping[str, Any], _goal: Goal, *, directory: Path, heard: Callable[[Point], None]
    ) -> Measured:
        assert directory == Path.cwd()
        name = config["precision"]["name"]
        asked.append(name)
        if name == "mixed_float16":
            raise UserError("precision=mixed_float16: no kernel for it")
        each = 9 * MIB if name == "fp32" else 4 * MIB
        points = [
            Point(size, (40 * MIB + each * size,), (1,), 60 * MIB, 20 * MIB, size * MIB, input_apart=True, seconds=0.1)
            for size in (8, 16, 32)
        ]
        for point in points:
            heard(point)
        return Measured(tuple(points), "CPU:0", 2**40, 10_000, 0)

    monkeypatch.setattr(story, "measure", measured)
    return asked


def test_the_table_splits_each_peak(made_up: list[str]) -> None:
    done = typed(*TINY, "--memory", "8GiB", "--batch-sizes", "32,128", "--precisions", "fp32,mixed_bfloat16")
    assert done.exit_code == 0, done.output
    assert made_up == ["fp32", "mixed_bfloat16"]
    rows = [line.split() for line in done.stdout.splitlines()]
    at_32 = next(row for row in rows if row[:2] == ["fp32", "32"])
    assert at_32[2:] == ["420", "MiB", "dry", "run", "60.0", "MiB", "20.0", "MiB", "308", "MiB", "32.0", "MiB"]
    at_128 = next(row for row in rows if row[:1] == ["128"])
    assert at_128 == ["128", "1.35", "GiB", "8%", "60.0", "MiB", "20.0", "MiB", "1.14", "GiB", "128", "MiB"]
    assert max(map(len, done.stdout.splitlines())) <= 80


def test_the_json_document_is_stable(made_up: list[str], tmp_path: Path) -> None:
    output = ("--format", "json", "--output", str(tmp_path / "out"))
    done = typed(*TINY, "--memory", "8GiB", "--batch-sizes", "128", "--precisions", "fp32", *output)
    assert done.exit_code == 0
    assert made_up == ["fp32"]
    found = json.loads(done.stdout)
    assert found == json.loads((tmp_path / "out" / "forecast.json").read_text())
    assert found["format"] == 1
    assert found["memory"]["usable_bytes"] == 6 * 2**30
    (by,) = found["precisions"]
    assert by["rows"] == [
        {
            "batch_size": 128,
            "peak_bytes": 1380 * MIB,
            "band": 0.08,
            "dry_run": False,
            "state_bytes": 60 * MIB,
            "gradient_bytes": 20 * MIB,
            "activation_bytes": 1172 * MIB,
            "input_bytes": 128 * MIB,
        }
    ]
    assert by["largest"]["batch_size"] == 512  # 5220 MiB, and 16 % are 6055 of 6144; at 520 it is 6153
    assert by["problem"] is None
    assert "| fp32 | 128 | 1.35 GiB | 8% |" in (tmp_path / "out" / "forecast.md").read_text()


def test_a_precision_without_an_answer_leaves_those_of_the_others_and_fails_the_command(made_up: list[str]) -> None:
    done = typed(*TINY, "--memory", "8GiB", "loss_scale=dynamic")
    assert done.exit_code == 1
    assert made_up == ["fp32", "mixed_bfloat16", "mixed_float16"]
    assert "mixed_float16: no kernel for it" in done.stdout
    assert "fp32" in done.stdout


def test_a_precision_in_the_overrides_is_the_one_that_is_forecast(made_up: list[str]) -> None:
    typed(*TINY, "precision=mixed_bfloat16", "--memory", "8GiB")
    assert made_up == ["mixed_bfloat16"]


def test_the_limit_of_a_run_that_is_to_fill_it_is_taken(made_up: list[str]) -> None:
    done = typed(*TINY, "batch_size=max", "memory.limit=4GiB", "--precisions", "fp32", "--format", "json")
    assert json.loads(done.stdout)["memory"]["total_bytes"] == 4 * 2**30
    assert made_up == ["fp32"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--memory", "plenty"), "--memory=plenty: give a number with a unit, such as 12GB"),
        (("--allowance", "-1GB"), "--allowance=-1GB: give a number with a unit"),
        (("--batch-sizes", "8,x"), "--batch-sizes=8,x: give integers of at least 1, such as 8,16,32"),
        (("--batch-sizes", "0"), "--batch-sizes=0: give integers"),
        (("--precisions", "fp32,float8"), "--precisions=fp32,float8: there is no float8"),
        (("precision=float8",), "float8"),
        (("epochs=0",), "epochs=0: give an integer of at least 1"),
    ],
)
def test_what_cannot_be_understood_is_one_line(
    words: tuple[str, ...], said: str, made_up: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(*TINY, *words) == 1
    printed = capsys.readouterr().err
    assert printed.startswith("mp_hydra: ")
    assert said in printed
    assert printed.count("\n") == 1
    assert made_up == []


def test_too_little_memory_is_a_line_of_the_answer(made_up: list[str]) -> None:
    done = typed(*TINY, "--memory", "2200MiB", "--precisions", "fp32")
    assert done.exit_code == 1
    assert made_up == ["fp32"]
    said = " ".join(done.stdout.split())
    assert (
        "fp32: a batch of 8 needs at least 2.18 GiB, an allowance of 2.00 GiB included, and there are 2.15 GiB" in said
    )


# --- in earnest --------------------------------------------------------------------------------------------------------


@pytest.mark.process
def test_the_largest_batch_of_a_real_model_stays_within_its_memory_when_it_is_run() -> None:
    words = ("--memory", "4MiB", "--allowance", "0", "--precisions", "fp32", "--verify", "--format", "json")
    done = typed(*TINY, *words, "--batch-sizes", "8,32")
    assert done.exit_code == 0, done.output
    (by,) = json.loads(done.stdout)["precisions"]
    small, large = by["rows"]
    assert small["state_bytes"] == large["state_bytes"] >= 3 * small["gradient_bytes"]  # Adam: weights and two moments
    assert large["input_bytes"] == 32 * (8 * 8 * 4 + 8)  # float32 images, int64 labels
    assert small["peak_bytes"] < large["peak_bytes"]
    largest = by["largest"]
    assert largest["batch_size"] % 8 == 0
    assert 0 < largest["measured_bytes"] * 1.03 <= 4 * MIB


@pytest.mark.process
def test_a_data_set_smaller_than_the_batch_can_be_forecast_but_not_filled() -> None:
    words = ("dataset=synthetic", "dataset.kind=vector", "dataset.size=30", "model=mlp", "memory=stock")
    config = composed(["precision=fp32", "tracking=off", *words])
    found = largest_batch(config, memory=2**30, directory=Path.cwd(), verify=False)
    assert [point.batch_size for point in found.points] == [8, 16, 32]
    assert (found.batch_size, found.capped) == (24, True)  # 27 samples are left after validation


@pytest.mark.process
def test_a_model_that_cannot_be_built_is_one_line() -> None:
    config = composed(["precision=fp32", "model=custom", "model._target_=no_such_module.build", "dataset=digits"])
    with pytest.raises(UserError, match=r"precision=fp32: .*no_such_module"):
        measure(config, Goal(), directory=Path.cwd())
