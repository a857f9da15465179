"""Finding the layer that a 16-bit policy breaks, in models that are broken in one place."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from click.testing import CliRunner

from mp_hydra.app import composed
from mp_hydra.cli import cli
from mp_hydra.culprit import Bisection, bisect
from mp_hydra.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Iterator

APP = Path(__file__).parent / "apps" / "own_model"


@pytest.fixture(autouse=True)
def my_models(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(APP))
    yield
    sys.modules.pop("my_broken", None)


def words(model: str, *others: str) -> list[str]:
    return ["model=custom", f"model._target_=my_broken.{model}", "precision=mixed_float16", "batch_size=32", *others]


@pytest.mark.parametrize(
    ("model", "layer"), [("exp_of_logits", "exp"), ("l2_normalised", "length"), ("masked", "block/mask")]
)
def test_the_broken_layer_is_found_and_pinning_it_as_printed_cures(model: str, layer: str) -> None:
    found = bisect(composed(words(model)), 2)
    assert found.trouble is not None
    assert found.trouble_in_float32 is None
    (culprit,) = found.culprits
    assert culprit.endswith(layer)
    block = yaml.safe_load("\n".join(found.lines()[-3:]))
    config = composed(words(model))
    config["precision"] = {**config["precision"], **block["precision"]}
    assert bisect(config, 2).trouble is None


def test_a_sound_model_has_no_culprit() -> None:
    found = bisect(composed(words("sound")), 2)
    assert (found.trouble, found.culprits) == (None, ())
    assert found.lines() == ["under mixed_float16 nothing goes wrong on these batches"]


def test_a_model_that_fails_in_float32_too_is_not_the_precisions_doing() -> None:
    found = bisect(composed(words("broken_everywhere")), 2)
    assert found.trouble_in_float32 is not None
    assert found.culprits == ()
    assert "not the precision's doing" in found.lines()[-1]


def test_a_policy_without_16_bits_is_one_line() -> None:
    with pytest.raises(UserError, match="precision=fp32 computes nothing in 16 bits"):
        bisect(composed([*words("sound"), "precision=fp32"]), 2)


def test_the_command_prints_the_block_and_exits_with_1_if_something_fails() -> None:
    done = CliRunner().invoke(cli, ["audit", "--bisect", "--batches", "1", *words("masked")])
    assert done.exit_code == 1
    assert yaml.safe_load("\n".join(done.output.splitlines()[-3:])) == {
        "precision": {"overrides": {"sequential/block/mask": "float32"}}
    }
    done = CliRunner().invoke(cli, ["audit", "--bisect", "--batches", "1", *words("sound")])
    assert done.exit_code == 0
    assert "nothing goes wrong" in done.output


def test_paths_with_signs_of_regular_expressions_are_escaped() -> None:
    found = Bisection("mixed_float16", "nan", None, ("model/a.b(1)/c",), 3)
    block = yaml.safe_load("\n".join(found.lines()[-3:]))
    assert block == {"precision": {"overrides": {r"model/a\.b\(1\)/c": "float32"}}}
