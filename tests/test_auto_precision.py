"""precision=auto: what it comes to, how that is recorded and repeated, and that measuring leaves no trace in the run."""

from __future__ import annotations

import json
import logging
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
import tensorflow as tf
import yaml
from omegaconf import OmegaConf

from mp_hydra import auto_precision, hardware, step_timing
from mp_hydra.app import composed
from mp_hydra.auto_precision import fastest, settle
from mp_hydra.capabilities import Device
from mp_hydra.config import InvalidConfigError
from mp_hydra.consistency import AUTO_SETTINGS
from mp_hydra.errors import ConfigError
from mp_hydra.paths import conf_dir
from mp_hydra.step_timing import Timing
from tests.e2e import app_driver

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

GENOA = Device("CPU", "AMD EPYC 9B14", flags=frozenset({"avx512f", "avx512_bf16"}))
SKYLAKE = Device("CPU", "Xeon 8175M", flags=frozenset({"avx512f"}))
A100, V100 = Device("GPU", "NVIDIA A100", (8, 0)), Device("GPU", "Tesla V100", (7, 0))
NOT_OPEN = (
    "precision.policy=mixed_float16: precision=auto means policy=auto; to fix what it comes to, give precision.resolved or "
    "choose that option instead"
)
TINY = ("model=mlp", "model.widths=[16]", "dataset=digits", "batch_size=64")


def never(*_: Any, **__: Any) -> Timing:
    raise AssertionError("measured without having been asked to")


def stopwatch(times: Mapping[str, float | str]) -> Callable[..., Timing]:
    """In place of `measure`: milliseconds by the name that auto came to, or the reason why there are none."""

    def measure(config: Mapping[str, Any], *, directory: Path) -> Timing:
        assert directory.is_absolute()
        found = times[config["precision"]["resolved"]]
        return Timing(None, problem=found) if isinstance(found, str) else Timing(found, 20)

    return measure


def settled(*overrides: str, devices: list[Device], measure: Callable[..., Timing] = never) -> auto_precision.Settled:
    config = composed(["precision=auto", *TINY, *overrides])
    return settle(config, directory=Path.cwd(), devices=lambda: devices, measure=measure)


# --- by hardware -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        ([GENOA], "mixed_bfloat16"),
        ([SKYLAKE], "fp32"),
        ([GENOA, A100], "mixed_bfloat16"),
        ([GENOA, V100], "mixed_float16"),
    ],
)
def test_auto_settles_on_what_the_hardware_is_fast_in_and_says_so_in_one_line(
    devices: list[Device], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="mp_hydra.auto_precision"):
        found = settled(devices=devices)
    (line,) = caplog.messages
    assert line == f"precision=auto comes to {name}: {found.reason}"
    assert found.tags() == {
        "mp_hydra.precision": "auto",
        "mp_hydra.precision_resolved": name,
        "mp_hydra.precision_reason": found.reason,
    }


@pytest.mark.parametrize(
    ("devices", "name"), [([GENOA], "mixed_bfloat16"), ([SKYLAKE], "fp32"), ([V100], "mixed_float16")]
)
def test_settled_config_is_that_of_the_option_but_for_the_request(devices: list[Device], name: str) -> None:
    found = settled("precision.float32_head=true", devices=devices).config
    fixed = composed([f"precision={name}", *TINY, "precision.float32_head=true"])
    changed = {"name": "auto", "by": "hardware", "resolved": name}
    assert found == {**fixed, "precision": {**fixed["precision"], **changed}}


@pytest.mark.parametrize("name", list(AUTO_SETTINGS))
def test_what_auto_fills_in_is_what_the_options_say(name: str) -> None:
    option = OmegaConf.load(conf_dir() / "precision" / f"{name}.yaml")
    assert (option.policy, option.tf32) == AUTO_SETTINGS[name]


@pytest.mark.parametrize("name", list(AUTO_SETTINGS))
def test_recorded_config_and_resolved_alone_both_settle_on_the_same_on_other_hardware(name: str) -> None:
    by_key = settled(f"precision.resolved={name}", devices=[]).config
    assert by_key["precision"]["policy"] == AUTO_SETTINGS[name][0]
    record = json.loads(json.dumps(by_key))
    again = settle(record, directory=Path.cwd(), devices=lambda: [V100], measure=never)
    assert again.config == by_key
    assert again.name == name
    assert again.reason == "fixed by precision.resolved"


