"""The environment report: pure parsers on texts as found on real machines, and the report of this machine."""

from __future__ import annotations

import json
import logging
from types import SimpleNamespace

import pytest

from mp_hydra import hardware

H200 = "device: 0, name: NVIDIA H200, pci bus id: 0000:65:00.0, compute capability: 9.0"
T4 = "device: 1, name: Tesla T4, pci bus id: 0000:00:1e.0, compute capability: 7.5"
X86 = """processor\t: 0
vendor_id\t: AuthenticAMD
model name\t: AMD EPYC 9B14
flags\t\t: fpu sse2 avx f16c avx2 fma avx512f avx512_bf16 avx512_vnni
vmx flags\t: amx_tile amx_bf16
bugs\t\t: sysret_ss_attrs

processor\t: 1
model name\t: AMD EPYC 9B14
flags\t\t: fpu sse2 avx f16c avx2 fma avx512f avx512_bf16 avx512_vnni
"""
ARM = """processor\t: 0
BogoMIPS\t: 2100.00
Features\t: fp asimd asimdhp sve bf16 i8mm svebf16
CPU implementer\t: 0x41

processor\t: 1
Features\t: fp asimd asimdhp
"""


@pytest.fixture
def gpus(monkeypatch):
    """A machine with two GPUs, as TensorFlow's list of local devices would describe it."""
    local = {"GPU:0": (H200, 143 * 10**9), "GPU:1": (T4, 15 * 10**9)}
    monkeypatch.setattr(hardware, "_local_gpus", lambda: local)


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        (H200, {"name": "NVIDIA H200", "pci_bus_id": "0000:65:00.0", "compute_capability": [9, 0]}),
        (T4, {"name": "Tesla T4", "pci_bus_id": "0000:00:1e.0", "compute_capability": [7, 5]}),
        (
            "device: 0, name: NVIDIA B200, pci bus id: 00000000:1B:00.0, compute capability: 10.0a",
            {"name": "NVIDIA B200", "pci_bus_id": "00000000:1B:00.0", "compute_capability": [10, 0]},
        ),
        (
            "device: 0, name: AMD Instinct MI300X, pci bus id: 0000:05:00.0",
            {"name": "AMD Instinct MI300X", "pci_bus_id": "0000:05:00.0", "compute_capability": None},
        ),
        ("device: 0, name: METAL", {"name": "METAL", "pci_bus_id": None, "compute_capability": None}),
        ("", {"name": None, "pci_bus_id": None, "compute_capability": None}),
    ],
    ids=["hopper", "turing", "two-digit-capability", "amd", "name-alone", "nothing"],
)
def test_parse_gpu(description, expected):
    assert hardware.parse_gpu(description) == expected


def test_cpu_flags_on_x86_are_those_of_the_host_and_not_of_its_virtual_machines() -> None:
    assert hardware.cpu_flags(X86) == ["avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16"]


def test_cpu_flags_on_arm_are_those_that_all_cores_share() -> None:
    assert hardware.cpu_flags(ARM) == ["asimd", "asimdhp"]


def test_cpu_flags_of_an_empty_text_are_none() -> None:
    assert hardware.cpu_flags("") == []


def test_cpu_model() -> None:
    assert hardware.cpu_model(X86) == "AMD EPYC 9B14"
    assert hardware.cpu_model(ARM) is None


@pytest.mark.parametrize(
    ("capabilities", "pays"),
    [
        ([], False),
        ([None], False),
        ([[7, 5]], False),
        ([[8, 0]], True),
        ([(8, 6)], True),
        ([[10, 0]], True),
        ([None, [7, 0], [9, 0]], True),
    ],
)
def test_tf32_pays_from_compute_capability_8_on_any_gpu(capabilities, pays):
    assert hardware.tf32_pays([{"compute_capability": capability} for capability in capabilities]) is pays


def test_relevant_variables_name_the_switches_and_leak_no_secrets() -> None:
    environ = {
        "XLA_FLAGS": "--xla_dump_to=/tmp/x",
        "TF_XLA_FLAGS": "--tf_xla_auto_jit=2",
        "TF_ENABLE_ONEDNN_OPTS": "0",
        "TF_GPU_ALLOCATOR": "cuda_malloc_async",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "TF_CONFIG": "{}",
        "CUDA_VISIBLE_DEVICES": "1",
        "NVIDIA_TF32_OVERRIDE": "0",
        "OMP_NUM_THREADS": "4",
        "TF_VAR_db_password": "terraform's",
        "TF_TOKEN_app_terraform_io": "terraform's",
        "AWS_SECRET_ACCESS_KEY": "s",
        "MLFLOW_TRACKING_PASSWORD": "s",
        "PATH": "/bin",
    }
    expected = [
        *("CUDA_VISIBLE_DEVICES", "NVIDIA_TF32_OVERRIDE", "OMP_NUM_THREADS", "TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL"),
        *("TF_ENABLE_ONEDNN_OPTS", "TF_GPU_ALLOCATOR", "TF_XLA_FLAGS", "XLA_FLAGS"),
    ]
    assert list(hardware.relevant_variables(environ)) == expected
    assert hardware.relevant_variables(environ)["OMP_NUM_THREADS"] == "4"


