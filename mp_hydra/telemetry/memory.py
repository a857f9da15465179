"""Memory of a training run, from sources that can tell its peak: TensorFlow's allocator and the kernel.

    allocator, host = AllocatorMemory("GPU:0"), HostMemory()
    baseline = allocator.current_bytes()
    allocator.reset()
    host.reset()
    ...  # train
    training = allocator.peak_bytes() - baseline  # where `allocator.unavailable` is None

Each source says in `source` where its numbers come from and in `unavailable` why there are none. The constructor starts
the first measurement; `reset` starts another.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.host_memory import available_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

_REGION = 2 * 2**30  # address space; the allocator's own table of it takes 1/32 of that in memory
_RESET_PEAK_RSS = b"5"  # proc_pid_clear_refs(5): sets VmHWM to the current resident set size


@dataclass(frozen=True)
class Unavailable:
    """A quantity that could not be measured.

    Attributes:
        reason: why, in words for the user.
    """

    reason: str


def count_every_cpu_allocation() -> None:
    """Make TensorFlow's CPU allocator keep statistics of everything; call it before TensorFlow's devices are initialised.

    By default, with oneDNN on, allocations below 256 KiB go to an allocator without statistics (kSmallAllocationsThreshold in
    mkl_cpu_allocator.h), so that tensors would leave the account just when they become half as large. Settings of the user
    stay in force.
    """
    os.environ.setdefault("TF_CPU_ALLOCATOR_USE_BFC", "1")
    with contextlib.suppress(ValueError, OSError, AttributeError):  # no sysconf: TensorFlow's limit of 64 GiB stays
        physical = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        os.environ.setdefault("TF_CPU_BFC_MEM_LIMIT_IN_MB", str(physical // 2**20))


def take_one_region() -> None:
    """Let TensorFlow's CPU allocator work in one large region from the start, as a GPU's does without memory growth.

    It would take regions from the system as it needs them, each a little larger than the last, and cannot join what is free in
    two of them: a tensor then occupies a free piece of up to twice its size, and peaks depend on where regions happen to end.
    The region is address space: pages that nothing is written to take no memory. Call it before anything else is allocated.
    """
    import tensorflow as tf

    available = available_bytes()
    size = _REGION if available is None else min(_REGION, available // 2)
    with contextlib.suppress(tf.errors.OpError), tf.device("CPU:0"):  # where it cannot be had, regions grow as they do
        tf.raw_ops.Empty(shape=[size // 4], dtype=tf.int32, init=False)


class AllocatorMemory:
    """Bytes that TensorFlow's allocator has handed out on one device, current and at the peak.

    Independent of what the allocator has reserved from the system. Exact but for the rounding of the allocator: up to 6 %
    for tensors of a few hundred KiB, towards 0 for large ones. On a CPU everything is counted only after
    `count_every_cpu_allocation`; `source` says so where it is not. Constructing one initialises TensorFlow's devices.

    Args:
        device: a TensorFlow device, `"CPU:0"` or `"GPU:0"`.
        leftover: bytes that do not belong to what is measured, subtracted from every reading: TensorFlow keeps the variables
            of a trained model for as long as the process lives, so a second run in it starts with those of the first.

    Attributes:
        source: where the numbers come from.
        unavailable: why there are none; None where there are.
    """

    def __init__(self, device: str, *, leftover: int = 0) -> None:
        self.device = device
        self._leftover = leftover
        self.source = f"TensorFlow allocator, {device}"
        self.unavailable: str | None = None
        self.reset()
        if self.current_bytes() is not None and not self._counts_small_allocations():
            self.source += ", allocations of 256 KiB and above only"

    def _counts_small_allocations(self) -> bool:
        import tensorflow as tf

        before = self.current_bytes()
        with tf.device(self.device):
            small = tf.zeros([64, 256]) + 1.0
        counted = self.current_bytes() != before
        del small
        return counted

    def reset(self) -> None:
        """Start a new measurement: the peak becomes what is in use now."""
        import tensorflow as tf

        if self.unavailable is None:
            try:
                tf.config.experimental.reset_memory_stats(self.device)
            except ValueError as error:
                self.unavailable = _no_allocator_statistics(self.device, str(error))

    def current_bytes(self) -> int | None:
        """Bytes in use now; None where they are unavailable."""
        return self._read("current")

    def peak_bytes(self) -> int | None:
        """The most bytes in use at one time since the last reset; None where they are unavailable."""
        return self._read("peak")

    def _read(self, key: str) -> int | None:
        import tensorflow as tf

        if self.unavailable is None:
            try:
                return int(tf.config.experimental.get_memory_info(self.device)[key]) - self._leftover
            except ValueError as error:
                self.unavailable = _no_allocator_statistics(self.device, str(error))
        return None


def _no_allocator_statistics(device: str, problem: str) -> str:
    if device.startswith("CPU"):
        return f"TensorFlow's CPU allocator keeps no statistics (it does with TF_CPU_ALLOCATOR_USE_BFC=1): {problem}"
    if os.environ.get("TF_GPU_ALLOCATOR") == "cuda_malloc_async":
        return f"the allocator cuda_malloc_async keeps no statistics (unset TF_GPU_ALLOCATOR): {problem}"
    return f"TensorFlow has no allocator statistics for {device}: {problem}"


class HostMemory:
    """Peak resident memory of this process: VmHWM, which Linux can reset.

    A peak that cannot be reset belongs to the process and not to the training, and so is unavailable. (`ru_maxrss`
    cannot be, and a child inherits it.) The kernel counts to within some pages for each CPU.

    Args:
        proc_root: the directory that holds `status` and `clear_refs`.

    Attributes:
        source: where the numbers come from.
        unavailable: why there are none; None where there are.
    """

    source = "VmHWM of /proc/self/status"

    def __init__(self, proc_root: str | Path = "/proc/self") -> None:
        self._root = Path(proc_root)
        self.unavailable: str | None = None
        self.reset()
        self.peak_bytes()

    def reset(self) -> None:
        """Start a new measurement: the peak becomes what is resident now."""
        if self.unavailable is not None:
            return
        path = self._root / "clear_refs"
        try:
            descriptor = os.open(path, os.O_WRONLY)
            try:
                os.write(descriptor, _RESET_PEAK_RSS)
            finally:
                os.close(descriptor)
        except OSError as error:
            self.unavailable = f"the peak of the process cannot be reset before training ({path}: {error.strerror})"

    def peak_bytes(self) -> int | None:
        """The most bytes resident at one time since the last reset; None where they are unavailable."""
        if self.unavailable is not None:
            return None
        path = self._root / "status"
        try:
            peak = high_water_bytes(path.read_text(encoding="utf-8", errors="replace"))
        except OSError as error:
            self.unavailable = f"{path} cannot be read: {error.strerror}"
            return None
        if peak is None:
            self.unavailable = f"{path} has no VmHWM"
        return peak


def high_water_bytes(status: str) -> int | None:
    r"""The peak resident set size in bytes, from the text of /proc/PID/status (proc_pid_status(5)).

    >>> high_water_bytes("Name:\tpython\nVmHWM:\t    2048 kB\n")
    2097152
    """
    found = re.search(r"^VmHWM:\s*(\d+) kB$", status, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def variables_bytes(variables: Iterable[Any]) -> int:
    """Bytes of the values of Keras or TensorFlow variables: elements times bytes per element.

    A variable that occurs more than once (shared between layers) counts once.
    """
    import tensorflow as tf

    unique = {id(variable): variable for variable in variables}
    return sum(math.prod(variable.shape) * int(tf.as_dtype(variable.dtype).size) for variable in unique.values())
