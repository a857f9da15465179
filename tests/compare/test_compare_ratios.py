from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import signal, stats  # type: ignore[import-untyped]

from mp_hydra.compare.ratios import RatioEstimate, memory_saving, paired_ratio, within_run_ratio
from mp_hydra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable


def steps(rng: np.random.Generator, count: int, median: float, correlation: float = 0.0) -> np.ndarray:
    """Step times: log-normal around `median` by 5 %, each like the one before by `correlation`, one in 20 threefold."""
    noise = rng.standard_normal(count + 200) * math.sqrt(1 - correlation**2)
    wave = signal.lfilter([1], [1, -correlation], noise)[200:]
    times: np.ndarray = median * np.exp(0.05 * wave) * np.where(rng.random(count) < 0.05, 3, 1)
    return times


# Pairs of runs


def test_paired_ratio_is_the_geometric_mean_with_the_t_interval_of_scipy() -> None:
    baseline, mixed = np.array([100.0, 110.0, 95.0, 102.0]), np.array([55.0, 52.0, 50.0, 58.0])
    found = paired_ratio(baseline, mixed, level=0.95)
    logs = np.log(mixed / baseline)
    interval = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
    assert found.value == pytest.approx(stats.gmean(mixed / baseline))
    assert (found.low, found.high) == pytest.approx((math.exp(interval.low), math.exp(interval.high)))
    assert (found.pairs, found.level) == (4, 0.95)
    assert "run to run" in found.method


def test_paired_ratio_of_two_pairs_worked_out_by_hand() -> None:
    # Ratios 1/2 and 2: logs -ln 2 and ln 2, mean 0, standard error ln 2; t quantile of one degree at 0.75 is 1.
    found = paired_ratio(np.array([2.0, 1.0]), np.array([1.0, 2.0]), level=0.5)
    assert (found.value, found.low, found.high) == pytest.approx((1.0, 0.5, 2.0))


def test_one_pair_has_a_ratio_and_no_interval() -> None:
    found = paired_ratio(np.array([400.0]), np.array([220.0]))
    assert found.value == pytest.approx(0.55)
    assert (found.low, found.high, found.pairs) == (None, None, 1)
    assert "no spread is known" in found.method


def test_pairs_that_agree_exactly_have_an_interval_without_width() -> None:
    found = paired_ratio(np.array([400.0, 400.0, 400.0]), np.array([200.0, 200.0, 200.0]))
    assert (found.value, found.low, found.high) == pytest.approx((0.5, 0.5, 0.5))


@settings(deadline=None)
@given(st.lists(st.tuples(st.floats(1e-3, 1e6), st.floats(1e-3, 1e6)), min_size=2, max_size=8), st.floats(1e-3, 1e3))
def test_paired_ratio_turns_over_with_the_roles_and_does_not_depend_on_the_unit(
    pairs: list[tuple[float, float]], unit: float
) -> None:
    baseline, mixed = (np.array(values) for values in zip(*pairs, strict=True))
    there, back = paired_ratio(baseline, mixed), paired_ratio(mixed, baseline)
    assert there.low is not None
    assert there.high is not None
    assert there.low <= there.value * (1 + 1e-9)
    assert there.value <= there.high * (1 + 1e-9)
    if there.low > 0 and there.high < math.inf:
        assert (back.value, back.low, back.high) == pytest.approx((1 / there.value, 1 / there.high, 1 / there.low))
    assert paired_ratio(baseline * unit, mixed * unit).value == pytest.approx(there.value)


def test_an_interval_beyond_what_a_float_holds_ends_at_infinity() -> None:
    found = paired_ratio(np.array([1.0, 1e6]), np.array([1e6, 1.0]), level=0.9999)
    assert (found.low, found.high) == (0.0, math.inf)


# Step times of one pair


def test_within_run_ratio_is_that_of_the_medians_with_the_welch_interval_of_batch_medians() -> None:
    rng = np.random.default_rng(0)
    baseline, mixed = steps(rng, 205, 20.0), steps(rng, 400, 10.0)
    found = within_run_ratio(baseline, mixed, level=0.9)
    batches = [np.log(np.median(series.reshape(10, -1), axis=1)) for series in (baseline[5:], mixed)]
    welch = stats.ttest_ind(batches[1], batches[0], equal_var=False).confidence_interval(0.9)
    half = (welch.high - welch.low) / 2
    assert found.value == pytest.approx(np.median(mixed) / np.median(baseline))
    assert (found.low, found.high) == pytest.approx((found.value * math.exp(-half), found.value * math.exp(half)))
    assert "within these runs only" in found.method