def test_other_options_pass_through_with_tf32s_remark(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "devices", lambda: [{"compute_capability": None}])
    fixed = composed(["precision=mixed_bfloat16", *TINY])
    found = settle(fixed, directory=Path.cwd(), measure=never)
    assert (found.config, found.name, found.reason) == (fixed, "mixed_bfloat16", None)
    assert "mp_hydra.precision_reason" not in found.tags()
    tf32 = settle(composed(["precision=tf32", *TINY]), directory=Path.cwd(), measure=never)
    assert tf32.name == "fp32"
    assert "comes to fp32 here" in tf32.tags()["mp_hydra.precision_reason"]


@pytest.mark.parametrize("scaling", [("loss_scale=dynamic",), ("loss_scale=fixed", "loss_scale.value=8")])
def test_scaling_that_was_asked_for_is_refused_where_auto_comes_to_fp32(scaling: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"no purpose with precision=auto, which came to fp32; use loss_scale=auto"):
        settled(*scaling, devices=[SKYLAKE])
    assert settled(*scaling, devices=[V100]).name == "mixed_float16"
    assert settled(*scaling, "loss_scale.force=true", devices=[SKYLAKE]).name == "fp32"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (
            ["precision=fp32", "precision.by=hardware"],
            "precision.by=hardware: goes with precision=auto, not with precision=fp32",
        ),
        (
            ["precision=tf32", "precision.resolved=fp32"],
            "precision.resolved=fp32: goes with precision=auto, not with precision=tf32",
        ),
        (
            ["precision=fp32", "precision.policy=auto"],
            "precision.policy=auto: goes with precision=auto, not with precision=fp32",
        ),
        (["precision=auto", "precision.by=guess"], "precision.by=guess: choose one of hardware, measurement, null"),
        (["precision=auto", "precision.by=null"], "precision.by=null: choose one of hardware, measurement"),
        (
            ["precision=auto", "precision.resolved=tf32"],
            "precision.resolved=tf32: choose one of fp32, mixed_float16, mixed_bfloat16, null",
        ),
        (
            ["precision=auto", "precision.policy=mixed_float16"],
            NOT_OPEN,
        ),
    ],
)
def test_settings_that_do_not_go_together_are_refused(overrides: list[str], line: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        composed([*overrides, *TINY])
    assert str(refused.value) == line


# --- by measurement --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("times", "name"),
    [
        ({"fp32": 10.0, "mixed_bfloat16": 9.4}, "mixed_bfloat16"),
        ({"fp32": 10.0, "mixed_bfloat16": 9.6}, "fp32"),  # saves 4 %
        ({"fp32": 10.0, "mixed_bfloat16": 12.0}, "fp32"),
        ({"fp32": 10.0, "mixed_bfloat16": 5.0, "mixed_float16": 4.9}, "mixed_bfloat16"),  # scaling for 2 %
        ({"fp32": 10.0, "mixed_bfloat16": 5.0, "mixed_float16": 4.0}, "mixed_float16"),
        ({"fp32": 10.0, "mixed_bfloat16": 9.6, "mixed_float16": 9.4}, "mixed_float16"),
        ({"fp32": 10.0, "mixed_bfloat16": "refused", "mixed_float16": 9.0}, "mixed_float16"),
        ({"fp32": "out of memory", "mixed_bfloat16": 50.0}, "mixed_bfloat16"),
        ({"fp32": "broken", "mixed_bfloat16": "broken"}, "fp32"),
    ],
)
def test_the_fastest_is_chosen_where_it_saves_more_than_the_margin(times: dict[str, float | str], name: str) -> None:
    timings = {key: Timing(None, problem=t) if isinstance(t, str) else Timing(t) for key, t in times.items()}
    choice = fastest(timings)
    assert choice.name == name
    for key, value in times.items():
        assert (
            f"{key} could not be timed ({value})" if isinstance(value, str) else f"{key} {value:.3g} ms"
        ) in choice.reason


