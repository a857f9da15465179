"""Main memory: what a process can still have of it, and who goes first where it runs out."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

_KILLED_FIRST = "500"  # of 1000: oom_score_adj, see proc(5)


def available_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Main memory that a process can still have, of the machine and of its cgroup; None where the system does not tell."""
    found = [size for size in (_machine(proc / "meminfo"), _cgroup(cgroup)) if size is not None]
    return min(found, default=None)


def _machine(meminfo: Path) -> int | None:
    matched = re.search(r"^MemAvailable:\s*(\d+) kB$", _text(meminfo), re.MULTILINE)
    return int(matched[1]) * 1024 if matched else None


def _cgroup(root: Path) -> int | None:
    """The limit less what is in use and cannot be dropped, of cgroup v2, else v1."""
    for folder, limit, usage in (
        (root, "memory.max", "memory.current"),
        (root / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        most, used = _text(folder / limit).strip(), _text(folder / usage).strip()
        if most.isdigit() and used.isdigit():
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _text(folder / "memory.stat"), re.MULTILINE)
            return max(int(most) - int(used) + (int(cached[1]) if cached else 0), 0)
    return None


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return ""


def be_killed_first() -> None:
    """Where memory runs out, let the kernel take this process, and not the one that started it."""
    with contextlib.suppress(OSError):  # not Linux, or not allowed: the kernel chooses by size
        Path("/proc/self/oom_score_adj").write_text(_KILLED_FIRST, encoding="ascii")
