"""Largest batches and memory modes: what is paired with what, and what may be said of it; all figures worked out by hand."""

from __future__ import annotations

import csv
import io
import json
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console

from mp_hydra.compare import story
from mp_hydra.compare.gate import failures, parse
from mp_hydra.compare.identity import batch_size_of, config_of, memory_of, recipe_of
from mp_hydra.compare.judge import judge
from mp_hydra.compare.model import Advice, Comparison
from mp_hydra.compare.pairing import pair
from mp_hydra.compare.report import markdown, page, tables, terminal
from tests.compare.made_runs import ended, run

if TYPE_CHECKING:
    from mp_hydra.compare.records import RunRecord

# samples per second by precision and resolved batch size; each is that of seed 1, the median of three seeds
THROUGHPUT = {
    ("fp32", "64"): 6000.0,
    ("fp32", "72"): 6250.0,
    ("mixed_bfloat16", "64"): 9000.0,
    ("mixed_bfloat16", "128"): 10000.0,
}
SPREAD = (0.98, 1.0, 1.02)
LINE = (
    "model=cnn dataset=digits, mixed_bfloat16: 1.50x at batch 64; each at its best batch 1.60x "
    "(mixed_bfloat16 10,000 samples/s at 128, fp32 6,250 samples/s at 72)"
)


def at_batch(precision: str, size: str, seed: int = 0, *, largest: bool = False, **changes: Any) -> RunRecord:
    """A run at a batch size, which was found if it is the largest."""
    tags = {
        "mp_hydra.batch_size_requested": "max" if largest else None,
        "mp_hydra.memory_resolved": "stock" if precision == "fp32" else "lean",
        **changes.pop("tags", {}),
    }
    memory = {"memory.mode": "auto", "memory.recompute": "null", "memory.limit": "null"}
    metrics = {
        "time/samples_per_second": THROUGHPUT.get((precision, size), 5000.0) * SPREAD[seed],
        **changes.pop("metrics", {}),
    }
    params = {"batch_size": size, **memory, **changes.pop("params", {})}
    name = changes.pop("name", f"{precision}-{'max' if largest else size}-s{seed}")
    return run(precision, seed, name=name, tags=tags, params=params, metrics=metrics, **changes)


def sweep(seeds: int = 3) -> list[RunRecord]:
    """`-m precision=fp32,mixed_bfloat16 batch_size=64,max seed=0,1,2`."""
    return [
        at_batch(precision, size, seed, largest=size != "64") for precision, size in THROUGHPUT for seed in range(seeds)
    ]


def compare(*records: RunRecord, baseline: str = "fp32") -> Comparison:
    return judge(pair(records, baseline=baseline), records)


def with_memory(mode: str, precision: str, seed: int = 0, **changes: Any) -> RunRecord:
    """A run of memory=mode; auto comes to lean under a mixed policy."""
    resolved = {"auto": "stock" if precision == "fp32" else "lean"}.get(mode, mode)
    params = {"memory.mode": mode, "memory.recompute": "block" if mode == "recompute" else "null"}
    tags = {"mp_hydra.memory_resolved": resolved, **changes.pop("tags", {})}
    params |= changes.pop("params", {})
    return run(
        precision, seed, name=changes.pop("name", f"{precision}-{mode}-s{seed}"), params=params, tags=tags, **changes
    )


def labels(comparison: Comparison) -> list[tuple[str, str | None]]:
    return [
        (row.label, one.baseline.name if one.baseline else None) for _, row in comparison.rows() for one in row.pairs
    ]


# --- batch_size=max: pairs --------------------------------------------------------------------------------------------


def test_the_batch_size_that_was_asked_for_decides_the_group() -> None:
    tags = {"mp_hydra.batch_size_requested": "max"}
    assert config_of({"batch_size": "72"}, tags) == config_of({"batch_size": "128"}, tags) == {"batch_size": "max"}
    assert config_of({"batch_size": "72"}, {}) == {"batch_size": "72"}


