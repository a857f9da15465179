"""What this machine computes on: devices, CPU features, versions, and the switches that change results or speed."""

from __future__ import annotations

import functools
import logging
import os
import platform
import re
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra import __version__
from mp_hydra.capabilities import Device, device_from
from mp_hydra.telemetry.memory import Unavailable
from mp_hydra.telemetry.nvml import driver_version

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

log = logging.getLogger(__name__)

# Instruction sets that decide how fast a CPU computes in float32, bfloat16 and float16: x86, then Arm.
CPU_FLAGS = (
    *("avx", "avx2", "fma", "f16c", "avx512f", "avx512_bf16", "avx512_fp16", "avx_ne_convert"),
    *("amx_tile", "amx_bf16", "amx_fp16", "avx10_2"),
    *("asimd", "asimdhp", "bf16", "sve", "sve2", "svebf16", "sme"),
)
_TF32_CAPABILITY = (8, 0)  # Ampere, the first with TF32 tensor cores (CUDA C++ Programming Guide, compute capabilities)

# By name and not by the bare prefix TF_, which Terraform uses as well, for secrets too (TF_VAR_, TF_TOKEN_).
_VARIABLES = re.compile(
    r"""TF_(AUTO_MIXED_PRECISION|CONFIG$|CPP|CPU|CUBLAS|CUDA|CUDNN|DETERMINISTIC|DISABLE|DUMP|ENABLE|FORCE|FP16|GPU|LAYOUT
           |MKL|NUM|ONEDNN|OVERRIDE|PER_DEVICE|SYNC|USE|XLA)
      | (ONEDNN|DNNL|OMP|KMP|MKL|OPENBLAS|MALLOC|TCMALLOC|NCCL)_
      | (XLA_FLAGS|CUDA_VISIBLE_DEVICES|CUDA_DEVICE_ORDER|CUDA_LAUNCH_BLOCKING|NVIDIA_VISIBLE_DEVICES
        |NVIDIA_TF32_OVERRIDE|KERAS_BACKEND|KERAS_HOME|LD_PRELOAD|PYTHONHASHSEED)$""",
    re.VERBOSE,
)


def environment() -> dict[str, Any]:
    """Everything about machine and software that a measurement depends on, ready for JSON.

    On a machine with a GPU this initialises TensorFlow's devices: call `allow_memory_growth` first.
    """
    import tensorflow as tf

    build = tf.sysconfig.get_build_info()
    driver = driver_version()
    found = devices()
    return {
        "versions": {
            "python": platform.python_version(),
            "mp_hydra": __version__,
            "tensorflow": tf.__version__,  # the distribution has other names, such as tensorflow-cpu
            **{name: _installed(name) for name in ("keras", "numpy", "mlflow", "hydra-core")},
        },
        "system": {"os": platform.platform(), "kernel": platform.release(), "memory_bytes": physical_memory()},
        "cpu": cpu(),
        "devices": found,
        "cuda": {"build": build.get("cuda_version"), "cudnn_build": build.get("cudnn_version")},
        "driver": {"version": None, "reason": driver.reason}
        if isinstance(driver, Unavailable)
        else {"version": driver, "reason": None},
        "tf32": {
            "allowed": bool(tf.config.experimental.tensor_float_32_execution_enabled()),
            "pays": tf32_pays(found),
        },
        "xla": {"auto_jit": tf.config.optimizer.get_jit() or "off"},
        "onednn": onednn(),
        "environment_variables": relevant_variables(os.environ),
    }


def devices() -> list[dict[str, Any]]:
    """The devices that TensorFlow would train on, the CPU included.

    Initialises TensorFlow's devices where one of them is a GPU.

    Returns:
        Per device `device` ("GPU:0"), `kind` ("GPU"), `name`, `compute_capability` ([major, minor]),
        `memory_limit_bytes` and `pci_bus_id`; the last three None where they do not apply or are not known.
    """
    processor = {
        "device": "CPU:0",
        "kind": "CPU",
        "name": cpu()["model"],
        "compute_capability": None,
        "memory_limit_bytes": None,  # TensorFlow states 256 MiB, which limits nothing
        "pci_bus_id": None,
    }
    return [
        processor,
        *(
            {"device": device, "kind": "GPU", **parse_gpu(description), "memory_limit_bytes": limit}
            for device, (description, limit) in _local_gpus().items()
        ),
    ]


def rated_devices() -> list[Device]:
    """The devices of `devices`, as `mp_hydra.capabilities` rates them."""
    processor = {**cpu(), "onednn": onednn()}
    return [device_from(found, processor, os.environ) for found in devices()]


def training_device() -> str:
    """The device that Keras trains on by default: "GPU:0" if TensorFlow has a GPU, else "CPU:0"."""
    import tensorflow as tf

    return "GPU:0" if tf.config.get_visible_devices("GPU") else "CPU:0"


