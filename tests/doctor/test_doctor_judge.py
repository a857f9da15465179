"""The doctor's rules on hand-made machines."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mp_hydra.capabilities import Speed, Verdict
from mp_hydra.doctor import judge
from mp_hydra.doctor.driver import Driver, Gpu
from mp_hydra.doctor.facts import Cpu, Facts, Software, Store, TensorFlow
from mp_hydra.doctor.measure import Measured

GIB = 2**30
BUILD = {
    "is_cuda_build": True,
    "cuda_version": "12.5.1",
    "cudnn_version": "9",
    "cuda_compute_capabilities": ["sm_60", "sm_70", "sm_80", "sm_89", "compute_90"],
}
A100 = Gpu("NVIDIA A100-SXM4-40GB", 40 * GIB, (8, 0), "00000000:65:00.0")
T4 = Gpu("Tesla T4", 15 * GIB, (7, 5), "00000000:66:00.0")
B200 = Gpu("NVIDIA B200", 180 * GIB, (10, 0), "00000000:67:00.0")
K80 = Gpu("Tesla K80", 11 * GIB, (3, 7), "00000000:68:00.0")
CUDA = {"nvidia-cudnn-cu12": "9.3.0.75", "nvidia-cuda-runtime-cu12": "12.5.82"}
SEEN = TensorFlow(
    gpus=({"name": A100.name, "compute_capability": [8, 0]},), tf32_allowed=True, auto_jit="off", onednn=True
)
BLIND = TensorFlow(
    tf32_allowed=True, auto_jit="off", onednn=True, said="W0000 libcudnn.so.9: cannot open shared object file\nx\n"
)
HEALTHY = Facts(
    software=Software(
        "3.11.7", {"tensorflow": "2.21.0", "keras": "3.15.1"}, CUDA, BUILD, keras={"backend": "tensorflow"}
    ),
    cpu=Cpu("AMD EPYC 9B14", 16, 128 * GIB, ("avx512f", "avx512_bf16")),
    driver=Driver("560.35.03", "12.6", (A100,)),
    store=Store("sqlite:////home/me/.mp_hydra/mlflow.db", reachable=True, said="it is there"),
    tensorflow=SEEN,
)
WITHOUT_GPU = replace(HEALTHY, driver=Driver(problem="no NVIDIA driver library"), tensorflow=BLIND)


def with_software(facts: Facts, **changes: Any) -> Facts:
    return replace(facts, software=replace(facts.software, **changes))


def texts(facts: Facts, severity: str) -> str:
    return "\n".join(finding.text for finding in judge.findings(facts) if finding.severity == severity)


@pytest.mark.parametrize("facts", [HEALTHY, WITHOUT_GPU, replace(HEALTHY, tensorflow=None)])
def test_a_healthy_machine_has_no_findings(facts: Facts) -> None:
    assert judge.findings(facts) == []
    assert judge.exit_code([]) == 0


BROKEN = [
    (
        replace(HEALTHY, tensorflow=BLIND),
        "TensorFlow sees no GPU, so training would run on the CPU; it said: W0000 libcudnn.so.9",
    ),
    (with_software(replace(HEALTHY, tensorflow=BLIND), cuda_packages={}), "pip has installed no CUDA libraries"),
    (
        with_software(replace(HEALTHY, tensorflow=BLIND), build={**BUILD, "is_cuda_build": False}),
        "this TensorFlow is built without CUDA",
    ),
    (
        replace(HEALTHY, tensorflow=BLIND, driver=Driver("470.57.02", "11.4", (A100,))),
        "driver 470.57.02 is older than CUDA 12.5.1",
    ),
    (
        replace(HEALTHY, driver=Driver("470.57.02", "11.4", (K80,)), tensorflow=BLIND),
        "no kernels for Tesla K80 (compute capability 3.7)",
    ),
    (
        replace(HEALTHY, driver=Driver(problem="different versions; reboot", broken=True), tensorflow=BLIND),
        "the NVIDIA driver does not work: different versions; reboot",
    ),
    (
        replace(HEALTHY, tensorflow=TensorFlow(problem="ImportError: libfoo")),
        "TensorFlow cannot be imported: ImportError: libfoo",
    ),
]


@pytest.mark.parametrize(("facts", "said"), BROKEN, ids=[said[:40] for _, said in BROKEN])
def test_a_gpu_that_cannot_be_used_is_an_error_with_exit_code_1(facts: Facts, said: str) -> None:
    assert said in texts(facts, "error")
    assert judge.exit_code(judge.findings(facts)) == 1


NOT_BROKEN = [
    (
        with_software(replace(HEALTHY, tensorflow=None), versions={"tensorflow": None}),
        "error",
        "TensorFlow is not installed",
    ),
    (replace(WITHOUT_GPU, tensorflow=TensorFlow(problem="ImportError: x")), "error", "cannot be imported"),
    (
        replace(HEALTHY, tensorflow=BLIND, environ={"CUDA_VISIBLE_DEVICES": "-1"}),
        "note",
        "CUDA_VISIBLE_DEVICES='-1' hides every GPU",
    ),
    (
        replace(HEALTHY, driver=Driver("470.57.02", "11.4", (A100,))),
        "warning",
        "driver 470.57.02 is older",
    ),  # cuda-compat
    (replace(HEALTHY, driver=Driver("570.86", "12.8", (B200,))), "note", "holds no kernels made for NVIDIA B200"),
    (
        with_software(HEALTHY, cuda_packages={"nvidia-cudnn-cu11": "8.9"}),
        "warning",
        "the installed libraries are those of CUDA 11",
    ),
    (
        replace(HEALTHY, tensorflow=replace(SEEN, loaded={"cudnn": "8.9.7"})),
        "warning",
        "TensorFlow is built for cuDNN 9, and 8.9.7 is loaded",
    ),
    (
        with_software(HEALTHY, unmet=("tensorflow requires keras >=3.12, and 3.5 is installed",)),
        "warning",
        "requires keras",
    ),
    (with_software(HEALTHY, keras={"backend": "jax"}), "error", "Keras is set to the backend jax"),
    (with_software(HEALTHY, keras={"floatx": "float16"}), "note", "keras.json sets floatx=float16"),
    (replace(HEALTHY, environ={"NVIDIA_TF32_OVERRIDE": "0"}), "note", "switches TF32 off"),
    (replace(HEALTHY, environ={"TF_GPU_ALLOCATOR": "cuda_malloc_async"}), "note", "memory of a run cannot be measured"),
    (
        replace(HEALTHY, environ={"TF_ENABLE_AUTO_MIXED_PRECISION": "1"}),
        "warning",
        "a run called fp32 would not be one",
    ),
    (
        replace(HEALTHY, store=Store("http://h:5", reachable=False, said="it does not answer")),
        "warning",
        "store http://h:5",
    ),
    (
        replace(
            HEALTHY,
            driver=Driver("560.35", "12.6", (A100, T4)),
            tensorflow=replace(SEEN, gpus=(*SEEN.gpus, {"name": "Tesla T4", "compute_capability": [7, 5]})),
        ),
        "note",
        "the GPUs differ",
    ),
]


@pytest.mark.parametrize(("facts", "severity", "said"), NOT_BROKEN, ids=[said[:40] for *_, said in NOT_BROKEN])
def test_what_breaks_no_gpu_is_said_and_leaves_exit_code_0(facts: Facts, severity: str, said: str) -> None:
    assert said in texts(facts, severity)
    assert judge.exit_code(judge.findings(facts)) == 0


def test_errors_come_first() -> None:
    facts = with_software(
        replace(HEALTHY, environ={"NVIDIA_TF32_OVERRIDE": "0"}), keras={"backend": "jax"}, unmet=("w",)
    )
    assert [finding.severity for finding in judge.findings(facts)] == ["error", "warning", "note"]


@pytest.mark.parametrize("version", ["525.60.13", "560.35.03", "580.65.06"])
def test_a_driver_from_the_minimum_on_is_right_for_cuda_12(version: str) -> None:
    assert judge.findings(replace(HEALTHY, driver=Driver(version, "12.6", (A100,)))) == []


@pytest.mark.parametrize(
    ("gpu", "covered"),
    [
        (Gpu("P100", None, (6, 0)), True),
        (Gpu("GTX 1080", None, (6, 1)), True),  # sm_60 runs on 6.1
        (T4, True),  # sm_70 runs on 7.5
        (Gpu("RTX 3090", None, (8, 6)), True),
        (Gpu("L4", None, (8, 9)), True),
        (Gpu("H100", None, (9, 0)), True),  # PTX of 9.0, as the build says
        (B200, False),
        (Gpu("RTX 5090", None, (12, 0)), False),
        (Gpu("unknown"), True),
    ],
)
def test_kernels_run_within_their_major_version_and_later_ones_are_compiled(gpu: Gpu, covered: bool) -> None:
    found = judge.findings(replace(HEALTHY, driver=Driver("580.65.06", "13.0", (gpu,))))
    assert bool(found) is not covered


def test_policies_are_those_of_the_gpus_that_tensorflow_sees_and_of_the_drivers_as_long_as_it_was_not_asked() -> None:
    def names(facts: Facts) -> list[str | None]:
        return [device.name for device, _ in judge.policies(facts)]

    assert names(HEALTHY) == [A100.name]
    assert names(replace(HEALTHY, tensorflow=BLIND)) == ["AMD EPYC 9B14"]
    assert names(replace(HEALTHY, tensorflow=None)) == [A100.name]
    assert names(replace(HEALTHY, tensorflow=None, environ={"CUDA_VISIBLE_DEVICES": ""})) == ["AMD EPYC 9B14"]
    assert names(replace(HEALTHY, tensorflow=None, driver=Driver("560.1", "12.6", (A100, A100, T4)))) == [
        A100.name,
        T4.name,
    ]


@pytest.mark.parametrize(
    ("facts", "name"),
    [
        (HEALTHY, "mixed_bfloat16"),
        (WITHOUT_GPU, "mixed_bfloat16"),
        (replace(HEALTHY, tensorflow=None, driver=Driver("560.1", "12.6", (T4,))), "mixed_float16"),
        (replace(WITHOUT_GPU, tensorflow=replace(BLIND, onednn=False)), "fp32"),
        (replace(WITHOUT_GPU, tensorflow=None, environ={"TF_ENABLE_ONEDNN_OPTS": "0"}), "fp32"),
        (replace(WITHOUT_GPU, environ={"ONEDNN_MAX_CPU_ISA": "AVX2"}), "fp32"),
    ],
)
def test_what_auto_comes_to_follows_from_the_facts(facts: Facts, name: str) -> None:
    assert judge.automatic(facts).name == name


def products(dtype: str, matmul: float, convolution: float, spread: float = 0.0) -> list[Measured]:
    return [
        Measured("matmul", dtype, "s", 1.0, matmul, (matmul * (1 - spread), matmul * (1 + spread)), 9),
        Measured(
            "convolution", dtype, "s", 1.0, convolution, (convolution * (1 - spread), convolution * (1 + spread)), 9
        ),
        Measured("softmax", dtype, "s", 1.0, 100.0, (100.0, 100.0), 9),
    ]


@pytest.mark.parametrize(
    ("speed", "measured", "ratio", "agrees"),
    [
        (Speed.fast, products("bfloat16", 2.0, 8.0), 4.0, True),  # geometric mean; softmax does not count
        (Speed.fast, products("bfloat16", 1.0, 1.0), 1.0, False),
        (Speed.fast, products("bfloat16", 1.1, 1.1, spread=0.5), 1.1, None),  # 0.55 to 1.65 over the rounds
        (Speed.slow, products("bfloat16", 0.5, 0.5), 0.5, True),
        (Speed.slow, products("bfloat16", 3.0, 3.0), 3.0, False),
        (Speed.slow, products("bfloat16", 1.2, 1.2, spread=0.5), 1.2, None),
        (Speed.unknown, products("bfloat16", 3.0, 3.0), 3.0, None),
        (Speed.fast, products("float16", 3.0, 3.0), None, None),
        (Speed.fast, [Measured("matmul", "bfloat16", "s", None, None, problem="no kernel")], None, None),
    ],
)
def test_a_verdict_is_confronted_with_products_and_convolutions(
    speed: Speed, measured: list[Measured], ratio: float | None, agrees: bool | None
) -> None:
    found = judge.confront(Verdict("mixed_bfloat16", speed, "because"), measured)
    assert found.ratio == (None if ratio is None else pytest.approx(ratio))
    assert found.agrees is agrees
