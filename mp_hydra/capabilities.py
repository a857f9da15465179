"""What a device computes fast in, and which precision follows from it, as pure functions over facts about the device.

Sources of the figures:

- tensor cores, TF32, bfloat16: NVIDIA, CUDA C++ Programming Guide, "Compute Capabilities", table of feature support;
- float16 at twice the rate of float32 or far below it: the same, "Arithmetic Instructions", table of throughputs (6.1: 2 results
  per clock cycle against 128 in float32);
- which product has which compute capability: developer.nvidia.com/cuda-gpus;
- 7.5 without tensor cores: the chips TU116 and TU117, sold as GeForce GTX 16xx, MX450, MX550, CMP 30HX, and as the T and
  Quadro T series for workstations (the Tesla T4 is a TU104 and has them);
- CPUs: `IsDataTypeSupportedByOneDNNOnThisCPU` in tensorflow/core/util/util.cc; oneDNN developer guide, "CPU Dispatcher Control"
  and "Data Types".

>>> choose([Device("GPU", "Tesla T4", compute_capability=(7, 5))]).name
'mixed_float16'
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

PRECISIONS = ("fp32", "tf32", "mixed_float16", "mixed_bfloat16")
_VOLTA, _AMPERE = (7, 0), (8, 0)
_TURING = (7, 5)
_DOUBLE_RATE_FLOAT16 = ((5, 3), (6, 0), (6, 2))  # without tensor cores; from 7.0 on all GPUs have it
_WITHOUT_TENSOR_CORES = re.compile(
    r"\b(GTX 16\d\d|MX[45]50|CMP 30HX|T(400|500|550|600|1000|1200|2000))\b", re.IGNORECASE
)
_BFLOAT16_FLAGS = ("avx512_bf16", "amx_bf16")
_FLOAT16_FLAGS = ("avx512_fp16", "amx_fp16")
_ARM_FLAGS = ("bf16", "svebf16", "asimdhp")
# The values of ONEDNN_MAX_CPU_ISA that leave bfloat16 instructions in use; any other one takes them away.
_ISA_WITH_BFLOAT16 = re.compile(r"^(DEFAULT|ALL|AVX512_CORE_(BF16|FP16|AMX\w*)|AVX10\w*)$", re.IGNORECASE)


class Speed(str, Enum):
    """How a precision's matrix products and convolutions compare with float32 on the same device.

    Attributes:
        reference: it is float32.
        fast: units of its own, several times faster.
        little: faster arithmetic without such units, or none at all: expect little.
        slow: converted or emulated.
        unknown: nothing here tells.
    """

    reference = "reference"
    fast = "fast"
    little = "little"
    slow = "slow"
    unknown = "unknown"


@dataclass(frozen=True)
class Device:
    """What is known about one device.

    Attributes:
        kind: "CPU", "GPU" or "TPU".
        name: as the driver or the kernel calls it.
        compute_capability: of an NVIDIA GPU; None where it is not known.
        flags: of a CPU, as in `mp_hydra.hardware.CPU_FLAGS`.
        onednn: of a CPU, whether TensorFlow uses oneDNN; None where it is not known.
        max_isa: of a CPU, the environment variable ONEDNN_MAX_CPU_ISA.
    """

    kind: str
    name: str | None = None
    compute_capability: tuple[int, int] | None = None
    flags: frozenset[str] = frozenset()
    onednn: bool | None = True
    max_isa: str | None = None

    @property
    def shown(self) -> str:
        """Its name, with the compute capability where it has one."""
        name = self.name or f"a {self.kind} without a name"
        if self.compute_capability is None:
            return name
        return f"{name} (compute capability {'.'.join(map(str, self.compute_capability))})"


@dataclass(frozen=True)
class Verdict:
    """What one precision would be on one device.

    Attributes:
        precision: an option of the group `precision`.
        speed: against float32.
        reason: why, in one sentence without a full stop.
        runs: whether it runs at all; None where nothing that we could try or read says so.
    """

    precision: str
    speed: Speed
    reason: str
    runs: bool | None = True


@dataclass(frozen=True)
class Choice:
    """A precision and why it was chosen."""

    name: str
    reason: str


def device_from(found: Mapping[str, Any], cpu: Mapping[str, Any], environ: Mapping[str, str]) -> Device:
    """A device of `mp_hydra.hardware.devices()` as the rules here want it.

    Args:
        found: the device.
        cpu: "flags" as in `mp_hydra.hardware.environment()["cpu"]`, and "onednn".
        environ: environment variables.
    """
    capability = found.get("compute_capability")
    is_cpu = found["kind"] == "CPU"
    return Device(
        kind=found["kind"],
        name=found.get("name"),
        compute_capability=(capability[0], capability[1]) if capability else None,
        flags=frozenset(cpu.get("flags") or ()) if is_cpu else frozenset(),
        onednn=cpu.get("onednn"),
        max_isa=environ.get("ONEDNN_MAX_CPU_ISA") or environ.get("DNNL_MAX_CPU_ISA"),
    )


def training_devices(devices: Iterable[Device]) -> list[Device]:
    """The devices that Keras would train on: the accelerators if there are any, else the CPU."""
    everything = list(devices)
    return [device for device in everything if device.kind != "CPU"] or everything


def tensor_cores(device: Device) -> bool | None:
    """Whether a GPU has tensor cores; None where its compute capability is not known, False for what is no GPU.

    >>> tensor_cores(Device("GPU", "NVIDIA GeForce GTX 1650", (7, 5)))
    False
    """
    if device.kind != "GPU":
        return False
    if device.compute_capability is None:
        return None
    lacks = device.compute_capability == _TURING and _WITHOUT_TENSOR_CORES.search(device.name or "")
    return device.compute_capability >= _VOLTA and not lacks


def float16_in_hardware(device: Device) -> bool | None:
    """Whether the device has float16 arithmetic at full speed; None where nothing tells."""
    if device.kind == "GPU":
        capability = device.compute_capability
        return None if capability is None else capability >= _VOLTA or capability in _DOUBLE_RATE_FLOAT16
    return device.kind == "CPU" and any(flag in device.flags for flag in (*_FLOAT16_FLAGS, "asimdhp"))


def bfloat16_in_hardware(device: Device) -> bool | None:
    """Whether the device has bfloat16 arithmetic; None where nothing tells."""
    if device.kind == "GPU":
        return None if device.compute_capability is None else device.compute_capability >= _AMPERE
    return device.kind == "TPU" or any(flag in device.flags for flag in (*_BFLOAT16_FLAGS, "bf16", "svebf16"))


def verdicts(device: Device) -> list[Verdict]:
    """What every precision would be on the device, in the order of `PRECISIONS`."""
    rules = {"GPU": _on_gpu, "TPU": _on_tpu, "CPU": _on_cpu}
    found = []
    for name in PRECISIONS:
        speed, reason = rules[device.kind](device, name)
        # 16-bit formats that an accelerator lacks: whether TensorFlow converts everywhere is not documented.
        doubtful = device.kind != "CPU" and speed is Speed.slow
        found.append(Verdict(name, speed, reason, runs=None if doubtful else True))
    return found


def verdict(device: Device, precision: str) -> Verdict:
    """What one precision would be on the device."""
    return next(found for found in verdicts(device) if found.precision == precision)


_Rule = tuple[Speed, str]
_NO_TF32 = "comes to fp32: TF32 is a format of GPUs of compute capability 8.0 and above"


def _on_gpu(device: Device, precision: str) -> _Rule:  # noqa: PLR0911 - a table
    capability = device.compute_capability
    if capability is None:
        if precision == "fp32":
            return Speed.reference, "float32"
        return Speed.unknown, "the compute capability of this GPU is not known"
    shown = ".".join(map(str, capability))
    if precision == "fp32":
        off = "; its TF32 tensor cores are switched off" if capability >= _AMPERE else ""
        return Speed.reference, f"float32, without tensor cores{off}"
    if precision == "tf32":
        return (
            (Speed.fast, "float32 layers whose matrix products and convolutions run on tensor cores in TF32")
            if capability >= _AMPERE
            else (Speed.reference, f"{_NO_TF32}, and this one is of {shown}")
        )
    if precision == "mixed_bfloat16":
        if capability >= _AMPERE:
            return Speed.fast, "tensor cores compute in bfloat16, and it needs no loss scaling"
        return (
            Speed.slow,
            f"bfloat16 arithmetic begins with compute capability 8.0; on {shown} it is converted to float32",
        )
    if tensor_cores(device):
        return Speed.fast, "tensor cores compute in float16"
    if capability == _TURING:
        return Speed.little, "a 7.5 without tensor cores (TU116, TU117): float16 at twice float32's rate at best"
    if float16_in_hardware(device):
        return (
            Speed.little,
            f"float16 at twice float32's rate, but no tensor cores (they begin with 7.0, this is {shown})",
        )
    return (
        Speed.slow,
        f"float16 arithmetic of compute capability {shown} is far slower than float32; only memory is saved",
    )


def _on_tpu(_: Device, precision: str) -> _Rule:
    return {
        "fp32": (Speed.reference, "float32"),
        "tf32": (Speed.reference, _NO_TF32),
        "mixed_float16": (Speed.slow, "a TPU has no float16 arithmetic"),
        "mixed_bfloat16": (Speed.fast, "a TPU's matrix units compute in bfloat16"),
    }[precision]


def _on_cpu(device: Device, precision: str) -> _Rule:  # noqa: PLR0911 - a table
    if precision == "fp32":
        return Speed.reference, "float32"
    if precision == "tf32":
        return Speed.reference, _NO_TF32
    wanted = _BFLOAT16_FLAGS if precision == "mixed_bfloat16" else _FLOAT16_FLAGS
    dtype = precision.removeprefix("mixed_")
    has = [flag.upper() for flag in wanted if flag in device.flags]
    names = " or ".join(flag.upper() for flag in wanted)
    if not device.flags:
        return Speed.unknown, "the instruction sets of this CPU are not known"
    if not has and any(flag in device.flags for flag in _ARM_FLAGS if flag.endswith("bf16") == (dtype == "bfloat16")):
        return (
            Speed.unknown,
            f"this Arm CPU has {dtype} instructions; whether TensorFlow's kernels use them, --measure tells",
        )
    if not has:
        return Speed.slow, f"this CPU has no {names}: {dtype} is converted to float32 and back at every operation"
    if device.onednn is False:
        return (
            Speed.slow,
            f"{' and '.join(has)} would help, but oneDNN, whose kernels use it, is off (TF_ENABLE_ONEDNN_OPTS=0)",
        )
    if device.max_isa and not _ISA_WITH_BFLOAT16.match(device.max_isa):
        return Speed.slow, f"{' and '.join(has)} would help, but ONEDNN_MAX_CPU_ISA={device.max_isa} forbids it"
    if dtype == "bfloat16":
        return Speed.fast, f"oneDNN computes bfloat16 with {' and '.join(has)}"
    return Speed.unknown, f"{' and '.join(has)} is there; whether it beats float32, --measure tells"


def choose(devices: Sequence[Device]) -> Choice:
    """What `precision=auto` comes to on the devices that training would use.

    A GPU of compute capability 8.0 or above, a TPU, and a CPU with AVX512_BF16 or AMX: mixed_bfloat16. A GPU of 7.0 or above with
    tensor cores: mixed_float16. Anything else: fp32. Where several GPUs differ, the weakest of them decides.

    Args:
        devices: all devices, as `training_devices` takes them.
    """
    using = training_devices(devices)
    if not using:
        return Choice("fp32", "no device is known")
    choices = [(_choice(device), device) for device in using]
    rank = ("fp32", "mixed_float16", "mixed_bfloat16")
    chosen, decides = min(choices, key=lambda pair: rank.index(pair[0].name))
    reason = f"{decides.shown}: {chosen.reason}"
    if len({found.name for found, _ in choices}) > 1:
        reason += f"; of the {len(using)} {decides.kind}s it is the weakest, and it decides"
    return Choice(chosen.name, reason)


def _choice(device: Device) -> Choice:
    for name in ("mixed_bfloat16", "mixed_float16"):
        found = verdict(device, name)
        if found.speed is Speed.fast:
            return Choice(name, found.reason)
    return Choice("fp32", _why_none(device))


def _why_none(device: Device) -> str:
    by_precision = {found.precision: found for found in verdicts(device)}
    if device.kind == "CPU":
        return by_precision["mixed_bfloat16"].reason
    return by_precision["mixed_float16"].reason


def candidates(devices: Sequence[Device]) -> tuple[str, ...]:
    """The precisions worth timing: fp32, and the 16-bit ones that no device that training would use is known to be slow in."""
    using = training_devices(devices)
    return (
        "fp32",
        *(
            name
            for name in ("mixed_bfloat16", "mixed_float16")
            if using and all(verdict(device, name).speed is not Speed.slow for device in using)
        ),
    )
