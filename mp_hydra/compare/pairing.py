"""Which runs are compared with which: groups of equal config, one row for each precision, pairs of equal seed.

A run is compared with the baseline that differs from it in precision alone:

- Runs whose configs differ in more than precision, loss scaling, memory mode and seed are in different groups, each with its own
  baseline. Runs with batch_size=max are in one group, whatever it came to.
- Runs of one config that did not run in the same circumstances (data, device, versions, XLA) are not compared.
- Within a group the runs of one precision are a row, and those of one seed a pair. Of several runs of one precision and seed
  the newest that finished counts.
- The baseline keeps what stock Keras keeps for the backward pass, if there is such a run of its precision; its other memory modes
  are rows.

No run is dropped in silence: what is in no pair is listed with its reason.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mp_hydra.compare.identity import (
    batch_size_of,
    circumstances_of,
    config_of,
    conflicts,
    differences,
    mapping,
    memory_of,
    precision_of,
    recipe_of,
    shortened,
    titled,
)
from mp_hydra.compare.model import Excluded, Pair, PairedGroup, PairedRow, Pairing, RunResult

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

    from mp_hydra.compare.records import RunRecord

_ORDER = ("fp32", "tf32", "mixed_float16", "mixed_bfloat16")  # of rows; others come last
_MEMORY = ("stock", "lean", "recompute")  # which of them a baseline has, the first that there is
_MOST_DIFFERENCES = 3  # above this a group has no baseline that could be called near


def pair(records: Iterable[RunRecord], *, baseline: str = "fp32") -> Pairing:
    """Find the pairs.

    Args:
        records: runs of one sweep or of many; parent runs may be among them.
        baseline: the precision that the others are compared with.
    """
    known: list[_Run] = []
    excluded = []
    for record in records:
        if precision_of(record):
            known.append(_Run.of(record))
        else:
            reason = "it names no precision: no training run of mp_hydra, such as the parent of a sweep"
            excluded.append(Excluded(result(record), reason))
    by_config: dict[frozenset[tuple[str, str]], list[_Run]] = defaultdict(list)
    for run in sorted(known, key=lambda run: (run.record.started, run.record.run_id)):
        by_config[run.config].append(run)
    clusters = [cluster for runs in by_config.values() for cluster in _same_circumstances(runs, baseline)]
    labels = _group_labels(clusters)
    bases = [cluster for cluster in clusters if any(run.is_baseline(baseline) for run in cluster.runs)]
    groups = [_group(cluster, settings, baseline, bases) for cluster, settings in zip(clusters, labels, strict=True)]
    return Pairing(baseline, tuple(groups), tuple(excluded))


def result(record: RunRecord) -> RunResult:
    """How the run ended, in the form of the comparison."""
    return RunResult(
        run_id=record.run_id,
        name=record.name,
        seed=record.params.get("seed", ""),
        status=record.status,
        outcome=record.outcome,
        reason=" ".join(record.tags.get("mp_hydra.reason", "").split()),
        precision=precision_of(record),
    )


@dataclass(frozen=True)
class _Run:
    """A run with everything that decides where it belongs."""

    record: RunRecord
    precision: str
    resolved: str
    seed: str
    config: frozenset[tuple[str, str]]
    recipe: Mapping[str, str]
    circumstances: Mapping[str, str]

    @classmethod
    def of(cls, record: RunRecord) -> _Run:
        precision = precision_of(record)
        return cls(
            record=record,
            precision=precision,
            resolved=record.tags.get("mp_hydra.precision_resolved") or precision,
            seed=record.params.get("seed", ""),
            config=frozenset(config_of(record.params, record.tags).items()),
            recipe=recipe_of(record.params),
            circumstances=circumstances_of(record),
        )

    def is_baseline(self, baseline: str) -> bool:
        return self.precision == baseline


@dataclass
class _Cluster:
    """Runs of one config that no known circumstance keeps apart."""

    runs: list[_Run]
    circumstances: dict[str, str]
    strangers: list[Excluded]

    @property
    def config(self) -> dict[str, str]:
        """In the order of the parameters, which the frozen set does not keep."""
        first = self.runs[0].record
        return config_of(first.params, first.tags)

    @property
    def started(self) -> int:
        return min(run.record.started for run in self.runs)


def _same_circumstances(runs: Sequence[_Run], baseline: str) -> list[_Cluster]:
    """Split runs of one config by circumstances; those without a baseline go to the nearest that has one, as strangers."""
    clusters: list[_Cluster] = []
    for run in sorted(runs, key=lambda run: -len(run.circumstances)):  # those of which little is known come last
        fitting = [one for one in clusters if not conflicts(run.circumstances, one.circumstances)]
        if fitting:
            home = max(fitting, key=lambda one: (any(run.is_baseline(baseline) for run in one.runs), len(one.runs)))
            home.runs.append(run)
            home.circumstances = {**run.circumstances, **home.circumstances}
        else:
            clusters.append(_Cluster([run], dict(run.circumstances), []))
    for cluster in clusters:
        cluster.runs.sort(key=lambda run: (run.record.started, run.record.run_id))
    kinds = {id(cluster): {run.is_baseline(baseline) for run in cluster.runs} for cluster in clusters}
    with_baseline = [cluster for cluster in clusters if True in kinds[id(cluster)]]
    complete = [cluster for cluster in with_baseline if len(_standard(cluster.runs, baseline)) < len(cluster.runs)]
    # A baseline alone is a stranger where others of its config are compared, and the host where none are.
    hosts = complete or with_baseline
    if not hosts:
        return sorted(clusters, key=lambda cluster: cluster.started)
    if not complete:
        hosts = [max(with_baseline, key=lambda cluster: cluster.runs[-1].record.started)]
    for cluster in clusters:
        if not any(cluster is host for host in hosts):
            host = min(hosts, key=lambda host: len(conflicts(cluster.circumstances, host.circumstances)))
            for run in cluster.runs:
                # A run that recorded little shares the fate of those that it was put together with.
                own = conflicts(run.circumstances, host.circumstances)
                reasons = own or conflicts(cluster.circumstances, host.circumstances)
                host.strangers.append(Excluded(result(run.record), f"not comparable: {'; '.join(reasons)}"))
    return sorted(hosts, key=lambda cluster: cluster.started)


def _standard(runs: Sequence[_Run], baseline: str) -> list[_Run]:
    """The runs of the baseline's precision that are the baseline: those of one memory mode."""
    own = [run for run in runs if run.precision == baseline]
    # A run of memory=auto that died too early to tell would have come to what the others came to.
    usual = next(
        (memory_of(run.record) for run in own if memory_of(run.record) and _asked_memory(run) == "auto"), "stock"
    )
    kinds: dict[str, list[_Run]] = defaultdict(list)
    for run in own:
        kinds[memory_of(run.record) or usual].append(run)
    if not kinds:
        return []
    chosen = kinds[min(kinds, key=lambda kind: [*_MEMORY, kind].index(kind))]
    first = chosen[0].recipe.get("memory.recompute")
    return [run for run in chosen if run.recipe.get("memory.recompute") == first]


