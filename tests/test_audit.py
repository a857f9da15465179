"""The census as JSON and Markdown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from mp_hydra.audit import Audit
from mp_hydra.precision import LayerRecord

if TYPE_CHECKING:
    from pathlib import Path

AUDIT = Audit(
    "mixed_float16",
    [
        LayerRecord("body", "Dense", "mixed_float16", "float16", 40, dtype_given=False),
        LayerRecord("head", "Dense", "float32", "float32", 27, dtype_given=True),
        LayerRecord("early", "Dense", "float32", "float32", 0, dtype_given=None),
    ],
    ["60 % of the parameters are out of reach"],
)


def test_json_holds_policy_warnings_and_every_field_of_every_layer() -> None:
    read = json.loads(AUDIT.json())
    assert read["policy"] == "mixed_float16"
    assert read["warnings"] == ["60 % of the parameters are out of reach"]
    assert read["layers"][1] == {
        "path": "head",
        "class_name": "Dense",
        "policy": "float32",
        "compute_dtype": "float32",
        "parameters": 27,
        "dtype_given": True,
    }
    assert read["layers"][2]["dtype_given"] is None


def test_markdown_is_a_heading_the_warnings_and_a_table_with_a_row_for_each_layer() -> None:
    assert AUDIT.markdown().splitlines() == [
        "# Precision of each layer under mixed_float16",
        "",
        "- 60 % of the parameters are out of reach",
        "",
        "| layer | class | computes in | parameters | dtype given |",
        "|---|---|---|---:|---|",
        "| body | Dense | float16 | 40 |  |",
        "| head | Dense | float32 | 27 | yes |",
        "| early | Dense | float32 | 0 |  |",
    ]


def test_both_are_written(tmp_path: Path) -> None:
    AUDIT.save(tmp_path)
    assert (tmp_path / "audit.json").read_text(encoding="utf-8") == AUDIT.json()
    assert (tmp_path / "audit.md").read_text(encoding="utf-8") == AUDIT.markdown()
