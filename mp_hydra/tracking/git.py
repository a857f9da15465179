"""Which commit a run was started from, and whether the tracked files differ from it."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

TIMEOUT_SECONDS = 5.0


@dataclass(frozen=True)
class GitState:
    """The commit that is checked out, and whether *tracked* files were changed since.

    Untracked files do not make a tree dirty: outputs, data and notes lie about in most clones.

    Attributes:
        commit: the full hash, or None where it cannot be told.
        dirty: whether a tracked file differs from the commit, staged or not; None where it cannot be told.
        reason: why a value is None; None where both are known.
    """

    commit: str | None
    dirty: bool | None
    reason: str | None = None

    def tags(self) -> dict[str, str]:
        """The run tags that record this state; what is not known is absent, with the reason."""
        tags = {}
        if self.commit is not None:
            tags["mlflow.source.git.commit"] = self.commit
        if self.dirty is not None:
            tags["mp_hydra.git_dirty"] = "true" if self.dirty else "false"
        if self.reason is not None:
            tags["mp_hydra.absent.git"] = self.reason
        return tags


def git_state(directory: Path) -> GitState:
    """Ask git about the repository that holds ``directory``; never raises."""
    commit = None
    try:
        commit = _git(directory, "rev-parse", "--verify", "HEAD")
        changed = _git(directory, "status", "--porcelain", "--untracked-files=no")
    except subprocess.TimeoutExpired:
        return GitState(commit, None, f"git gave no answer within {TIMEOUT_SECONDS:g} s")
    except FileNotFoundError:
        return GitState(None, None, "git is not installed")
    except OSError as error:
        return GitState(commit, None, f"git cannot be run: {error.strerror}")
    except subprocess.CalledProcessError as error:
        said = error.stderr.strip().splitlines()
        return GitState(commit, None, said[0] if said else f"git ended with exit status {error.returncode}")
    return GitState(commit, bool(changed))


def _git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", "-C", os.fspath(directory), *arguments],
        # Without optional locks, so that runs side by side do not stand in each other's way in the index.
        env={**os.environ, "LC_ALL": "C", "GIT_OPTIONAL_LOCKS": "0"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=True,
        timeout=TIMEOUT_SECONDS,
        encoding="utf-8",
        errors="replace",
    )
    return done.stdout.strip()