def test_measurement_times_the_candidates_with_the_scaling_of_each_and_records_the_times(tmp_path: Path) -> None:
    asked: list[tuple[str, str, str]] = []

    def measure(config: Mapping[str, Any], **_: Any) -> Timing:
        precision = config["precision"]
        asked.append((precision["resolved"], precision["policy"], config["loss_scale"]["mode"]))
        return Timing({"fp32": 9.0, "mixed_bfloat16": 6.0, "mixed_float16": 3.0}[precision["resolved"]], 25)

    found = settled("precision.by=measurement", "loss_scale=dynamic", devices=[GENOA, A100], measure=measure)
    assert asked == [
        ("fp32", "float32", "none"),  # which would refuse loss_scale=dynamic
        ("mixed_bfloat16", "mixed_bfloat16", "dynamic"),
        ("mixed_float16", "mixed_float16", "dynamic"),
    ]
    assert found.name == "mixed_float16"
    assert found.config["loss_scale"]["mode"] == "dynamic"
    found.save(tmp_path)
    record = json.loads((tmp_path / "auto_precision.json").read_text())
    assert record["timings"]["mixed_bfloat16"] == {"step_ms": 6.0, "steps": 25, "problem": None}
    assert (record["requested"], record["by"], record["resolved"], record["margin"]) == (
        "auto",
        "measurement",
        "mixed_float16",
        0.05,
    )


def test_a_precision_that_cannot_be_timed_is_a_warning_and_out(caplog: pytest.LogCaptureFixture) -> None:
    times: dict[str, float | str] = {"fp32": 9.0, "mixed_bfloat16": "the head gives bfloat16 outputs"}
    found = settled("precision.by=measurement", devices=[GENOA], measure=stopwatch(times))
    assert found.name == "fp32"
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == ["precision=auto: mixed_bfloat16 is out: the head gives bfloat16 outputs"]


def test_nothing_is_timed_where_every_16_bit_format_is_known_to_be_slow() -> None:
    found = settled("precision.by=measurement", devices=[SKYLAKE])
    assert found.name == "fp32"
    assert "nothing was measured" in str(found.reason)


def test_nothing_is_written_for_a_precision_that_was_named(tmp_path: Path) -> None:
    settle(composed(["precision=fp32", *TINY]), directory=tmp_path, measure=never).save(tmp_path)
    assert list(tmp_path.iterdir()) == []


def fixed(name: str, *overrides: str) -> dict[str, Any]:
    return composed([f"precision={name}", *TINY, *overrides])


def test_timed_steps_are_steady_ones_of_the_real_model() -> None:
    before = keras.config.dtype_policy().name
    timing = step_timing.timed(fixed("mixed_bfloat16"), directory=Path.cwd())
    assert timing.problem is None
    assert timing.steps >= step_timing.STEPS
    assert timing.step_ms is not None
    assert 0 < timing.step_ms < 1000
    assert keras.config.dtype_policy().name == before


def test_a_data_set_of_one_batch_is_timed_over_several_epochs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_timing, "SECONDS", 0.0)
    timing = step_timing.timed(fixed("fp32", "batch_size=1000"), directory=Path.cwd())
    assert timing.steps >= step_timing.STEPS
    assert timing.step_ms is not None


