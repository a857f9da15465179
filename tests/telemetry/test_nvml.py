"""The NVML sampler, on the real pynvml with a fake driver library (fake_nvml.c), and its pure parts."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mp_hydra.telemetry.nvml import NvmlSampler, process_bytes

MIB = 2**20
BUS = "0000:65:00.0"
ALONE = 0xFFFFFFFF  # the instance ids of a GPU without MIG

# With an interval of an hour the samples are exactly two: at the start and at the stop.
SCRIPT = """
import json, os, sys, time
import pynvml
from ctypes import c_int
from mp_hydra.telemetry.nvml import NvmlSampler, driver_version

def count(name):
    return c_int.in_dll(pynvml.nvmlLib, name).value

def measure(mode, bus="0000:65:00.0", samples=2):
    os.environ["FAKE_NVML_MODE"] = mode
    sampler = NvmlSampler(bus, interval_s=3600 if samples == 2 else 0.001)
    with sampler:
        deadline = time.monotonic() + 30
        while samples > 2 and count("fake_nvml_samples") < samples and time.monotonic() < deadline:
            time.sleep(0.001)
    return {
        "peak": sampler.peak_bytes, "joules": sampler.joules, "why": sampler.unavailable, "source": sampler.source,
        "open": count("fake_nvml_open"),
    }

found = {mode: measure(mode) for mode in sys.argv[1].split(",")}
found["unknown_bus"] = measure("", bus="0000:01:00.0")
found["threaded"] = measure("", samples=4)
found["timeout_once"] = measure("timeout_once", samples=4)

os.environ["FAKE_NVML_MODE"] = ""
pynvml.nvmlInit()  # somebody else uses NVML too
sampler = NvmlSampler("0000:65:00.0", interval_s=3600)
sampler.start()
sampler.start()
opened = count("fake_nvml_open")
running = dict(sampler.unavailable)
sampler.stop()
sampler.stop()
found["twice"] = {"opened": opened, "left": count("fake_nvml_open"), "running": running, "peak": sampler.peak_bytes}
with sampler:
    pass
