"""One sentence: whether a precision pays and is safe, or what to run to find out.

Rules, the first that applies:

1. A run that broke down (diverged, out of memory, no updates) where its baseline did not: do not use it.
2. Nothing could be compared: undecided, and what is missing.
3. Accuracy is worse: do not use it.
4. Neither memory nor time is gained: no gain; and if one of them is lost: do not use it.
5. The only gain is not sure, or accuracy is undecided or was not tested: undecided, and what to run next.
6. Both gained, or one gained and none lost: use it. One gained at the cost of the other: use it where that one is short.

A gain or loss is noticeable from 5 % on, and where an interval is known it must leave out "no change" to be sure. A gain that is
not sure needs more seeds; a loss that is not sure makes "use it" conditional. That nothing is gained is sure where no interval
holds a noticeable gain.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra.compare.model import Advice, Recommendation

if TYPE_CHECKING:
    from collections.abc import Sequence

NOTICEABLE = 0.05
_RANK = (Advice.use, Advice.trade, Advice.undecided, Advice.no_gain, Advice.avoid)


@dataclass(frozen=True)
class Measured:
    """A ratio in which more is better, with its interval where one is known.

    >>> [measured.change for measured in (Measured(1.8, 1.7, 1.9), Measured(1.8, 0.9, 2.7), Measured(0.97), Measured(0.5))]
    ['gain', 'gain?', 'none', 'loss']
    >>> Measured(1.02, 0.1, 11).change
    'none?'
    """

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def change(self) -> str:
        """One of "gain", "loss", "none"; with a question mark where the interval does not confirm it."""
        low, high = (self.value, self.value) if self.low is None or self.high is None else (self.low, self.high)
        if self.value >= 1 + NOTICEABLE:
            return "gain" if low > 1 else "gain?"
        if self.value <= 1 / (1 + NOTICEABLE):
            return "loss" if high < 1 else "loss?"
        return "none" if low >= 1 / (1 + NOTICEABLE) and high <= 1 + NOTICEABLE else "none?"

    @property
    def may_be_gain(self) -> bool:
        """Whether no gain was found, and the interval holds one."""
        return self.change == "none?" and self.high is not None and self.high > 1 + NOTICEABLE


@dataclass(frozen=True)
class Case:
    """What the rules look at.

    Attributes:
        label: of the row.
        baseline: the name of the baseline's precision.
        seeds: runs of the row, one per seed.
        compared: how many of them are in the figures.
        tested: how many of these are in the test of accuracy.
        breakdowns: how runs ended that broke down where their baselines did not: "diverged", "out_of_memory", ...
        problems: why pairs are not compared; one entry for each.
        baseline_out_of_memory: whether the row finished where every baseline ran out of memory.
        saving: 1 / the ratio of training memory; None if it is not known.
        speed: baseline step time / step time; None if it is not known.
        accuracy: the verdict; None if there is none.
        margin: in points.
        difference: of accuracy in points, with the ends of its interval; None if there is none.
        next_seeds: how many more seeds would decide; None if that is not known or no number would.
        next_samples: how many more test samples would; likewise.
        prospect: the verdict that more of them would lead to; None if unknown.
        detectable: the smallest difference that the test can show, in points.
        untested: why there is no verdict.
    """

    label: str
    baseline: str
    seeds: int
    compared: int
    tested: int = 0
    breakdowns: Sequence[str] = ()
    problems: Sequence[str] = ()
    baseline_out_of_memory: bool = False
    saving: Measured | None = None
    speed: Measured | None = None
    accuracy: str | None = None
    margin: float = 0.1
    difference: tuple[float, float, float] | None = None
    next_seeds: int | None = None
    next_samples: int | None = None
    prospect: str | None = None
    detectable: float | None = None
    untested: str = ""


def recommend(case: Case) -> Recommendation:
    """Apply the rules to one row."""
    advice, words = _judged(case)
    some = f" ({case.compared} of {case.seeds} seeds compared)" if 0 < case.compared < case.seeds else ""
    return Recommendation(advice, f"{case.label}: {words}{some}")


def best(baseline: str, rows: Sequence[tuple[str, Recommendation, float]], problem: str = "") -> Recommendation:
    """The sentence of a group: that of its best row, or why to stay with the baseline.

    Args:
        baseline: the name of the baseline's precision.
        rows: label, recommendation and merit (more is better; speed x memory saving) of each row.
        problem: why nothing in the group is compared; empty if something is.
    """
    if problem or not rows:
        return Recommendation(Advice.undecided, problem or f"nothing to compare with {baseline}")
    _, top, _ = min(rows, key=lambda row: (_RANK.index(row[1].advice), -row[2]))
    if len(rows) == 1 or top.advice not in (Advice.no_gain, Advice.avoid):
        return top
    reasons = "; ".join(f"{label}: {recommendation.advice.value}" for label, recommendation, _ in rows)
    return Recommendation(top.advice, f"stay with {baseline} ({reasons})")


def _judged(case: Case) -> tuple[Advice, str]:
    if case.breakdowns:
        return Advice.avoid, _broken(case)
    if not case.compared:
        return Advice.undecided, _nothing_compared(case)
    figures = _figures(case)
    advice, words = _weighed(case)
    return advice, f"{figures}; {words}"


def _weighed(case: Case) -> tuple[Advice, str]:
    """Rules 3 to 6."""
    known = [measured for measured in (case.saving, case.speed) if measured is not None]
    changes = {measured.change for measured in known}
    hopeless = not changes & {"gain", "gain?"}
    if case.accuracy == "worse":
        found = Advice.avoid, "do not use it"
    elif not changes:
        found = Advice.undecided, "neither memory nor step time was measured in both runs"
    elif hopeless and "loss" in changes:
        found = Advice.avoid, "do not use it"
    elif hopeless and not any(measured.may_be_gain for measured in known):
        found = Advice.no_gain, "no gain"
    elif "gain" not in changes:
        found = (
            Advice.undecided,
            f"undecided: run more seeds to settle whether {'there' if hopeless else 'it'} is a gain",
        )
    elif case.accuracy not in ("equivalent", "better"):
        found = Advice.undecided, _next_step(case)
    elif changes & {"loss", "loss?"}:
        faster = case.speed is not None and case.speed.change == "gain"
        found = Advice.trade, f"use it where {'time is short and memory is not' if faster else 'memory is short'}"
    else:
        found = Advice.use, "use it"
    return found


def _broken(case: Case) -> str:
    names = {
        "out_of_memory": "ran out of memory",
        "no_updates": "never made a step that counts",
        "diverged": "diverged",
    }
    counts = {ending: list(case.breakdowns).count(ending) for ending in dict.fromkeys(case.breakdowns)}
    told = [
        names.get(ending, ending) + (f" in {count} of {case.seeds} seeds" if case.seeds > 1 else "")
        for ending, count in counts.items()
    ]
    return f"{' and '.join(told)}, where {case.baseline} did not; do not use it"


def _nothing_compared(case: Case) -> str:
    if case.baseline_out_of_memory:
        cure = f"to judge its accuracy compare both at a batch_size that {case.baseline} can train"
        return f"trains where {case.baseline} runs out of memory; {cure}"
    return f"not compared: {'; '.join(dict.fromkeys(case.problems)) or 'no runs'}"


def _figures(case: Case) -> str:
    parts = []
    if case.saving is not None:
        parts.append(_memory(case.saving))
    if case.speed is not None:
        parts.append(_speed(case.speed))
    return ", ".join([*parts, _accuracy(case)])


def _memory(saving: Measured) -> str:
    said = f"{1 / saving.value:.2f}x training memory"
    if saving.change.endswith("?") and saving.low and saving.high:
        return f"{said} ({1 / saving.high:.2f}x to {1 / saving.low:.2f}x: unclear)"
    return said


def _speed(speed: Measured) -> str:
    if speed.change == "none":
        return "about as fast"
    if speed.change.endswith("?"):
        return f"{speed.value:.2f}x the speed ({speed.low:.2f}x to {speed.high:.2f}x: unclear)"
    return f"{speed.value:.3g}x faster" if speed.value > 1 else f"{1 / speed.value:.3g}x slower"


def _accuracy(case: Case) -> str:
    if case.accuracy is None or case.difference is None:
        return "accuracy not tested"
    value, low, high = case.difference
    between = f"{value:+.2f} points, {low:+.2f} to {high:+.2f}"
    if case.accuracy == "equivalent":
        return f"accuracy equivalent within {case.margin:g} points{' (one seed)' if case.tested == 1 else ''}"
    return f"accuracy {case.accuracy} ({between})"


def _next_step(case: Case) -> str:
    if case.accuracy is None:
        return f"undecided, since there is no verdict on accuracy: {case.untested}"
    steps = []
    if case.next_seeds is not None:
        steps.append(f"run {case.next_seeds:,} more {'seed' if case.next_seeds == 1 else 'seeds'}")
    elif case.tested == 1:
        steps.append("run 2 more seeds")
    if case.next_samples is not None:
        steps.append(f"test on {case.next_samples:,} more samples")
    if not steps:
        shown = (
            "" if case.detectable is None else f"; the smallest difference it can show is {case.detectable:.2g} points"
        )
        return f"undecided, and more seeds or samples alone would not change that at a margin of {case.margin:g} points{shown}"
    likely = (
        f", which would show it to be {case.prospect} if the estimate holds"
        if case.prospect in ("worse", "better")
        else ""
    )
    return f"undecided: {' or '.join(steps)}{likely}"
