"""The MLflow UI, started with the command that a run prints, shows the precisions side by side."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.error import URLError
from urllib.parse import quote

import pytest

from tests.browser import browser, needs_browser
from tests.e2e.app_driver import BRIEF, Tracked, tracked, type_command

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_SECONDS = 90.0
PRECISIONS = ("fp32", "mixed_float16", "mixed_bfloat16")
SHOWN = (
    *("memory/training_mib", "memory/peak_mib", "time/step_ms", "time/samples_per_second"),
    *("test/accuracy", "test/loss", "loss_scale/value", "gradients/global_norm"),
)

pytestmark = [pytest.mark.browser, pytest.mark.process, needs_browser]


@contextmanager
def served(command: str, log: Path) -> Iterator[str]:
    """The address of the server that `command` starts, on a free port; it ends with the block, its children too."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    scripts = str(Path(sys.executable).parent)  # as an activated environment would have it
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    with log.open("wb") as said:
        server = subprocess.Popen(  # noqa: S602 - a command for a shell, as the user copies it
            f"{command} --port {port}",
            shell=True,
            env=environment,
            stdout=said,
            stderr=said,
            start_new_session=True,
        )
    try:
        end = time.monotonic() + DEADLINE_SECONDS
        while not _answers(f"http://127.0.0.1:{port}/health"):
            assert server.poll() is None, log.read_text(errors="replace")
            assert time.monotonic() < end, log.read_text(errors="replace")
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(server.pid, signal.SIGKILL)
        server.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:  # noqa: S310 - http, on this machine
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def text_of(driver: Any, url: str, *, until: str) -> str:
    """The text of a page, as soon as it contains `until`."""
    driver.get(url)
    end = time.monotonic() + DEADLINE_SECONDS
    while until not in (text := str(driver.execute_script("return document.body.innerText"))):
        assert time.monotonic() < end, f"no {until!r} in the page:\n{text}"
        time.sleep(0.2)
    return text


@pytest.fixture(scope="module")
def command(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What the last of three runs, one in each precision, prints for looking at them."""
    cwd = tmp_path_factory.mktemp("ui")
    with pytest.MonkeyPatch.context() as patch:
        said: list[str] = []
        patch.setattr("mp_hydra.console.show_summary", lambda *words, **_: said.extend(words[2]))
        for name in PRECISIONS:
            assert type_command(*BRIEF, "model=mlp", f"precision={name}", f"hydra.run.dir={cwd}/{name}", cwd=cwd) == 0
    (line,) = {line for line in said if "mlflow ui" in line}
    return re.sub(r"^look at\s+", "", line)


@pytest.fixture(scope="module")
def runs(command: str) -> list[Tracked]:
    return tracked()[-len(PRECISIONS) :]


def test_the_ui_shows_the_runs_of_three_precisions_and_their_metrics_side_by_side(
    command: str, runs: list[Tracked], tmp_path: Path
) -> None:
    ids, experiments = (
        json.dumps(sorted({getattr(run.run.info, key) for run in runs})) for key in ("run_id", "experiment_id")
    )
    link = f"/#/compare-runs?runs={quote(ids)}&experiments={quote(experiments)}"
    with served(command, tmp_path / "server.log") as address, browser(tmp_path / "profile") as driver:
        page = text_of(driver, f"{address}{link}", until="memory/training_mib")
        driver.save_screenshot(str(tmp_path / "compare.png"))
    for run in runs:
        assert run.run.info.run_name in page
    missing = [name for name in SHOWN if name not in page]
    assert not missing
    assert "NaN" not in page