def test_runs_at_their_largest_batch_pair_with_each_other_and_those_at_64_as_ever() -> None:
    groups = pair(sweep(seeds=1)).groups
    assert [group.label for group in groups] == [
        "model=cnn dataset=digits batch_size=64",
        "model=cnn dataset=digits batch_size=max",
    ]
    assert [
        [(one.mixed.name, one.baseline and one.baseline.name) for one in group.rows[0].pairs] for group in groups
    ] == [
        [("mixed_bfloat16-64-s0", "fp32-64-s0")],
        [("mixed_bfloat16-max-s0", "fp32-max-s0")],
    ]


def test_a_group_of_largest_batches_says_so_by_label_and_remark_even_if_it_is_alone() -> None:
    (group,) = pair([one for one in sweep() if "-max-" in one.name]).groups
    assert group.label == "model=cnn dataset=digits batch_size=max"
    assert group.remarks[0] == "each at its largest batch: fp32 72, mixed_bfloat16 128"


def test_seeds_that_came_to_different_largest_batches_are_given_as_a_range() -> None:
    records = [at_batch("fp32", size, seed, largest=True) for seed, size in enumerate(("72", "80"))]
    records += [at_batch("mixed_bfloat16", "128", seed, largest=True) for seed in (0, 1)]
    assert pair(records).groups[0].remarks[0] == "each at its largest batch: fp32 72 to 80, mixed_bfloat16 128"


def test_a_run_that_died_while_it_looked_for_its_largest_batch_is_in_that_group() -> None:
    dead = ended(
        "error",
        "mixed_bfloat16",
        params={"batch_size": "max"},
        tags={"mp_hydra.outcome": "error", "mp_hydra.batch_size_requested": "max"},
    )
    assert batch_size_of(dead) is None
    (group,) = compare(at_batch("fp32", "72", largest=True), dead).groups
    assert group.rows[0].pairs[0].problem == "error"
    assert group.rows[0].batch_size.baseline.value == 72
    assert group.remarks == ("each at its largest batch: fp32 72",)


def test_two_limits_of_memory_are_two_groups_and_none_is_as_if_it_were_not_recorded() -> None:
    records = [
        at_batch(precision, "72", largest=True, params={"memory.limit": limit}, name=f"{precision}-{limit}")
        for limit in ("4GB", "8GB")
        for precision in ("fp32", "mixed_bfloat16")
    ]
    assert len(pair(records).groups) == 2
    assert config_of({"memory.limit": "null", "epochs": "1"}) == {"epochs": "1"}


# --- batch_size=max: figures ------------------------------------------------------------------------------------------


def test_at_different_batches_speed_is_the_ratio_of_samples_per_second_and_step_times_have_none() -> None:
    """Steps take 10 and 5 ms, which would be 2; samples per second are 10,000 and 6,250, which is 1.6."""
    _, largest = compare(*sweep()).groups
    (row,) = largest.rows
    assert row.batches_differ
    assert (row.batch_size.baseline.value, row.batch_size.mixed.value) == (72, 128)
    assert row.batch_size.ratio.value == pytest.approx(128 / 72)
    assert row.speed.value == row.throughput.ratio.value == pytest.approx(1.6)
    assert row.step_time.ratio.value is None
    assert row.step_time.ratio.missing == (
        "a step is not the same work: 72 and 128 samples; speed is the ratio of samples per second"
    )
    assert (row.step_time.baseline.value, row.step_time.mixed.value) == pytest.approx((10, 5))


def test_at_different_batches_memory_is_no_saving_and_accuracy_is_compared_with_a_remark() -> None:
    _, largest = compare(*sweep()).groups
    (row,) = largest.rows
    assert row.training_memory.ratio.value == pytest.approx(220 / 400)
    assert row.attained.missing == "each ran at its own batch size, so that this is no saving"
    assert row.attainable_peak.value is None
    assert row.accuracy.verdict == "equivalent"
    assert row.remarks[:3] == (
        "the batch sizes differ: speed is the ratio of samples per second, and step times are not compared",
        "memory is that of each at its own batch size: a ratio of it is no saving",
        "accuracy is compared although the batch size differs, which by itself changes what is learned",
    )
    assert row.recommendation.advice is Advice.use
    assert row.recommendation.sentence.startswith("mixed_bfloat16 at batch 128, fp32 at 72: 1.6x faster, accuracy")


