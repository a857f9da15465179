"""Questions answered by a fresh process: answers, reasons, and what is said on the way."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.fresh_process import NoAnswerError, ask, death

if TYPE_CHECKING:
    from pathlib import Path

MODULE = """
import os, signal, sys
from mp_hydra.errors import UserError
from mp_hydra.fresh_process import serve

def answered(request, say):
    say("begun")
    if request == "user":
        raise UserError("two\\n lines")
    if request == "bug":
        raise ValueError("first\\nsecond")
    if request == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if request == "exit":
        print("the last word")
        os._exit(3)
    print("chatter")
    return {"pid": os.getpid(), "request": request}

if __name__ == "__main__":
    serve(answered)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "answering_module.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "answering_module"


@pytest.mark.process
def test_the_answer_is_of_another_process_and_what_it_says_is_heard(module: str) -> None:
    heard: list[Any] = []
    answer = ask(module, [1, 2], heard=heard.append)
    assert answer["request"] == [1, 2]
    assert heard == ["begun"]


@pytest.mark.process
@pytest.mark.parametrize(
    ("request_", "reason", "killed"),
    [
        ("user", "two lines", False),
        ("bug", "ValueError: first", False),
        ("killed", "its process was ended by SIGKILL, as by the kernel when memory runs out", True),
        ("exit", "its process ended with 3: the last word", False),
    ],
)
def test_no_answer_is_a_reason(module: str, request_: str, reason: str, *, killed: bool) -> None:
    heard: list[Any] = []
    with pytest.raises(NoAnswerError) as caught:
        ask(module, request_, heard=heard.append)
    assert str(caught.value) == reason
    assert caught.value.killed is killed
    assert heard == ["begun"]  # what was said before the end is not lost


@pytest.mark.parametrize(
    ("code", "said", "problem"),
    [
        (-9, "", "its process was ended by SIGKILL, as by the kernel when memory runs out"),
        (-11, "x", "its process was ended by SIGSEGV"),
        (1, "Traceback\nImportError: libcudnn\n\n", "its process ended with 1: ImportError: libcudnn"),
        (3, "", "its process ended with 3: it said nothing"),
    ],
)
def test_a_process_that_dies_is_a_reason(code: int, said: str, problem: str) -> None:
    assert death(code, said) == problem
