"""One real sweep and its comparison: every number worked out again, what the store holds, and what the UI shows."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock
from urllib.parse import unquote, urlsplit

import psutil
import pytest
from mlflow import MlflowClient

from mp_hydra import cli
from tests.browser import browser, needs_browser
from tests.e2e.app_driver import ROOT
from tests.e2e.raw_figures import GROUP, ROW, Raw, page_figures

if TYPE_CHECKING:
    from collections.abc import Iterator

DEADLINE_SECONDS = 90.0
SMALL = ("model=mlp", "model.widths=[32]", "epochs=2", "batch_size=64", "optimizer.learning_rate=0.01")
UI = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from mp_hydra.cli import main; main()"
WHOLE = ("runs", "groups", "margin", "ratio_level", "accuracy_level", "baselines", "pairs", "compared")

pytestmark = [pytest.mark.process, pytest.mark.timeout(280)]


@dataclass(frozen=True)
class Swept:
    """What the sweep left."""

    directory: Path
    said: str
    parent: Any
    baseline: list[Raw]
    mixed: list[Raw]

    @property
    def home(self) -> Path:
        return self.directory / "home"

    @property
    def client(self) -> MlflowClient:
        return MlflowClient(f"sqlite:///{self.home}/mlflow.db")

    @property
    def children(self) -> list[Raw]:
        return [*self.baseline, *self.mixed]

    def page(self) -> str:
        return (self.directory / "sweep" / "comparison.html").read_text(encoding="utf-8")

    def address(self, name: str) -> str:
        """The one line with this name at the end of what the command said."""
        (found,) = re.findall(rf"^{name} +(\S+)$", self.said, flags=re.MULTILINE)
        return str(found)


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """Two precisions and two seeds, with the launcher `isolated`."""
    directory = tmp_path_factory.mktemp("swept")
    words = ["-m", "precision=fp32,mixed_bfloat16", "seed=0,1", *SMALL, f"hydra.sweep.dir={directory}/sweep"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), *words],
        cwd=directory,
        env={**os.environ, "MP_HYDRA_HOME": str(directory / "home")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    client = MlflowClient(f"sqlite:///{directory}/home/mlflow.db")
    runs = client.search_runs(["1"])
    (parent,) = [run for run in runs if run.data.tags.get("mp_hydra.kind") == "sweep"]
    children = sorted((Raw(client, run) for run in runs if run is not parent), key=lambda run: run.seed)
    arms = [[run for run in children if run.precision == name] for name in ("fp32", "mixed_bfloat16")]
    assert [len(arm) for arm in arms] == [2, 2]
    return Swept(directory, done.stderr, parent, *arms)


class Figures(HTMLParser):
    """The elements of a page that name a figure: name, row, value in full, and the text that is read."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found: list[tuple[str, str, float, str]] = []
        self._open: tuple[str, str, float] | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if name := given.get("data-figure"):
            self._open = (name, str(given["data-row"]), float(str(given["data-value"])))

    def handle_data(self, data: str) -> None:
        if self._open is not None:
            self.found.append((*self._open, data))
            self._open = None


def read(text: str) -> tuple[float, float]:
    """A number as it is written, and half a unit of its last digit."""
    (digits,) = re.findall(r"[+-]?[\d,]*\.?\d+", text.replace("\N{MINUS SIGN}", "-"))
    places = len(digits.partition(".")[2])
    scale = 0.01 if "%" in text else 1.0
    return scale * float(digits.replace(",", "")), scale * 0.5 * 10.0**-places


# --- the numbers -----------------------------------------------------------------------------------------------------