def test_numbers_of_steps_that_differ_with_the_batch_are_not_remarked_on() -> None:
    records = [
        at_batch("fp32", "72", largest=True),
        at_batch("mixed_bfloat16", "128", largest=True, metrics={"loss_scale/applied_steps": 50.0}),
    ]
    (row,) = compare(*records).groups[0].rows
    assert not any("training steps" in line for line in row.remarks)


def test_largest_batches_that_came_out_equal_are_compared_like_any_others() -> None:
    records = [at_batch(precision, "72", largest=True) for precision in ("fp32", "mixed_bfloat16")]
    (row,) = compare(*records).groups[0].rows
    assert not row.batches_differ
    assert row.speed.value == pytest.approx(2)
    assert row.attained.value == pytest.approx(0.9)


def test_the_children_of_a_sweep_carry_no_ratio_of_memory_or_step_time_of_different_batches() -> None:
    found = {mixed.name: values for mixed, _, values in story.ratios(compare(*sweep(seeds=1)))}
    assert found["mixed_bfloat16-64-s0"]["compare/step_time_ratio"] == 0.5
    largest = found["mixed_bfloat16-max-s0"]
    assert largest.pop("compare/throughput_ratio") == pytest.approx(1.6)
    assert largest.keys() == {"compare/energy_ratio", "compare/accuracy_difference_points"}


def test_a_gate_on_memory_is_for_equal_batches_and_needs_some() -> None:
    both = compare(*sweep())
    assert failures(both, parse("memory<=0.6,speed>=1.5")) == []
    assert failures(both, parse("memory<=0.5")) == [
        "model=cnn dataset=digits batch_size=64, mixed_bfloat16: memory<=0.5 fails: 0.55"
    ]
    largest = compare(*(one for one in sweep() if "-max-" in one.name))
    assert failures(largest, parse("memory<=0.6,speed>=1.5")) == [
        "memory<=0.6 cannot be judged: each run was at its own batch size"
    ]


# --- best batches -----------------------------------------------------------------------------------------------------


def test_throughput_at_equal_batch_and_at_each_ones_best_is_told_for_a_model() -> None:
    """Equal: 9000 / 6000 at 64. Best: 10000 at 128 over 6250 at 72. Medians over seeds of which 1 is the middle."""
    (found,) = compare(*sweep()).throughputs
    assert (found.label, found.baseline) == ("model=cnn dataset=digits", "fp32")
    assert found.best is not None
    assert (found.best.batch_size, found.best.throughput.value, found.best.throughput.runs) == (72, 6250, 3)
    (row,) = found.rows
    assert row.rows == ((0, 0), (1, 0))
    assert {size: ratio.value for size, ratio in row.equal.items()} == {64: pytest.approx(1.5)}
    assert (row.best.batch_size, row.best.throughput.value, row.ratio.value) == (128, 10000, 1.6)


def test_the_best_batch_is_the_one_with_most_samples_per_second_and_not_the_largest() -> None:
    records = [
        at_batch(precision, size, metrics={"time/samples_per_second": value})
        for precision, size, value in (
            ("fp32", "32", 800.0),
            ("fp32", "256", 700.0),
            ("mixed_bfloat16", "32", 900.0),
            ("mixed_bfloat16", "256", 1000.0),
        )
    ]
    (found,) = compare(*records).throughputs
    assert found.best is not None
    assert (found.best.batch_size, found.rows[0].best.batch_size) == (32, 256)
    assert found.rows[0].ratio.value == 1.25
    assert {size: ratio.value for size, ratio in found.rows[0].equal.items()} == pytest.approx({32: 1.125, 256: 10 / 7})


def test_a_sweep_at_one_batch_size_has_no_such_summary() -> None:
    assert compare(run(), run("mixed_bfloat16")).throughputs == ()


