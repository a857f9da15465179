"""Minimising a set that cures: what is left cures, and nothing of it can be spared."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mp_hydra.delta_debugging import minimised

if TYPE_CHECKING:
    from collections.abc import Sequence


@pytest.mark.parametrize("wanted", [[3], [0], [9], [0, 9], [4, 5], [1, 4, 8], list(range(10))])
def test_finds_exactly_what_is_needed_together(wanted: list[int]) -> None:
    assert minimised(range(10), lambda kept: set(wanted) <= set(kept)) == wanted


def test_one_of_two_that_each_suffice() -> None:
    assert minimised(range(6), lambda kept: 1 in kept or 4 in kept) in ([1], [4])


def test_nothing_to_choose_from_and_a_single_thing_are_returned_as_they_are() -> None:
    assert minimised([], lambda _: True) == []
    assert minimised(["a"], lambda _: True) == ["a"]


def test_no_set_is_tried_twice_and_a_single_culprit_among_64_takes_few_trials() -> None:
    tried: list[tuple[int, ...]] = []

    def cures(kept: Sequence[int]) -> bool:
        tried.append(tuple(kept))
        return 37 in kept

    assert minimised(range(64), cures) == [37]
    assert len(tried) == len(set(tried)) <= 2 * 6


@given(st.integers(1, 12), st.data())
def test_what_is_left_cures_and_would_not_without_any_one_of_its_elements(size: int, data: st.DataObject) -> None:
    sets = data.draw(st.lists(st.sets(st.integers(0, size - 1), min_size=1), min_size=1, max_size=3))

    def cures(kept: Sequence[int]) -> bool:
        return any(needed <= set(kept) for needed in sets)

    left = minimised(range(size), cures)
    assert cures(left)
    assert len(left) == 1 or not any(cures([other for other in left if other != one]) for one in left)