def _asked_memory(run: _Run) -> str:
    return run.recipe["memory.mode"]


def _group(cluster: _Cluster, settings: Mapping[str, str], baseline: str, bases: Sequence[_Cluster]) -> PairedGroup:
    standard = _standard(cluster.runs, baseline)
    counting, excluded = _one_per_seed(standard, f"of the {baseline} baselines with this seed")
    remarks = _remarks(cluster, standard, counting)
    others: dict[tuple[str, frozenset[tuple[str, str]]], list[_Run]] = defaultdict(list)
    for run in cluster.runs:
        if not any(run is one for one in standard):
            others[run.precision, frozenset(run.recipe.items())].append(run)
    in_order = sorted(others.values(), key=lambda runs: [*_ORDER, runs[0].precision].index(runs[0].precision))
    labels = _row_labels([runs[0] for runs in in_order], standard[:1])
    rows = [_row(runs, label, counting, baseline) for runs, label in zip(in_order, labels, strict=True)]
    by_label = {row.label: runs for row, runs in zip(rows, in_order, strict=True)}
    remarks += _batch_remarks(cluster, standard, baseline, by_label)
    remarks += _memory_remarks(standard, baseline, by_label)
    finished = [run for run in counting.values() if run.finished]
    problem = ""
    if not counting:
        problem = _no_baseline(cluster, baseline, bases)
    elif not finished:
        problem = (
            f"no {baseline} baseline has finished: {'; '.join(dict.fromkeys(run.ending for run in counting.values()))}"
        )
    elif not rows:
        problem = f"nothing to compare with the {baseline} baseline"
    return PairedGroup(
        label=titled(settings),
        settings=settings,
        baseline=baseline,
        baselines=tuple(counting.values()),
        rows=tuple(rows),
        excluded=(*excluded, *cluster.strangers),
        problem=problem,
        remarks=tuple(remarks),
    )