found["again"] = {"peak": sampler.peak_bytes, "joules": sampler.joules}
found["driver"] = driver_version()
found["tensorflow"] = "tensorflow" in sys.modules
print(json.dumps(found))
"""
MODES = (
    "alone,driver_not_loaded,no_permission,old_driver,lists_forbidden,lost,empty_list,host_pids,graphics_only,both_lists,"
    "others,memory_not_told,cannot_draw,no_energy_counter,energy_stands_still,without_mig,mig"
)


def run(library: Path, script: str, *arguments: str) -> Any:
    root = Path(__file__).parents[2]
    environment = {**os.environ, "LD_LIBRARY_PATH": str(library.parent), "PYTHONPATH": str(root)}
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc, which builds the fake NVML library, is not installed")
    library = tmp_path_factory.mktemp("fake_nvml") / "libnvidia-ml.so.1"
    source = Path(__file__).with_name("fake_nvml.c")
    subprocess.run([gcc, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(library), str(source)], check=True)
    answers: dict[str, Any] = run(library, SCRIPT, MODES)
    return answers


@pytest.mark.process
class TestWithFakeDriver:
    def test_peak_is_the_highest_sample_and_energy_the_difference_of_the_readings(self, found):
        alone = found["alone"]
        assert alone["peak"] == 300 * MIB  # samples of 100 and 300 MiB
        assert alone["joules"] == 2.5  # 5000 and 7500 mJ
        assert alone["why"] == {}
        assert alone["source"] == f"NVML, this process on GPU {BUS}, sampled every 3600 s"

    def test_the_thread_samples_between_start_and_stop(self, found):
        assert found["threaded"]["peak"] == 300 * MIB  # the second sample; 100 and 200 MiB at the ends

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("driver_not_loaded", "the NVIDIA kernel driver is not loaded"),
            ("no_permission", "this user may not query the GPU"),
            ("unknown_bus", "NVML knows no GPU with bus id 0000:01:00.0"),
        ],
    )
    def test_without_a_device_neither_memory_nor_energy_is_known(self, found, mode, reason):
        assert (found[mode]["peak"], found[mode]["joules"]) == (None, None)
        assert found[mode]["why"] == {"memory": reason, "energy": reason}

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("host_pids", "the GPU's process list does not show this process"),
            ("empty_list", "the GPU's process list does not show this process"),
            ("memory_not_told", "the driver does not tell how much memory a single process uses"),
            ("lists_forbidden", "this user may not query the GPU"),
            ("old_driver", "the NVIDIA driver is too old"),
            ("lost", "the GPU no longer answers"),
        ],
    )
    def test_memory_that_cannot_be_told_is_none_with_the_reason(self, found, mode, reason):
        assert found[mode]["peak"] is None
        assert reason in found[mode]["why"]["memory"]

    @pytest.mark.parametrize("mode", ["graphics_only", "both_lists", "cannot_draw", "without_mig", "mig", "others"])
    def test_memory_is_found_in_either_process_list_and_counted_once(self, found, mode):
        assert found[mode]["peak"] == 300 * MIB
        assert "memory" not in found[mode]["why"]

    @pytest.mark.parametrize(
        ("mode", "reason"),
        [
            ("others", "other processes were on it (pid 4242)"),
            ("host_pids", "other processes were on it (pid 999999)"),
            ("empty_list", "may hide others"),
            ("lists_forbidden", "who was on it is not known"),
            ("mig", "MIG divides"),
            ("no_energy_counter", "the GPU has no energy counter"),
            ("energy_stands_still", "did not advance"),
        ],
    )
    def test_energy_that_may_not_be_this_process_alone_is_none_with_the_reason(self, found, mode, reason):
        assert found[mode]["joules"] is None
        assert reason in found[mode]["why"]["energy"]

    @pytest.mark.parametrize("mode", ["graphics_only", "both_lists", "cannot_draw", "without_mig", "memory_not_told"])
    def test_energy_is_known_where_this_process_is_alone_on_the_gpu(self, found, mode):
        assert found[mode]["joules"] == 2.5

    def test_one_failed_sample_is_said_in_the_source_and_does_not_end_the_measurement(self, found):
        once = found["timeout_once"]
        assert once["peak"] == 200 * MIB  # the sample of 300 MiB is the one that failed
        assert ", 1 of " in once["source"]
        assert once["source"].endswith(" samples failed")
        assert once["joules"] == 2.5

    def test_nvml_is_shut_down_as_often_as_it_was_initialised(self, found):
        balances = {
            mode: result["open"] for mode, result in found.items() if isinstance(result, dict) and "open" in result
        }
        assert len(balances) == len(MODES.split(",")) + 3
        assert set(balances.values()) == {0}

    def test_start_and_stop_twice_count_once_and_leave_other_users_of_nvml_alone(self, found):
        twice = found["twice"]
        assert twice["opened"] == 2
        assert twice["left"] == 1
        assert twice["running"] == dict.fromkeys(("memory", "energy"), "the measurement is still running")
        assert twice["peak"] == 300 * MIB

    def test_a_stopped_sampler_can_measure_again_from_scratch(self, found):
        assert found["again"] == {"peak": 300 * MIB, "joules": 2.5}

    def test_driver_version_comes_from_the_library(self, found):
        assert found["driver"] == "999.99-fake"

    def test_sampling_does_not_import_tensorflow(self, found):
        assert found["tensorflow"] is False


@pytest.mark.process
def test_without_the_driver_library_the_reason_names_it(tmp_path):
    library = tmp_path / "libnvidia-ml.so.1"
    library.write_text("not a library")  # found first, so that a machine with a GPU takes the same path
    script = (
        "import json; from mp_hydra.telemetry.nvml import NvmlSampler, driver_version\n"
        f"sampler = NvmlSampler('{BUS}')\n"
        "with sampler: pass\n"
        "print(json.dumps([sampler.unavailable, driver_version().reason]))"
    )
    reason = "no NVIDIA driver library (libnvidia-ml.so.1) could be loaded"
    assert run(library, script) == [{"memory": reason, "energy": reason}, reason]


def test_a_run_without_a_gpu_says_so_and_starts_nothing() -> None:
    sampler = NvmlSampler(None)
    with sampler:
        pass
    reason = "training does not run on an NVIDIA GPU"
    assert sampler.unavailable == {"memory": reason, "energy": reason}
    assert (sampler.peak_bytes, sampler.joules) == (None, None)


def test_before_start_the_reason_is_that_nothing_was_started() -> None:
    sampler = NvmlSampler(BUS)
    sampler.stop()
    assert set(sampler.unavailable.values()) == {"the measurement was not started"}


def entry(pid: int, used: int | None, gpu_instance: int = ALONE, compute_instance: int = ALONE) -> SimpleNamespace:
    return SimpleNamespace(pid=pid, usedGpuMemory=used, gpuInstanceId=gpu_instance, computeInstanceId=compute_instance)


@pytest.mark.parametrize(
    ("processes", "expected"),
    [
        ([], None),
        ([entry(8, 500)], None),
        ([entry(7, None)], None),
        ([entry(7, 500), entry(8, 900)], 500),
        ([entry(7, 0)], 0),
        ([entry(7, 500), entry(7, 500)], 500),
        ([entry(7, None), entry(7, 500)], 500),
        ([entry(7, 500, 1, 0), entry(7, 300, 2, 0)], 800),
        ([entry(7, 500, 1, 0), entry(7, None, 2, 0)], None),
    ],
    ids=[
        "nobody",
        "somebody-else",
        "figure-not-told",
        "among-others",
        "zero-is-a-figure",
        "in-both-lists-counts-once",
        "told-in-one-list",
        "instances-add-up",
        "an-instance-not-told",
    ],
)
def test_process_bytes(processes, expected):
    assert process_bytes(processes, 7) == expected
