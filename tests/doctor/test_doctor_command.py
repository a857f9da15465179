"""`mp-hydra doctor` as it is typed, and on the real pynvml with a fake driver library."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from mp_hydra import cli
from mp_hydra.doctor import measure as measuring
from mp_hydra.doctor import story
from mp_hydra.doctor.driver import Driver, Gpu
from mp_hydra.doctor.facts import Facts, TensorFlow, gather

if TYPE_CHECKING:
    from click.testing import Result

ROOT = Path(__file__).parents[2]


def typed(*words: str) -> Result:
    return CliRunner().invoke(cli.cli, ["doctor", *words], env={"COLUMNS": "160"})


@pytest.fixture
def without_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mp_hydra.doctor.facts.ask_driver", lambda: Driver(problem="no driver"))


@pytest.mark.usefixtures("without_driver")
def test_doctor_shows_machine_precisions_and_what_auto_comes_to() -> None:
    done = typed()
    assert done.exit_code == 0, done.output
    for shown in (
        "TensorFlow is built for",
        "NVML does not answer: no driver",
        "MLflow store",
        "mixed_bfloat16",
        "oneDNN",
    ):
        assert shown in done.output
    assert "precision=auto comes to" in done.output


@pytest.mark.usefixtures("without_driver")
def test_quick_leaves_tensorflow_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "ask_tensorflow", lambda: pytest.fail("TensorFlow was asked"))
    done = typed("--quick")
    assert done.exit_code == 0
    assert "precision=auto comes to" in done.output
    assert "What TensorFlow would train on" not in done.output


def test_measuring_without_tensorflow_is_refused() -> None:
    done = typed("--quick", "--measure")
    assert done.exit_code == 2
    assert "--measure needs TensorFlow" in done.output


@pytest.mark.usefixtures("without_driver")
def test_json_is_one_document_with_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"matmul": (16, 16), "convolution": (1, 4, 4, 8), "BatchNorm": (2, 4, 4, 8), "softmax": (4, 8)}
    monkeypatch.setattr(measuring, "_SIZES", {"CPU": small})
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 1e-5)
    done = typed("--json", "--measure")
    found = json.loads(done.stdout)
    assert found["schema"] == 1
    assert found["exit_code"] == done.exit_code == 0
    (device,) = found["precisions"]
    assert device["kind"] == "CPU"
    assert [verdict["precision"] for verdict in device["verdicts"]] == [
        "fp32",
        "tf32",
        "mixed_float16",
        "mixed_bfloat16",
    ]
    assert device["verdicts"][3]["measured"]["ratio"] > 0
    assert {one["operation"] for one in found["measured"]} == set(measuring.OPERATIONS)
    assert found["auto"]["name"] in ("fp32", "mixed_bfloat16")
    assert found["tensorflow"]["problem"] is None


def test_json_and_tables_of_a_machine_with_a_gpu_that_works_and_with_one_that_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gpu = Gpu("NVIDIA H200", 141 * 2**30, (9, 0), "00000000:65:00.0", mig=True)
    seen = TensorFlow(
        gpus=({"name": gpu.name, "compute_capability": [9, 0]},),
        tf32_allowed=True,
        auto_jit="off",
        onednn=True,
        loaded={"cudnn": "9.3.0"},
    )
    monkeypatch.setattr("mp_hydra.doctor.facts.ask_driver", lambda: Driver("560.35.03", "12.6", (gpu,)))
    monkeypatch.setattr(story, "ask_tensorflow", lambda: seen)
    done = typed()
    assert done.exit_code == 0, done.output
    for shown in (
        *(
            "NVIDIA H200, 141 GiB, compute capability 9.0, divided by MIG",
            "560.35.03, for CUDA up to 12.6; NVML answers",
        ),
        *("cudnn 9.3.0 loaded", "yes, on by default", "precision=auto comes to mixed_bfloat16"),
    ):
        assert shown in done.output
    monkeypatch.setattr(story, "ask_tensorflow", lambda: TensorFlow(onednn=True, auto_jit="off", tf32_allowed=True))
    broken = typed("--json")
    assert broken.exit_code == 1
    found = json.loads(broken.stdout)
    assert found["findings"][0]["breaks_gpu"]
    assert "sees no GPU" in found["findings"][0]["text"]


@pytest.mark.usefixtures("without_driver")
@pytest.mark.parametrize("words", [(), ("--json",), ("--measure",)])
def test_tensorflow_that_cannot_be_imported_is_a_line(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(story, "ask_tensorflow", lambda: TensorFlow(problem="ImportError: libfoo.so"))
    done = typed(*words)
    assert done.exit_code == 0
    assert "ImportError: libfoo.so" in done.output


def test_gathered_facts_become_json_as_they_are() -> None:
    from mp_hydra.doctor import show

    assert isinstance(gather(), Facts)
    assert json.loads(json.dumps(show.as_json(gather(), [])))["tensorflow"] is None


# --- the fake driver -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    gcc = shutil.which("gcc")
    if gcc is None:
        pytest.skip("gcc, which builds the fake NVML library, is not installed")
    folder = tmp_path_factory.mktemp("fake_nvml")
    source = ROOT / "tests" / "telemetry" / "fake_nvml.c"
    subprocess.run(
        [gcc, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(folder / "libnvidia-ml.so.1"), str(source)], check=True
    )
    return folder


def with_driver(library: Path, mode: str, *words: str, **environment: str) -> tuple[int, Any]:
    variables = {
        **{name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"},
        "LD_LIBRARY_PATH": str(library),
        "PYTHONPATH": str(ROOT),
        "FAKE_NVML_MODE": mode,
        **environment,
    }
    done = subprocess.run(
        [sys.executable, "-c", "from mp_hydra.cli import main; main()", "doctor", "--json", *words],
        env=variables,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    return done.returncode, json.loads(done.stdout)


@pytest.mark.process
def test_quick_reads_the_driver_and_rates_its_gpu(library: Path) -> None:
    code, found = with_driver(library, "alone", "--quick")
    assert code == 0
    assert found["driver"] == {
        "version": "999.99-fake",
        "cuda": "12.6",
        "gpus": [
            {
                "name": "Fake GPU",
                "memory_bytes": 24 * 2**30,
                "compute_capability": [8, 9],
                "pci_bus_id": "00000000:65:00.0",
                "mig": False,
            }
        ],
        "problem": None,
        "broken": False,
    }
    assert found["auto"]["name"] == "mixed_bfloat16"
    assert found["auto"]["reason"].startswith("Fake GPU (compute capability 8.9)")


@pytest.mark.process
def test_what_a_driver_does_not_tell_is_null_and_decides_nothing(library: Path) -> None:
    code, found = with_driver(library, "bare", "--quick")
    assert code == 0
    (gpu,) = found["driver"]["gpus"]
    assert gpu == {"name": None, "memory_bytes": None, "compute_capability": None, "pci_bus_id": None, "mig": False}
    assert found["driver"]["cuda"] is None
    assert found["auto"]["name"] == "fp32"


@pytest.mark.process
@pytest.mark.parametrize(
    ("mode", "code", "said"),
    [
        ("driver_not_loaded", 0, "the NVIDIA kernel driver is not loaded"),
        ("no_permission", 0, "this user may not query the GPU"),
        ("version_mismatch", 1, "the NVIDIA driver and its library have different versions; reboot"),
    ],
)
def test_nvml_that_does_not_answer_says_why_and_only_a_broken_driver_is_a_failure(
    library: Path, mode: str, code: int, said: str
) -> None:
    found_code, found = with_driver(library, mode, "--quick")
    assert found["driver"]["problem"] == said
    assert found_code == found["exit_code"] == code


@pytest.mark.process
def test_a_gpu_that_tensorflow_does_not_see_is_a_failure(library: Path) -> None:
    code, found = with_driver(library, "alone")
    assert code == 1
    assert found["findings"][0]["severity"] == "error"
    assert "the driver knows Fake GPU, but TensorFlow sees no GPU" in found["findings"][0]["text"]


@pytest.mark.process
def test_quick_imports_neither_tensorflow_nor_mlflow_nor_keras() -> None:
    script = (
        "import sys\nfrom mp_hydra.doctor.facts import gather\nfrom mp_hydra.doctor import show\nshow.as_json(gather(), [])\n"
        "print([name for name in ('tensorflow', 'keras', 'mlflow', 'numpy') if name in sys.modules])"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.strip() == "[]"
