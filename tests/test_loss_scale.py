"""The rule of dynamic loss scaling: by hand, against a slow reference, and the same in numpy and in Keras."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_hydra.loss_scale import Rule, State, effective_mode, next_state


def reference(rule: Rule, start: float, finite: list[bool]) -> list[float]:
    """The scale before each step and after the last, counted from the history alone, without carried state."""
    scales = [start]
    since = 0  # the step after the last change of the run of finite steps
    for step, good in enumerate(finite):
        scale = scales[-1]
        if not good:
            scale = scale * rule.backoff_factor
            scale = max(scale, rule.minimum)
            since = step + 1
        elif step - since + 1 == rule.growth_interval:
            scale = scale * rule.growth_factor
            scale = min(scale, rule.maximum)
            since = step + 1
        scales.append(scale)
    return scales


def run(rule: Rule, start: float, finite: list[bool]) -> list[float]:
    state = State(start, 0)
    scales = [start]
    for good in finite:
        state = next_state(rule, state, good)
        scales.append(float(state.scale))
    return scales


@pytest.mark.parametrize("interval", [1, 2, 3, 4])
@pytest.mark.parametrize("factors", [(2.0, 0.5), (1.5, 0.25)])
@pytest.mark.parametrize("limits", [(1.0, 2.0**32), (2.0, 16.0), (8.0, 8.0)])
def test_rule_equals_the_reference_on_every_sequence_of_ten_steps(
    interval: int, factors: tuple[float, float], limits: tuple[float, float]
) -> None:
    rule = Rule(interval, *factors, *limits)
    for finite in itertools.product([True, False], repeat=10):
        assert run(rule, 8.0, list(finite)) == reference(rule, 8.0, list(finite)), finite


rules = st.builds(
    Rule,
    growth_interval=st.integers(1, 6),
    growth_factor=st.floats(1.01, 8.0),
    backoff_factor=st.floats(0.01, 0.99),
    minimum=st.floats(0.5, 4.0),
    maximum=st.floats(4.0, 2.0**20),
)


@settings(max_examples=300, deadline=None)
@given(rule=rules, finite=st.lists(st.booleans(), max_size=40), share=st.floats(0, 1))
def test_scale_stays_in_its_limits_and_moves_only_as_the_rule_says(
    rule: Rule, finite: list[bool], share: float
) -> None:
    start = min(max(rule.minimum + share * (rule.maximum - rule.minimum), rule.minimum), rule.maximum)
    scales = run(rule, start, finite)
    assert all(rule.minimum <= scale <= rule.maximum for scale in scales)
    in_a_row = 0
    for good, before, after in zip(finite, scales, scales[1:], strict=False):
        in_a_row = in_a_row + 1 if good else 0
        if not good:
            assert after == max(before * rule.backoff_factor, rule.minimum)
        elif in_a_row == rule.growth_interval:
            assert after == min(before * rule.growth_factor, rule.maximum)
            in_a_row = 0
        else:
            assert after == before


def test_scale_stops_at_the_floor_and_recovers_from_it() -> None:
    rule = Rule(growth_interval=1, minimum=1.0, maximum=64.0)
    assert run(rule, 4.0, [False] * 4 + [True] * 3) == [4, 2, 1, 1, 1, 2, 4, 8]


def test_scale_stops_at_the_ceiling_and_comes_back_from_it() -> None:
    rule = Rule(growth_interval=1, minimum=1.0, maximum=10.0)
    assert run(rule, 4.0, [True] * 3 + [False]) == [4, 8, 10, 10, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"growth_interval": 0},
        {"growth_factor": 1.0},
        {"growth_factor": math.inf},
        {"backoff_factor": 0.0},
        {"backoff_factor": 1.0},
        {"minimum": 0.0},
        {"minimum": 4.0, "maximum": 2.0},
        {"maximum": math.inf},
        {"growth_factor": math.nan},
    ],
)
def test_number_out_of_its_range_is_refused_by_name(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Rule(**wrong)  # type: ignore[arg-type]


def test_count_restarts_after_growth_and_after_a_bad_step() -> None:
    rule = Rule(growth_interval=3)
    state, counts = State(1.0, 0), []
    for finite in (True, True, True, True, False, True):
        state = next_state(rule, state, finite)
        counts.append(int(state.finite_in_a_row))
    assert counts == [1, 2, 0, 1, 0, 1]


def test_default_rule_never_leaves_float32s_normal_range() -> None:
    rule = Rule(growth_interval=1)
    assert run(rule, 2.0**15, [False] * 200)[-1] == 1.0
    assert run(rule, 2.0**15, [True] * 200)[-1] == 2.0**32
    assert math.isfinite(float(np.float32(rule.maximum)))


@settings(max_examples=10, deadline=None)
@given(finite=st.lists(st.booleans(), min_size=1, max_size=20), interval=st.integers(1, 4))
def test_numpy_and_keras_ops_give_the_same_states(finite: list[bool], interval: int) -> None:
    import tensorflow as tf
    from keras import ops

    rule = Rule(growth_interval=interval, maximum=2.0**17)
    plain = State(np.float32(2.0**15), np.int32(0))
    tensors = State(tf.constant(2.0**15), tf.constant(0))
    for good in finite:
        plain = next_state(rule, plain, good)
        tensors = next_state(rule, tensors, tf.constant(good), xp=ops)
        assert float(tensors.scale) == float(plain.scale)
        assert int(tensors.finite_in_a_row) == int(plain.finite_in_a_row)
    assert tensors.scale.dtype == tf.float32


@pytest.mark.parametrize(
    ("mode", "float16", "effective"),
    [
        ("auto", True, "dynamic"),
        ("auto", False, "none"),
        ("fixed", False, "fixed"),
        ("none", True, "none"),
        ("dynamic", False, "dynamic"),
    ],
)
def test_auto_means_dynamic_exactly_where_something_computes_in_float16(
    mode: str, float16: bool, effective: str
) -> None:
    assert effective_mode(mode, float16=float16) == effective
