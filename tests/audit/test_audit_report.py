"""An audit as JSON, Markdown and text, and what it says to a build server."""

from __future__ import annotations

import io
import json
from collections import Counter
from typing import TYPE_CHECKING

import pytest

from mp_hydra.audit import Audit, Finding, Severity
from mp_hydra.audit.facts import Layer, Model
from mp_hydra.audit.findings import overrides_block
from mp_hydra.audit.tracing import Traced
from mp_hydra.precision import LayerRecord

if TYPE_CHECKING:
    from pathlib import Path

BODY = Layer(
    LayerRecord("body", "Dense", "mixed_float16", "float16", 40, dtype_given=False),
    traced=Traced(("float16",), ("float16",), 32, Counter(float16=32), Counter(float16=600), 2048, 4096),
)
NORM = Layer(
    LayerRecord("norm", "BatchNormalization", "mixed_float16", "float16", 8, dtype_given=False),
    traced=Traced(("float16",), ("float16",), 32, Counter(float32=99), Counter(), 4096, 4096),
)
HEAD = Layer(
    LayerRecord("head", "Dense", "float32", "float32", 52, dtype_given=True),
    traced=Traced(("float32",), ("float32",), 8, Counter(float32=8), Counter(float32=200)),
)
TOTAL = Traced(flops=Counter(float16=600, float32=200), kept_bytes=6144, kept_bytes_float32=8192)
MODEL = Model("mixed_float16", [BODY, NORM, HEAD], batch_size=8, total=TOTAL, scaling="dynamic", heads=["head"])
BLIND = Model("mixed_float16", [Layer(HEAD.record)], untraceable="it prints", scaling="none")
UNSCALED = Model("mixed_float16", [BODY, NORM, HEAD], batch_size=6, total=TOTAL, scaling="none", heads=["head"])


def shown(audit: Audit, width: int = 110) -> str:
    from rich.console import Console

    out = io.StringIO()
    audit.show(Console(file=out, width=width))
    return out.getvalue()


def test_json_holds_policy_warnings_findings_reach_and_every_layer() -> None:
    read = json.loads(Audit.of(UNSCALED).json())
    assert read["batch_size"] == 6
    assert read["policy"] == "mixed_float16"
    assert read["warnings"][1:] == [
        "layers compute in float16 without loss scaling: gradients below 6e-8 become zero; use loss_scale=auto"
    ]
    assert [(f["code"], f["severity"], f["places"]) for f in read["findings"]] == [
        ("out_of_reach", "warning", ["head"]), ("scaler_missing", "warning", []), ("batch_not_multiple", "note", []),
    ]  # fmt: skip
    assert read["layers"][0] == {
        "path": "body", "class_name": "Dense", "policy": "mixed_float16", "compute_dtype": "float16", "parameters": 40,
        "dtype_given": False, "overridden": False, "computes_in": "float16", "input_dtypes": ["float16"],
        "output_dtypes": ["float16"], "output_elements": 32 // 6, "flops": {"float16": 600},
        "kept": {"bytes": 2048, "bytes_stock": 2048, "bytes_float32": 4096},
    }  # fmt: skip


@pytest.mark.parametrize(("pinned", "severities"), [(50, []), (51, ["warning"]), (99, ["warning"]), (100, ["error"])])
def test_more_than_half_of_the_parameters_out_of_reach_is_a_finding(pinned: int, severities: list[str]) -> None:
    body = LayerRecord("body", "Dense", "mixed_float16", "float16", 100 - pinned, dtype_given=False)
    tail = LayerRecord("tail", "Dense", "float32", "float32", pinned, dtype_given=True)
    audit = Audit.of(Model("mixed_float16", [Layer(body), Layer(tail)], scaling="dynamic"))
    assert [f.severity for f in audit.findings if f.code == "out_of_reach"] == severities


def test_reach_is_the_share_of_parameters_flops_and_bytes_worked_out_by_hand() -> None:
    reach = json.loads(Audit.of(MODEL).json())["reach"]
    assert reach == {
        "parameters": 40 / 100, "flops": 600 / 800, "kept_bytes": 6144, "kept_bytes_float32": 8192,
        "kept_bytes_stock": 6144, "kept_ratio": 0.75,
    }  # fmt: skip