@pytest.mark.process
def test_a_run_by_measurement_is_bit_for_bit_the_run_of_what_it_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measured in earnest, in processes of its own; the margin decides for what is not the default."""
    monkeypatch.setattr(hardware, "rated_devices", lambda: [GENOA])
    real = step_timing.measure
    measured: dict[str, Timing] = {}

    def measure(config: Mapping[str, Any], *, directory: Path) -> Timing:
        name = config["precision"]["resolved"]
        measured[name] = real(config, directory=directory)
        return Timing(1.0, 1) if name == "mixed_bfloat16" else Timing(2.0, 1)

    monkeypatch.setattr(auto_precision.settle, "__kwdefaults__", {**(settle.__kwdefaults__ or {}), "measure": measure})
    words = (*TINY, "model.dropout=0.2")
    auto = app_driver.train("precision=auto", "precision.by=measurement", *words, cwd=tmp_path / "auto")
    pinned = app_driver.train("precision=mixed_bfloat16", *words, cwd=tmp_path / "pinned")
    assert {name: timing.problem for name, timing in measured.items()} == {"fp32": None, "mixed_bfloat16": None}
    assert all(timing.step_ms is not None and timing.steps >= step_timing.STEPS for timing in measured.values())
    assert auto.tags["mp_hydra.precision_resolved"] == "mixed_bfloat16"
    mine, theirs = auto.arrays("predictions.npz"), pinned.arrays("predictions.npz")
    assert mine.keys() == theirs.keys()
    for key in mine:
        np.testing.assert_array_equal(mine[key], theirs[key])
    for metric in ("train/loss", "val/loss", "test/loss"):
        assert auto.metrics[metric] == pinned.metrics[metric]


@pytest.mark.process
def test_a_model_that_cannot_be_built_is_a_reason_and_not_an_exception(tmp_path: Path) -> None:
    config = composed(["precision=fp32", "model=custom", "model._target_=no_such_module.build", "dataset=digits"])
    timing = step_timing.measure(config, directory=tmp_path)
    assert timing.step_ms is None
    assert "no_such_module" in str(timing.problem)


# --- whole runs ------------------------------------------------------------------------------------------------------


def test_a_run_records_request_result_reason_and_the_settled_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "rated_devices", lambda: [V100])
    run = app_driver.train("precision=auto", *TINY, cwd=tmp_path)
    assert run.tags["mp_hydra.precision"] == "auto"
    assert run.tags["mp_hydra.precision_resolved"] == "mixed_float16"
    assert run.tags["mp_hydra.precision_reason"].startswith("Tesla V100 (compute capability 7.0): tensor cores")
    assert run.params["precision.name"] == "auto"
    assert run.params["precision.policy"] == "mixed_float16"
    assert run.params["precision.tf32"] == "true"
    assert run.params["precision.resolved"] == "mixed_float16"
    assert run.metrics["loss_scale/value"] == 2.0**15  # loss_scale=auto follows
    assert {layer["compute_dtype"] for layer in run.json("audit.json")["layers"]} >= {"float16"}
    assert run.json("auto_precision.json")["resolved"] == "mixed_float16"
    recorded = yaml.safe_load((run.artifacts / "config.yaml").read_text())
    assert recorded["precision"]["name"] == "auto"
    assert recorded["precision"]["policy"] == "mixed_float16"
    assert tf.config.experimental.tensor_float_32_execution_enabled()


def test_a_recorded_run_is_repeated_by_precision_resolved_on_other_hardware(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hardware, "rated_devices", lambda: [GENOA])
    first = app_driver.train("precision=auto", *TINY, cwd=tmp_path / "first")
    monkeypatch.setattr(hardware, "rated_devices", lambda: [SKYLAKE])
    again = app_driver.train(
        "precision=auto", f"precision.resolved={first.params['precision.resolved']}", *TINY, cwd=tmp_path / "b"
    )
    assert again.metrics["test/loss"] == first.metrics["test/loss"]
    assert again.params["precision.policy"] == "mixed_bfloat16"


def test_a_sweep_over_auto_and_fp32_compares_what_auto_came_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mp_hydra.compare.identity import precision_of, recipe_of
    from mp_hydra.compare.records import RunRecord

    monkeypatch.setattr(hardware, "rated_devices", lambda: [GENOA])
    auto, fp32 = app_driver.sweep("precision=auto,fp32", *TINY, cwd=tmp_path)
    assert auto.tags["mp_hydra.precision_resolved"] == "mixed_bfloat16"
    assert fp32.tags["mp_hydra.precision_resolved"] == "fp32"
    assert math.isfinite(auto.metrics["test/accuracy"])
    assert set(auto.params) == set(fp32.params)
    assert recipe_of(auto.params) == recipe_of(fp32.params)  # so that the row is called mixed_bfloat16, and no more
    fields: dict[str, Any] = dict.fromkeys(RunRecord.__dataclass_fields__)
    record = RunRecord(**{**fields, "params": auto.params, "tags": auto.tags})
    assert precision_of(record) == "mixed_bfloat16"
