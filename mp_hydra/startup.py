"""TensorFlow's start: allocator and memory growth set in time, chatter kept off the screen, a missing GPU noticed."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra import hardware
from mp_hydra.heavy_imports import heavy_imports
from mp_hydra.signals import signals_held_back
from mp_hydra.telemetry.memory import Unavailable, count_every_cpu_allocation, take_one_region
from mp_hydra.telemetry.nvml import driver_version

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)


def start_tensorflow() -> None:
    """Import TensorFlow and initialise its devices; does nothing that matters the second time in a process.

    What TensorFlow prints meanwhile goes to the debug log, or to the screen if it fails; what it has to say later it says from
    warnings on, unless TF_CPP_MIN_LOG_LEVEL is set. A driver that is there while TensorFlow sees no GPU is a warning: the run
    would train on the CPU.
    """
    count_every_cpu_allocation()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")  # read once, at import
    with _stderr_kept() as kept:
        if "tensorflow" not in sys.modules:
            # Some packages make an ImportError of their own of an exception that meets them while they are imported.
            with signals_held_back(lost=False), heavy_imports():
                import keras  # noqa: F401 - imports TensorFlow, and what goes with it
        import tensorflow as tf

        hardware.allow_memory_growth()
        device = hardware.training_device()
        take_one_region()
        tf.zeros(())
    log.debug("TensorFlow said while starting:\n%s", kept.text)
    driver = driver_version()
    if (
        device.startswith("CPU")
        and not isinstance(driver, Unavailable)
        and os.environ.get("CUDA_VISIBLE_DEVICES") not in ("", "-1")
    ):
        log.warning(
            "there is an NVIDIA driver (%s) but TensorFlow sees no GPU, so this trains on the CPU; pip install 'mp_hydra[gpu]' "
            "brings the CUDA libraries. TensorFlow said: %s",
            driver,
            kept.text[-1000:],
        )


@dataclass
class _Kept:
    text: str = ""


@contextmanager
def _stderr_kept() -> Iterator[_Kept]:
    """Keep what arrives on file descriptor 2, where C++ writes past Python; it is shown if the block fails."""
    kept = _Kept()
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 2)
        failed = False
        try:
            yield kept
        except Exception:
            failed = True
            raise
        finally:
            sys.stderr.flush()
            os.dup2(shown, 2)
            os.close(shown)
            file.seek(0)
            kept.text = file.read().decode(errors="replace")
            if failed:
                sys.stderr.write(kept.text)
