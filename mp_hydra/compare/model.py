"""What a comparison consists of: pairs of runs, figures with their sources, verdicts. What the renderers draw.

    Comparison                   one call of `mp-hydra compare`
      Group                      runs whose configs differ in precision, memory mode and seed alone
        Row                      one precision against the baseline, over all seeds
          Pair                   one seed: the run, and its baseline
      Throughputs                over groups that differ in batch size alone: each precision at its best one

`mp_hydra.compare.pairing` makes groups of `PairedRow`s, `mp_hydra.compare.judge` turns those into `Row`s.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from mp_hydra.compare.accuracy import AccuracyComparison
    from mp_hydra.compare.records import RunRecord


@dataclass(frozen=True)
class RunResult:
    """How one run ended.

    Attributes:
        run_id: MLflow's id; the key into `Comparison.records`.
        name: the run's name.
        seed: its seed, as text; empty if unknown.
        status: MLflow's status.
        outcome: a value of `mp_hydra.tracking.Outcome`, "running" or "unknown".
        reason: why it ended so; empty if nothing is recorded.
        precision: its precision, as in `PairedRow`; empty if unknown.
    """

    run_id: str
    name: str
    seed: str
    status: str
    outcome: str
    reason: str = ""
    precision: str = ""

    @property
    def finished(self) -> bool:
        """Whether its figures count: it came to its end. A run that diverged did, too."""
        return self.status == "FINISHED"

    @property
    def ending(self) -> str:
        """Outcome and reason as one text, such as "out_of_memory (...)"."""
        return f"{self.outcome} ({self.reason})" if self.reason else self.outcome


@dataclass(frozen=True)
class Pair:
    """A run and the baseline of the same seed.

    Attributes:
        seed: the seed of both, as text; empty if unknown.
        mixed: the run.
        baseline: its baseline; None if there is none of this seed.
        problem: why the two are not compared; empty if they are.
    """

    seed: str
    mixed: RunResult
    baseline: RunResult | None
    problem: str = ""

    @property
    def compared(self) -> bool:
        """Whether the pair goes into the figures."""
        return not self.problem


@dataclass(frozen=True)
class Excluded:
    """A run that is in no pair, and why."""

    run: RunResult
    reason: str


@dataclass(frozen=True)
class PairedRow:
    """All runs of one precision in a group.

    Attributes:
        precision: what the layers compute in, resolved: "mixed_bfloat16", "tf32", ...
        label: the precision, with those settings that tell it from other rows of the same precision.
        settings: these settings: `loss_scale.*`, `precision.*` and `memory.*` parameters.
        pairs: one per seed, in order of seeds.
        excluded: runs of this precision that are in no pair: superseded ones, and others that cannot be compared.
    """

    precision: str
    label: str
    settings: Mapping[str, str]
    pairs: tuple[Pair, ...]
    excluded: tuple[Excluded, ...] = ()


@dataclass(frozen=True)
class PairedGroup:
    """Runs that differ in precision and seed alone.

    Attributes:
        label: what tells the group from the others, such as "model=cnn dataset=digits".
        settings: the same as parameters.
        baseline: the name of the baseline's precision.
        baselines: the baselines that count, one per seed.
        rows: the other precisions.
        excluded: baselines that do not count, and runs that could not be put into a row, with reasons.
        problem: why nothing in the group can be compared; empty if something can.
        remarks: what a reader should know, one line each.
    """

    label: str
    settings: Mapping[str, str]
    baseline: str
    baselines: tuple[RunResult, ...]
    rows: tuple[PairedRow, ...]
    excluded: tuple[Excluded, ...] = ()
    problem: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Pairing:
    """Groups of runs, and runs that are in none (with the reason)."""

    baseline: str
    groups: tuple[PairedGroup, ...]
    excluded: tuple[Excluded, ...] = ()

    def run_ids(self) -> list[str]:
        """The runs that the figures and plots need: those of every pair and every baseline that counts."""
        ids: dict[str, None] = {}
        for group in self.groups:
            ids.update(dict.fromkeys(run.run_id for run in group.baselines))
            ids.update(dict.fromkeys(pair.mixed.run_id for row in group.rows for pair in row.pairs))
        return list(ids)


@dataclass(frozen=True)
class Figure:
    """A number, where it comes from and how far it spreads; or why there is none.

    Attributes:
        value: the number; None if it is missing.
        unit: "x" for ratios, "share" (0 to 1), "MiB", "ms", "s", "J", "steps", "samples", "samples/s", "points" (percent of
            the test samples) or "" for a loss.
        interval: the confidence interval; None where there is none.
        level: its level, such as 0.95.
        range: the least and the greatest of several runs or pairs; None for one.
        runs: how many runs or pairs it comes from.
        source: what measured it.
        method: how value and interval were worked out.
        missing: why there is no value; empty if there is one.
    """

    value: float | None
    unit: str
    interval: tuple[float, float] | None = None
    level: float | None = None
    range: tuple[float, float] | None = None
    runs: int = 0
    source: str = ""
    method: str = ""
    missing: str = ""

    def __bool__(self) -> bool:
        """Whether there is a value."""
        return self.value is not None


@dataclass(frozen=True)
class Compared:
    """One quantity of the baseline and of the other precision, over the compared pairs, and their ratio.

    Attributes:
        baseline: of the baselines: the geometric mean, so that `ratio` is the ratio of the two values.
        mixed: of the others.
        ratio: mixed / baseline, paired by seed.
    """

    baseline: Figure
    mixed: Figure
    ratio: Figure


@dataclass(frozen=True)
class Accuracy:
    """Accuracy on the test set.

    Attributes:
        baseline: share of correct test samples, mean over seeds; as a share, 0 to 1.
        mixed: the same of the other precision.
        difference: mixed - baseline in points, with the interval.
        comparison: the equivalence test; None if it could not be done, for which `difference.missing` gives the reason.
        loss: the difference of test/loss, mixed - baseline; without a verdict.
    """

    baseline: Figure
    mixed: Figure
    difference: Figure
    comparison: AccuracyComparison | None
    loss: Figure

    @property
    def verdict(self) -> str | None:
        """equivalent, worse, better or undecided; None if there is no test."""
        return None if self.comparison is None else str(self.comparison.verdict.value)


class Advice(str, Enum):
    """What to do with a precision."""

    use = "use it"
    avoid = "do not use it"
    trade = "use it where memory, or time, is short"
    no_gain = "no gain"
    undecided = "undecided"


@dataclass(frozen=True)
class Recommendation:
    """The sentence, and what it says in one word."""

    advice: Advice
    sentence: str


@dataclass(frozen=True)
class Row:
    """One precision against the baseline: the pairs, the figures, the verdict.

    Attributes:
        precision: as in `PairedRow`.
        label: as in `PairedRow`.
        settings: as in `PairedRow`.
        pairs: as in `PairedRow`; all of them, those that are not compared as well.
        excluded: as in `PairedRow`.
        batch_size: samples of a step; the two differ where each was run at its largest batch, and then no step times are
            compared.
        training_memory: memory/training_mib, what a step needs on top of variables, optimizer state and data.
        peak_memory: memory/peak_mib.
        state_memory: memory/state_mib, variables and optimizer state: float32 in every precision, cannot shrink.
        attained: share of the attainable saving of training memory (one half, for 16 bits) that was attained: 1 is all of
            it, negative is more memory than the baseline's.
        attainable_peak: what the peak ratio would be if all of the attainable saving were attained.
        step_time: time/step_ms, the median step in steady state.
        speed: throughput ratio: above 1 is faster. Baseline step time / mixed step time; where the batch sizes differ, the
            ratio of `throughput`.
        throughput: time/samples_per_second.
        first_step: time/first_step_seconds.
        energy: energy/joules.
        skipped: loss_scale/skipped_steps, the most of any run.
        steps: training steps of a run, skipped ones included, as the run with the most skipped ones counted them.
        accuracy: of the test set.
        recommendation: what follows.
        remarks: what a reader should know, one line each.
    """

    precision: str
    label: str
    settings: Mapping[str, str]
    pairs: tuple[Pair, ...]
    excluded: tuple[Excluded, ...]
    batch_size: Compared
    training_memory: Compared
    peak_memory: Compared
    state_memory: Compared
    attained: Figure
    attainable_peak: Figure
    step_time: Compared
    speed: Figure
    throughput: Compared
    first_step: Compared
    energy: Compared
    skipped: Figure
    steps: Figure
    accuracy: Accuracy
    recommendation: Recommendation
    remarks: tuple[str, ...] = ()

    @property
    def compared(self) -> tuple[Pair, ...]:
        """The pairs that the figures come from."""
        return tuple(pair for pair in self.pairs if pair.compared)

    @property
    def batches_differ(self) -> bool:
        """Whether a step was not the same work on both sides."""
        return self.batch_size.ratio.value not in (None, 1.0)


@dataclass(frozen=True)
class Group:
    """A `PairedGroup` with judged rows, and one sentence on the best of them."""

    label: str
    settings: Mapping[str, str]
    baseline: str
    baselines: tuple[RunResult, ...]
    rows: tuple[Row, ...]
    excluded: tuple[Excluded, ...]
    problem: str
    remarks: tuple[str, ...]
    recommendation: Recommendation


@dataclass(frozen=True)
class BestBatch:
    """The batch size at which some runs had the most samples per second.

    Attributes:
        batch_size: samples of a step.
        throughput: median of time/samples_per_second over the runs at this batch size.
    """

    batch_size: int
    throughput: Figure


@dataclass(frozen=True)
class RowThroughput:
    """One precision over batch sizes.

    Attributes:
        label: as in `PairedRow`.
        precision: as in `PairedRow`.
        rows: its rows: indices of group and row in `Comparison.groups`.
        equal: for each batch size that the baseline ran at, too, the throughput ratio.
        best: at its best batch size.
        ratio: its best throughput / that of the baseline at the baseline's own best batch size.
    """

    label: str
    precision: str
    rows: tuple[tuple[int, int], ...]
    equal: Mapping[int, Figure]
    best: BestBatch
    ratio: Figure


@dataclass(frozen=True)
class Throughputs:
    """Groups that differ in nothing but batch size.

    Attributes:
        label: what they have in common, such as "model=cnn dataset=digits".
        baseline: the name of the baseline's precision.
        best: the baseline at its best batch size; None if no baseline finished.
        rows: the other precisions.
    """

    label: str
    baseline: str
    best: BestBatch | None
    rows: tuple[RowThroughput, ...]


@dataclass(frozen=True)
class Comparison:
    """Everything that is shown.

    Attributes:
        title: what was compared, such as the name of a sweep.
        baseline: the name of the baseline's precision.
        margin: of equivalence, in points.
        accuracy_level: of the intervals of accuracy.
        ratio_level: of the intervals of ratios.
        groups: in the order in which their first run started.
        excluded: runs that are in no group, and why.
        throughputs: over several batch sizes, for each model, data set ... that was run at more than one.
        remarks: what a reader should know of the whole, such as runs that could not be read; one line each.
        records: the runs by id, for plots; not part of the JSON form.
    """

    title: str
    baseline: str
    margin: float
    accuracy_level: float
    ratio_level: float
    groups: tuple[Group, ...]
    excluded: tuple[Excluded, ...] = ()
    remarks: tuple[str, ...] = ()
    throughputs: tuple[Throughputs, ...] = ()
    records: Mapping[str, RunRecord] = field(default_factory=dict, repr=False, compare=False)

    def rows(self) -> Iterator[tuple[Group, Row]]:
        """Every row with its group."""
        for group in self.groups:
            for row in group.rows:
                yield group, row

    def to_json(self) -> dict[str, Any]:
        """Plain values for `json.dumps`; a number that is not finite becomes None."""
        plain = {
            item.name: _plain(getattr(self, item.name)) for item in dataclasses.fields(self) if item.name != "records"
        }
        for shown, (_, row) in zip(
            (row for group in plain["groups"] for row in group["rows"]), self.rows(), strict=True
        ):
            shown["accuracy"]["verdict"] = row.accuracy.verdict
        return plain


def _plain(value: Any) -> Any:
    plain = value
    if isinstance(value, Enum):
        plain = value.value
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        plain = {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    elif isinstance(value, Mapping):
        plain = {str(key): _plain(item) for key, item in value.items()}
    elif isinstance(value, (np.generic, np.ndarray)):
        plain = _plain(value.tolist())
    elif isinstance(value, (list, tuple)):
        plain = [_plain(item) for item in value]
    elif isinstance(value, float) and not math.isfinite(value):
        plain = None
    return plain
