"""Precisions take turns: the order worked out by hand, and what holds for every sweep."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING

from hypothesis import given
from hypothesis import strategies as st

from mp_hydra.sweep.order import interleaved, replicated

if TYPE_CHECKING:
    from collections.abc import Sequence


def grid(**values: list[str]) -> list[list[str]]:
    """Jobs in Hydra's own order: the last key varies fastest."""
    return [
        [f"{key}={value}" for key, value in zip(values, job, strict=True)]
        for job in itertools.product(*values.values())
    ]


def short(jobs: Sequence[Sequence[str]]) -> list[str]:
    return ["".join(override.partition("=")[2] for override in job) for job in jobs]


def test_three_precisions_and_three_seeds_make_a_latin_square() -> None:
    jobs = grid(precision=["a", "b", "c"], seed=["0", "1", "2"])
    assert short(interleaved(jobs)) == ["a0", "b0", "c0", "b1", "c1", "a1", "c2", "a2", "b2"]


def test_other_settings_stay_together_within_a_seed() -> None:
    jobs = grid(precision=["a", "b"], model=["x", "y"], seed=["0", "1"])
    assert short(interleaved(jobs)) == ["ax0", "bx0", "ay0", "by0", "bx1", "ax1", "by1", "ay1"]


def test_without_a_seed_precisions_take_turns_over_the_other_settings() -> None:
    jobs = grid(precision=["a", "b"], batch_size=["8", "16"])
    assert short(interleaved(jobs)) == ["a8", "b8", "a16", "b16"]


def test_jobs_without_a_precision_keep_their_order_within_a_seed() -> None:
    jobs = grid(seed=["0", "1"], batch_size=["8", "16"])
    assert short(interleaved(jobs)) == ["08", "016", "18", "116"]


def test_keys_that_are_added_with_a_plus_count() -> None:
    jobs = [
        ["+precision=a", "+seed=0"],
        ["+precision=a", "+seed=1"],
        ["+precision=b", "+seed=0"],
        ["+precision=b", "+seed=1"],
    ]
    assert [job[0][-1] + job[1][-1] for job in interleaved(jobs)] == ["a0", "b0", "b1", "a1"]


def test_replicated_only_with_more_than_one_seed() -> None:
    assert replicated(grid(precision=["a"], seed=["0", "1"]))
    assert not replicated(grid(precision=["a", "b"], seed=["0"]))
    assert not replicated(grid(precision=["a", "b"]))


@given(
    precisions=st.integers(1, 4),
    seeds=st.integers(1, 5),
    others=st.integers(1, 3),
    shuffle=st.randoms(use_true_random=False),
)
def test_every_job_runs_once_and_each_precision_stands_in_each_place_equally_often(
    precisions: int, seeds: int, others: int, shuffle: object
) -> None:
    names = [f"p{number}" for number in range(precisions)]
    jobs = grid(precision=names, x=[str(n) for n in range(others)], seed=[str(n) for n in range(seeds)])
    shuffle.shuffle(jobs)  # type: ignore[attr-defined]
    ordered = interleaved(jobs)
    assert Counter(map(tuple, ordered)) == Counter(map(tuple, jobs))
    blocks = [[job[0] for job in ordered[start : start + precisions]] for start in range(0, len(ordered), precisions)]
    assert all(len(set(block)) == precisions for block in blocks)
    if seeds % precisions == 0:
        places = Counter((name, place) for block in blocks for place, name in enumerate(block))
        assert len(places) == precisions**2  # each in every place
        assert len(set(places.values())) == 1
