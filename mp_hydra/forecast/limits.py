"""The memory that a batch has to fit into, and what of it is not TensorFlow's to give out."""

from __future__ import annotations

from dataclasses import dataclass

GPU_ALLOWANCE = 2 * 2**30
GPU_REASON = (
    "CUDA context, cuDNN and cuBLAS: TensorFlow withholds 1536 MiB of a card of compute capability 8, 1800 MiB from 9 on "
    "(MinSystemMemory in gpu_device.cc), beside the context itself"
)
HOST_ALLOWANCE = 2**30
HOST_REASON = "what the process takes beside TensorFlow's allocator: libraries, compiled code, the input pipeline"


@dataclass(frozen=True)
class Memory:
    """What has to suffice.

    Attributes:
        total_bytes: the memory.
        source: where the figure comes from.
        allowance_bytes: what of it is left to others than the allocator.
        allowance_reason: what that is for.
    """

    total_bytes: int
    source: str
    allowance_bytes: int
    allowance_reason: str

    @property
    def usable_bytes(self) -> int:
        """What the allocator may hold at its peak."""
        return max(self.total_bytes - self.allowance_bytes, 0)


def to_fit(given: int | None, *, device: str, device_bytes: int, allowance: int | None) -> Memory:
    """The memory for which the largest batch is looked for.

    A figure that is given is the size of a card, perhaps one that this machine does not have; so what a GPU adds is left to it.
    TensorFlow's own limit of a GPU that is there has that taken off already.

    Args:
        given: bytes; None for what this machine has.
        device: where the dry runs were made, "GPU:0" or "CPU:0".
        device_bytes: what was available there.
        allowance: bytes; None for the default.
    """
    if given is not None:
        source, default, reason = "given", GPU_ALLOWANCE, GPU_REASON
    elif device.startswith("GPU"):
        source = f"what TensorFlow may take of {device}"
        default, reason = 0, "TensorFlow's limit leaves out what the GPU needs beside it"
    else:
        source, default, reason = "available on this machine", HOST_ALLOWANCE, HOST_REASON
    if allowance is not None:
        default, reason = allowance, "as given"
    return Memory(device_bytes if given is None else given, source, default, reason)
