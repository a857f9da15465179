"""Figures, verdicts and sentences of a comparison, worked out by hand."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.compare.judge import judge
from mp_hydra.compare.model import Advice, Comparison, Recommendation
from mp_hydra.compare.pairing import pair
from mp_hydra.compare.recommend import Case, Measured, best, recommend
from mp_hydra.errors import ConfigError
from tests.compare.made_runs import SAMPLES, ended, right, run

if TYPE_CHECKING:
    from mp_hydra.compare.model import Row
    from mp_hydra.compare.records import RunRecord


def compare(*records: RunRecord, **settings: Any) -> Comparison:
    baseline = settings.pop("baseline", "fp32")
    return judge(pair(records, baseline=baseline), records, **settings)


def only_row(comparison: Comparison) -> Row:
    ((_, row),) = comparison.rows()
    return row


def test_every_ratio_of_one_pair_is_mixed_over_baseline() -> None:
    row = only_row(compare(run(), run("mixed_float16")))
    ratios = {
        "training": (row.training_memory, 220 / 400),
        "peak": (row.peak_memory, 320 / 500),
        "state": (row.state_memory, 1.0),
        "step": (row.step_time, 5 / 10),
        "throughput": (row.throughput, 12800 / 6400),
        "first step": (row.first_step, 3 / 2),
        "energy": (row.energy, 450 / 900),
    }
    assert {name: one.ratio.value for name, (one, _) in ratios.items()} == pytest.approx(
        {name: value for name, (_, value) in ratios.items()}
    )
    assert row.speed.value == pytest.approx(2)
    assert (row.training_memory.baseline.value, row.training_memory.mixed.value) == pytest.approx((400, 220))
    assert row.training_memory.ratio.runs == 1


def test_the_attained_share_is_of_half_the_training_memory() -> None:
    """180 of 200 MiB were saved; had it been all, the peak would be (100 + 200) / (100 + 400)."""
    row = only_row(compare(run(), run("mixed_float16")))
    assert (row.attained.value, row.attainable_peak.value) == pytest.approx((0.9, 0.6))


def test_a_float32_row_has_no_attainable_saving_and_says_so() -> None:
    row = only_row(compare(run(), run("tf32")))
    assert row.attained.value is None
    assert row.attained.missing == "tf32 keeps float32, which saves no memory"
    assert row.training_memory.ratio.value == 1.0


def test_between_two_16_bit_precisions_there_is_no_attainable_saving() -> None:
    row = only_row(compare(run("mixed_float16"), run("mixed_bfloat16"), baseline="mixed_float16"))
    assert row.attained.missing == "the baseline computes in 16 bits, too"


def test_ratios_of_several_seeds_are_geometric_means_with_the_range_of_the_pairs() -> None:
    """0.5 and 0.32 have the geometric mean 0.4; on logarithms t(0.975, 1 df) = 12.706 half differences."""
    records = [
        run(seed=0, metrics={"time/step_ms": 10.0}),
        run(seed=1, metrics={"time/step_ms": 20.0}),
        run("mixed_float16", 0, metrics={"time/step_ms": 5.0}),
        run("mixed_float16", 1, metrics={"time/step_ms": 6.4}),
    ]
    row = only_row(compare(*records))
    ratio = row.step_time.ratio
    assert ratio.value == pytest.approx(0.4)
    assert (ratio.runs, ratio.level) == (2, 0.95)
    assert ratio.range == pytest.approx((0.32, 0.5))
    half = 12.7062 * math.log(0.5 / 0.32) / 2
    assert ratio.interval == pytest.approx((0.4 * math.exp(-half), 0.4 * math.exp(half)), rel=1e-4)
    assert row.step_time.baseline.value == pytest.approx(math.sqrt(200))
    assert row.speed.value == pytest.approx(2.5)
    assert row.speed.range == pytest.approx((2.0, 3.125))
    assert row.speed.interval == pytest.approx((2.5 * math.exp(-half), 2.5 * math.exp(half)), rel=1e-4)


def test_with_one_pair_the_interval_of_the_step_time_comes_from_its_steps() -> None:
    noise = np.tile([0.9, 1.0, 1.1, 1.0], 25)
    row = only_row(compare(run(step_ms=10 * noise), run("mixed_float16", step_ms=5 * noise)))
    assert row.step_time.ratio.value == pytest.approx(0.5)
    assert row.step_time.ratio.interval is not None
    assert "within these runs only" in row.step_time.ratio.method
    assert row.training_memory.ratio.interval is None


def test_steps_that_cannot_be_used_leave_the_ratio_of_the_medians_without_an_interval() -> None:
    row = only_row(compare(run(step_ms=np.array([])), run("mixed_float16", step_ms=np.array([5.0]))))
    assert row.step_time.ratio.value == pytest.approx(0.5)
    assert row.step_time.ratio.interval is None


def test_sources_come_from_the_tags() -> None:
    row = only_row(compare(run(), run("mixed_float16")))
    assert row.peak_memory.ratio.source == "TensorFlow allocator, GPU:0"
    assert row.state_memory.ratio.source == "counted: elements x bytes"


def test_memory_measured_in_two_ways_has_no_ratio_and_names_both() -> None:
    other = {"mp_hydra.memory_source": "TensorFlow allocator, CPU:0, allocations of 256 KiB and above only"}
    row = only_row(compare(run(), run("mixed_float16", tags=other)))
    assert row.training_memory.ratio.missing == (
        "not measured in the same way: TensorFlow allocator, GPU:0, and TensorFlow allocator, CPU:0, "
        "allocations of 256 KiB and above only"
    )
    assert row.training_memory.mixed.value == pytest.approx(220)
    assert row.attained.missing == row.training_memory.ratio.missing
    assert row.state_memory.ratio.value == 1.0


def test_a_missing_metric_gives_the_reason_that_the_run_recorded() -> None:
    absent = {"mp_hydra.absent.energy/joules": "other processes used the device"}
    row = only_row(compare(run(), run("mixed_float16", metrics={"energy/joules": None}, tags=absent)))
    assert row.energy.ratio.value is None
    assert row.energy.ratio.missing == row.energy.mixed.missing == "other processes used the device"
    assert row.energy.baseline.value == pytest.approx(900)


def test_a_metric_that_is_missing_without_a_reason_names_the_run_and_the_metric() -> None:
    row = only_row(compare(run(), run("mixed_float16", metrics={"memory/peak_mib": None})))
    assert row.peak_memory.ratio.missing == "cnn-digits-mixed_float16-s0 recorded no memory/peak_mib"


def test_a_metric_that_one_of_two_pairs_lacks_comes_from_the_other_and_it_is_said() -> None:
    records = [run(seed=0), run(seed=1), run("mixed_float16", 0)]
    row = only_row(compare(*records, run("mixed_float16", 1, metrics={"memory/training_mib": None})))
    assert row.training_memory.ratio.value == pytest.approx(0.55)
    assert row.training_memory.ratio.runs == 1
    assert row.peak_memory.ratio.runs == 2
    assert "some figures come from 1 of 2 pairs, since not every run recorded them" in row.remarks


def test_a_baseline_that_used_no_memory_gives_a_reason_and_no_ratio() -> None:
    row = only_row(compare(run(metrics={"memory/training_mib": 0.0}), run("mixed_float16")))
    assert row.training_memory.ratio.value is None
    assert "memory/training_mib: " in row.training_memory.ratio.missing


def test_skipped_steps_are_the_most_of_any_run_with_all_steps_of_that_run() -> None:
    many = {"loss_scale/skipped_steps": 9.0, "loss_scale/applied_steps": 91.0}
    row = only_row(compare(run(), run(seed=1), run("mixed_float16"), run("mixed_float16", 1, metrics=many)))
    assert (row.skipped.value, row.skipped.range, row.steps.value) == (9, (3, 9), 100)


def test_runs_of_different_lengths_are_told() -> None:
    row = only_row(compare(run(), run("mixed_float16", metrics={"loss_scale/applied_steps": 47.0})))
    assert row.remarks == ("seed 0: 50 training steps, 100 of the baseline",)


def test_equal_predictions_on_a_large_test_set_are_equivalent() -> None:
    comparison = compare(run(correct=right(1000)), run("mixed_float16", correct=right(1000)))
    row = only_row(comparison)
    assert row.accuracy.verdict == "equivalent"
    assert (row.accuracy.baseline.value, row.accuracy.mixed.value) == (0.9, 0.9)
    assert row.accuracy.difference.value == 0
    assert row.recommendation == Recommendation(
        Advice.use,
        "mixed_float16: 0.55x training memory, 2x faster, accuracy equivalent within 0.1 points (one seed); use it",
    )
    assert comparison.groups[0].recommendation == row.recommendation


def test_accuracy_is_the_mean_over_seeds_and_the_difference_is_in_points() -> None:
    """Of 10,000 samples 100 more are wrong with seed 0, 300 more with seed 1: -1 and -3 points."""
    wrong = {("fp32", 0): 0, ("fp32", 1): 100, ("mixed_float16", 0): 100, ("mixed_float16", 1): 400}
    row = only_row(compare(*(run(*key, correct=right(count)) for key, count in wrong.items())))
    assert row.accuracy.difference.value == pytest.approx(-2)
    assert row.accuracy.difference.range == pytest.approx((-3, -1))
    assert (row.accuracy.baseline.value, row.accuracy.mixed.value) == pytest.approx((0.995, 0.975))
    assert row.accuracy.difference.runs == 2
    assert row.accuracy.loss.value == pytest.approx(0.01)


def test_a_clear_loss_of_accuracy_is_worse_whatever_is_saved() -> None:
    row = only_row(compare(run(), run("mixed_float16", correct=right(200))))
    assert row.accuracy.verdict == "worse"
    assert row.recommendation.advice is Advice.avoid
    assert "accuracy worse (-2.00 points" in row.recommendation.sentence


def test_margin_and_levels_reach_the_test() -> None:
    comparison = compare(run(), run("mixed_float16", correct=right(200)), margin=5.0, accuracy_level=0.99)
    accuracy = only_row(comparison).accuracy
    assert accuracy.comparison is not None
    assert (accuracy.verdict, accuracy.comparison.margin, accuracy.comparison.level) == ("equivalent", 5.0, 0.99)


def test_a_margin_out_of_range_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="margin"):
        compare(run(), run("mixed_float16"), margin=0.0)


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        (
            {"labels": np.zeros(SAMPLES, dtype=int)},
            "{mixed} and {base} were not tested on the same samples: their labels differ",
        ),
        ({"labels": None}, "{mixed} does not tell the labels of its test samples"),
        (
            {"correct": None},
            "{mixed} does not tell which test samples it got right (regression, or no predictions.npz)",
        ),
        ({"correct": np.ones((SAMPLES, 2), dtype=bool)}, "{mixed} has no single right or wrong for each test sample"),
        ({"correct": np.ones(5, dtype=bool)}, "{mixed} and {base} were not tested on the same number of samples"),
    ],
)
def test_without_comparable_test_samples_there_is_a_reason_and_the_difference_of_the_loss(
    changes: dict[str, Any], missing: str
) -> None:
    row = only_row(compare(run(), run("mixed_float16", **changes)))
    names = {"mixed": "cnn-digits-mixed_float16-s0", "base": "cnn-digits-fp32-s0"}
    assert row.accuracy.verdict is None
    assert row.accuracy.difference.missing == missing.format(**names)
    assert row.accuracy.loss.value == pytest.approx(0.01)
    assert row.accuracy.mixed.value == pytest.approx(0.9)
    assert row.recommendation.advice is Advice.undecided


def test_seeds_with_different_test_samples_are_not_tested_together() -> None:
    other = np.arange(SAMPLES) % 7
    records = [run(seed=0), run("mixed_float16", 0), run(seed=1, labels=other), run("mixed_float16", 1, labels=other)]
    row = only_row(compare(*records))
    assert row.accuracy.difference.missing == "the test samples are not the same for all seeds, which the test needs"


def test_a_seed_without_predictions_is_left_out_of_the_test_and_named() -> None:
    records = [run(seed=0), run("mixed_float16", 0), run(seed=1), run("mixed_float16", 1, correct=None)]
    row = only_row(compare(*records))
    assert row.accuracy.comparison is not None
    assert row.accuracy.comparison.seeds == 1
    assert any(line.startswith("not in the test of accuracy: cnn-digits-mixed_float16-s1") for line in row.remarks)


def test_a_diverged_run_keeps_its_memory_and_time_and_has_no_verdict_on_the_seeds_that_survived() -> None:
    records = [run(seed=0), run("mixed_float16", 0), run(seed=1), ended("diverged", seed=1)]
    row = only_row(compare(*records))
    assert row.training_memory.ratio.runs == 2
    assert row.accuracy.difference.missing == "diverged where the baseline did not: seed 1"
    assert row.recommendation == Recommendation(
        Advice.avoid, "mixed_float16: diverged in 1 of 2 seeds, where fp32 did not; do not use it"
    )


def test_a_baseline_that_diverged_is_not_held_against_the_other_precision() -> None:
    records = [ended("diverged", "fp32", 0), run("mixed_float16", 0), run(seed=1), run("mixed_float16", 1)]
    row = only_row(compare(*records))
    assert row.accuracy.comparison is not None
    assert row.accuracy.comparison.seeds == 1
    assert row.remarks == ("seed 0: the baseline diverged",)
    assert row.recommendation.advice is Advice.use


def test_where_both_diverged_there_is_no_verdict_and_no_blame() -> None:
    row = only_row(compare(ended("diverged", "fp32"), ended("diverged")))
    assert row.accuracy.difference.missing == "the baseline diverged"
    assert row.remarks == ("seed 0: both runs diverged",)
    assert row.recommendation.advice is Advice.undecided


def test_out_of_memory_where_the_baseline_was_not_means_do_not_use_it() -> None:
    row = only_row(compare(run(), ended("out_of_memory", reason="8 GiB wanted")))
    assert row.recommendation.sentence == "mixed_float16: ran out of memory, where fp32 did not; do not use it"
    assert row.training_memory.ratio.missing == "the run ended as out_of_memory"
    assert row.training_memory.baseline.value == pytest.approx(400)
    assert row.training_memory.mixed.missing == "no run has finished"


def test_a_baseline_out_of_memory_is_the_best_reason_to_use_another_precision() -> None:
    comparison = compare(ended("out_of_memory", "fp32"), run("mixed_float16"))
    assert comparison.groups[0].recommendation.sentence == (
        "mixed_float16: trains where fp32 runs out of memory; "
        "to judge its accuracy compare both at a batch_size that fp32 can train"
    )
    assert only_row(comparison).peak_memory.mixed.value == pytest.approx(320)


@pytest.mark.parametrize(("outcome", "shown"), [("killed", "killed"), ("error", "error"), ("running", "still running")])
def test_a_run_that_was_stopped_or_still_runs_is_undecided(outcome: str, shown: str) -> None:
    row = only_row(compare(run(), ended(outcome)))
    assert row.recommendation == Recommendation(Advice.undecided, f"mixed_float16: not compared: {shown}")


def test_a_seed_that_failed_is_counted_in_the_sentence() -> None:
    row = only_row(compare(run(seed=0), run(seed=1), run("mixed_float16", 0), ended("killed", seed=1)))
    assert row.recommendation.sentence.endswith("(one seed); use it (1 of 2 seeds compared)")


def test_a_group_without_a_baseline_says_so_and_its_rows_show_what_was_measured() -> None:
    comparison = compare(run("mixed_float16"))
    assert comparison.groups[0].recommendation == Recommendation(Advice.undecided, "no fp32 baseline")
    row = only_row(comparison)
    assert row.step_time.mixed.value == pytest.approx(5)
    assert row.step_time.baseline.missing == "no run has finished"
    assert row.speed.missing == "no fp32 baseline with seed 0"


def test_unread_artifacts_are_told_once_with_the_runs() -> None:
    records = [run(missing=("predictions.npz: gone",)), run("mixed_float16", missing=("predictions.npz: gone",))]
    comparison = compare(*records, remarks=["2 runs were deleted"])
    assert comparison.remarks == (
        "2 runs were deleted",
        "predictions.npz: gone (cnn-digits-fp32-s0; cnn-digits-mixed_float16-s0)",
    )


def test_nothing_to_compare_is_an_empty_comparison() -> None:
    comparison = compare()
    assert comparison.groups == ()
    assert json.loads(json.dumps(comparison.to_json()))["groups"] == []


def test_the_json_form_is_plain_and_strict_and_leaves_the_records_out() -> None:
    comparison = compare(run(), run("mixed_float16"), ended("killed", "mixed_bfloat16"), title="today")
    plain = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert plain["title"] == "today"
    assert "records" not in plain
    row = plain["groups"][0]["rows"][0]
    assert row["training_memory"]["ratio"]["value"] == pytest.approx(0.55)
    assert (row["accuracy"]["verdict"], row["recommendation"]["advice"]) == ("equivalent", "use it")
    assert row["accuracy"]["comparison"]["verdict"] == "equivalent"
    assert comparison.records["cnn-digits-fp32-s0"].name == "cnn-digits-fp32-s0"


def test_a_figure_that_is_not_finite_becomes_null_in_json() -> None:
    comparison = compare(run(metrics={"test/loss": math.inf}), run("mixed_float16"))
    json.dumps(comparison.to_json(), allow_nan=False)


SAME = "accuracy equivalent within 0.1 points"
GOOD = Case(
    label="mixed_float16",
    baseline="fp32",
    seeds=3,
    compared=3,
    tested=3,
    saving=Measured(2.0),
    speed=Measured(1.8, 1.7, 1.9),
    accuracy="equivalent",
    difference=(0.0, -0.05, 0.05),
)


@pytest.mark.parametrize(
    ("changes", "advice", "end"),
    [
        ({}, Advice.use, "0.50x training memory, 1.8x faster, accuracy equivalent within 0.1 points; use it"),
        ({"accuracy": "better", "difference": (0.5, 0.3, 0.7)}, Advice.use, "better (+0.50 points, +0.30 to +0.70); use it"),
        ({"accuracy": "worse", "difference": (-0.5, -0.7, -0.3)}, Advice.avoid, "(-0.50 points, -0.70 to -0.30); do not use it"),
        ({"speed": Measured(1.02, 1.01, 1.03)}, Advice.use, f"0.50x training memory, about as fast, {SAME}; use it"),
        ({"speed": None}, Advice.use, "0.50x training memory, accuracy equivalent within 0.1 points; use it"),
        ({"speed": Measured(0.5, 0.4, 0.6)}, Advice.trade, f"2x slower, {SAME}; use it where memory is short"),
        ({"saving": Measured(0.8)}, Advice.trade, "use it where time is short and memory is not"),
        ({"saving": Measured(1.04), "speed": Measured(1.04)}, Advice.no_gain, f"about as fast, {SAME}; no gain"),
        ({"saving": Measured(1.0), "speed": Measured(0.5)}, Advice.avoid, f"2x slower, {SAME}; do not use it"),
        (
            {"saving": Measured(1.0), "speed": Measured(1.3, 0.9, 1.9)},
            Advice.undecided,
            f"1.30x the speed (0.90x to 1.90x: unclear), {SAME}; undecided: run more seeds to settle whether it is a gain",
        ),
        ({"speed": Measured(0.7, 0.4, 1.2)}, Advice.trade, f"1.20x: unclear), {SAME}; use it where memory is short"),
        ({"saving": Measured(1.0), "speed": Measured(0.7, 0.4, 1.2)}, Advice.no_gain, f"1.20x: unclear), {SAME}; no gain"),
        (
            {"saving": Measured(1.06, 0.6, 1.9), "speed": None, "accuracy": "undecided"},
            Advice.undecided,
            "-0.05 to +0.05); undecided: run more seeds to settle whether it is a gain",
        ),
        ({"saving": None, "speed": None}, Advice.undecided, "neither memory nor step time was measured in both runs"),
    ],
)  # fmt: skip
def test_the_advice_follows_from_gains_losses_and_accuracy(changes: dict[str, Any], advice: Advice, end: str) -> None:
    given = recommend(replace(GOOD, **changes))
    assert given.advice is advice
    assert given.sentence.startswith("mixed_float16: ")
    assert given.sentence.endswith(end)


@pytest.mark.parametrize(
    ("changes", "end"),
    [
        ({"next_seeds": 3, "next_samples": 2000}, "undecided: run 3 more seeds or test on 2,000 more samples"),
        ({"next_seeds": 1}, "undecided: run 1 more seed"),
        ({"tested": 1, "next_samples": 500}, "undecided: run 2 more seeds or test on 500 more samples"),
        (
            {"next_seeds": 3, "prospect": "worse"},
            "run 3 more seeds, which would show it to be worse if the estimate holds",
        ),
        ({"next_seeds": 3, "prospect": "equivalent"}, "run 3 more seeds"),
        (
            {"detectable": 0.83},
            "would not change that at a margin of 0.1 points; the smallest difference it can show is 0.83 points",
        ),
    ],
)
def test_an_undecided_accuracy_says_what_to_run_next(changes: dict[str, Any], end: str) -> None:
    given = recommend(replace(GOOD, accuracy="undecided", difference=(0.0, -0.8, 0.8), **changes))
    assert given.advice is Advice.undecided
    assert given.sentence.endswith(end)


def test_an_undecided_accuracy_does_not_matter_where_nothing_is_gained() -> None:
    case = replace(GOOD, accuracy="undecided", difference=(0.0, -1, 1), saving=Measured(1.0), speed=Measured(1.0))
    assert recommend(case).advice is Advice.no_gain


def test_the_groups_sentence_is_that_of_its_best_row() -> None:
    rows = [
        ("a", Recommendation(Advice.avoid, "a: no"), 9.0),
        ("b", Recommendation(Advice.use, "b: use it"), 2.0),
        ("c", Recommendation(Advice.use, "c: use it"), 3.0),
    ]
    assert best("fp32", rows).sentence == "c: use it"


def test_where_no_row_is_worth_it_the_groups_sentence_says_to_stay() -> None:
    rows = [("a", Recommendation(Advice.avoid, "a: bad"), 1.0), ("b", Recommendation(Advice.no_gain, "b: same"), 1.0)]
    assert best("fp32", rows) == Recommendation(Advice.no_gain, "stay with fp32 (a: do not use it; b: no gain)")
    assert best("fp32", rows[:1]).sentence == "a: bad"
