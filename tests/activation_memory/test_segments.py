"""Where a model is cut for recomputation; costs worked out by hand or by trying every way to cut."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mp_hydra.activation_memory.segments import Step, segments


def chain(sizes: list[int], inside: list[int]) -> list[Step]:
    return [Step([i], [(i + 1, size)], inside=more) for i, (size, more) in enumerate(zip(sizes, inside, strict=True))]


def spans(steps: list[Step], results: list[Any], **options: Any) -> list[tuple[int, int, bool]]:
    return [(s.first, s.end, s.recomputed) for s in segments(steps, results, **options)]


def peak(steps: list[Step], results: list[Any], firsts: list[int]) -> int:
    """The most that is there at once: what is kept before a segment and all inside it."""
    ends = [*firsts[1:], len(steps)]
    last = {key: i for i, step in enumerate(steps) for key in step.uses} | dict.fromkeys(results, len(steps))
    kept, peaks = 0, []
    for first, end in zip(firsts, ends, strict=True):
        peaks.append(kept + sum(step.inside for step in steps[first:end]))
        kept += sum(size for step in steps[first:end] for key, size in step.gives if last.get(key, -1) >= end)
    return max(peaks)


def test_a_chain_of_equal_blocks_is_cut_at_each_and_its_last_is_not_recomputed() -> None:
    assert spans(chain([1] * 4, [10] * 4), [4]) == [(0, 1, True), (1, 2, True), (2, 3, True), (3, 4, False)]


def test_the_last_is_recomputed_in_a_model_inside_another() -> None:
    assert spans(chain([1] * 2, [10] * 2), [2], last_too=True) == [(0, 1, True), (1, 2, True)]


def test_early_segments_are_larger_as_less_is_kept_when_their_turn_comes() -> None:
    # Segments of 5, 4, 3, 2 and 1 peak at 5 each; one more layer would not fit.
    found = segments(chain([1] * 15, [1] * 15), [15])
    assert [s.end - s.first for s in found] == [5, 4, 3, 2, 1]


def test_cuts_are_where_tensors_are_small() -> None:
    steps = chain([9, 1, 9, 9, 1, 9], [9, 9, 6, 6, 6, 9])
    assert [first for first, _, _ in spans(steps, [6])] == [0, 2, 5]


def test_a_tensor_used_far_on_is_kept_once() -> None:
    steps = [Step(["in"], [("skip", 3)], 6), *chain([1] * 4, [6] * 4), Step([4, "skip"], [("out", 1)], 6)]
    steps[1] = Step(["skip"], [(1, 1)], 6)
    found = segments(steps, ["out"])
    assert [s.first for s in found] == [0, 1, 2, 3, 4, 5]
    assert [s.kept for s in found] == [3, 1, 1, 1, 1, 1]


def test_a_step_alone_is_in_no_segment_and_divides_those_around_it() -> None:
    steps = chain([1] * 5, [10] * 5)
    steps[2] = Step([2], [(3, 1)], 0, alone=True)
    found = segments(steps, [5])
    assert [(s.first, s.end, s.recomputed, s.alone) for s in found] == [
        (0, 1, True, False),
        (1, 2, True, False),
        (2, 3, False, True),
        (3, 4, True, False),
        (4, 5, False, False),
    ]


def test_a_segment_that_would_keep_as_much_as_it_gives_up_runs_as_it_is() -> None:
    steps = [Step([0], [(1, 5)], 5), Step([1], [(2, 1)], 20, alone=True), Step([2], [(3, 1)], 4)]
    assert spans(steps, [3], last_too=True) == [(0, 1, False), (1, 2, False), (2, 3, True)]


@pytest.mark.parametrize(("every", "firsts"), [(1, [0, 1, 2, 3, 4]), (2, [0, 2, 4]), (3, [0, 3]), (9, [0])])
def test_every_joins_neighbours(every: int, firsts: list[int]) -> None:
    assert [s.first for s in segments(chain([1] * 5, [10] * 5), [5], every=every)] == firsts


def test_a_model_without_steps_has_no_segments() -> None:
    assert segments([], []) == []


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_segments_cover_every_step_once_and_their_peak_is_near_the_least_of_all_ways_to_cut(
    data: st.DataObject,
) -> None:
    count = data.draw(st.integers(1, 8))
    steps = []
    for i in range(count):
        uses = data.draw(st.lists(st.integers(0, i), min_size=1, max_size=2, unique=True)) if i else [0]
        size = data.draw(st.integers(1, 8))
        steps.append(Step(uses, [(i + 1, size)], inside=size + data.draw(st.integers(0, 20))))
    found = segments(steps, [count])
    assert [s.first for s in found] == [0, *(s.end for s in found[:-1])]
    assert found[-1].end == count
    ways = (list(cuts) for n in range(count) for cuts in combinations(range(1, count), n))
    best = min(peak(steps, [count], [0, *cuts]) for cuts in ways)
    assert peak(steps, [count], [s.first for s in found]) <= best * 1.12 + 1
