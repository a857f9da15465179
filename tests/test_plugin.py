"""The groups `precision` and `loss_scale` in a Hydra app that knows nothing of mp_hydra but that it is installed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = """
import json
import sys

import hydra
from omegaconf import OmegaConf


@hydra.main(version_base="1.3", config_path="conf", config_name="config")
def main(config):
    heavy = sorted({"tensorflow", "keras", "mlflow", "numpy"} & set(sys.modules))
    print("JSON" + json.dumps({"config": OmegaConf.to_container(config), "heavy": heavy}))


main()
"""
pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An app with a model group of its own, and an option of its own in the group precision."""
    directory = tmp_path_factory.mktemp("app")
    files = {
        "app.py": CODE,
        "conf/config.yaml": "defaults:\n  - precision: fp32\n  - model: theirs\n  - _self_\nlayers: 3\n",
        "conf/model/theirs.yaml": "name: theirs\n",
        "conf/precision/fp32.yaml": "name: their own fp32\npolicy: float32\n",
        "conf/precision/odd.yaml": "name: odd\n",
    }
    for name, text in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        (directory / name).write_text(text, encoding="utf-8")
    return directory


def typed(app: Path, *words: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "app.py", *words, f"hydra.run.dir={app}/out"]
    return subprocess.run(command, cwd=app, env=environment, capture_output=True, text=True, check=False)


def config(app: Path, *words: str) -> dict:
    done = typed(app, *words)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("JSON")]
    found = json.loads(line.removeprefix("JSON"))
    assert found["heavy"] == []
    return dict(found["config"])


def test_groups_can_be_chosen_and_overridden_and_nothing_heavy_is_imported(app: Path) -> None:
    found = config(app, "precision=mixed_bfloat16", "+loss_scale=fixed", "loss_scale.value=128", "precision.tf32=true")
    assert found["precision"]["policy"] == "mixed_bfloat16"
    assert found["precision"]["tf32"] is True
    assert (found["loss_scale"]["mode"], found["loss_scale"]["value"]) == ("fixed", 128)
    assert (found["layers"], found["model"]) == (3, {"name": "theirs"})


def test_the_apps_own_option_of_the_same_name_wins(app: Path) -> None:
    assert config(app)["precision"] == {"name": "their own fp32", "policy": "float32"}


def test_help_lists_the_groups_with_the_options_of_both_and_no_other_group_of_ours(app: Path) -> None:
    listed = typed(app, "--help").stdout
    groups = dict(line.split(": ", maxsplit=1) for line in listed.splitlines() if ": " in line and "[" not in line)
    assert groups["precision"].split(", ") == ["auto", "fp32", "mixed_bfloat16", "mixed_float16", "odd", "tf32"]
    assert groups["loss_scale"].split(", ") == ["auto", "dynamic", "fixed", "none"]
    assert groups["model"] == "theirs"
    assert not {"dataset", "optimizer", "tracking", "experiment", "schedule", "callbacks"} & set(groups)


def test_other_groups_of_ours_are_not_offered(app: Path) -> None:
    done = typed(app, "model=cnn")
    assert done.returncode == 1
    assert "Could not find 'model/cnn'" in done.stderr
    # Where there is no such group, Hydra takes + for a plain value.
    assert config(app, "+dataset=digits", "+experiment=tokens")["dataset"] == "digits"


def test_search_path_says_where_the_groups_come_from_and_that_the_app_goes_first(app: Path) -> None:
    lines = typed(app, "--info", "searchpath").stdout.splitlines()
    providers = [line.split("|")[1].strip() for line in lines if line.count("|") == 3]
    assert providers.index("main") < providers.index("mp_hydra")
    (ours,) = [line for line in lines if "| mp_hydra " in line]
    assert f"mp-hydra://{ROOT / 'conf'}" in ours


def test_primary_config_of_ours_does_not_take_the_place_of_one_that_is_missing(app: Path, tmp_path: Path) -> None:
    (tmp_path / "conf").mkdir()
    (tmp_path / "app.py").write_text(CODE, encoding="utf-8")
    done = typed(tmp_path)
    assert done.returncode != 0
    assert "Cannot find primary config 'config'" in done.stderr
