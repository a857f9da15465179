"""The package as others get it: the wheel holds all that it needs, and a clone works from anywhere."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import yaml

from tests.e2e.app_driver import ROOT

pytestmark = pytest.mark.process

SHOW_CONFIG = """
import sys
import mp_hydra.paths
from mp_hydra.app import main
main()
print(mp_hydra.paths.conf_dir(), "tensorflow" in sys.modules, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of this source tree, built as pip's build front end would call the back end."""
    builder = pytest.importorskip("hatchling.builders.wheel", reason="hatchling builds the wheel").WheelBuilder
    return Path(next(builder(str(ROOT)).build(directory=str(tmp_path_factory.mktemp("wheel")), versions=["standard"])))


def _names(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def _python(*words: str | Path, cwd: Path, path: str = "") -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if path:
        environment["PYTHONPATH"] = path
    return subprocess.run(
        [sys.executable, *words], cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def test_the_wheel_holds_every_config_file_module_and_plugin_and_nothing_else(wheel: Path) -> None:
    configs = {f"mp_hydra/conf/{path.relative_to(ROOT / 'conf')}" for path in (ROOT / "conf").rglob("*.yaml")}
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "mp_hydra").rglob("*.py")}
    plugins = {str(path.relative_to(ROOT)) for path in (ROOT / "hydra_plugins").rglob("*.py")}
    packaged = {name for name in _names(wheel) if ".dist-info/" not in name}
    others = {"mp_hydra/py.typed", "mp_hydra/compare/report/page.html.j2"}
    assert packaged == configs | modules | plugins | others
    assert "mp_hydra/conf/config.yaml" in packaged


def test_the_wheel_installs_both_commands(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = (name for name in archive.namelist() if name.endswith("entry_points.txt"))
        commands = archive.read(entry_points).decode()
    assert "mp-hydra-train = mp_hydra.app:main" in commands
    assert "mp-hydra = mp_hydra.cli:main" in commands


def test_an_unpacked_wheel_finds_its_own_conf_from_any_directory_and_without_tensorflow(
    wheel: Path, tmp_path: Path
) -> None:
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    elsewhere.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    done = _python("-c", SHOW_CONFIG, "--cfg", "job", "precision=mixed_float16", cwd=elsewhere, path=str(site))
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["precision"]["policy"] == "mixed_float16"
    assert done.stderr.split() == [str(site / "mp_hydra" / "conf"), "False"]
    assert not list(elsewhere.iterdir())


@pytest.mark.parametrize("word", ["--cfg", "--help"])
def test_train_py_of_a_clone_answers_from_any_directory_and_leaves_nothing_there(word: str, tmp_path: Path) -> None:
    words = ["--cfg", "job"] if word == "--cfg" else ["--help"]
    done = _python(ROOT / "train.py", *words, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "batch_size" in done.stdout
    assert not list(tmp_path.iterdir())
