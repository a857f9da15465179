from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, stats  # type: ignore[import-untyped]

from mp_hydra.compare.accuracy import AccuracyComparison, Verdict, compare_accuracy, judge
from mp_hydra.compare.crossed import analyse, interval
from mp_hydra.compare.paired_proportions import score_interval
from mp_hydra.errors import ConfigError, DataError


def models(outcomes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Baseline and mixed, correct or not, whose difference is `outcomes` (-1, 0 or 1)."""
    return outcomes <= 0, outcomes >= 0


def compare(outcomes: np.ndarray, **options: float) -> AccuracyComparison:
    baseline, mixed = models(outcomes)
    return compare_accuracy(baseline, mixed, **options)


def counts(gained: int, lost: int, samples: int, seeds: int = 1) -> np.ndarray:
    """The same outcomes for each seed."""
    row = np.zeros(samples, dtype="int8")
    row[:gained], row[gained : gained + lost] = 1, -1
    return np.tile(row, (seeds, 1))


def simulated(
    rng: np.random.Generator,
    seeds: int,
    samples: int,
    *,
    discordant: float,
    alike: float,
    seed_sd: float,
    difference: float,
) -> np.ndarray:
    """Outcomes with seeds and samples as crossed random factors.

    A share 2 * `discordant` of the samples is hard. On a hard sample a pair of models disagrees every second time; who is
    right then leans to one side, the same for all seeds, by `alike` (0: not at all, 1: always). The true accuracy
    difference of a seed is normal with mean `difference` and standard deviation `seed_sd`; these are shares, not points.
    """
    hard = rng.binomial(samples, 2 * discordant)
    lean = np.where(rng.random(hard) < 0.5, alike, -alike)
    shift = (difference + seed_sd * rng.standard_normal(seeds)) / discordant
    assert alike + np.abs(shift).max() <= 1, "the difference would be smaller than it is said to be"
    wins = rng.random((seeds, hard)) < (1 + lean[None, :] + shift[:, None]) / 2
    outcomes = np.zeros((seeds, samples), dtype="int8")
    outcomes[:, :hard] = np.where(rng.random((seeds, hard)) < 0.5, np.where(wins, 1, -1), 0)
    return outcomes


def likeliest_loss(gained: int, lost: int, samples: int, difference: float) -> float:
    """Probability of a lost sample that maximises the trinomial likelihood under `difference`, found by search."""

    def minus_log_likelihood(q: float) -> float:
        cells = ((gained, q + difference), (lost, q), (samples - gained - lost, 1 - 2 * q - difference))
        return -sum(count * math.log(max(p, 1e-300)) for count, p in cells if count)

    bounds = (max(0.0, -difference), (1 - difference) / 2)
    return float(
        optimize.minimize_scalar(minus_log_likelihood, bounds=bounds, method="bounded", options={"xatol": 1e-12}).x
    )


# The score interval of one pair of models


def test_score_interval_equals_a_published_example() -> None:
    # Cavo et al. 2012 in Fagerland, Lydersen and Laake, Statistical Analysis of Contingency Tables (2017), chapter 8.
    low, high = score_interval(6, 16, 161, level=0.95)
    assert (round(low, 4), round(high, 4)) == (-0.1240, -0.0054)


@pytest.mark.parametrize(
    ("gained", "lost", "samples"), [(6, 16, 161), (0, 1, 50), (12, 2, 50), (3, 3, 1000), (7, 0, 20)]
)
def test_score_interval_ends_where_the_score_test_with_searched_likelihood_rejects(
    gained: int, lost: int, samples: int
) -> None:
    z = stats.norm.ppf(0.95)
    for end, sign in zip(score_interval(gained, lost, samples, level=0.9), (1, -1), strict=True):
        q = likeliest_loss(gained, lost, samples, end)
        score = (gained - lost - samples * end) / math.sqrt(samples * (2 * q + end * (1 - end)))
        assert score == pytest.approx(sign * z, rel=1e-4)


@pytest.mark.parametrize("samples", [5, 100, 1_000_000])
def test_score_interval_without_discordant_samples_has_its_closed_form(samples: int) -> None:
    z = stats.norm.ppf(0.95)
    expected = z**2 / (samples + z**2)
    assert score_interval(0, 0, samples, level=0.9) == pytest.approx((-expected, expected), rel=1e-6)


def test_score_interval_of_models_that_differ_on_every_sample_ends_at_one() -> None:
    z = stats.norm.ppf(0.95)
    assert score_interval(10, 0, 10, level=0.9) == pytest.approx(((10 - z**2) / (10 + z**2), 1.0))
    assert score_interval(0, 10, 10, level=0.9) == pytest.approx((-1.0, -(10 - z**2) / (10 + z**2)))


# Seeds and samples


def test_analysis_of_variance_equals_explicit_sums() -> None:
    d = np.random.default_rng(0).integers(-1, 2, size=(4, 23))
    seeds, samples = d.shape
    mean = d.mean()
    of_seeds = sum(samples * (d[s].mean() - mean) ** 2 for s in range(seeds)) / (seeds - 1)
    of_samples = sum(seeds * (d[:, i].mean() - mean) ** 2 for i in range(samples)) / (samples - 1)
    rest = sum((d[s, i] - d[s].mean() - d[:, i].mean() + mean) ** 2 for s in range(seeds) for i in range(samples)) / (
        (seeds - 1) * (samples - 1)
    )
    found = analyse(d)
    assert found.mean_square_seeds == pytest.approx(of_seeds)
    assert found.mean_square_samples == pytest.approx(of_samples)
    assert found.mean_square_rest == pytest.approx(rest)
    assert found.estimate == pytest.approx(mean)
    assert found.variance == pytest.approx(d.var())


def test_mean_squares_of_simulated_outcomes_give_the_variance_of_the_mean() -> None:
    rng = np.random.default_rng(1)
    setting = {"discordant": 0.06, "alike": 0.6, "seed_sd": 0.004, "difference": 0.0}
    found = [analyse(simulated(rng, 4, 1000, **setting)) for _ in range(2000)]
    predicted = np.mean([f.mean_square_seeds + f.mean_square_samples - f.mean_square_rest for f in found]) / 4000
    assert predicted == pytest.approx(np.var([f.estimate for f in found]), rel=0.1)


def test_interval_of_many_discordant_samples_is_the_sum_of_squares_of_seed_and_sample_noise() -> None:
    d = simulated(np.random.default_rng(2), 5, 50_000, discordant=0.1, alike=0.5, seed_sd=0.01, difference=0.0)
    found = analyse(d)
    total = found.seeds * found.samples
    t, z = stats.t.ppf(0.95, 4), stats.norm.ppf(0.95)
    between_samples = found.mean_square_samples - found.mean_square_rest
    half = math.sqrt((t**2 * found.mean_square_seeds + z**2 * between_samples) / total)
    low, high = interval(found, level=0.9)
    assert found.estimate - low == pytest.approx(half, rel=0.005)
    assert high - found.estimate == pytest.approx(half, rel=0.005)


@pytest.mark.parametrize("seeds", [2, 3, 10])
def test_seeds_that_repeat_one_another_tell_no_more_than_one(seeds: int) -> None:
    one, several = compare(counts(30, 50, 4000)), compare(counts(30, 50, 4000, seeds))
    assert (several.low, several.high) == pytest.approx((one.low, one.high))


def test_more_seeds_narrow_the_interval_down_to_what_the_test_set_allows() -> None:
    rng = np.random.default_rng(3)
    setting = {"discordant": 0.02, "alike": 0.6, "seed_sd": 0.0, "difference": 0.0}
    arms = [compare(simulated(rng, seeds, 5000, **setting)).detectable for seeds in (3, 10, 1000)]
    assert arms[0] > arms[1] > arms[2]
    # 4 % of the samples are hard, where the mean over many seeds is 0.3 one way or the other.
    samples_alone = 100 * stats.norm.ppf(0.95) * math.sqrt(0.04 * 0.3**2 / 5000)
    assert arms[2] == pytest.approx(samples_alone, rel=0.15)


# Verdicts


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [
        (-0.09, 0.09, Verdict.equivalent),
        (-0.09, -0.01, Verdict.equivalent),
        (-0.10, 0.05, Verdict.undecided),
        (-0.30, -0.05, Verdict.undecided),
        (-0.30, 0.30, Verdict.undecided),
        (-0.30, -0.11, Verdict.worse),
        (0.11, 0.30, Verdict.better),
        (-0.30, -0.10, Verdict.undecided),
    ],
)
def test_verdict_needs_the_whole_interval_on_one_side_of_the_margin(low: float, high: float, verdict: Verdict) -> None:
    assert judge(low, high, 0.1) is verdict


@pytest.mark.parametrize("seeds", [1, 3])
def test_identical_predictions_are_equivalent_on_a_large_test_set(seeds: int) -> None:
    found = compare(counts(0, 0, 10_000, seeds))
    missed = 100 * (1 - 0.05 ** (1 / 10_000))
    assert found.verdict is Verdict.equivalent
    assert found.difference == 0
    assert (found.low, found.high) == pytest.approx((-missed, missed))
    assert found.discordant == (0, 0)
    assert (found.more_seeds, found.more_samples, found.prospect) == (None, None, None)
    assert any("agree" in remark for remark in found.remarks)


@pytest.mark.parametrize("seeds", [1, 3, 100])
def test_identical_predictions_are_undecided_on_a_small_test_set_however_many_seeds(seeds: int) -> None:
    found = compare(counts(0, 0, 1000, seeds))
    assert found.verdict is Verdict.undecided
    assert found.more_seeds is None
    # The smallest n with 1 - 0.05^(1/n) < 0.001.
    assert found.more_samples == math.ceil(math.log(0.05) / math.log(0.999)) - 1000 == 1995
    assert found.prospect is Verdict.equivalent


def test_one_differing_sample_is_equivalent_on_a_large_test_set_and_within_the_exact_binomial_bound() -> None:
    found = compare(counts(0, 1, 10_000))
    assert found.verdict is Verdict.equivalent
    assert found.difference == pytest.approx(-0.01)
    assert found.discordant == (0, 1)
    exact = -100 * stats.beta.ppf(0.95, 2, 9_999)  # Clopper and Pearson: the loss at most, 1 of 10,000
    assert found.low == pytest.approx(exact, rel=0.06)


def test_a_tiny_test_set_is_undecided_and_says_what_one_sample_weighs() -> None:
    found = compare(counts(1, 2, 100, seeds=3))
    assert found.verdict is Verdict.undecided
    assert "One test sample is 1 points, more than the margin of 0.1." in found.remarks
    assert found.detectable > 1


def test_one_seed_speaks_of_two_models_only() -> None:
    found = compare(counts(10, 10, 50_000))
    assert (found.seeds, found.samples, found.scope) == (1, 50_000, "these two models only")
    assert found.verdict is Verdict.equivalent
    assert "Tango" in found.method
    assert any("One seed" in remark for remark in found.remarks)


def test_several_seeds_speak_of_the_recipe_and_two_are_called_few() -> None:
    two = compare(counts(10, 10, 50_000, 2))
    assert two.scope == "training with this recipe"
    assert any("Two seeds" in remark for remark in two.remarks)
    assert not any("seeds tell little" in remark for remark in compare(counts(10, 10, 50_000, 3)).remarks)


def test_two_seeds_that_disagree_are_undecided_although_each_alone_would_be_worse() -> None:
    d = np.concatenate([counts(0, 30, 10_000), counts(0, 90, 10_000)])
    assert compare(d[:1]).verdict is compare(d[1:]).verdict is Verdict.worse
    both = compare(d)
    assert both.verdict is Verdict.undecided
    # t quantile of one degree of freedom times the standard error of the two means 0.3 and 0.9 points.
    assert both.difference - both.low >= stats.t.ppf(0.95, 1) * 0.3


@pytest.mark.parametrize(("seeds", "at_least"), [(3, 140), (5, 195)])
def test_a_real_loss_of_half_a_point_is_found(seeds: int, at_least: int) -> None:
    rng = np.random.default_rng(4)
    setting = {"discordant": 0.02, "alike": 0.5, "seed_sd": 0.001, "difference": -0.005}
    verdicts = [compare(simulated(rng, seeds, 10_000, **setting)).verdict for _ in range(200)]
    assert verdicts.count(Verdict.worse) >= at_least
    assert verdicts.count(Verdict.equivalent) == verdicts.count(Verdict.better) == 0


def test_a_loss_that_is_sure_but_may_be_within_the_margin_is_undecided_and_said_to_be_lower() -> None:
    found = compare(counts(2, 16, 10_000))
    assert found.high < 0
    assert found.verdict is Verdict.undecided
    assert "Accuracy is lower, but whether by more than the margin is open." in found.remarks


def test_a_loss_that_is_sure_and_within_the_margin_is_equivalent_and_said_to_be_lower() -> None:
    found = compare(counts(0, 16, 100_000))
    assert found.high < 0
    assert found.verdict is Verdict.equivalent
    assert "Accuracy is lower, by less than the margin." in found.remarks


# Error rates under simulation: (seeds, samples, margin in points, setting)
ALARMS = [
    (1, 2000, 1.0, {"discordant": 0.04, "alike": 0.5, "seed_sd": 0.0}),
    (1, 10_000, 0.1, {"discordant": 0.002, "alike": 0.4, "seed_sd": 0.0}),
    (2, 2000, 2.0, {"discordant": 0.06, "alike": 0.4, "seed_sd": 0.002}),
    (3, 2000, 1.0, {"discordant": 0.04, "alike": 0.4, "seed_sd": 0.002}),
    (5, 2000, 0.7, {"discordant": 0.04, "alike": 0.5, "seed_sd": 0.002}),
    (5, 2000, 0.6, {"discordant": 0.04, "alike": 0.8, "seed_sd": 0.0}),
    (10, 2000, 0.5, {"discordant": 0.04, "alike": 0.0, "seed_sd": 0.0}),
    (10, 2000, 0.5, {"discordant": 0.04, "alike": 0.6, "seed_sd": 0.002}),
    (10, 2000, 0.6, {"discordant": 0.04, "alike": 0.2, "seed_sd": 0.005}),
]


@pytest.mark.parametrize(("seeds", "samples", "margin", "setting"), ALARMS)
def test_a_loss_as_large_as_the_margin_is_called_equivalent_at_most_once_in_twenty(
    seeds: int, samples: int, margin: float, setting: dict[str, float]
) -> None:
    rng, repeats = np.random.default_rng(5), 1500
    alarms = covered = 0
    for _ in range(repeats):
        d = simulated(rng, seeds, samples, **setting, difference=-margin / 100)
        low, high = interval(analyse(d), level=0.9)
        alarms += judge(100 * low, 100 * high, margin) is Verdict.equivalent
        covered += low <= -margin / 100 <= high
    noise = 3 * math.sqrt(0.05 * 0.95 / repeats)
    assert alarms / repeats <= 0.05 + noise
    assert covered / repeats >= 0.90 - 3 * math.sqrt(0.09 / repeats)


@pytest.mark.parametrize(("seeds", "samples"), [(1, 1000), (1, 3000), (5, 3000), (5, 10_000)])
def test_rare_samples_that_every_mixed_model_loses_do_not_pass_as_equivalent(seeds: int, samples: int) -> None:
    # At 0.1 % of all samples a test set of 1,000 holds none of them in 37 % of all cases.
    losses, chances = range(200), stats.binom.pmf(range(200), samples, 0.001)
    called = [compare(counts(0, lost, samples, seeds)).verdict is Verdict.equivalent for lost in losses]
    assert float(np.dot(called, chances)) <= 0.062


def test_equivalence_is_found_where_it_holds_and_the_design_is_large_enough() -> None:
    rng = np.random.default_rng(6)
    setting = {"discordant": 0.002, "alike": 0.3, "seed_sd": 0.0001, "difference": 0.0}
    verdicts = [compare(simulated(rng, 5, 10_000, **setting)).verdict for _ in range(200)]
    assert verdicts.count(Verdict.equivalent) >= 180


# Advice


def test_more_samples_for_one_seed_are_the_fewest_that_decide() -> None:
    found = compare(counts(50, 50, 10_000))
    assert found.verdict is Verdict.undecided
    assert found.more_seeds is None
    assert any("start with three" in remark for remark in found.remarks)
    assert found.more_samples is not None

    def arm(samples: int) -> float:
        low, _ = score_interval(0.005 * samples, 0.005 * samples, samples, level=0.9)
        return -low

    enough = 10_000 + found.more_samples
    assert arm(enough) < 0.001 <= arm(enough - 1)
    assert enough == pytest.approx(stats.norm.ppf(0.95) ** 2 * 0.01 / 0.001**2, rel=0.05)
    assert found.prospect is Verdict.equivalent


def test_more_seeds_follow_from_the_estimated_noise() -> None:
    # In each of two seeds 100 samples are gained and 100 lost, no sample in both: all the noise is in the rest.
    d = np.zeros((2, 20_000), dtype="int8")
    d[0, :100], d[0, 100:200], d[1, 200:300], d[1, 300:400] = 1, -1, 1, -1
    found = analyse(d)
    assert found.mean_square_rest == pytest.approx(0.01, rel=1e-3)
    assert compare(d).verdict is Verdict.equivalent
    asked = compare(d, margin=0.05)
    assert asked.verdict is Verdict.undecided
    assert asked.prospect is Verdict.equivalent
    assert asked.more_seeds is not None

    def arm(seeds: int) -> float:
        return 100 * float(stats.t.ppf(0.95, seeds - 1)) * math.sqrt(found.mean_square_rest / (seeds * 20_000))

    enough = 2 + asked.more_seeds
    assert arm(enough) < 0.05 < arm(enough - 1)


def test_no_number_of_seeds_makes_up_for_a_small_test_set() -> None:
    found = compare(counts(5, 5, 1000, 3))
    assert found.more_seeds is None
    assert any(remark.startswith("Even 1,000 seeds") for remark in found.remarks)
    assert found.more_samples is not None


def test_no_number_of_samples_makes_up_for_noise_between_seeds() -> None:
    d = np.concatenate([counts(0, 30, 10_000), counts(30, 0, 10_000)])
    found = compare(d)
    assert found.more_samples is None
    assert any(remark.startswith("Even 100,000,000 test samples") for remark in found.remarks)
    assert found.more_seeds is not None
    assert found.more_seeds > 5


def test_an_estimate_outside_the_margin_is_said_to_lead_to_worse() -> None:
    found = compare(counts(30, 50, 10_000))
    assert found.verdict is Verdict.undecided
    assert found.prospect is Verdict.worse
    assert any("if it holds, more data would show worse, not equivalent" in remark for remark in found.remarks)


# Bad input


@pytest.mark.parametrize("margin", [0.0, -0.1, math.nan, math.inf])
def test_a_margin_that_is_not_a_positive_number_is_refused(margin: float) -> None:
    with pytest.raises(ConfigError, match="margin="):
        compare(counts(0, 0, 10), margin=margin)


@pytest.mark.parametrize("level", [0.0, 1.0, 90.0, math.nan])
def test_a_level_outside_zero_and_one_is_refused(level: float) -> None:
    with pytest.raises(ConfigError, match="level="):
        compare(counts(0, 0, 10), level=level)


@pytest.mark.parametrize(
    "mixed", [np.ones((1, 9), bool), np.ones((2, 10), bool), np.ones(10, bool), np.ones((1, 10)), np.ones((1, 0), bool)]
)
def test_arrays_that_do_not_pair_are_refused_in_one_line(mixed: np.ndarray) -> None:
    with pytest.raises(DataError, match=r"shape") as raised:
        compare_accuracy(np.ones((1, 10), dtype=bool), mixed)
    assert "\n" not in str(raised.value)


# Properties


@st.composite
def paired(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray]:
    seeds, samples = draw(st.integers(1, 4)), draw(st.integers(1, 60))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    accuracy, agreement = draw(st.floats(0, 1)), draw(st.floats(0, 1))
    baseline = rng.random((seeds, samples)) < accuracy
    mixed = np.where(rng.random((seeds, samples)) < agreement, baseline, rng.random((seeds, samples)) < accuracy)
    return baseline, mixed


MARGINS = st.floats(0.01, 100)
OPPOSITE = {
    Verdict.worse: Verdict.better,
    Verdict.better: Verdict.worse,
    Verdict.equivalent: Verdict.equivalent,
    Verdict.undecided: Verdict.undecided,
}


@settings(deadline=None, max_examples=60)
@given(paired(), MARGINS)
def test_swapping_the_models_turns_the_sign(pair: tuple[np.ndarray, np.ndarray], margin: float) -> None:
    there, back = compare_accuracy(*pair, margin=margin), compare_accuracy(*pair[::-1], margin=margin)
    assert (back.difference, back.low, back.high) == pytest.approx((-there.difference, -there.high, -there.low))
    assert back.verdict is OPPOSITE[there.verdict]
    assert back.discordant == there.discordant[::-1]


@settings(deadline=None, max_examples=60)
@given(paired(), st.integers(0, 1000))
def test_the_order_of_seeds_and_samples_does_not_matter(pair: tuple[np.ndarray, np.ndarray], seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows, columns = rng.permutation(pair[0].shape[0]), rng.permutation(pair[0].shape[1])
    shuffled = [array[rows][:, columns] for array in pair]
    assert compare_accuracy(*shuffled) == compare_accuracy(*pair)


@settings(deadline=None, max_examples=100)
@given(paired(), st.floats(0.01, 0.99))
def test_the_interval_has_a_width_and_holds_the_estimate(pair: tuple[np.ndarray, np.ndarray], level: float) -> None:
    found = compare_accuracy(*pair, level=level)
    assert -100 <= found.low <= found.difference <= found.high <= 100
    assert found.low < found.high
    assert found.difference == pytest.approx(100 * (pair[1].mean() - pair[0].mean()))


@settings(deadline=None, max_examples=60)
@given(paired(), MARGINS, st.floats(1, 100))
def test_a_wider_margin_keeps_equivalent_equivalent(
    pair: tuple[np.ndarray, np.ndarray], margin: float, factor: float
) -> None:
    if compare_accuracy(*pair, margin=margin).verdict is Verdict.equivalent:
        assert compare_accuracy(*pair, margin=margin * factor).verdict is Verdict.equivalent


@settings(deadline=None, max_examples=60)
@given(paired(), st.floats(0.5, 0.9))
def test_a_higher_level_never_narrows_the_interval(pair: tuple[np.ndarray, np.ndarray], level: float) -> None:
    lower, higher = compare_accuracy(*pair, level=level), compare_accuracy(*pair, level=level + 0.09)
    assert higher.low <= lower.low + 1e-9
    assert higher.high >= lower.high - 1e-9