def test_devices_describe_each_gpu_beside_the_cpu(gpus):
    cpu, h200, t4 = hardware.devices()
    assert (cpu["device"], cpu["kind"], cpu["compute_capability"], cpu["pci_bus_id"]) == ("CPU:0", "CPU", None, None)
    assert h200 == {
        "device": "GPU:0",
        "kind": "GPU",
        "name": "NVIDIA H200",
        "pci_bus_id": "0000:65:00.0",
        "compute_capability": [9, 0],
        "memory_limit_bytes": 143 * 10**9,
    }
    assert (t4["device"], t4["name"]) == ("GPU:1", "Tesla T4")
    assert set(cpu) == set(h200)


def test_pci_bus_id_is_that_of_the_device_and_none_for_a_cpu(gpus):
    assert hardware.pci_bus_id("GPU:1") == "0000:00:1e.0"
    assert hardware.pci_bus_id("GPU:0") == "0000:65:00.0"
    assert hardware.pci_bus_id("CPU:0") is None
    assert hardware.pci_bus_id("GPU:7") is None


def test_tensorflows_local_devices_are_asked_with_its_own_settings_once_it_has_applied_them(monkeypatch):
    import tensorflow as tf
    from tensorflow.python.client import device_lib

    calls = []
    cpu = SimpleNamespace(name="/device:CPU:0", device_type="CPU", physical_device_desc="", memory_limit=2**28)
    gpu = SimpleNamespace(name="/device:GPU:0", device_type="GPU", physical_device_desc=H200, memory_limit=5)

    def list_local_devices(config):
        calls.append(config)
        return [cpu, gpu]

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: ["a GPU"])
    monkeypatch.setattr(tf.config, "list_logical_devices", lambda: calls.append("initialised"))
    monkeypatch.setattr(device_lib, "list_local_devices", list_local_devices)
    assert hardware._local_gpus.__wrapped__() == {"GPU:0": (H200, 5)}
    assert calls[0] == "initialised"
    assert hasattr(calls[1], "gpu_options")


@pytest.mark.parametrize(("visible", "expected"), [([], "CPU:0"), (["a GPU"], "GPU:0")])
def test_training_device_is_the_first_gpu_that_tensorflow_may_use(monkeypatch, visible, expected):
    import tensorflow as tf

    monkeypatch.setattr(tf.config, "get_visible_devices", lambda kind: visible)
    assert hardware.training_device() == expected


def test_memory_growth_is_switched_on_for_every_gpu(monkeypatch, caplog):
    import tensorflow as tf

    switched = []
    names = [SimpleNamespace(name="GPU:0"), SimpleNamespace(name="GPU:1")]
    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: names)
    monkeypatch.setattr(
        tf.config.experimental, "set_memory_growth", lambda gpu, enable: switched.append((gpu.name, enable))
    )
    hardware.allow_memory_growth()
    assert switched == [("GPU:0", True), ("GPU:1", True)]
    assert caplog.records == []


@pytest.mark.parametrize("error", [RuntimeError("Physical devices cannot be modified"), ValueError("virtual devices")])
def test_memory_growth_that_comes_too_late_is_a_warning(monkeypatch, caplog, error):
    import tensorflow as tf

    def refuse(gpu, enable):
        raise error

    monkeypatch.setattr(tf.config, "list_physical_devices", lambda kind: [SimpleNamespace(name="GPU:0")])
    monkeypatch.setattr(tf.config.experimental, "set_memory_growth", refuse)
    with caplog.at_level(logging.WARNING):
        hardware.allow_memory_growth()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert str(error) in caplog.text


def test_environment_of_this_machine_is_json_and_complete() -> None:
    import keras
    import tensorflow as tf

    report = hardware.environment()
    assert json.loads(json.dumps(report)) == report
    assert report["versions"]["tensorflow"] == tf.__version__
    assert report["versions"]["keras"] == keras.__version__
    assert set(report["versions"]) == {"python", "mp_hydra", "tensorflow", "keras", "numpy", "mlflow", "hydra-core"}
    assert report["devices"][0]["kind"] == "CPU"
    assert report["cpu"]["logical_cores"] >= 1
    assert (report["driver"]["version"] is None) != (report["driver"]["reason"] is None)
    assert report["tf32"]["allowed"] is tf.config.experimental.tensor_float_32_execution_enabled()
    assert set(report) == {
        *("versions", "system", "cpu", "devices", "cuda", "driver", "tf32", "xla", "onednn"),
        "environment_variables",
    }


def test_environment_shows_switches_as_they_are(monkeypatch):
    import tensorflow as tf

    monkeypatch.setattr(tf.config.experimental, "tensor_float_32_execution_enabled", lambda: False)
    monkeypatch.setattr(tf.config.optimizer, "get_jit", lambda: "autoclustering")
    monkeypatch.setenv("TF_XLA_FLAGS", "--tf_xla_auto_jit=2")
    report = hardware.environment()
    assert report["tf32"]["allowed"] is False
    assert report["xla"]["auto_jit"] == "autoclustering"
    assert report["environment_variables"]["TF_XLA_FLAGS"] == "--tf_xla_auto_jit=2"


def test_a_distribution_that_is_not_installed_has_no_version() -> None:
    assert hardware._installed("mp-hydra-no-such-distribution") is None
