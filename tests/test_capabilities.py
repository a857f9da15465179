"""The hardware rules on a table of real devices: what is fast, what precision=auto comes to, and why.

Compute capabilities: developer.nvidia.com/cuda-gpus. Tensor cores: NVIDIA's data sheets (Volta, Turing and later; TU116 and TU117
have none). CPU flags: as /proc/cpuinfo names them, those that matter here, by the makers' documents; TPUs by Cloud TPU's names.
"""

from __future__ import annotations

import pytest

from mp_hydra import capabilities
from mp_hydra.capabilities import Device, Speed, candidates, choose, tensor_cores, verdict


def gpu(name: str, major: int, minor: int) -> Device:
    return Device("GPU", name, (major, minor))


def cpu(name: str, *flags: str, onednn: bool | None = True, max_isa: str | None = None) -> Device:
    return Device("CPU", name, flags=frozenset(flags), onednn=onednn, max_isa=max_isa)


A100, V100, T4, P100 = (
    gpu("NVIDIA A100-SXM4-40GB", 8, 0),
    gpu("Tesla V100-SXM2-16GB", 7, 0),
    gpu("Tesla T4", 7, 5),
    gpu("P100", 6, 0),
)
GENOA = cpu("AMD EPYC 9B14", "avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16")
SAPPHIRE_RAPIDS = cpu("Xeon Platinum 8480C", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16")
GRANITE_RAPIDS = cpu("Xeon 6980P", "avx512f", "avx512_bf16", "avx512_fp16", "amx_tile", "amx_bf16", "amx_fp16")
SKYLAKE = cpu("Xeon Platinum 8175M", "avx", "avx2", "fma", "f16c", "avx512f")
GRAVITON3 = cpu("Neoverse-V1", "asimd", "asimdhp", "bf16", "sve", "svebf16")

FAST, LITTLE, SLOW, UNKNOWN = Speed.fast, Speed.little, Speed.slow, Speed.unknown
DEVICES = [  # device, tensor cores, tf32, float16, bfloat16, precision=auto
    (gpu("Tesla K80", 3, 7), False, Speed.reference, SLOW, SLOW, "fp32"),
    (P100, False, Speed.reference, LITTLE, SLOW, "fp32"),
    (gpu("NVIDIA GeForce GTX 1080 Ti", 6, 1), False, Speed.reference, SLOW, SLOW, "fp32"),
    (gpu("NVIDIA Tegra X2", 6, 2), False, Speed.reference, LITTLE, SLOW, "fp32"),
    (V100, True, Speed.reference, FAST, SLOW, "mixed_float16"),
    (gpu("Xavier", 7, 2), True, Speed.reference, FAST, SLOW, "mixed_float16"),
    (T4, True, Speed.reference, FAST, SLOW, "mixed_float16"),
    (gpu("NVIDIA GeForce RTX 2080 Ti", 7, 5), True, Speed.reference, FAST, SLOW, "mixed_float16"),
    (gpu("Quadro RTX 4000", 7, 5), True, Speed.reference, FAST, SLOW, "mixed_float16"),
    (gpu("NVIDIA GeForce GTX 1650", 7, 5), False, Speed.reference, LITTLE, SLOW, "fp32"),
    (gpu("NVIDIA GeForce GTX 1660 Ti with Max-Q Design", 7, 5), False, Speed.reference, LITTLE, SLOW, "fp32"),
    (gpu("NVIDIA T1000 8GB", 7, 5), False, Speed.reference, LITTLE, SLOW, "fp32"),
    (gpu("Quadro T2000 with Max-Q Design", 7, 5), False, Speed.reference, LITTLE, SLOW, "fp32"),
    (gpu("NVIDIA GeForce MX450", 7, 5), False, Speed.reference, LITTLE, SLOW, "fp32"),
    (A100, True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("NVIDIA GeForce RTX 3090", 8, 6), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("Orin", 8, 7), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("NVIDIA L4", 8, 9), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("NVIDIA H100 80GB HBM3", 9, 0), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("NVIDIA H200", 9, 0), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("NVIDIA B200", 10, 0), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (gpu("NVIDIA GeForce RTX 5090", 12, 0), True, FAST, FAST, FAST, "mixed_bfloat16"),
    (Device("GPU", "AMD Instinct MI300X"), None, UNKNOWN, UNKNOWN, UNKNOWN, "fp32"),
    (Device("TPU", "TPU v4"), False, Speed.reference, SLOW, FAST, "mixed_bfloat16"),
    (Device("TPU", "TPU v6 lite"), False, Speed.reference, SLOW, FAST, "mixed_bfloat16"),
    (GENOA, False, Speed.reference, SLOW, FAST, "mixed_bfloat16"),
    (SAPPHIRE_RAPIDS, False, Speed.reference, UNKNOWN, FAST, "mixed_bfloat16"),
    (GRANITE_RAPIDS, False, Speed.reference, UNKNOWN, FAST, "mixed_bfloat16"),
    (
        cpu("Xeon Platinum 8380H (Cooper Lake)", "avx512f", "avx512_bf16"),
        False,
        Speed.reference,
        SLOW,
        FAST,
        "mixed_bfloat16",
    ),
    (SKYLAKE, False, Speed.reference, SLOW, SLOW, "fp32"),
    (cpu("AMD EPYC 7763", "avx", "avx2", "fma", "f16c"), False, Speed.reference, SLOW, SLOW, "fp32"),
    (cpu("Core Ultra 7 155H", "avx2", "fma", "f16c"), False, Speed.reference, SLOW, SLOW, "fp32"),
    (GRAVITON3, False, Speed.reference, UNKNOWN, UNKNOWN, "fp32"),
    (cpu("Neoverse-N1", "asimd", "asimdhp"), False, Speed.reference, UNKNOWN, SLOW, "fp32"),
    (cpu("no flags known"), False, Speed.reference, UNKNOWN, UNKNOWN, "fp32"),
]


@pytest.mark.parametrize(
    ("device", "cores", "speeds", "auto"),
    [(device, cores, speeds, auto) for device, cores, *speeds, auto in DEVICES],
    ids=[str(row[0].name) for row in DEVICES],
)
def test_rules_on_real_devices(device: Device, cores: bool | None, speeds: list[Speed], auto: str) -> None:
    assert tensor_cores(device) is cores
    found = {name: verdict(device, name).speed for name in capabilities.PRECISIONS}
    assert found == dict(zip(capabilities.PRECISIONS, [Speed.reference, *speeds], strict=True))
    assert choose([device]).name == auto


@pytest.mark.parametrize("device", [row[0] for row in DEVICES], ids=[str(row[0].name) for row in DEVICES])
def test_every_verdict_and_choice_gives_a_reason_in_one_line(device: Device) -> None:
    reasons = [one.reason for one in capabilities.verdicts(device)] + [choose([device]).reason]
    assert all(reason and "\n" not in reason and not reason.endswith(".") for reason in reasons)


@pytest.mark.parametrize(
    ("device", "said"),
    [
        (cpu("Genoa", "avx512_bf16", onednn=False), "oneDNN, whose kernels use it, is off"),
        (cpu("Genoa", "avx512_bf16", max_isa="AVX2"), "ONEDNN_MAX_CPU_ISA=AVX2 forbids it"),
        (cpu("Genoa", "avx512_bf16", max_isa="avx512_core"), "forbids it"),
        (cpu("Genoa", "amx_bf16", max_isa="AVX512_CORE_VNNI"), "forbids it"),
    ],
)
def test_bfloat16_instructions_that_onednn_may_not_use_do_not_count(device: Device, said: str) -> None:
    assert verdict(device, "mixed_bfloat16").speed is Speed.slow
    choice = choose([device])
    assert choice.name == "fp32"
    assert said in choice.reason


@pytest.mark.parametrize("isa", ["DEFAULT", "AVX512_CORE_BF16", "avx512_core_amx", "AVX10_1_512"])
def test_a_limit_that_leaves_bfloat16_instructions_changes_nothing(isa: str) -> None:
    assert choose([cpu("Genoa", "avx512_bf16", max_isa=isa)]).name == "mixed_bfloat16"


def test_a_cpu_is_not_asked_where_there_is_a_gpu() -> None:
    assert choose([GENOA, P100]).name == "fp32"
    assert choose([SKYLAKE, A100]).name == "mixed_bfloat16"


@pytest.mark.parametrize(
    ("gpus", "name", "decides"),
    [
        ((A100, V100), "mixed_float16", "V100"),
        ((V100, A100), "mixed_float16", "V100"),
        ((A100, T4, P100), "fp32", "P100"),
    ],
)
def test_of_gpus_that_differ_the_weakest_decides_and_is_named(
    gpus: tuple[Device, ...], name: str, decides: str
) -> None:
    choice = choose([SKYLAKE, *gpus])
    assert choice.name == name
    assert decides in choice.reason.partition(":")[0]
    assert choice.reason.endswith(f"of the {len(gpus)} GPUs it is the weakest, and it decides")


def test_gpus_that_agree_are_not_called_weak() -> None:
    assert "weakest" not in choose([GENOA, A100, A100]).reason


def test_no_device_at_all_is_fp32() -> None:
    assert choose([]).name == "fp32"
    assert candidates([]) == ("fp32",)


@pytest.mark.parametrize(
    ("devices", "expected"),
    [
        ([GENOA], ("fp32", "mixed_bfloat16")),
        ([SKYLAKE], ("fp32",)),
        ([SAPPHIRE_RAPIDS], ("fp32", "mixed_bfloat16", "mixed_float16")),
        ([GRAVITON3], ("fp32", "mixed_bfloat16", "mixed_float16")),
        ([GENOA, A100], ("fp32", "mixed_bfloat16", "mixed_float16")),
        ([GENOA, T4], ("fp32", "mixed_float16")),
        ([GENOA, A100, T4], ("fp32", "mixed_float16")),
        ([GENOA, P100], ("fp32", "mixed_float16")),
    ],
)
def test_only_what_no_device_is_known_to_be_slow_in_is_worth_timing(
    devices: list[Device], expected: tuple[str, ...]
) -> None:
    assert candidates(devices) == expected


@pytest.mark.parametrize(
    ("device", "float16", "bfloat16"),
    [
        (gpu("GTX 1080", 6, 1), False, False),
        (P100, True, False),
        (T4, True, False),
        (A100, True, True),
        (Device("GPU", "unknown"), None, None),
        (Device("TPU", "TPU v3"), False, True),
        (GENOA, False, True),
        (SAPPHIRE_RAPIDS, True, True),
        (SKYLAKE, False, False),
        (GRAVITON3, True, True),
    ],
)
def test_hardware_support_of_16_bit_formats(device: Device, float16: bool | None, bfloat16: bool | None) -> None:
    assert capabilities.float16_in_hardware(device) is float16
    assert capabilities.bfloat16_in_hardware(device) is bfloat16


def test_a_format_that_an_accelerator_lacks_is_not_promised_to_run() -> None:
    assert verdict(V100, "mixed_bfloat16").runs is None
    assert verdict(SKYLAKE, "mixed_float16").runs is True
    assert all(one.runs for one in capabilities.verdicts(A100))


def test_a_device_is_read_from_the_hardware_report() -> None:
    found = {"kind": "GPU", "name": "Tesla T4", "compute_capability": [7, 5]}
    assert capabilities.device_from(found, {"flags": ["avx2"], "onednn": True}, {}) == Device("GPU", "Tesla T4", (7, 5))
    processor = {"kind": "CPU", "name": "EPYC", "compute_capability": None}
    read = capabilities.device_from(processor, {"flags": ["avx2"], "onednn": None}, {"ONEDNN_MAX_CPU_ISA": "AVX2"})
    assert read == cpu("EPYC", "avx2", onednn=None, max_isa="AVX2")