def test_every_number_of_the_page_is_what_the_raw_data_give(swept: Swept) -> None:
    expected = page_figures(swept.baseline, swept.mixed)
    found = Figures(swept.page()).found
    assert {(name, row) for name, row, _, _ in found} <= expected.keys()
    assert expected.keys() - {(name, row) for name, row, _, _ in found} <= {
        ("state_memory.ratio", ROW),  # the page shows what cannot shrink, and not its ratio
        ("state_memory.ratio.low", ROW),
        ("state_memory.ratio.high", ROW),
    }
    for name, row, value, text in found:
        if name.startswith("accuracy.comparison.more_"):
            assert value == pytest.approx(expected[name, row], abs=1), name  # the last one hangs on the last bit
        else:
            assert value == pytest.approx(expected[name, row], rel=1e-6, abs=1e-9), name
        shown, half_a_unit = read(text)
        assert shown == pytest.approx(value, abs=half_a_unit * (1 + 1e-6)), (name, text)


def test_what_the_runs_recorded_agrees_with_their_own_files(swept: Swept) -> None:
    for run in swept.children:
        assert run.last("time/step_ms") == pytest.approx(run.value("time/step_ms"), rel=1e-9)
        assert run.last("test/accuracy") == pytest.approx(run.correct.mean(), abs=1e-6)
        held = run.last("memory/peak_mib") - run.last("memory/baseline_mib")
        assert run.last("memory/training_mib") == pytest.approx(held, abs=1e-6)


def test_the_numbers_of_the_json_form_are_those_of_the_page(swept: Swept) -> None:
    form = json.loads((swept.directory / "sweep" / "comparison.json").read_text(encoding="utf-8"))
    (group,) = form["groups"]
    (row,) = group["rows"]
    for name, where, value, _ in Figures(swept.page()).found:
        if name in WHOLE:
            assert where in ("", GROUP, ROW)
            continue
        node: Any = row
        end = None
        for part in name.split("."):
            if part in ("low", "high"):
                end = node["interval"][part == "high"]
            else:
                node = node[int(part)] if part.isdigit() else node[part]
        number = end if end is not None else node["value"] if isinstance(node, dict) else node
        assert number == value, name
    assert (form["margin"], len(group["baselines"]), len(row["pairs"])) == (0.1, 2, 2)


def test_the_sentence_says_the_figures_of_the_table(swept: Swept) -> None:
    values = {name: value for name, _, value, _ in Figures(swept.page()).found}
    (sentence,) = [line for line in swept.said.splitlines() if line.startswith("mixed_bfloat16: ")]
    (memory,) = re.findall(r"([\d.]+)x training memory", sentence)
    assert float(memory) == pytest.approx(values["training_memory.ratio"], abs=0.006)
    (difference,) = re.findall(r"accuracy \w+ \((\S+) points", sentence)
    assert float(difference) == pytest.approx(values["accuracy.difference"], abs=0.006)


# --- what the store holds --------------------------------------------------------------------------------------------


def test_the_parent_has_ended_and_holds_the_page_and_the_table(swept: Swept) -> None:
    parent = swept.client.get_run(swept.parent.info.run_id)
    assert (parent.info.status, parent.data.tags["mp_hydra.outcome"]) == ("FINISHED", "ok")
    artifacts = Path(parent.info.artifact_uri.removeprefix("file://"))
    for name in ("comparison.html", "comparison.md", "comparison.csv", "comparison.json"):
        assert (artifacts / "comparison" / name).read_bytes() == (swept.directory / "sweep" / name).read_bytes()
    description = parent.data.tags["mlflow.note.content"]
    assert description == (swept.directory / "sweep" / "comparison.md").read_text(encoding="utf-8")
    assert "| mixed_bfloat16 (2 seeds) |" in description


def test_the_children_carry_the_ratios_to_their_twins(swept: Swept) -> None:
    metrics = {
        "training_memory_ratio": "memory/training_mib",
        "peak_memory_ratio": "memory/peak_mib",
        "step_time_ratio": "time/step_ms",
        "throughput_ratio": "time/samples_per_second",
    }
    for base, mixed in zip(swept.baseline, swept.mixed, strict=True):
        expected = {f"compare/{name}": mixed.last(metric) / base.last(metric) for name, metric in metrics.items()}
        points = 100 * (mixed.last("test/accuracy") - base.last("test/accuracy"))
        run_id = mixed.run.info.run_id
        found = swept.client.get_run(run_id).data
        compared = {key: value for key, value in found.metrics.items() if key.startswith("compare/")}
        assert compared == {**expected, "compare/accuracy_difference_points": points}
        assert all(len(swept.client.get_metric_history(run_id, key)) == 1 for key in compared)
        assert found.tags["mp_hydra.compared_with"] == base.run.info.run_id


