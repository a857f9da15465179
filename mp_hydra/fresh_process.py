"""A question answered by a fresh Python process, so that nothing of the answer's making is left in the one that asked.

    value = ask("mp_hydra.step_timing", request)  # the module ends with: if __name__ == "__main__": serve(answered)

No traced function, no variable, no random state and no allocated memory stays behind, and a process that the kernel kills is a
`NoAnswerError` and not the end of the program.
"""

from __future__ import annotations

import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mp_hydra.host_memory import be_killed_first

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

_POLL = 0.1  # seconds between looks at what the process has said


class NoAnswerError(Exception):
    """The process gave none; `str` is the reason, one line for the user.

    Args:
        reason: in words for the user.
        killed: whether the process was ended by SIGKILL, as by the kernel when memory runs out.
    """

    def __init__(self, reason: str, *, killed: bool = False) -> None:
        super().__init__(reason)
        self.killed = killed


def ask(
    module: str,
    request: Any,
    *,
    heard: Callable[[Any], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Any:
    """Start `python -m module`, hand it the request and return its answer.

    Args:
        module: it calls `serve` when it is run.
        request: anything that pickles.
        heard: receives what the process says on its way, each as soon as it is there.
        environment: variables that differ from those here.

    Raises:
        NoAnswerError: if it failed or died.
    """
    with tempfile.TemporaryDirectory(prefix="mp_hydra_fresh_") as folder:
        asked, answer, said = (Path(folder) / name for name in ("request.pickle", "answer.jsonl", "said.txt"))
        asked.write_bytes(pickle.dumps(request))
        with said.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", module, str(asked), str(answer)],
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(path or str(Path.cwd()) for path in sys.path),
                    **(environment or {}),
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            try:
                messages = _follow(process, answer, heard or (lambda _: None))
            except BaseException:
                process.kill()
                process.wait()
                raise
        for message in messages:
            if "problem" in message:
                raise NoAnswerError(str(message["problem"]))
            if "value" in message:
                return message["value"]
        code, text = process.returncode, said.read_text(encoding="utf-8", errors="replace")
        raise NoAnswerError(death(code, text), killed=code == -signal.SIGKILL)


def _follow(process: subprocess.Popen[bytes], answer: Path, heard: Callable[[Any], None]) -> list[dict[str, Any]]:
    """Wait for the process, and pass on what it says; all that it has said."""
    messages: list[dict[str, Any]] = []
    ended = False
    while not ended:
        try:
            process.wait(timeout=_POLL)
            ended = True
        except subprocess.TimeoutExpired:
            pass
        text = answer.read_text(encoding="utf-8") if answer.is_file() else ""
        whole = text[: text.rfind("\n") + 1].splitlines()
        for line in whole[len(messages) :]:
            message = json.loads(line)
            messages.append(message)
            if "on_the_way" in message:
                heard(message["on_the_way"])
    return messages


def death(code: int, said: str) -> str:
    r"""Why a process ended that gave no answer, from its exit code and its output.

    >>> death(1, "Traceback ...\nImportError: libcudnn\n")
    'its process ended with 1: ImportError: libcudnn'
    """
    if code < 0:
        out_of_memory = ", as by the kernel when memory runs out" if -code == signal.SIGKILL else ""
        return f"its process was ended by {signal.Signals(-code).name}{out_of_memory}"
    lines = [line for line in said.splitlines() if line.strip()]
    return f"its process ended with {code}: {lines[-1].strip() if lines else 'it said nothing'}"


def serve(answered: Callable[[Any, Callable[[Any], None]], Any]) -> None:
    """In the fresh process: answer the request that the command line names; an exception becomes the reason for no answer.

    Args:
        answered: from the request, and a function that says something on the way, to the answer; both ready for JSON.
    """
    asked, answer = map(Path, sys.argv[1:])
    request = pickle.loads(asked.read_bytes())  # noqa: S301 - written by `ask`
    be_killed_first()
    with answer.open("a", encoding="utf-8") as file:

        def say(kind: str, content: Any) -> None:
            file.write(json.dumps({kind: content}) + "\n")
            file.flush()

        try:
            value = answered(request, lambda content: say("on_the_way", content))
        except Exception as error:  # noqa: BLE001 - whatever it is, the one who asked decides what it means
            say("problem", one_line(error))
        else:
            say("value", value)


def one_line(error: Exception) -> str:
    """An exception in one line: that of a user's error as it is, another one with its class."""
    from mp_hydra.errors import UserError

    said = next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:500]
    return said if isinstance(error, UserError) else f"{type(error).__name__}: {said}"
