"""GPU memory and energy of a run as the NVIDIA driver sees them, through NVML.

    with NvmlSampler(pci_bus_id) as nvml:
        ...  # train
    print(nvml.peak_bytes, nvml.joules, nvml.unavailable, nvml.source)

The driver counts what TensorFlow has reserved, CUDA's own context and libraries included, so the figure means something
only with memory growth on. NVML keeps no peak: it is the highest of the samples taken.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import TYPE_CHECKING, Any

from mp_hydra.telemetry.memory import Unavailable

if TYPE_CHECKING:
    from collections.abc import Iterable
    from types import TracebackType

    from typing_extensions import Self

_NOT_STARTED = "the measurement was not started"
_RUNNING = "the measurement is still running"


class NvmlSampler:
    """Peak memory of one process on one GPU, sampled in a thread, and the energy that the GPU used meanwhile.

    Nothing here raises: what cannot be measured stays None, with the reason in `unavailable`. Energy is counted for the
    whole GPU and so is given only where no other process was seen on it.

    Args:
        pci_bus_id: the GPU, as `"0000:65:00.0"`; None where training does not use one.
        interval_s: seconds between samples.
        pid: the process; None for this one.

    Attributes:
        peak_bytes: the most GPU memory that the process was seen to hold.
        joules: energy between `start` and `stop`.
        unavailable: for "memory" and "energy", why the number is None; no entry where there is one.
    """

    def __init__(self, pci_bus_id: str | None, *, interval_s: float = 0.1, pid: int | None = None) -> None:
        self._pci_bus_id = pci_bus_id
        self._interval_s = interval_s
        self._pid = os.getpid() if pid is None else pid
        self._thread: threading.Thread | None = None
        self._reset()
        self._give_up("training does not run on an NVIDIA GPU" if pci_bus_id is None else _NOT_STARTED)

    def _reset(self) -> None:
        self.peak_bytes: int | None = None
        self.joules: float | None = None
        self.unavailable: dict[str, str] = {}
        self._stopping = threading.Event()
        self._device: Any = None
        self._mig = False
        self._energy_at_start: int | Unavailable = Unavailable(_NOT_STARTED)
        self._samples = 0
        self._failures = 0
        self._failure: str | None = None  # of the latest sample
        self._listed = False
        self._others: set[int] = set()

    @property
    def source(self) -> str:
        """Where `peak_bytes` comes from."""
        failed = f", {self._failures} of {self._samples} samples failed" if self._failures else ""
        return f"NVML, this process on GPU {self._pci_bus_id}, sampled every {self._interval_s:g} s{failed}"

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start a measurement; does nothing while one is running."""
        if self._thread is not None or self._pci_bus_id is None:
            return
        import pynvml

        self._reset()
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self._give_up(explain(error))
            return
        try:
            self._device = pynvml.nvmlDeviceGetHandleByPciBusId(self._pci_bus_id)
        except pynvml.NVMLError as error:
            not_found = error.value in (pynvml.NVML_ERROR_NOT_FOUND, pynvml.NVML_ERROR_INVALID_ARGUMENT)
            self._give_up(f"NVML knows no GPU with bus id {self._pci_bus_id}" if not_found else explain(error))
            _shut_down()
            return
        self._give_up(_RUNNING)
        self._mig = _mig_enabled(self._device)
        self._energy_at_start = _millijoules(self._device)
        self._sample()
        self._thread = threading.Thread(target=self._sample_until_stopped, name="mp_hydra-nvml", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the measurement with one last sample; does nothing where none is running."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        self._sample()
        memory = self._memory()
        energy = self._energy(_millijoules(self._device))
        self.unavailable = {}
        if isinstance(memory, Unavailable):
            self.peak_bytes = None
            self.unavailable["memory"] = memory.reason
        if isinstance(energy, Unavailable):
            self.unavailable["energy"] = energy.reason
        else:
            self.joules = energy
        _shut_down()

    def _give_up(self, reason: str) -> None:
        self.unavailable = {"memory": reason, "energy": reason}

    def _sample_until_stopped(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._sample()

    def _sample(self) -> None:
        self._samples += 1
        processes = _processes(self._device)
        if isinstance(processes, Unavailable):
            self._failures += 1
            self._failure = processes.reason
            return
        self._failure = None
        pids = {process.pid for process in processes}
        self._listed |= self._pid in pids
        self._others |= pids - {self._pid}
        used = process_bytes(processes, self._pid)
        if used is not None:
            self.peak_bytes = used if self.peak_bytes is None else max(self.peak_bytes, used)

    def _memory(self) -> int | Unavailable:
        if self._failure is not None:
            # Samples missed up to the end may have missed the peak; one missed in the middle is a longer interval.
            return Unavailable(self._failure)
        if not self._listed:
            return Unavailable("the GPU's process list does not show this process, as is usual in containers")
        if self.peak_bytes is None:
            return Unavailable("the driver does not tell how much memory a single process uses")
        return self.peak_bytes

    def _energy(self, at_end: int | Unavailable) -> float | Unavailable:
        if isinstance(self._energy_at_start, Unavailable):
            return self._energy_at_start
        if isinstance(at_end, Unavailable):
            return at_end
        not_ours_alone = self._shared()
        if not_ours_alone is not None:
            return Unavailable(f"energy is counted for the whole GPU, {not_ours_alone}")
        millijoules = at_end - self._energy_at_start
        if millijoules <= 0:
            return Unavailable("the GPU's energy counter did not advance during training")
        return millijoules / 1e3

    def _shared(self) -> str | None:
        """Why the GPU may not have been this process's alone; None where it was."""
        if self._mig:
            return "which MIG divides"
        if self._others:
            return f"and other processes were on it ({self._others_text()})"
        if self._failure is not None:
            return f"and who was on it is not known: {self._failure}"
        if not self._listed:
            return "and its process list, which does not even show this process, may hide others"
        return None

    def _others_text(self) -> str:
        shown = sorted(self._others)[:3]
        rest = len(self._others) - len(shown)
        return "pid " + ", ".join(map(str, shown)) + (f" and {rest} more" if rest else "")


def process_bytes(processes: Iterable[Any], pid: int) -> int | None:
    """GPU memory of one process in NVML's process lists.

    A process that computes and draws stands in both lists, with the same figure in each; under MIG it has one entry for
    each instance that it uses. So: the largest figure per instance, summed over instances.

    Args:
        processes: entries of the compute and the graphics list, with `pid`, `usedGpuMemory` (None where the driver does
            not tell), `gpuInstanceId` and `computeInstanceId`.
        pid: the process.

    Returns:
        Bytes; None where the process is not listed, or not with all its figures.
    """
    instances: dict[tuple[int, int], int | None] = {}
    for process in processes:
        if process.pid == pid:
            instance = (process.gpuInstanceId, process.computeInstanceId)
            known = [used for used in (instances.get(instance), process.usedGpuMemory) if used is not None]
            instances[instance] = max(known, default=None)
    used = [figure for figure in instances.values() if figure is not None]
    return sum(used) if used and len(used) == len(instances) else None


def driver_version() -> str | Unavailable:
    """The version of the NVIDIA driver, such as "560.35.03"."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Unavailable(explain(error))
    try:
        return str(pynvml.nvmlSystemGetDriverVersion())
    except pynvml.NVMLError as error:
        return Unavailable(explain(error))
    finally:
        _shut_down()


def explain(error: Exception) -> str:
    """What an error of pynvml means to a user, as a sentence without a full stop."""
    import pynvml

    if isinstance(error, pynvml.NVMLLibraryMismatchError):
        return "the NVIDIA driver is too old for the process lists that nvidia-ml-py asks for"
    known = {
        pynvml.NVML_ERROR_LIBRARY_NOT_FOUND: "no NVIDIA driver library (libnvidia-ml.so.1) could be loaded",
        pynvml.NVML_ERROR_DRIVER_NOT_LOADED: "the NVIDIA kernel driver is not loaded",
        pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: "the NVIDIA driver and its library have different versions; reboot",
        pynvml.NVML_ERROR_NO_PERMISSION: "this user may not query the GPU",
        pynvml.NVML_ERROR_NOT_SUPPORTED: "the GPU does not support this query",
        pynvml.NVML_ERROR_GPU_IS_LOST: "the GPU no longer answers",
        pynvml.NVML_ERROR_TIMEOUT: "the GPU did not answer in time",
    }
    return known.get(getattr(error, "value", None), f"NVML reports an error: {error}")


def _processes(device: Any) -> list[Any] | Unavailable:
    import pynvml

    try:
        compute = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        try:
            graphics = pynvml.nvmlDeviceGetGraphicsRunningProcesses(device)
        except pynvml.NVMLError_NotSupported:
            graphics = []  # a GPU that cannot draw
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError) as error:
        return Unavailable(explain(error))
    return [*compute, *graphics]


def _millijoules(device: Any) -> int | Unavailable:
    import pynvml

    try:
        return int(pynvml.nvmlDeviceGetTotalEnergyConsumption(device))
    except pynvml.NVMLError_NotSupported:
        return Unavailable("the GPU has no energy counter")
    except pynvml.NVMLError as error:
        return Unavailable(explain(error))


def _mig_enabled(device: Any) -> bool:
    import pynvml

    try:
        current, _pending = pynvml.nvmlDeviceGetMigMode(device)
    except pynvml.NVMLError:
        return False  # GPUs without MIG answer "not supported"
    return bool(current == pynvml.NVML_DEVICE_MIG_ENABLE)


def _shut_down() -> None:
    import pynvml

    with contextlib.suppress(pynvml.NVMLError):
        pynvml.nvmlShutdown()