def test_the_command_ends_with_the_table_and_names_the_page_and_the_links(swept: Swept) -> None:
    assert "Brackets: 95 % intervals of ratios, 90 % of accuracy." in swept.said
    page = Path(unquote(urlsplit(swept.address("page")).path))
    assert page == swept.directory / "sweep" / "comparison.html"
    assert page.is_file()
    asked = unquote(swept.address("compare"))
    assert asked.startswith("http://127.0.0.1:5000/#/compare-runs?runs=")
    assert all(run.run.info.run_id in asked for run in swept.children)
    assert swept.address("runs").endswith(f"viewStateShareKey=mp_hydra.{swept.parent.info.run_id}")


# --- the UI ----------------------------------------------------------------------------------------------------------


@contextmanager
def ui(swept: Swept, port: int) -> Iterator[subprocess.Popen[str]]:
    """`mp-hydra ui` as a process; whatever it leaves is killed."""
    server = subprocess.Popen(
        [sys.executable, "-c", UI, "ui", "--port", str(port)],
        cwd=swept.directory,
        env={**os.environ, "MP_HYDRA_HOME": str(swept.home), "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    started: list[psutil.Process] = []
    try:
        yield server
    finally:
        if server.poll() is None:
            started = psutil.Process(server.pid).children(recursive=True)
            server.kill()
        for process in started:
            process.kill()
        server.communicate()


def descendants(server: subprocess.Popen[str]) -> list[psutil.Process]:
    """The processes that a server has started, as soon as MLflow's is among them: imports start some, too."""
    end = time.monotonic() + DEADLINE_SECONDS
    while not any(map(_is_mlflow, found := psutil.Process(server.pid).children(recursive=True))):
        assert server.poll() is None
        assert time.monotonic() < end
        time.sleep(0.05)
    return found


def _is_mlflow(process: psutil.Process) -> bool:
    try:
        return "mlflow" in process.cmdline()
    except psutil.Error:  # it has ended
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# The compare page has the names of metrics in one grid and their values in another; lines are told by their height.
READ_COMPARED = """
const cells = Array.from(document.querySelectorAll('.ReactVirtualized__Grid__innerScrollContainer > *'))
const at = cell => Math.round(cell.getBoundingClientRect().top)
const found = {}
for (const name of cells.filter(cell => cell.querySelector('a')))
  found[name.innerText.trim()] = cells.filter(cell => cell !== name && at(cell) === at(name))
    .sort((a, b) => a.getBoundingClientRect().left - b.getBoundingClientRect().left).map(cell => cell.innerText.trim())
return found
"""
READ_TABLE = """
const rows = {}
for (const row of document.querySelectorAll('.ag-row')) {
  const cells = rows[row.getAttribute('row-index')] ??= {}
  for (const cell of row.querySelectorAll('[col-id]')) cells[cell.getAttribute('col-id')] = cell.innerText.trim()
}
return Object.values(rows)
"""


def opened(driver: Any, address: str, script: str, until: str) -> Any:
    """What a script reads from a page, as soon as this text is in it."""
    driver.get("about:blank")
    driver.get(address)
    end = time.monotonic() + DEADLINE_SECONDS
    while until not in str(found := driver.execute_script(script)):
        assert time.monotonic() < end, driver.execute_script("return document.body.innerText")
        time.sleep(0.2)
    return found


@pytest.mark.browser
@needs_browser
def test_the_ui_shows_the_figures_of_the_store_asks_nobody_else_and_ends_with_ctrl_c(
    swept: Swept, tmp_path: Path
) -> None:
    port = free_port()
    with ui(swept, port) as server:
        assert server.stdout is not None
        said = dict(line.split(maxsplit=1) for line in iter(server.stdout.readline, "Ctrl-C ends it\n") if line.strip())
        pages = {name: address.strip() for name, address in said.items()}
        assert pages.keys() == {"ui", "compare", "runs", "page"}
        parent = f"{pages['ui']}/#/experiments/1/runs/{swept.parent.info.run_id}/artifacts/comparison/comparison.html"
        with browser(tmp_path / "profile", width=2600) as driver:
            compared = opened(driver, pages["compare"], READ_COMPARED, "test/accuracy")
            table = opened(driver, pages["runs"], READ_TABLE, "compare/training_memory_ratio")
            opened(driver, parent, "return document.querySelector('iframe') ? 'frame' : ''", "frame")
            driver.switch_to.frame(driver.find_element("css selector", "iframe"))
            artifact = driver.execute_script(
                "return Array.from(document.querySelectorAll('[data-figure]')).map(one => one.dataset.value)"
            )
            events = [json.loads(entry["message"])["message"] for entry in driver.get_log("performance")]
            complaints = [entry for entry in driver.get_log("browser") if entry["level"] == "SEVERE"]
        started = descendants(server)
        peers = [one.raddr.ip for process in started for one in process.net_connections("inet") if one.raddr]
        assert set(peers) <= {"127.0.0.1"}
        server.send_signal(signal.SIGINT)
        assert server.wait(timeout=30) == 0
        assert not [process for process in started if process.is_running()]
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0

    ids = re.findall(r"[0-9a-f]{32}", unquote(pages["compare"]))
    in_order = [next(run for run in swept.children if run.run.info.run_id == run_id) for run_id in ids]
    for metric in ("memory/training_mib", "test/accuracy"):
        assert [float(text) for text in compared[metric]] == [
            pytest.approx(run.last(metric), abs=6e-4) for run in in_order
        ]

    rows = {row["attributes.`Run Name`"].split("\n")[-1]: row for row in table}
    assert rows.keys() == {run.run.info.run_name for run in swept.children}
    for run in swept.children:
        row = rows[run.run.info.run_name]
        for metric in ("memory/training_mib", "test/accuracy"):
            assert float(row[f"metrics.`{metric}`"]) == run.last(metric)
        ratio = swept.client.get_run(run.run.info.run_id).data.metrics.get("compare/training_memory_ratio")
        assert row["metrics.`compare/training_memory_ratio`"] == ("-" if ratio is None else str(ratio))
    assert [float(value) for value in artifact] == [value for _, _, value, _ in Figures(swept.page()).found]

    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    asked += [event["params"]["url"] for event in events if event["method"] == "Network.webSocketCreated"]
    hosts = {urlsplit(url).netloc for url in asked if urlsplit(url).scheme not in ("data", "blob", "about", "chrome")}
    assert hosts == {f"127.0.0.1:{port}"}
    # MLflow's own page asks for the user of a server without users.
    assert [
        one["message"] for one in complaints if "/mlflow/users/current - Failed to load resource" not in one["message"]
    ] == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_ui_that_is_told_to_end_while_it_starts_ends_with_0_and_leaves_no_process(
    swept: Swept, number: signal.Signals
) -> None:
    with ui(swept, free_port()) as server:
        started = descendants(server)
        server.send_signal(number)
        assert server.wait(timeout=30) == 0
        assert not [process for process in started if process.is_running()]


def test_a_port_that_is_taken_is_one_line(
    swept: Swept, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MP_HYDRA_HOME", str(swept.home))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with mock.patch.object(sys, "argv", ["mp-hydra", "ui", "--port", str(port)]), pytest.raises(SystemExit) as end:
            cli.main()
    said = capsys.readouterr()
    assert (end.value.code, said.out) == (1, "")
    assert said.err == f"mp_hydra: --port={port}: Address already in use; choose another port, such as {port + 1}\n"