def pci_bus_id(device: str) -> str | None:
    """The PCI bus id of a device such as "GPU:0", which NVML knows it by; None for a CPU or where it is not known.

    Initialises TensorFlow's devices where one of them is a GPU.
    """
    return next((found["pci_bus_id"] for found in devices() if found["device"] == device), None)


def parse_gpu(description: str) -> dict[str, Any]:
    """`name`, `pci_bus_id` and `compute_capability` from TensorFlow's `physical_device_desc`; None for what it lacks.

    >>> parse_gpu("device: 0, name: NVIDIA H200, pci bus id: 0000:65:00.0, compute capability: 9.0")
    {'name': 'NVIDIA H200', 'pci_bus_id': '0000:65:00.0', 'compute_capability': [9, 0]}
    """
    name = re.search(r"\bname: (.+?)(?:, pci bus id:|$)", description)
    bus = re.search(r"\bpci bus id: ([0-9a-fA-F:]+\.[0-9a-fA-F])", description)
    capability = re.search(r"\bcompute capability: (\d+)\.(\d+)", description)
    return {
        "name": name[1] if name else None,
        "pci_bus_id": bus[1] if bus else None,
        "compute_capability": [int(capability[1]), int(capability[2])] if capability else None,
    }


def tf32_pays(devices: Iterable[Mapping[str, Any]]) -> bool:
    """Whether some device computes float32 matrix products faster in TF32: a GPU of compute capability 8.0 or above.

    Args:
        devices: as in `environment()["devices"]`.

    >>> tf32_pays([{"compute_capability": None}, {"compute_capability": [7, 5]}])
    False
    """
    capabilities = (device.get("compute_capability") for device in devices)
    return any(tuple(capability) >= _TF32_CAPABILITY for capability in capabilities if capability)


def allow_memory_growth() -> None:
    """Let TensorFlow take GPU memory as it needs it, not nearly all at once, so that NVML's figures mean something.

    Must come before anything runs on a GPU; too late is a logged warning.
    """
    import tensorflow as tf

    for gpu in tf.config.list_physical_devices("GPU"):
        _allow_growth(gpu)


def _allow_growth(gpu: Any) -> None:
    import tensorflow as tf

    try:
        tf.config.experimental.set_memory_growth(gpu, True)
    except (RuntimeError, ValueError) as error:  # initialised already, or divided into virtual devices
        log.warning(
            "%s keeps its memory settings (%s): the memory that the driver reports for this process is what TensorFlow "
            "has reserved, not what training needs",
            gpu.name,
            error,
        )


def cpu_flags(text: str) -> list[str]:
    r"""Those of `CPU_FLAGS` that every core has, from /proc/cpuinfo ("flags" on x86, "Features" on Arm).

    >>> cpu_flags("flags\t\t: fpu sse2 avx avx2 avx512_bf16\n")
    ['avx', 'avx2', 'avx512_bf16']
    """
    cores = [set(flags.split()) for flags in re.findall(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)]
    return [flag for flag in CPU_FLAGS if cores and all(flag in core for core in cores)]


def cpu_model(text: str) -> str | None:
    """The processor's name from /proc/cpuinfo; None where it gives none, as on most Arm machines."""
    found = re.search(r"^(?:model name|Model|Hardware)\s*:\s*(\S.*?)\s*$", text, re.MULTILINE)
    return found[1] if found else None


def relevant_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that change how TensorFlow computes, sorted by name."""
    return {name: environ[name] for name in sorted(environ) if _VARIABLES.match(name)}


def cpu() -> dict[str, Any]:
    """The processor: `model`, `logical_cores`, `usable_cores` and `flags`; None for what is not known."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        text = ""
    return {
        "model": cpu_model(text) or platform.processor() or platform.machine() or None,
        "logical_cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "flags": cpu_flags(text),
    }


def physical_memory() -> int | None:
    """Bytes of main memory; None where the system does not tell."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _installed(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def onednn() -> bool | None:
    """Whether TensorFlow uses its oneDNN kernels, TF_ENABLE_ONEDNN_OPTS included; None where it does not tell."""
    try:
        from tensorflow.python.util import _pywrap_util_port
    except ImportError:
        return None
    return bool(_pywrap_util_port.IsMklEnabled())


@functools.cache
def _local_gpus() -> dict[str, tuple[str, int]]:
    """Per logical GPU its physical_device_desc and memory limit in bytes.

    Asked once: a later answer would subtract what is allocated by then. TensorFlow's own settings are passed on, since
    by default the call creates allocators that take all memory, on all GPUs.
    """
    import tensorflow as tf

    if not tf.config.get_visible_devices("GPU"):
        return {}
    from tensorflow.python.client import device_lib
    from tensorflow.python.eager import context

    tf.config.list_logical_devices()
    return {
        found.name.removeprefix("/device:"): (found.physical_device_desc, int(found.memory_limit))
        for found in device_lib.list_local_devices(context.context().config)
        if found.device_type == "GPU"
    }
