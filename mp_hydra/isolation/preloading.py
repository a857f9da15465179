"""What the job server does before it serves: the imports that all jobs share, and a look at whether forking is safe then."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mp_hydra.heavy_imports import heavy_imports
from mp_hydra.isolation import processes

if TYPE_CHECKING:
    from collections.abc import Sequence

# Threads do not survive a fork. jemalloc's in pyarrow, which Keras imports by way of pandas, is the one that can be spared.
THREADLESS = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}

_ALWAYS = ("hydra._internal.hydra", "hydra._internal.config_loader_impl", "cloudpickle", "mp_hydra.isolation.job")


def preload(modules: Sequence[str]) -> list[str]:
    """Import modules, and what every job of a Hydra app needs.

    Returns:
        A line for each one that could not be imported.
    """
    from hydra.core.plugins import Plugins

    failures = []
    Plugins.instance()  # looks at everything installed, which takes as long as a small job
    with heavy_imports():
        for name in (*_ALWAYS, *modules):
            try:
                importlib.import_module(name)
            except (Exception, SystemExit) as error:  # noqa: BLE001, PERF203 - any code may run at import
                failures.append(f"{name} could not be imported before the jobs: {type(error).__name__}: {error}")
    return failures


def unsafe_to_fork() -> str | None:
    """Why jobs must not be forked from this process; None if they may."""
    initialised = _initialised()
    if initialised is not None:
        return f"{initialised}, which would hang the jobs"
    names = processes.threads()
    if len(names) > 1:
        return f"the preloaded modules have started threads ({', '.join(sorted(names)[:5])}), which the jobs would lack"
    return None


def _initialised() -> str | None:
    context = getattr(sys.modules.get("tensorflow.python.eager.context"), "_context", None)
    if getattr(context, "_initialized", False):
        return "TensorFlow's devices are initialised after the preload"
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    if cuda is not None and cuda.is_initialized():
        return "PyTorch's CUDA is initialised after the preload"
    if getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None):
        return "JAX' devices are initialised after the preload"
    for entry in Path("/proc/self/fd").glob("*"):
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(("/dev/nvidia", "/dev/dri", "/dev/kfd")):
            return f"a GPU is in use after the preload ({target} is open)"
    return None