def test_runs_that_failed_and_other_models_and_machines_are_kept_out_of_a_best_batch() -> None:
    dead = ended("out_of_memory", "fp32", params={"batch_size": "256"}, name="dead")
    slow = [
        at_batch(
            precision, "64", environment={"devices": [{"kind": "GPU", "name": "NVIDIA T4"}]}, name=f"slow-{precision}"
        )
        for precision in ("fp32", "mixed_bfloat16")
    ]
    other = [
        at_batch(precision, "64", params={"model.name": "mlp"}, name=f"mlp-{precision}")
        for precision in ("fp32", "tf32")
    ]
    (found,) = compare(*sweep(), dead, *slow, *other).throughputs
    assert found.best is not None
    assert (found.best.batch_size, found.best.throughput.runs) == (72, 3)
    assert [row.label for row in found.rows] == ["mixed_bfloat16"]


def test_a_best_batch_without_a_baseline_has_no_ratio() -> None:
    (found,) = compare(*(one for one in sweep() if one.name.startswith("mixed"))).throughputs
    assert found.best is None
    assert found.rows[0].ratio.missing == "no baseline has finished"
    assert found.rows[0].equal == {}


def test_the_summary_is_in_every_form() -> None:
    comparison = compare(*sweep())
    console = Console(width=160, record=True, file=io.StringIO())
    terminal.show(comparison, console)
    assert LINE in " ".join(console.export_text().split())
    assert f"- {LINE}" in markdown.render(comparison)
    assert f"<li>{LINE}</li>" in page.render(comparison)
    (found,) = json.loads(tables.to_json(comparison))["throughputs"]
    assert found["best"]["batch_size"] == 72
    assert found["rows"][0]["equal"]["64"]["value"] == pytest.approx(1.5)
    assert found["rows"][0]["ratio"]["value"] == pytest.approx(1.6)
    lines = list(csv.DictReader(io.StringIO(tables.to_csv(comparison))))
    assert [line["batch_size_mixed"] for line in lines] == ["64.0", "128.0"]
    assert [line["batch_size_baseline"] for line in lines] == ["64.0", "72.0"]
    for line in lines:
        assert float(line["best_batch_ratio"]) == pytest.approx(1.6)
        assert (line["best_batch_size_mixed"], line["best_batch_size_baseline"]) == ("128", "72")
        assert line["best_batch_throughput_baseline_samples_per_second"] == "6250.0"
    assert lines[1]["step_time_ratio"] == ""
    assert float(lines[1]["speed"]) == pytest.approx(1.6)


def test_tables_show_batch_size_and_throughput_where_batches_differ_and_only_there() -> None:
    equal, largest = markdown.render(compare(*sweep())).split("batch_size=max")
    assert "batch size |" not in equal
    assert "| throughput |" not in equal
    assert "|  | batch size | training memory |" in largest
    assert "| speed | throughput | accuracy |" in largest
    assert "| fp32 (baseline) | 72 |" in largest
    assert "| mixed_bfloat16 (3 seeds) | 128 |" in largest
    assert "5.00 ms, not compared" in largest


# --- memory modes -----------------------------------------------------------------------------------------------------


def test_memory_modes_are_rows_against_stock_fp32() -> None:
    records = [
        with_memory(mode, precision)
        for mode in ("recompute", "lean", "stock")
        for precision in ("mixed_bfloat16", "fp32")
    ]
    comparison = compare(*records)
    assert len(comparison.groups) == 1
    assert labels(comparison) == [
        ("fp32 memory=recompute", "fp32-stock-s0"),
        ("fp32 memory=lean", "fp32-stock-s0"),
        ("mixed_bfloat16 memory=recompute", "fp32-stock-s0"),
        ("mixed_bfloat16 memory=lean", "fp32-stock-s0"),
        ("mixed_bfloat16 memory=stock", "fp32-stock-s0"),
    ]
    assert comparison.groups[0].remarks == (
        (
            "mixed_bfloat16 memory=recompute (memory=recompute), mixed_bfloat16 memory=lean (memory=lean): the ratios are of "
            "precision and memory mode together, since fp32 ran with memory=stock; of precision alone: "
            "mixed_bfloat16 memory=stock"
        ),
    )
    assert comparison.groups[0].rows[0].attained.missing == (
        "fp32 keeps float32, so that what it saves comes from its memory mode"
    )


