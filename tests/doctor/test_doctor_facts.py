"""What the doctor finds out about an installation: with things missing, broken and in odd states."""

from __future__ import annotations

import builtins
import json
import sqlite3
from contextlib import closing
from http.server import BaseHTTPRequestHandler, HTTPServer
from importlib import metadata, util
from threading import Thread
from typing import TYPE_CHECKING, Any

import pytest

from mp_hydra.doctor import facts as facts_module
from mp_hydra.doctor.driver import ask_driver
from mp_hydra.doctor.facts import (
    ask_tensorflow,
    build_info,
    cudnn_version,
    gather,
    keras_settings,
    library_paths,
    store,
    unmet,
)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


def test_this_machine_is_described_without_importing_tensorflow() -> None:
    found = gather()
    assert found.tensorflow is None
    assert found.software.versions["tensorflow"] == metadata.version("tensorflow")
    assert found.software.build is not None
    assert {"cuda_version", "is_cuda_build"} <= set(found.software.build) or not found.software.build["is_cuda_build"]
    assert found.cpu.usable_cores is None or found.cpu.usable_cores >= 1
    assert found.driver.problem is None or found.driver.gpus == ()


def test_build_info_read_from_the_file_is_what_tensorflow_says() -> None:
    import tensorflow as tf

    assert build_info() == dict(tf.sysconfig.get_build_info())


def test_without_tensorflow_there_is_a_line_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(util, "find_spec", lambda _name: None)
    assert build_info() is None
    real = builtins.__import__

    def no_tensorflow(name: str, *arguments: Any, **keywords: Any) -> Any:
        if name == "tensorflow":
            raise ModuleNotFoundError("No module named 'tensorflow'")
        return real(name, *arguments, **keywords)

    monkeypatch.setattr(builtins, "__import__", no_tensorflow)
    assert ask_tensorflow().problem == "ModuleNotFoundError: No module named 'tensorflow'"


