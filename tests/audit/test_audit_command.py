"""`mp-hydra audit`, as it is typed."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Any

import pytest
from click.testing import CliRunner

from mp_hydra.cli import cli

if TYPE_CHECKING:
    from pathlib import Path

MODEL = """
import keras

def build(input_shape, outputs, softmax=False, pinned=True):
    x = keras.Input(input_shape)
    y = keras.layers.Dense(16, name="body")(keras.layers.Flatten()(x))
    head = keras.layers.Dense(
        outputs, activation="softmax" if softmax else None, dtype="float32" if pinned else None, name="head"
    )
    return keras.Model(x, head(y))
"""


@pytest.fixture
def typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Type the command in a directory with a model of one's own."""
    (tmp_path / "audited_model.py").write_text(MODEL, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def run(*words: str) -> Any:
        own = ("model=custom", "model._target_=audited_model.build", "dataset=digits", "tracking=off")
        return CliRunner().invoke(cli, ["audit", *own, *words])

    return run


def test_a_sound_model_gives_exit_code_0_and_both_files(typed: Any, tmp_path: Path) -> None:
    done = typed("precision=mixed_bfloat16", "--strict")
    assert done.exit_code == 0, done.output
    assert "Nothing found." in done.output
    read = json.loads((tmp_path / "audit" / "audit.json").read_text())
    assert {row["path"]: row["computes_in"] for row in read["layers"]}["body"] == "bfloat16"
    assert (tmp_path / "audit" / "audit.md").is_file()


def test_what_a_run_refuses_is_an_error_among_the_findings_with_exit_code_1(typed: Any) -> None:
    done = typed("precision=mixed_float16", "+model.softmax=true", "+model.pinned=false", "--format", "json")
    assert done.exit_code == 1
    read = json.loads(done.stdout)
    assert [(f["code"], f["places"]) for f in read["findings"]] == [
        ("sixteen_bit_head", ["head"]),
        ("head_activation", ["head"]),
        ("width_not_multiple", ["head"]),
    ]
    assert typed("precision=mixed_float16", "+model.pinned=false", "precision.float32_head=true").exit_code == 0
    assert typed("precision=mixed_float16", "+model.pinned=false", "precision.overrides={head: float32}").exit_code == 0


def test_warnings_fail_with_strict_alone(typed: Any) -> None:
    words = ("precision=mixed_float16", "loss_scale=none", "--format", "markdown")
    assert typed(*words).exit_code == 0
    done = typed(*words, "--strict")
    assert done.exit_code == 1
    assert "- **warning** (scaler_missing) layers compute in float16 without loss scaling" in done.stdout


def test_gradients_come_in_addition(typed: Any, tmp_path: Path) -> None:
    done = typed("precision=mixed_float16", "precision.overrides={body: bfloat16}", "--gradients", "--batches", "1")
    assert done.exit_code == 1, done.output  # no layer with weights computes in float16 any more
    done = typed("precision=mixed_float16", "--gradients", "--batches", "1")
    assert done.exit_code == 0, done.output
    assert "Gradients of outputs in float16's range" in done.output
    names = {path.name for path in (tmp_path / "audit").iterdir()}
    assert names == {"audit.json", "audit.md", "gradients.json", "gradients.png"}