def test_the_default_is_one_row_with_a_remark_that_tells_how_to_separate_precision_from_memory_mode() -> None:
    comparison = compare(with_memory("auto", "fp32"), with_memory("auto", "mixed_bfloat16"))
    assert labels(comparison) == [("mixed_bfloat16", "fp32-auto-s0")]
    assert comparison.groups[0].remarks == (
        (
            "mixed_bfloat16 (memory=lean by memory=auto): the ratios are of precision and memory mode together, since fp32 ran "
            "with memory=stock; memory=stock shows precision alone"
        ),
    )


def test_with_one_memory_mode_for_both_precisions_the_ratios_are_of_precision_alone() -> None:
    assert compare(with_memory("stock", "fp32"), with_memory("stock", "mixed_bfloat16")).groups[0].remarks == ()


def test_fp32_in_another_memory_mode_is_the_baseline_where_it_is_the_only_one_and_that_is_said() -> None:
    comparison = compare(with_memory("lean", "fp32"), with_memory("lean", "mixed_bfloat16"))
    assert labels(comparison) == [("mixed_bfloat16", "fp32-lean-s0")]
    assert comparison.groups[0].remarks == ("the fp32 baseline ran with memory=lean",)


def test_a_memory_mode_that_came_to_another_is_told() -> None:
    odd = with_memory("recompute", "mixed_bfloat16", tags={"mp_hydra.memory_resolved": "stock"})
    assert compare(with_memory("stock", "fp32"), odd).groups[0].remarks == (
        "mixed_bfloat16: memory=recompute came to stock",
    )


def test_where_to_recompute_makes_rows_and_counts_only_where_anything_is_recomputed() -> None:
    records = [with_memory("stock", "fp32")]
    records += [
        with_memory("recompute", "mixed_bfloat16", params={"memory.recompute": every}, name=every)
        for every in ("1", "3")
    ]
    assert [label for label, _ in labels(compare(*records))] == [
        "mixed_bfloat16 memory.recompute=1",
        "mixed_bfloat16 memory.recompute=3",
    ]
    lean = {"precision.name": "mixed_bfloat16", "memory.mode": "lean", "memory.recompute": "null"}
    assert recipe_of(lean) == recipe_of({**lean, "memory.recompute": "3"})


def test_runs_recorded_before_there_were_memory_modes_count_as_stock() -> None:
    assert memory_of(run()) == "stock"
    comparison = compare(run(), with_memory("stock", "mixed_bfloat16"), run("mixed_bfloat16", 1), run("fp32", 1))
    assert labels(comparison) == [
        ("mixed_bfloat16", "cnn-digits-fp32-s0"),
        ("mixed_bfloat16", "cnn-digits-fp32-s1"),
    ]


def test_a_mixed_baseline_is_stock_where_there_is_one_and_its_other_modes_are_rows() -> None:
    records = [
        with_memory("stock", "mixed_bfloat16"),
        with_memory("auto", "mixed_bfloat16"),
        with_memory("auto", "fp32"),
    ]
    assert labels(compare(*records, baseline="mixed_bfloat16")) == [
        ("fp32", "mixed_bfloat16-stock-s0"),
        ("mixed_bfloat16 memory=auto", "mixed_bfloat16-stock-s0"),
    ]


def test_a_run_that_died_before_its_memory_mode_was_known_stays_with_the_others_of_its_row() -> None:
    dead = ended("killed", "mixed_bfloat16", 1, params={"memory.mode": "auto"}, name="dead")
    assert memory_of(dead) == ""
    comparison = compare(
        with_memory("auto", "mixed_bfloat16"), dead, with_memory("auto", "fp32"), baseline="mixed_bfloat16"
    )
    assert [one.name for one in comparison.groups[0].baselines] == ["mixed_bfloat16-auto-s0", "dead"]
