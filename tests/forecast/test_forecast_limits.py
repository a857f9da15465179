"""The memory to fit into: where it comes from, and what of it is left to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from mp_hydra.forecast.limits import GPU_ALLOWANCE, HOST_ALLOWANCE, to_fit
from mp_hydra.host_memory import available_bytes

if TYPE_CHECKING:
    from pathlib import Path

GIB = 2**30


@pytest.mark.parametrize(
    ("given", "device", "allowance", "usable"),
    [
        (12 * GIB, "CPU:0", None, 12 * GIB - GPU_ALLOWANCE),  # a card to be bought
        (12 * GIB, "GPU:0", None, 12 * GIB - GPU_ALLOWANCE),
        (None, "GPU:0", None, 20 * GIB),  # TensorFlow's limit has it taken off
        (None, "CPU:0", None, 20 * GIB - HOST_ALLOWANCE),
        (12 * GIB, "CPU:0", 0, 12 * GIB),
        (None, "GPU:0", 5 * GIB, 15 * GIB),
        (GIB, "CPU:0", None, 0),  # never negative
    ],
)
def test_the_allowance_goes_with_where_the_memory_comes_from(
    given: int | None, device: str, allowance: int | None, usable: int
) -> None:
    assert to_fit(given, device=device, device_bytes=20 * GIB, allowance=allowance).usable_bytes == usable


def machine(root: Path, **files: str) -> tuple[Path, Path]:
    for name, text in files.items():
        path = root / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root / "proc", root / "cgroup"


def test_a_container_has_what_its_limit_leaves_and_what_can_be_dropped(tmp_path: Path) -> None:
    files = {
        "proc__meminfo": "MemTotal: 9000 kB\nMemAvailable:    8000 kB\n",
        "cgroup__memory_dot_max": "4096000\n",
        "cgroup__memory_dot_current": "3000000\n",
        "cgroup__memory_dot_stat": "anon 5\ninactive_file 200000\n",
    }
    assert available_bytes(*machine(tmp_path, **files)) == 4096000 - 3000000 + 200000


@pytest.mark.parametrize("limit", ["max\n", None])
def test_without_a_limit_it_is_the_machines(tmp_path: Path, limit: str | None) -> None:
    files = {"proc__meminfo": "MemAvailable:    8000 kB\n"}
    if limit is not None:
        files |= {"cgroup__memory_dot_max": limit, "cgroup__memory_dot_current": "5\n"}
    assert available_bytes(*machine(tmp_path, **files)) == 8000 * 1024


def test_version_1_of_cgroups(tmp_path: Path) -> None:
    files = {
        "cgroup__memory__memory_dot_limit_in_bytes": "1000\n",
        "cgroup__memory__memory_dot_usage_in_bytes": "600\n",
        "cgroup__memory__memory_dot_stat": "total_inactive_file 50\n",
    }
    assert available_bytes(*machine(tmp_path, **files)) == 450


def test_where_the_system_does_not_tell_it_is_not_known(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "no", tmp_path / "none") is None