def test_without_pynvml_there_is_a_line_and_no_exception(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pynvml", None)
    found = ask_driver()
    assert found.problem == "the package nvidia-ml-py is not installed"
    assert not found.broken


def test_tensorflow_that_is_there_tells_its_switches() -> None:
    import tensorflow as tf

    found = ask_tensorflow()
    assert found.problem is None
    assert found.tf32_allowed is tf.config.experimental.tensor_float_32_execution_enabled()
    assert len(found.gpus) == len(tf.config.get_visible_devices("GPU"))
    assert found.auto_jit == "off"


def test_a_gpu_of_tensorflow_is_described_with_what_it_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    import tensorflow as tf

    details = {"a": {"device_name": "Tesla T4", "compute_capability": (7, 5)}, "b": {}}
    monkeypatch.setattr(tf.config, "get_visible_devices", lambda _kind: ["a", "b"])
    monkeypatch.setattr(tf.config.experimental, "get_device_details", details.__getitem__)
    assert ask_tensorflow().gpus == (
        {"name": "Tesla T4", "compute_capability": [7, 5]},
        {"name": None, "compute_capability": None},
    )


# --- requirements ----------------------------------------------------------------------------------------------------


@pytest.fixture
def packages(monkeypatch: pytest.MonkeyPatch) -> dict[str, tuple[str, list[str]]]:
    """Installed packages: version and requirements by name."""
    found: dict[str, tuple[str, list[str]]] = {}

    def entry(name: str) -> tuple[str, list[str]]:
        if name not in found:
            raise metadata.PackageNotFoundError(name)
        return found[name]

    monkeypatch.setattr(metadata, "version", lambda name: entry(name)[0])
    monkeypatch.setattr(metadata, "requires", lambda name: entry(name)[1])
    return found


def test_requirements_that_are_not_met_are_named_with_what_is_installed(
    packages: dict[str, tuple[str, list[str]]],
) -> None:
    packages["tensorflow"] = (
        "2.21.0",
        [
            "keras>=3.12",
            "numpy>=1.26",
            "absl-py",
            'nvidia-cudnn-cu12<10.0,>=9.3; extra == "and-cuda"',
            "six; python_version < '3'",
        ],
    )
    packages["keras"] = ("3.5.0", [])
    packages["numpy"] = ("2.4.6", [])
    packages["nvidia-cudnn-cu12"] = ("8.9.7.29", [])
    assert unmet() == [
        "tensorflow requires keras >=3.12, and 3.5.0 is installed",
        "tensorflow requires absl-py, which is not installed",
        "tensorflow requires nvidia-cudnn-cu12 <10.0,>=9.3, and 8.9.7.29 is installed",
    ]


def test_cuda_libraries_that_pip_did_not_install_may_come_from_elsewhere(
    packages: dict[str, tuple[str, list[str]]],
) -> None:
    packages["tensorflow"] = ("2.21.0", ['nvidia-cudnn-cu12>=9.3; extra == "and-cuda"'])
    assert unmet() == []


def test_nothing_installed_is_nothing_unmet(packages: dict[str, tuple[str, list[str]]]) -> None:
    assert packages == {}
    assert unmet() == []


# --- Keras' settings, loaded libraries -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "environment", "expected"),
    [
        (None, None, {"backend": "tensorflow"}),
        ('{"backend": "jax", "floatx": "float16"}', None, {"backend": "jax", "floatx": "float16"}),
        ('{"backend": "jax"}', "tensorflow", {"backend": "tensorflow"}),
        ("not json", "torch", {"backend": "torch"}),
        ("[1]", None, {"backend": "tensorflow"}),
    ],
)
def test_keras_settings_are_those_that_keras_would_read(
    content: str | None,
    environment: str | None,
    expected: dict[str, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("KERAS_HOME", str(tmp_path))
    monkeypatch.delenv("KERAS_BACKEND", raising=False)
    if environment:
        monkeypatch.setenv("KERAS_BACKEND", environment)
    if content is not None:
        (tmp_path / "keras.json").write_text(content)
    assert keras_settings() == expected


def test_libraries_are_found_in_the_memory_map_and_others_left() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 00:00 1  /opt/cu/lib/libcudart.so.12.5.82\n"
        "7f02-7f03 r--p 00000000 00:00 2  /opt/cu/lib/libcudnn_ops.so.9\n"
        "7f04-7f05 r--p 00000000 00:00 3  /opt/cu/lib/libcudnn.so.9\n"
        "7f06-7f07 rw-p 00000000 00:00 0  [heap]\n"
    )
    assert library_paths(maps) == {"cudart": "/opt/cu/lib/libcudart.so.12.5.82", "cudnn": "/opt/cu/lib/libcudnn.so.9"}


@pytest.mark.parametrize(("number", "version"), [(8907, "8.9.7"), (8500, "8.5.0"), (90300, "9.3.0"), (91002, "9.10.2")])
def test_cudnns_number_is_read_in_the_form_of_its_major_version(number: int, version: str) -> None:
    assert cudnn_version(number) == version


def test_a_library_that_cannot_be_asked_is_left_out(tmp_path: Path) -> None:
    broken = tmp_path / "libcudnn.so.9"
    broken.write_text("not a library")
    assert facts_module._ask_library("cudnn", str(broken)) is None


# --- the store -------------------------------------------------------------------------------------------------------


def test_a_store_that_is_not_there_yet_is_not_created(tmp_path: Path) -> None:
    found = store(f"sqlite:///{tmp_path}/deep/er/mlflow.db")
    assert found.reachable
    assert found.said == "not there yet; the first run creates it"
    assert list(tmp_path.iterdir()) == []


def test_a_store_below_a_file_cannot_be_created(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    found = store(f"sqlite:///{tmp_path}/file/mlflow.db")
    assert not found.reachable
    assert "cannot be created" in found.said


@pytest.mark.parametrize(
    ("content", "reachable", "said"),
    [
        ("CREATE TABLE experiments (id)", True, "it is there"),
        ("CREATE TABLE other (id)", True, "a database without MLflow's tables; the first run creates them"),
        (None, False, "it cannot be read: file is not a database"),
    ],
)
def test_a_store_that_is_there_is_looked_into(content: str | None, reachable: bool, said: str, tmp_path: Path) -> None:
    database = tmp_path / "my store%20.db"
    if content is None:
        database.write_text("no database" * 100)
    else:
        with closing(sqlite3.connect(database)) as connection:
            connection.execute(content)
    before = database.read_bytes()
    from mp_hydra.tracking.store import sqlite_uri

    found = store(sqlite_uri(database))
    assert (found.reachable, found.said) == (reachable, said)
    assert database.read_bytes() == before
    assert list(tmp_path.iterdir()) == [database]


def test_an_address_that_keeps_no_runs_is_the_reason() -> None:
    found = store("file:///tmp/mlruns")
    assert not found.reachable
    assert "runs cannot be kept there" in found.said


@pytest.fixture
def server() -> Iterator[tuple[HTTPServer, dict[str, int]]]:
    answer = {"code": 200}

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            assert self.path == "/health"
            self.send_response(answer["code"])
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as made:
        thread = Thread(target=made.serve_forever)
        thread.start()
        yield made, answer
        made.shutdown()
        thread.join()


@pytest.mark.parametrize(("code", "reachable"), [(200, True), (401, True), (404, False), (500, False)])
def test_a_server_is_asked_for_its_health(
    server: tuple[HTTPServer, dict[str, int]], code: int, reachable: bool
) -> None:
    made, answer = server
    answer["code"] = code
    found = store(f"http://127.0.0.1:{made.server_port}")
    assert found.reachable is reachable
    assert str(code) in found.said


def test_a_server_that_is_not_there_does_not_answer_and_a_password_is_not_shown() -> None:
    import socket

    with socket.socket() as taken:  # bound, not listening: refused
        taken.bind(("127.0.0.1", 0))
        found = store(f"http://me:secret@127.0.0.1:{taken.getsockname()[1]}")
    assert not found.reachable
    assert found.said.startswith("it does not answer")
    assert "secret" not in json.dumps(vars(found))
