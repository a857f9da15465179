"""The NVIDIA driver and the GPUs that it knows, through NVML: no CUDA library and no TensorFlow is needed for that."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True)
class Gpu:
    """A GPU as the driver describes it; None for what it does not tell.

    Attributes:
        name: such as "NVIDIA H200".
        memory_bytes: of the whole GPU.
        compute_capability: (major, minor).
        pci_bus_id: such as "00000000:65:00.0".
        mig: whether it is divided by MIG.
    """

    name: str | None = None
    memory_bytes: int | None = None
    compute_capability: tuple[int, int] | None = None
    pci_bus_id: str | None = None
    mig: bool = False


@dataclass(frozen=True)
class Driver:
    """What NVML says.

    Attributes:
        version: of the driver, such as "560.35.03"; None where there is none, or it does not answer.
        cuda: the newest CUDA version that it supports, such as "12.6".
        gpus: the GPUs that it knows.
        problem: why NVML does not answer; None where it does.
        broken: whether there is a driver that should answer and cannot.
    """

    version: str | None = None
    cuda: str | None = None
    gpus: tuple[Gpu, ...] = ()
    problem: str | None = None
    broken: bool = False


def ask_driver() -> Driver:
    """Ask NVML; whatever it cannot tell is left out."""
    try:
        import pynvml
    except ImportError:
        return Driver(problem="the package nvidia-ml-py is not installed")
    from mp_hydra.telemetry.nvml import explain

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        broken = error.value in (pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH, pynvml.NVML_ERROR_GPU_IS_LOST)
        return Driver(problem=explain(error), broken=broken)
    try:
        cuda = _asked(pynvml.nvmlSystemGetCudaDriverVersion)
        return Driver(
            version=_asked(pynvml.nvmlSystemGetDriverVersion),
            cuda=None if cuda is None else f"{cuda // 1000}.{cuda % 1000 // 10}",
            gpus=tuple(_gpu(index) for index in range(_asked(pynvml.nvmlDeviceGetCount) or 0)),
        )
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _gpu(index: int) -> Gpu:
    import pynvml

    handle = _asked(pynvml.nvmlDeviceGetHandleByIndex, index)
    if handle is None:
        return Gpu()
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    capability = _asked(pynvml.nvmlDeviceGetCudaComputeCapability, handle)
    pci = _asked(pynvml.nvmlDeviceGetPciInfo, handle)
    mig = _asked(pynvml.nvmlDeviceGetMigMode, handle)
    return Gpu(
        name=_text(_asked(pynvml.nvmlDeviceGetName, handle)),
        memory_bytes=None if memory is None else int(memory.total),
        compute_capability=None if capability is None else (int(capability[0]), int(capability[1])),
        pci_bus_id=None if pci is None else _text(pci.busId),
        mig=mig is not None and mig[0] == pynvml.NVML_DEVICE_MIG_ENABLE,
    )


def _asked(function: Callable[..., Any], *arguments: Any) -> Any:
    """The answer; None where this driver or this GPU has none."""
    import pynvml

    try:
        return function(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):
        return None


def _text(value: Any) -> str | None:
    return value.decode(errors="replace") if isinstance(value, bytes) else value