def _row(
    runs: Sequence[_Run], settings: Mapping[str, str], baselines: Mapping[str, RunResult], baseline: str
) -> PairedRow:
    counting, excluded = _one_per_seed(runs, "of the runs with this precision and seed")
    pairs = [
        Pair(seed, mixed, baselines.get(seed), _problem(mixed, baselines.get(seed), baseline))
        for seed, mixed in counting.items()
    ]
    precision = runs[0].precision
    return PairedRow(
        precision=precision,
        label=" ".join([precision, *(f"{shortened(key)}={value}" for key, value in settings.items())]),
        settings=settings,
        pairs=tuple(pairs),
        excluded=tuple(excluded),
    )


def _problem(mixed: RunResult, baseline: RunResult | None, name: str) -> str:
    if not mixed.finished:
        return "still running" if mixed.outcome == "running" else mixed.ending
    if baseline is None:
        return f"no {name} baseline with seed {mixed.seed}" if mixed.seed else f"no {name} baseline without a seed"
    if not baseline.finished:
        return f"its {name} baseline: {baseline.ending}"
    return ""


def _one_per_seed(runs: Iterable[_Run], which: str) -> tuple[dict[str, RunResult], list[Excluded]]:
    """For each seed the run that counts, the newest that finished or else the newest; and the others."""
    by_seed: dict[str, list[_Run]] = defaultdict(list)
    for run in runs:
        by_seed[run.seed].append(run)
    counting: dict[str, RunResult] = {}
    others = []
    for seed in sorted(by_seed, key=_seed_order):
        newest = sorted(by_seed[seed], key=lambda run: (run.record.status == "FINISHED", run.record.started))
        chosen = result(newest[-1].record)
        counting[seed] = chosen
        for run in reversed(newest[:-1]):
            why = "the newest that finished" if chosen.finished else "the newest"
            own = "superseded" if run.record.status == "FINISHED" else f"superseded ({result(run.record).ending})"
            others.append(
                Excluded(result(run.record), f"{own}: {which} {why} counts, {chosen.name} ({chosen.run_id[:8]})")
            )
    return counting, others


def _seed_order(seed: str) -> tuple[float, str]:
    try:
        return float(seed), seed
    except ValueError:
        return math.inf, seed


def _no_baseline(cluster: _Cluster, baseline: str, bases: Sequence[_Cluster]) -> str:
    """That there is none, and in what the nearest of the other groups differs."""
    line = f"no {baseline} baseline"
    own = cluster.runs[0].config
    others = [base for base in bases if base is not cluster and base.runs[0].config != own]
    if not others:
        return line
    nearest = min(others, key=lambda base: len(base.runs[0].config ^ own))
    differing = differences(cluster.config, nearest.config)
    return f"{line}; the nearest differs: {'; '.join(differing)}" if len(differing) <= _MOST_DIFFERENCES else line


def _remarks(cluster: _Cluster, baselines: Sequence[_Run], counting: Mapping[str, RunResult]) -> list[str]:
    remarks = []
    for seed, chosen in counting.items():
        count = sum(run.seed == seed for run in baselines)
        if count > 1:
            which = "the newest that finished" if chosen.finished else "the newest, since none finished,"
            remarks.append(f"{count} baselines with seed {seed or '(none)'}: {which} counts, {chosen.name}")
    ended = [run for run in cluster.runs if run.record.status == "FINISHED"]
    unknown = [key for key in cluster.circumstances if any(key not in run.circumstances for run in ended)]
    if unknown:
        silent = [run.record.name for run in ended if any(key not in run.circumstances for key in unknown)]
        remarks.append(f"not checked: {', '.join(unknown)}; not recorded by {_some(silent)}")
    elif not cluster.circumstances:
        remarks.append("data, device and library versions were not checked: no run recorded them")
    commits = {run.record.tags.get("mlflow.source.git.commit") for run in cluster.runs} - {None}
    if len(commits) > 1:
        remarks.append(f"the runs are of different git commits: {_some(sorted(str(commit)[:8] for commit in commits))}")
    versions = {mapping(run.record.environment.get("versions")).get("mp_hydra") for run in cluster.runs} - {None}
    if len(versions) > 1:
        remarks.append(f"the runs are of different versions of mp_hydra: {_some(sorted(map(str, versions)))}")
    changed = {run.precision: run.resolved for run in cluster.runs if run.resolved != run.precision}
    for asked, got in changed.items():
        noise = "" if any(run.is_baseline(asked) for run in baselines) else ": its row shows noise alone"
        remarks.append(f"{asked} came to {got} on this device{noise}")
    return remarks


