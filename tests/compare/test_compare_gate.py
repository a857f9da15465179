"""`--require`: what it accepts, what breaks it, and what it says then."""

from __future__ import annotations

from typing import Any

import pytest

from mp_hydra.compare.gate import Condition, failures, parse
from mp_hydra.compare.judge import judge
from mp_hydra.compare.pairing import pair
from mp_hydra.errors import ConfigError
from tests.compare.made_runs import ended, right, run


def broken(require: str, *records: Any) -> list[str]:
    return failures(judge(pair(records), records), parse(require))


GOOD = (run(), run("mixed_float16"))


def test_conditions_are_read_with_their_operators_and_rows() -> None:
    assert parse(" accuracy = equivalent|better , memory<=0.6,mixed_bfloat16: speed >= 1.2,skipped=0") == (
        Condition("accuracy", "=", ("equivalent", "better")),
        Condition("memory", "<=", 0.6),
        Condition("speed", ">=", 1.2, "mixed_bfloat16"),
        Condition("skipped", "=", 0.0),
    )


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "'' is no condition; write them as in accuracy=equivalent,memory<=0.6,speed>=1.2"),
        ("memory<=0.6,", "'' is no condition"),
        ("memory", "'memory' is no condition"),
        ("memory<=0.5<=0.6", "'memory<=0.5<=0.6' is no condition"),
        ("memory=<0.6", "'memory=<0.6' is no condition"),
        ("memroy<=0.6", "'memroy' cannot be required; choose from accuracy, memory, peak, speed, energy, skipped"),
        ("memory<=half", "'memory<=half' needs a number of at least 0 after <="),
        ("memory<=nan", "needs a number"),
        ("speed>=inf", "needs a number"),
        ("speed>=-1", "needs a number"),
        ("speed>=", "needs a number"),
        ("accuracy=undecided", "write accuracy=equivalent, accuracy=better or accuracy=equivalent|better"),
        ("accuracy>=0.9", "'accuracy>=0.9' is no verdict to require"),
        (":memory<=0.6", "names no precision before the colon"),
    ],
)
def test_bad_syntax_is_one_line_that_names_option_and_part(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text)
    line = str(caught.value)
    assert line.startswith("--require=")
    assert problem in line
    assert "\n" not in line


def test_conditions_that_hold_leave_nothing_to_say() -> None:
    assert broken("accuracy=equivalent,memory<=0.6,peak<0.65,speed>=2,energy<=0.5,skipped<=3", *GOOD) == []


@pytest.mark.parametrize(
    ("require", "line"),
    [
        ("memory<=0.5", "mixed_float16: memory<=0.5 fails: 0.55"),
        ("peak<0.64", "mixed_float16: peak<0.64 fails: 0.64"),
        ("speed>2", "mixed_float16: speed>2 fails: 2"),
        ("energy<0.5", "mixed_float16: energy<0.5 fails: 0.5"),
        ("skipped=0", "mixed_float16: skipped=0 fails: 3"),
        ("accuracy=better", "mixed_float16: accuracy=better fails: equivalent"),
    ],
)
def test_a_condition_that_does_not_hold_is_a_line_with_the_figure(require: str, line: str) -> None:
    assert broken(require, *GOOD) == [line]


def test_worse_and_undecided_break_a_condition_on_accuracy() -> None:
    worse = run("mixed_float16", correct=right(500))
    assert broken("accuracy=equivalent|better", run(), worse) == [
        "mixed_float16: accuracy=equivalent|better fails: worse"
    ]


def test_a_missing_figure_fails_with_its_reason() -> None:
    absent = {"mp_hydra.absent.energy/joules": "no NVIDIA GPU"}
    bare = run("mixed_float16", metrics={"energy/joules": None}, tags=absent, correct=None, name="bare")
    energy, accuracy = broken("energy<=1,accuracy=equivalent", run(), bare)
    assert energy == "mixed_float16: energy<=1 cannot be judged: no NVIDIA GPU"
    assert accuracy.startswith(
        "mixed_float16: accuracy=equivalent cannot be judged: bare does not tell which test samples"
    )


def test_every_row_of_every_group_must_hold_and_the_line_names_the_group() -> None:
    other = {"batch_size": "128"}
    heavy = run("mixed_float16", params=other, metrics={"memory/training_mib": 380.0}, name="heavy")
    assert broken("memory<=0.6", *GOOD, run(params=other, name="light"), heavy) == [
        "model=cnn dataset=digits batch_size=128, mixed_float16: memory<=0.6 fails: 0.95"
    ]


def test_a_condition_for_one_precision_leaves_the_others_alone() -> None:
    slow = run("mixed_bfloat16", metrics={"time/step_ms": 20.0})
    assert broken("mixed_float16:speed>=1.5", *GOOD, slow) == []
    assert broken("mixed_bfloat16:speed>=1.5", *GOOD, slow) == ["mixed_bfloat16: speed>=1.5 fails: 0.5"]


def test_a_condition_for_a_precision_that_is_not_there_fails() -> None:
    assert broken("mixed_bfloat16:memory<=0.6", *GOOD) == ["mixed_bfloat16: no such row; there is mixed_float16"]


def test_a_run_that_did_not_end_well_fails_the_gate_even_where_the_other_seeds_hold() -> None:
    killed = ended("killed", seed=1, reason="SIGTERM")
    assert broken("memory<=0.6", *GOOD, run(seed=1), killed) == [
        "mixed_float16: cnn-digits-mixed_float16-s1 ended as killed (SIGTERM)"
    ]
    assert broken("memory<=0.6", *GOOD, run(seed=1), ended("running", seed=1)) == [
        "mixed_float16: cnn-digits-mixed_float16-s1 is still running"
    ]


def test_a_diverged_run_fails_the_gate_whatever_is_required() -> None:
    assert broken("memory<=2", run(), ended("diverged")) == [
        "mixed_float16: cnn-digits-mixed_float16-s0 ended as diverged"
    ]


def test_no_baseline_fails_with_that_reason() -> None:
    assert broken("memory<=0.6", run("mixed_float16")) == [
        "mixed_float16: memory<=0.6 cannot be judged: no fp32 baseline with seed 0"
    ]


def test_a_run_that_could_not_be_compared_fails_unless_the_condition_is_for_another_precision() -> None:
    stranger = run("mixed_bfloat16", dataset=("digits", "ffff"))
    line = "mixed_bfloat16: cnn-digits-mixed_bfloat16-s0 is not comparable: data digest ffff, not a2c3f5a8"
    assert broken("memory<=0.6", *GOOD, stranger) == [line]
    assert broken("mixed_float16:memory<=0.6", *GOOD, stranger) == []


def test_a_baseline_that_does_not_count_fails_nothing() -> None:
    assert broken("memory<=0.6", run(name="old"), *GOOD) == []


def test_a_group_in_which_nothing_was_compared_fails_beside_one_that_holds() -> None:
    assert broken("memory<=0.6", *GOOD, run(params={"batch_size": "1"}, name="alone")) == [
        "model=cnn dataset=digits batch_size=1, nothing was compared: nothing to compare with the fp32 baseline"
    ]


def test_nothing_compared_fails() -> None:
    assert broken("memory<=0.6") == ["nothing was compared: no runs"]
    assert broken("memory<=0.6", run()) == ["nothing was compared: nothing to compare with the fp32 baseline"]