def test_the_summary_is_one_sentence_with_these_numbers() -> None:
    assert Audit.of(MODEL).summary() == (
        "mixed_float16 reaches 40% of the parameters and 75% of the matrix FLOPs; a batch of 8 keeps about 6.0 KiB for the "
        "backward pass instead of 8.0 KiB (0.75 times)."
    )
    assert (
        Audit.of(MODEL).warnings[0].startswith("head: 52 % of the parameters are in layers with a dtype of their own")
    )


def test_a_layer_that_was_not_traced_has_null_for_what_is_not_known_and_the_reason_is_said() -> None:
    read = json.loads(Audit.of(BLIND).json())
    assert (read["untraceable"], read["reach"]) == ("it prints", None)
    assert read["layers"][0]["compute_dtype"] == "float32"
    assert all(read["layers"][0][key] is None for key in ("computes_in", "input_dtypes", "flops", "kept"))
    assert "not_traced" in [f["code"] for f in read["findings"]]
    assert "float32, as declared" in Audit.of(BLIND).markdown()


def test_markdown_is_heading_summary_findings_and_a_row_for_each_layer() -> None:
    assert Audit.of(MODEL).markdown().splitlines() == [
        "# Precision of each layer under mixed_float16",
        "",
        Audit.of(MODEL).summary(),
        "",
        f"- **warning** (out_of_reach) {Audit.of(MODEL).warnings[0]}",
        "",
        "| layer | class | policy | computes in | in | out | parameters | outputs | kept in fp32 | kept |",
        "| --- | --- | --- | --- | --- | --- | ---: | ---: | ---: | ---: |",
        "| body | Dense | mixed_float16 | float16 | float16 | float16 | 40 | 4 | 4.0 KiB | 2.0 KiB |",
        "| norm | BatchNormalization | mixed_float16 | float32 inside | float16 | float16 | 8 | 4 | 4.0 KiB | 4.0 KiB |",
        "| head | Dense | float32, given | float32 | float32 | float32 | 52 | 1 | 0 | 0 |",
    ]


def test_the_terminal_shows_layers_findings_with_their_cures_and_the_summary() -> None:
    text = shown(Audit.of(UNSCALED))
    for words in ("f32 inside", "f32, given", "warning (scaler_missing)", "use loss_scale=auto", "0.75 times"):
        assert words in text
    assert "Nothing found." in shown(Audit("float32", 8, []))


@pytest.mark.parametrize(
    ("severity", "plain", "strict"),
    [(None, False, False), ("note", False, False), ("warning", False, True), ("error", True, True)],
)
def test_a_build_fails_on_errors_and_with_strict_on_warnings(severity: str | None, plain: bool, strict: bool) -> None:
    found = [Finding("x", Severity(severity), ("here",), "it is wrong", "mend it")] if severity else []
    audit = Audit("float32", 8, [], found)
    assert (audit.fails(strict=False), audit.fails(strict=True)) == (plain, strict)
    assert audit.warnings == (["here: it is wrong; mend it"] if severity in ("warning", "error") else [])


def test_both_files_are_written_into_a_directory_that_is_made(tmp_path: Path) -> None:
    audit = Audit.of(MODEL)
    assert audit.save(tmp_path / "deep" / "audit") == [
        tmp_path / "deep/audit/audit.json",
        tmp_path / "deep/audit/audit.md",
    ]
    assert (tmp_path / "deep/audit/audit.json").read_text(encoding="utf-8") == audit.json()
    assert (tmp_path / "deep/audit/audit.md").read_text(encoding="utf-8") == audit.markdown()


def test_many_places_are_shortened_in_a_line_and_kept_in_json() -> None:
    found = Finding("x", Severity.note, tuple("abcde"), "r", "c")
    assert found.line() == "a, b, c and 2 more: r; c"
    assert found.asdict()["places"] == list("abcde")


def test_the_cures_block_is_one_that_hydra_reads_back_and_that_matches_just_these_paths() -> None:
    import re

    from mp_hydra.app import composed

    paths = ["net/dense_1", "net/block.2/conv"]
    overrides = composed(["precision=mixed_bfloat16", overrides_block(paths)])["precision"]["overrides"]
    assert set(overrides.values()) == {"float32"}
    assert [[p for p in (*paths, "net/blockx2/conv") if re.fullmatch(key, p)] for key in overrides] == [
        [p] for p in paths
    ]