def _batch_remarks(
    cluster: _Cluster, standard: Sequence[_Run], baseline: str, rows: Mapping[str, Sequence[_Run]]
) -> list[str]:
    """With batch_size=max, what it came to."""
    if cluster.config.get("batch_size") != "max":
        return []
    sizes = {
        label: sorted({size for run in runs if (size := batch_size_of(run.record)) is not None})
        for label, runs in {baseline: standard, **rows}.items()
    }
    told = ", ".join(
        f"{label} {' to '.join(f'{size:,}' for size in dict.fromkeys((s[0], s[-1])))}"
        for label, s in sizes.items()
        if s
    )
    return [f"each at its largest batch: {told or 'which is not recorded'}"]


def _memory_remarks(standard: Sequence[_Run], baseline: str, rows: Mapping[str, Sequence[_Run]]) -> list[str]:
    """Where the memory mode is not the baseline's, and where it is not what was asked for."""
    own = _came_to(standard)
    lines = [] if own in ("", "stock") else [f"the {baseline} baseline ran with memory={own}"]
    alone, both = [], []
    for label, runs in rows.items():
        asked, came = runs[0].recipe["memory.mode"], _came_to(runs)
        if asked not in ("auto", came) and came:
            lines.append(f"{label}: memory={asked} came to {came}")
        if own and came and runs[0].precision != baseline:
            if came == own:
                alone.append(label)
            else:
                both.append(f"{label} (memory={came}{' by memory=auto' if asked == 'auto' else ''})")
    if both:
        cure = f"of precision alone: {_some(alone)}" if alone else f"memory={own} shows precision alone"
        lines.append(
            f"{_some(both)}: the ratios are of precision and memory mode together, since {baseline} ran with memory={own}; {cure}"
        )
    return lines


def _came_to(runs: Sequence[_Run]) -> str:
    """The memory mode of a row; empty if no run of it tells."""
    return next((mode for run in reversed(runs) if (mode := memory_of(run.record))), "")


def _row_labels(firsts: Sequence[_Run], standard: Sequence[_Run]) -> list[dict[str, str]]:
    """For each row the settings that tell it from the rows of the same precision, and from the baseline."""
    shown: list[dict[str, str]] = []
    for run in firsts:
        alike = [other.recipe for other in (*firsts, *standard) if other.precision == run.precision]
        keys = _telling_keys(alike, first=("memory.mode", "loss_scale.mode", "loss_scale.value"))
        shown.append({key: run.recipe[key] for key in keys if key in run.recipe})
    return shown


def _group_labels(clusters: Sequence[_Cluster]) -> list[dict[str, str]]:
    """For each group its model and data set, and what else tells it from the others."""
    titles = ("model.name", "dataset.name")
    whole = [{**cluster.config, **cluster.circumstances} for cluster in clusters]
    last = {key for cluster in clusters for key in cluster.circumstances}
    always = (*titles, "batch_size") if any(values.get("batch_size") == "max" for values in whole) else titles
    telling = _telling_keys(whole, first=always, last=last, always=always)
    return [{key: values[key] for key in telling if key in values} for values in whole]


def _telling_keys(
    rows: Sequence[Mapping[str, str]], *, first: Sequence[str], last: Collection[str] = (), always: Sequence[str] = ()
) -> list[str]:
    """A few keys by whose values all rows can be told apart; those in `always` whether they help or not."""
    present = dict.fromkeys(key for row in rows for key in row)
    varying = [key for key in present if len({row.get(key) for row in rows}) > 1]
    # Keys at the top say more than those of sections: batch_size before optimizer.beta_1.
    ordered = sorted(varying, key=lambda key: (key in last, key.count(".")))
    chosen: list[str] = []
    distinct, goal = 1, len({tuple(row.get(key) for key in varying) for row in rows})
    for key in dict.fromkeys([*(key for key in first if key in present), *ordered]):
        if distinct < goal or key in always:
            now = len({tuple(row.get(name) for name in (*chosen, key)) for row in rows})
            if now > distinct or key in always:
                chosen.append(key)
            distinct = now
    return chosen


def _some(names: Sequence[str], most: int = 3) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")
