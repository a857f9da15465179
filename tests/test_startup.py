"""TensorFlow's start: what is printed meanwhile is kept, and shown where it matters."""

from __future__ import annotations

import logging
import os
import sys
from typing import Any

import pytest

from mp_hydra import startup
from mp_hydra.telemetry.memory import Unavailable


def chatter(line: str) -> None:
    """Write past Python, as C++ does."""
    os.write(2, line.encode())


def test_what_is_written_to_the_descriptor_is_kept_and_not_shown(capfd: pytest.CaptureFixture[str]) -> None:
    with startup._stderr_kept() as kept:
        chatter("from C++\n")
    print("afterwards", file=sys.stderr, flush=True)
    shown = capfd.readouterr().err
    assert "from C++\n" in kept.text
    assert shown == "afterwards\n"


def test_what_was_written_is_shown_where_the_start_fails(capfd: pytest.CaptureFixture[str]) -> None:
    def start() -> None:
        with startup._stderr_kept():
            chatter("libcudart.so.12: cannot open\n")
            raise ImportError

    with pytest.raises(ImportError):
        start()
    sys.stderr.flush()
    assert "libcudart.so.12: cannot open\n" in capfd.readouterr().err


def test_bytes_that_are_no_utf8_do_no_harm() -> None:
    with startup._stderr_kept() as kept:
        os.write(2, b"caf\xe9\n")
    assert kept.text == "caf\ufffd\n"


def test_start_leaves_no_descriptor_open() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))  # noqa: PTH208

    if not os.path.isdir("/proc/self/fd"):  # noqa: PTH112
        pytest.skip("no /proc")
    startup.start_tensorflow()
    before = descriptors()
    for _ in range(3):
        startup.start_tensorflow()
    assert descriptors() == before


@pytest.mark.parametrize(
    ("driver", "visible", "warned"),
    [
        ("550.54", None, True),
        ("550.54", "0", True),
        ("550.54", "", False),
        ("550.54", "-1", False),
        (Unavailable("no driver"), None, False),
    ],
)
def test_driver_without_a_gpu_in_tensorflow_is_a_warning_unless_the_gpu_was_hidden_on_purpose(
    driver: Any, visible: str | None, warned: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(startup, "driver_version", lambda: driver)
    monkeypatch.setattr("mp_hydra.hardware.training_device", lambda: "CPU:0")
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    with caplog.at_level(logging.WARNING, logger="mp_hydra.startup"):
        startup.start_tensorflow()
    assert ("TensorFlow sees no GPU" in caplog.text) is warned


def test_allocator_is_told_before_tensorflow_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TF_CPU_ALLOCATOR_USE_BFC", raising=False)
    monkeypatch.delenv("TF_CPU_BFC_MEM_LIMIT_IN_MB", raising=False)
    startup.start_tensorflow()
    assert os.environ["TF_CPU_ALLOCATOR_USE_BFC"] == "1"
