"""The report on gradient ranges: what its sentence concludes, the table, and the files."""

from __future__ import annotations

import io
import json
from typing import TYPE_CHECKING

import numpy as np
import pytest
from rich.console import Console

from mp_hydra.gradient_ranges import GradientRange, float16_range
from mp_hydra.gradient_report import conclusion, save, show

if TYPE_CHECKING:
    from pathlib import Path


def of(*values: float, layer: str = "a", kind: str = "weights") -> GradientRange:
    return float16_range(layer, kind, [np.array(values, "float32")])


@pytest.mark.parametrize(
    ("ranges", "sentence"),
    [
        pytest.param([of(0.0)], "Every gradient is zero: nothing can be said about scaling.", id="zeros"),
        pytest.param([], "Every gradient is zero: nothing can be said about scaling.", id="nothing"),
        pytest.param(
            [of(2.0**-24, 1.0), of(0.0, 65504.0)],
            "No scaling is needed: float16 holds every gradient as it is.",
            id="all within",
        ),
        pytest.param(
            [of(2.0**-24.5)],
            "No scaling is needed: float16 holds every gradient as it is.",
            id="rounds to the smallest",
        ),
        pytest.param(
            [of(2.0**-30, 1.0, 1.0, 1.0, layer="b"), of(1.0)],
            "Scales from 2^6 to 2^15 keep every gradient; without scaling up to 25.00% of a layer's gradients become zero "
            "(b, weights).",
            id="some lost",
        ),
        pytest.param(
            [of(2.0**20, layer="loud", kind="outputs"), of(1.0)],
            "Scales from 2^-24 to 2^-5 keep every gradient; without scaling gradients up to 1e+06 become inf (loud, outputs).",
            id="some overflow",
        ),
        pytest.param(
            [of(2.0**-30, layer="b"), of(2.0**11)],
            "No power of two as a scale keeps every gradient: some become inf above 2^4, some zero below 2^6; without scaling "
            "up to 100.00% of a layer's gradients become zero (b, weights).",
            id="none suits",
        ),
        pytest.param(
            [of(2.0**-30, layer="b"), of(2.0**20, layer="c")],
            "No power of two as a scale keeps every gradient: some become inf above 2^-5, some zero below 2^6; without scaling "
            "up to 100.00% of a layer's gradients become zero (b, weights) and gradients up to 1e+06 become inf (c, weights).",
            id="both",
        ),
        pytest.param(
            [of(2.0**-25 * 1.5 / 32, 1.0), of(65504 / 2.0**5.5)],
            "No power of two as a scale keeps",
            id="no power of two between",
        ),
    ],
)
def test_conclusion_says_whether_scaling_is_needed_and_which_scales_do(
    ranges: list[GradientRange], sentence: str
) -> None:
    assert conclusion(ranges).startswith(sentence)


def shown(*ranges: GradientRange, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width)
    show(ranges, console)
    return str(console.file.getvalue())  # type: ignore[attr-defined]


def test_table_gives_shares_and_scales_of_each_layer_in_one_line_of_a_narrow_terminal() -> None:
    said = shown(of(0.0, 2.0**-30, 2.0**-20, 1.0, layer="block/attention/value"), of(0.0, layer="dead", kind="outputs"))
    (row,) = [line.split() for line in said.splitlines() if line.split()[:1] == ["block/attention/value"]]
    assert row == ["block/attention/value", "25.00%", "25.00%", "25.00%", "1", "2^6…2^15"]
    (dead,) = [line.split() for line in said.splitlines() if line.split()[:1] == ["dead"]]
    assert dead == ["dead", "100.00%", "0.00%", "0.00%", "0", "-"]
    assert "Gradients of weights" in said
    assert "Gradients of outputs" in said
    assert max(map(len, said.splitlines())) <= 80


def test_layer_for_which_no_scale_suits_says_none() -> None:
    said = shown(of(2.0**-40, 2.0**10))
    assert [line.split()[-1] for line in said.splitlines() if line.split()[:1] == ["a"]] == ["none"]


def test_long_paths_are_folded_and_not_cut() -> None:
    path = "a_rather_long_model/encoder/block_12/attention/attention_output"
    said = shown(of(1.0, layer=path))
    folded = [line[: line.index("0.00%")] if "0.00%" in line else line for line in said.splitlines()[5:]]
    assert "".join(part.strip() for part in folded).startswith(path)


def test_files_are_the_numbers_and_a_picture_in_a_directory_that_is_made(tmp_path: Path) -> None:
    ranges = [of(2.0**-30, 1.0, kind="outputs"), of(0.0, 2.0)]
    written = save(ranges, tmp_path / "deep" / "audit")
    assert [path.name for path in written] == ["gradients.json", "gradients.png"]
    found = json.loads(written[0].read_text())
    assert [(r["layer"], r["kind"], r["count"]) for r in found] == [("a", "outputs", 2), ("a", "weights", 2)]
    assert found[0]["scales"] == [2.0**6, 65504.0]
    assert (found[0]["underflow"], found[1]["zero"], found[1]["smallest"]) == (0.5, 0.5, 2.0)
    assert sum(found[0]["exponents"]) == 2
    assert written[1].read_bytes().startswith(b"\x89PNG")
    assert save(ranges, tmp_path / "deep" / "audit") == written  # once more, over the first