def test_within_run_ratio_of_constant_steps_is_exact() -> None:
    found = within_run_ratio(np.full(100, 20.0), np.full(50, 10.0))
    assert (found.value, found.low, found.high) == (0.5, 0.5, 0.5)


@pytest.mark.parametrize(("count", "correlation"), [(20, 0.0), (100, 0.0), (100, 0.5), (500, 0.9), (2000, 0.9)])
def test_within_run_interval_covers_the_ratio_although_steps_are_correlated_and_have_outliers(
    count: int, correlation: float
) -> None:
    rng, repeats, covered = np.random.default_rng(1), 600, 0
    for _ in range(repeats):
        found = within_run_ratio(steps(rng, count, 20.0, correlation), steps(rng, count, 10.0, correlation))
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= 0.5 <= found.high
    assert covered / repeats >= 0.90


def test_a_drift_within_a_run_widens_the_interval() -> None:
    rng = np.random.default_rng(2)
    baseline, steady = steps(rng, 200, 20.0), steps(rng, 200, 10.0)
    drifting = within_run_ratio(baseline, steady * np.linspace(0.8, 1.2, 200))
    still = within_run_ratio(baseline, steady)
    assert drifting.high is not None
    assert still.high is not None
    assert drifting.high / drifting.value > 3 * (still.high / still.value - 1) + 1


def test_few_steps_give_a_ratio_and_say_why_there_is_no_interval() -> None:
    found = within_run_ratio(np.full(100, 20.0), np.full(19, 10.0))
    assert (found.value, found.low, found.high) == (0.5, None, None)
    assert "19 steps are too few" in found.method


# Memory


def test_memory_saving_worked_out_by_hand() -> None:
    # 300 MiB of state and 500 of activations; 300 are left of these, where 250 would be half.
    found = memory_saving(baseline_training=500, mixed_training=300, state=300)
    assert (found.peak_ratio, found.attainable_peak_ratio, found.share) == (0.75, 0.6875, 0.8)
    assert found.reason == ""


@pytest.mark.parametrize(("mixed", "share"), [(400.0, 0.0), (200.0, 1.0), (500.0, -0.5), (150.0, 1.25)])
def test_share_of_the_saving_is_0_without_one_1_at_half_and_may_lie_outside(mixed: float, share: float) -> None:
    assert memory_saving(400.0, mixed, 50.0).share == share


def test_a_baseline_whose_steps_use_no_memory_has_no_share_and_a_reason() -> None:
    found = memory_saving(0.0, 0.0, 10.0)
    assert (found.peak_ratio, found.attainable_peak_ratio, found.share) == (1.0, 1.0, None)
    assert "no memory on top" in found.reason


def test_no_memory_at_all_has_no_ratio_and_a_reason() -> None:
    found = memory_saving(0.0, 5.0, 0.0)
    assert (found.peak_ratio, found.attainable_peak_ratio, found.share) == (None, None, None)
    assert found.reason


# Bad input


@pytest.mark.parametrize("values", [[], [0.0], [-1.0], [math.nan], [math.inf], [[1.0]]])
@pytest.mark.parametrize("function", [paired_ratio, within_run_ratio])
def test_values_that_have_no_ratio_are_refused_by_name(function: Callable[..., RatioEstimate], values: list) -> None:
    with pytest.raises(DataError, match="mixed:"):
        function(np.array([1.0]), np.array(values))


def test_unequal_numbers_of_pairs_are_refused() -> None:
    with pytest.raises(DataError, match="3 and 2"):
        paired_ratio(np.ones(3), np.ones(2))


@pytest.mark.parametrize("function", [paired_ratio, within_run_ratio])
def test_a_level_outside_zero_and_one_is_refused(function: Callable[..., RatioEstimate]) -> None:
    with pytest.raises(ConfigError, match="level=95"):
        function(np.ones(30), np.ones(30), level=95)


@pytest.mark.parametrize("value", [-1.0, math.nan, math.inf])
def test_memory_that_is_no_amount_is_refused_by_name(value: float) -> None:
    with pytest.raises(DataError, match="mixed_training"):
        memory_saving(100.0, value, 10.0)
