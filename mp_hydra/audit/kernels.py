"""Which operations a device has a kernel for, from TensorFlow's own registry; it lists GPU kernels without a GPU, too."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mp_hydra.audit.operations import Kernel

FAILS = "the step fails"
FALLS_BACK = "it runs on the CPU, with a copy there and back"
_DEVICES = {"CPU": ("CPU", "DEFAULT"), "GPU": ("GPU", "DEFAULT")}


def missing(kernel: Kernel, device: str) -> str | None:
    """What TensorFlow does with an operation for which `device` has no kernel; None if it has one, or nothing is registered.

    Args:
        kernel: the operation with its types.
        device: "CPU" or "GPU".
    """
    found = _registered(kernel.op)
    if not found or any(_takes(entry, kernel) for entry in found if entry.device_type in _DEVICES[device]):
        return None
    if device == "CPU":
        # oneDNN's kernels take the place of TensorFlow's, where the processor has what they need.
        mkl = [entry for name in (f"_Mkl{kernel.op}", f"_MklNative{kernel.op}") for entry in _registered(name)]
        usable = all(_onednn_computes(dtype) for _, dtype in kernel.types)
        return None if usable and any(_takes(entry, kernel) for entry in mkl if entry.device_type == "CPU") else FAILS
    return FALLS_BACK if any(_takes(entry, kernel) for entry in found if entry.device_type == "CPU") else FAILS


# TensorFlow, util/util.cc, IsDataTypeSupportedByOneDNNOnThisCPU.
_ONEDNN_NEEDS = {
    "float16": {"avx512_fp16", "amx_fp16", "avx_ne_convert"},
    "bfloat16": {"avx512f", "avx_ne_convert"},
}


@functools.cache
def _onednn_computes(dtype: str) -> bool:
    """Whether oneDNN computes in a dtype on this processor."""
    from mp_hydra.hardware import cpu_flags

    needed = _ONEDNN_NEEDS.get(dtype)
    if needed is None:
        return True
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:  # not Linux
        return False
    return bool(needed & set(cpu_flags(text)))


@functools.cache
def _registered(op: str) -> tuple[Any, ...]:
    from tensorflow.python.framework import kernels

    return tuple(kernels.get_registered_kernels_for_op(op).kernel)


def _takes(entry: Any, kernel: Kernel) -> bool:
    import tensorflow as tf

    allowed = {c.name: {tf.dtypes.as_dtype(t).name for t in c.allowed_values.list.type} for c in entry.constraint}
    return all(name not in allowed or not allowed[name] or dtype in allowed[name] for name, dtype in kernel.types)
