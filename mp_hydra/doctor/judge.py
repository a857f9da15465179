"""The doctor's rules, as pure functions over `Facts`: what is wrong, what each precision would be here, what the figures say.

Sources beside those of `mp_hydra.capabilities`: NVIDIA, "CUDA Compatibility", table of minimum drivers for minor version
compatibility; NVIDIA, "CUDA C++ Programming Guide", "Compute Capabilities", on binaries (same major version, minor not above)
and PTX (any later version).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.capabilities import Choice, Device, Speed, Verdict, choose, training_devices, verdicts

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from mp_hydra.doctor.driver import Gpu
    from mp_hydra.doctor.facts import Facts
    from mp_hydra.doctor.measure import Measured

_MINIMUM_DRIVER = {11: (450, 80), 12: (525, 60), 13: (580, 65)}  # by CUDA's major version; Linux
_GPU_EXTRA = "pip install 'mp_hydra[gpu]'"
_FASTER, _NOT_FASTER = 1.2, 1.1


@dataclass(frozen=True)
class Finding:
    """Something that the user should know.

    Attributes:
        severity: "error", "warning" or "note".
        text: what it is, as one sentence without a full stop.
        cure: what to do; None where there is nothing to do.
        breaks_gpu: whether a GPU that is there cannot be used because of it.
    """

    severity: str
    text: str
    cure: str | None = None
    breaks_gpu: bool = False


def exit_code(findings: Sequence[Finding]) -> int:
    """1 if a GPU that is there cannot be used, else 0."""
    return int(any(finding.breaks_gpu for finding in findings))


def devices(facts: Facts) -> list[Device]:
    """The processor, and the GPUs that TensorFlow would use; those of the driver as long as TensorFlow was not asked."""
    onednn: bool | None = facts.environ.get("TF_ENABLE_ONEDNN_OPTS", "1").lower() not in ("0", "false")
    if facts.tensorflow is not None and facts.tensorflow.problem is None:
        onednn = facts.tensorflow.onednn
        gpus = [_gpu(found["name"], found["compute_capability"]) for found in facts.tensorflow.gpus]
    else:
        gpus = [] if hidden(facts) else [_gpu(gpu.name, gpu.compute_capability) for gpu in facts.driver.gpus]
    max_isa = facts.environ.get("ONEDNN_MAX_CPU_ISA") or facts.environ.get("DNNL_MAX_CPU_ISA")
    return [Device("CPU", facts.cpu.model, None, frozenset(facts.cpu.flags), onednn, max_isa), *gpus]


def _gpu(name: str | None, capability: Sequence[int] | None) -> Device:
    return Device("GPU", name, None if capability is None else (capability[0], capability[1]))


def policies(facts: Facts) -> list[tuple[Device, list[Verdict]]]:
    """What every precision would be, on each kind of device that training would use."""
    using = dict.fromkeys(training_devices(devices(facts)))
    return [(device, verdicts(device)) for device in using]


def automatic(facts: Facts) -> Choice:
    """What `precision=auto` would come to."""
    return choose(devices(facts))


def hidden(facts: Facts) -> bool:
    """Whether the user keeps the GPUs from TensorFlow."""
    return facts.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1")


def findings(facts: Facts) -> list[Finding]:
    """Everything that is wrong or worth knowing, errors first."""
    found = [*_software(facts), *_driver(facts), *_gpus(facts), *_libraries(facts), *_switches(facts), *_store(facts)]
    return sorted(found, key=lambda finding: ("error", "warning", "note").index(finding.severity))


def _software(facts: Facts) -> Iterator[Finding]:
    if facts.software.versions.get("tensorflow") is None and (facts.tensorflow is None or facts.tensorflow.problem):
        yield Finding("error", "TensorFlow is not installed", "pip install mp_hydra, or with a GPU " + _GPU_EXTRA)
    elif facts.tensorflow is not None and facts.tensorflow.problem:
        there = bool(facts.driver.gpus) and not hidden(facts)
        yield Finding("error", f"TensorFlow cannot be imported: {facts.tensorflow.problem}", breaks_gpu=there)
    for line in facts.software.unmet:
        yield Finding("warning", line, "install a version that meets it")
    backend = facts.software.keras.get("backend", "tensorflow")
    if backend != "tensorflow":
        cure = "unset KERAS_BACKEND, or set it to tensorflow"
        yield Finding("error", f"Keras is set to the backend {backend}; mp_hydra trains on TensorFlow", cure)
    for key in ("floatx", "dtype_policy"):
        value = facts.software.keras.get(key)
        if value not in (None, "float32"):
            yield Finding(
                "note", f"keras.json sets {key}={value}; a run of mp_hydra sets its own, other programs get this one"
            )


def _driver(facts: Facts) -> Iterator[Finding]:
    driver = facts.driver
    if driver.broken:
        yield Finding("error", f"the NVIDIA driver does not work: {driver.problem}", breaks_gpu=True)
    needed = _MINIMUM_DRIVER.get(_leading(_build(facts).get("cuda_version")) or 0)
    version = _numbers(driver.version)
    if needed and version and version < needed:
        cuda, least = _build(facts)["cuda_version"], ".".join(map(str, needed))
        unseen = _unseen(facts)
        yield Finding(
            "error" if unseen else "warning",
            f"driver {driver.version} is older than CUDA {cuda}, which TensorFlow is built for, can do with",
            f"install driver {least} or newer",
            breaks_gpu=unseen,
        )


def _unseen(facts: Facts) -> bool:
    """Whether there are GPUs that TensorFlow should see and does not."""
    asked = facts.tensorflow is not None and facts.tensorflow.problem is None
    return asked and bool(facts.driver.gpus) and not facts.tensorflow.gpus and not hidden(facts)  # type: ignore[union-attr]


def _gpus(facts: Facts) -> Iterator[Finding]:
    if facts.driver.gpus and hidden(facts):
        value = facts.environ["CUDA_VISIBLE_DEVICES"]
        yield Finding("note", f"CUDA_VISIBLE_DEVICES={value!r} hides every GPU: training runs on the CPU")
        return
    if _unseen(facts):
        yield _why_unseen(facts)
    kernels = _build(facts).get("cuda_compute_capabilities") or ()
    for gpu in dict.fromkeys(facts.driver.gpus):
        yield from _coverage(gpu, kernels)
    kinds = {
        (device.name, device.compute_capability) for device in training_devices(devices(facts)) if device.kind == "GPU"
    }
    if len(kinds) > 1:
        yield Finding(
            "note", "the GPUs differ: a run uses the first unless it is told otherwise; precision=auto asks the weakest"
        )


def _why_unseen(facts: Facts) -> Finding:
    names = ", ".join(dict.fromkeys(gpu.name or "a GPU" for gpu in facts.driver.gpus))
    text = f"the driver knows {names}, but TensorFlow sees no GPU, so training would run on the CPU"
    build = facts.software.build
    if build is not None and not build.get("is_cuda_build"):
        return Finding("error", f"{text}: this TensorFlow is built without CUDA", _GPU_EXTRA, breaks_gpu=True)
    if not facts.software.cuda_packages:
        why = f"{text}: pip has installed no CUDA libraries, and those of the system, if any, did not do"
        return Finding("error", why, _GPU_EXTRA, breaks_gpu=True)
    said = [line.strip() for line in (facts.tensorflow.said if facts.tensorflow else "").splitlines()]
    telling = [line for line in said if re.search(r"cuda|cudnn|gpu|dlerror|libcu", line, re.IGNORECASE)]
    return Finding(
        "error", f"{text}; it said: {' '.join(telling[-2:])[-500:] or 'nothing'}", _GPU_EXTRA, breaks_gpu=True
    )


def _coverage(gpu: Gpu, kernels: Sequence[str]) -> Iterator[Finding]:
    """Whether TensorFlow holds kernels for a GPU: binaries for it, or PTX that the driver compiles at the first use."""
    if gpu.compute_capability is None or not kernels:
        return
    shown = f"{gpu.name} (compute capability {'.'.join(map(str, gpu.compute_capability))})"
    binaries = [_capability(name) for name in kernels]
    ptx = [_capability(name) for name in kernels if name.startswith("compute_")]
    if any(major == gpu.compute_capability[0] and minor <= gpu.compute_capability[1] for major, minor in binaries):
        return
    if any(version <= gpu.compute_capability for version in ptx):
        version = ".".join(map(str, max(ptx)))
        text = f"this TensorFlow holds no kernels made for {shown}; it compiles those for {version} at the first use, in minutes"
        yield Finding("note", text, "keep CUDA_CACHE_MAXSIZE large (4294967296), so that it happens once")
    else:
        lowest = ".".join(map(str, min(binaries)))
        text = f"this TensorFlow has no kernels for {shown}; the lowest that it supports is {lowest}"
        yield Finding("error", text, "use an older TensorFlow, or another GPU", breaks_gpu=True)


def _capability(name: str) -> tuple[int, int]:
    digits = re.sub(r"\D", "", name)
    return int(digits[:-1]), int(digits[-1])


def _libraries(facts: Facts) -> Iterator[Finding]:
    build = _build(facts)
    cuda, cudnn = _leading(build.get("cuda_version")), _leading(build.get("cudnn_version"))
    if not build.get("is_cuda_build") or cuda is None:
        return
    majors = {int(found[1]) for name in facts.software.cuda_packages if (found := re.search(r"-cu(\d+)$", name))}
    if majors and cuda not in majors:
        there = ", ".join(f"CUDA {major}" for major in sorted(majors))
        text = f"TensorFlow is built for CUDA {build['cuda_version']}, and the installed libraries are those of {there}"
        yield Finding("warning", text, _GPU_EXTRA)
    loaded = facts.tensorflow.loaded.get("cudnn") if facts.tensorflow else None
    if loaded is not None and cudnn is not None and _leading(loaded) != cudnn:
        yield Finding(
            "warning", f"TensorFlow is built for cuDNN {build['cudnn_version']}, and {loaded} is loaded", _GPU_EXTRA
        )


def _switches(facts: Facts) -> Iterator[Finding]:
    environ = facts.environ
    if environ.get("NVIDIA_TF32_OVERRIDE") == "0":
        yield Finding(
            "note", "NVIDIA_TF32_OVERRIDE=0 switches TF32 off in NVIDIA's libraries, whatever precision=tf32 asks"
        )
    if environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        text = "TF_GPU_ALLOCATOR=cuda_malloc_async keeps no peak: memory of a run cannot be measured"
        yield Finding("note", text, "unset it to measure memory")
    if environ.get("TF_ENABLE_AUTO_MIXED_PRECISION", "0") not in ("0", "false", ""):
        text = "TF_ENABLE_AUTO_MIXED_PRECISION rewrites float32 graphs to float16: a run called fp32 would not be one"
        yield Finding("warning", text, "unset it")


def _store(facts: Facts) -> Iterator[Finding]:
    if not facts.store.reachable:
        where = f"the MLflow store {facts.store.uri}: " if facts.store.uri else ""
        yield Finding("warning", f"runs cannot be recorded: {where}{facts.store.said}", "see tracking in the README")


def _build(facts: Facts) -> Mapping[str, Any]:
    return facts.software.build or {}


def _numbers(version: str | None) -> tuple[int, int] | None:
    found = re.match(r"(\d+)\.(\d+)", version or "")
    return (int(found[1]), int(found[2])) if found else None


def _leading(version: str | None) -> int | None:
    found = re.match(r"(\d+)", str(version or ""))
    return int(found[1]) if found else None


@dataclass(frozen=True)
class Confrontation:
    """A verdict beside what was measured.

    Attributes:
        ratio: how many times as fast as float32: the geometric mean over matrix product and convolution; None if not measured.
        agrees: whether that is what the rule expects; None where it expects nothing, nothing was measured, or the rounds of the
            measurement differ too much to say.
    """

    ratio: float | None
    agrees: bool | None


_DTYPES = {"tf32": "tf32", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


def confront(verdict: Verdict, measured: Sequence[Measured]) -> Confrontation:
    """Theory beside this machine: fast means at least 1.2 times as fast as float32, slow at most 1.1 times.

    A contradiction has to hold for three quarters of the rounds, since other load on the machine makes them differ.
    """
    figures = [
        (one.ratio, *one.quartiles)
        for one in measured
        if one.dtype == _DTYPES.get(verdict.precision)
        and one.operation in ("matmul", "convolution")
        and one.ratio is not None
        and one.quartiles is not None
    ]
    if not figures:
        return Confrontation(None, None)
    ratio, low, high = (math.prod(column) ** (1 / len(figures)) for column in zip(*figures, strict=True))
    if verdict.speed is Speed.fast:
        return Confrontation(ratio, True if ratio >= _FASTER else False if high < _FASTER else None)
    if verdict.speed is Speed.slow:
        return Confrontation(ratio, True if ratio <= _NOT_FASTER else False if low > _NOT_FASTER else None)
    return Confrontation(ratio, None)
