"""What each of several jobs that run at a time may use: a GPU of its own, or its share of the cores."""

from __future__ import annotations

import contextlib
import itertools
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True)
class Slot:
    """A place for one job at a time.

    Attributes:
        environ: variables that the job gets.
        cores: what it may run on; None for all that there are.
        text: in words.
    """

    environ: Mapping[str, str] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    text: str = "nothing pinned"


def slots(n_jobs: int, gpus: Sequence[str], cores: Collection[int]) -> tuple[Slot, ...]:
    """A slot for each of the jobs that run at a time; more jobs than GPUs or cores share them, round robin.

    Args:
        n_jobs: how many.
        gpus: entries for CUDA_VISIBLE_DEVICES, each one GPU or one MIG device.
        cores: those that there are, if no GPU is.

    >>> [slot.environ["CUDA_VISIBLE_DEVICES"] for slot in slots(3, ["0", "GPU-8a5f"], {0, 1})]
    ['0', 'GPU-8a5f', '0']
    >>> [slot.cores for slot in slots(2, [], {0, 1, 2, 3, 4})]
    [(0, 1, 2), (3, 4)]
    """
    if n_jobs == 1:
        return (Slot(),)
    if gpus:
        chosen = [gpus[index % len(gpus)] for index in range(n_jobs)]
        return tuple(Slot({VISIBLE: gpu}, text=f"GPU {gpu}") for gpu in chosen)
    return tuple(Slot(cores=share, text=f"cores {share}") for share in shares(n_jobs, sorted(cores)))


def shares(parts: int, cores: Sequence[int]) -> list[tuple[int, ...]]:
    """Neighbouring cores for each part, as equally as can be; with fewer cores than parts, one each, round robin.

    >>> shares(3, [4, 5])
    [(4,), (5,), (4,)]
    """
    if len(cores) < parts:
        return [(cores[index % len(cores)],) for index in range(parts)] if cores else [()] * parts
    size, larger = divmod(len(cores), parts)
    starts = [index * size + min(index, larger) for index in range(parts + 1)]
    return [tuple(cores[start:end]) for start, end in itertools.pairwise(starts)]


def visible(value: str) -> list[str]:
    """The devices that CUDA_VISIBLE_DEVICES names: CUDA stops reading at the first entry that is not one, such as -1.

    Indices, GPU-UUIDs and MIG-UUIDs stay as they are written.

    >>> visible("1, GPU-8a5f,MIG-02d1,-1,0"), visible("-1")
    (['1', 'GPU-8a5f', 'MIG-02d1'], [])
    """
    found: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if not (entry.isdecimal() or entry.startswith(("GPU-", "MIG-"))):
            break
        found.append(entry)
    return found


def gpus(environ: Mapping[str, str]) -> list[str]:
    """The GPUs that jobs with this environment may use, as entries for CUDA_VISIBLE_DEVICES.

    Raises:
        ConfigError: there are NVIDIA GPUs that NVML does not list.
    """
    return visible(environ[VISIBLE]) if VISIBLE in environ else _installed()


def cores() -> set[int]:
    """The cores that this process may use; empty where the system does not tell."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def _installed() -> list[str]:
    """UUIDs of all GPUs, and of the MIG devices in place of those that MIG divides; none without the NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(pynvml.nvmlDeviceGetCount())]
        return [uuid for handle in handles for uuid in _uuids(pynvml, handle)]
    except pynvml.NVMLError as error:
        raise ConfigError(
            "hydra.launcher.n_jobs", "several", f"NVML does not tell which GPUs there are ({error}); set {VISIBLE}"
        ) from error
    finally:
        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _uuids(pynvml: Any, handle: Any) -> list[str]:
    try:
        divided = pynvml.nvmlDeviceGetMigMode(handle)[0] == pynvml.NVML_DEVICE_MIG_ENABLE
    except pynvml.NVMLError:  # GPUs without MIG answer "not supported"
        divided = False
    if not divided:
        return [_text(pynvml.nvmlDeviceGetUUID(handle))]
    found = []
    for index in range(pynvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with contextlib.suppress(pynvml.NVMLError_NotFound):
            found.append(_text(pynvml.nvmlDeviceGetUUID(pynvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))))
    return found


def _text(uuid: str | bytes) -> str:
    return uuid.decode() if isinstance(uuid, bytes) else uuid
