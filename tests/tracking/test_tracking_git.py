from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING

import pytest

from mp_hydra.tracking import git as git_module
from mp_hydra.tracking import git_state

if TYPE_CHECKING:
    from pathlib import Path


def _git(directory: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", "-C", str(directory), *identity, *arguments], check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    _git(tmp_path, "init", "-q")
    (tmp_path / "code.py").write_text("1\n")
    _git(tmp_path, "add", "code.py")
    _git(tmp_path, "commit", "-q", "-m", "first")
    return tmp_path


def test_a_clean_clone_gives_its_commit_and_is_not_dirty(clone: Path) -> None:
    state = git_state(clone)
    assert (state.commit, state.dirty, state.reason) == (_git(clone, "rev-parse", "HEAD"), False, None)
    assert state.tags() == {"mlflow.source.git.commit": state.commit, "mp_hydra.git_dirty": "false"}


def test_untracked_files_do_not_make_a_clone_dirty(clone: Path) -> None:
    (clone / "notes.txt").write_text("x")
    assert git_state(clone).dirty is False


@pytest.mark.parametrize("staged", [False, True])
def test_a_changed_tracked_file_makes_a_clone_dirty_seen_from_a_folder_below(clone: Path, staged: bool) -> None:
    (clone / "code.py").write_text("2\n")
    if staged:
        _git(clone, "add", "code.py")
    below = clone / "a" / "b"
    below.mkdir(parents=True)
    assert git_state(below).dirty is True


def test_outside_a_clone_nothing_is_known_and_the_reason_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    state = git_state(tmp_path)
    assert (state.commit, state.dirty) == (None, None)
    assert "not a git repository" in (state.reason or "")
    assert list(state.tags()) == ["mp_hydra.absent.git"]


def test_a_clone_without_a_commit_gives_a_reason(tmp_path: Path) -> None:
    _git(tmp_path, "init", "-q")
    state = git_state(tmp_path)
    assert state.commit is None
    assert state.reason


def test_without_git_on_the_path_the_reason_says_so(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert git_state(clone).reason == "git is not installed"


def test_a_git_that_hangs_is_given_up(clone: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    slow = tmp_path / "bin" / "git"
    slow.parent.mkdir()
    slow.write_text("#!/bin/sh\nexec sleep 30\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow.parent}:/usr/bin:/bin")
    monkeypatch.setattr(git_module, "TIMEOUT_SECONDS", 0.2)
    assert git_state(clone).reason == "git gave no answer within 0.2 s"
