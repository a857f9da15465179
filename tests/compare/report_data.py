"""Comparisons made by hand, for tests of what is shown."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.compare.accuracy import compare_accuracy
from mp_hydra.compare.judge import judge
from mp_hydra.compare.model import (
    Accuracy,
    Advice,
    Compared,
    Comparison,
    Excluded,
    Figure,
    Group,
    Pair,
    Recommendation,
    Row,
    RunResult,
)
from mp_hydra.compare.pairing import pair as paired
from mp_hydra.compare.records import RunRecord, Series
from tests.compare.made_runs import run as made_run

if TYPE_CHECKING:
    from collections.abc import Sequence

MARGIN, LEVEL = 0.1, 0.90
TEST_SAMPLES = 20_000
STEPS = 1_200
ERRORS = 0.021
ALLOCATOR = "TensorFlow's allocator"
NOT_ON_CPU = "there is no GPU whose energy could be read"
# training memory MiB, peak MiB, step ms, first step s, share of test samples that are wrong because of it
RECIPES = {
    "fp32": (231.4, 262.1, 14.2, 3.1, 0.0),
    "tf32": (231.4, 262.1, 11.3, 3.2, 0.001),
    "mixed_bfloat16": (119.8, 150.5, 8.1, 3.4, 0.0001),
    "mixed_float16": (121.0, 151.7, 7.9, 3.9, 0.006),
}


def run(name: str, seed: int = 0, outcome: str = "ok", reason: str = "") -> RunResult:
    status = {"ok": "FINISHED", "diverged": "FINISHED", "running": "RUNNING"}.get(outcome, "FAILED")
    return RunResult(f"id-of-{name}", name, str(seed), status, outcome, reason)


def figure(value: float | None, unit: str, *, spread: float = 0.0, runs: int = 3, **others: Any) -> Figure:
    """A figure; with `spread` an interval of this relative half-width."""
    interval = (value * (1 - spread), value * (1 + spread)) if value is not None and spread else None
    ends = (value * 0.98, value * 1.02) if value is not None and runs > 1 else None
    level = 0.95 if interval else None
    return Figure(value, unit, interval=interval, level=level, range=ends, runs=runs, **others)


def missing(unit: str, reason: str) -> Figure:
    return Figure(None, unit, missing=reason)


def compared(baseline: float, mixed: float, unit: str, *, runs: int = 3, spread: float = 0.03, source: str) -> Compared:
    method = "geometric mean of the ratios of pairs, t interval on their logarithms: noise from run to run"
    return Compared(
        figure(baseline, unit, runs=runs, source=source, method="geometric mean over runs"),
        figure(mixed, unit, runs=runs, source=source, method="geometric mean over runs"),
        figure(mixed / baseline, "x", runs=runs, spread=spread if runs > 1 else 0.0, source=source, method=method),
    )


def not_compared(unit: str, reason: str) -> Compared:
    return Compared(missing(unit, reason), missing(unit, reason), missing("x", reason))


def record(result: RunResult, precision: str, *, size: float = 1.0, series: bool = True) -> RunRecord:
    """A run with histories that look like those of a training."""
    known = RECIPES.get(precision, RECIPES["mixed_bfloat16"])
    random = np.random.default_rng([int(result.seed or 0), *precision.encode()])
    steps = np.arange(1, 41, dtype="int64") * (STEPS // 40)
    loss = size * (0.05 + 2.2 * np.exp(-steps / 260)) * np.exp(random.normal(0, 0.04, 40))
    scale = np.ones(40)
    if precision == "mixed_float16":
        scale = 2.0 ** np.clip(13 + np.arange(40) // 8 - (np.arange(40) > 25) * 2, 0, 16)
    correct = np.random.default_rng(7).random(TEST_SAMPLES) >= ERRORS
    flips = random.random(TEST_SAMPLES) < known[4]
    names = ("train/loss", "val/loss", "loss_scale/value")
    values = (loss, loss * 1.15 + 0.01, scale)
    return RunRecord(
        run_id=result.run_id,
        experiment_id="1",
        name=result.name,
        status=result.status,
        params={},
        tags={"mp_hydra.outcome": result.outcome},
        metrics={},
        environment={
            "versions": {"tensorflow": "2.21.0", "keras": "3.15.0"},
            "devices": [{"kind": "CPU", "name": "some CPU"}, {"kind": "GPU", "name": "NVIDIA H200"}],
        },
        series={name: Series(steps, value) for name, value in zip(names, values, strict=True)} if series else {},
        correct=correct & ~flips,
        step_ms=size * known[2] * np.exp(random.normal(0, 0.04, STEPS) + 0.3 * (random.random(STEPS) < 0.02)),
    )


def accuracy_of(baselines: Sequence[RunRecord], mixed: Sequence[RunRecord]) -> Accuracy:
    both = [np.stack([item.correct for item in items if item.correct is not None]) for items in (baselines, mixed)]
    test = compare_accuracy(*both, margin=MARGIN, level=LEVEL)
    runs, source = len(mixed), "predictions.npz"
    shares = [figure(float(item.mean()), "share", runs=runs, source=source, method="mean over seeds") for item in both]
    difference = Figure(
        *(test.difference, "points", (test.low, test.high), LEVEL, None, runs, source), method=test.method
    )
    return Accuracy(shares[0], shares[1], difference, test, figure(0.0031, "", runs=runs, source="test/loss"))


def row(
    precision: str, baselines: Sequence[RunResult], records: dict[str, RunRecord], *, label: str = "", size: float = 1.0
) -> Row:
    """A row in which everything was measured but energy."""
    base, mine = RECIPES["fp32"], RECIPES[precision]
    pairs = [Pair(item.seed, run(f"{precision}-{item.name}", int(item.seed)), item) for item in baselines]
    for pair in pairs:
        records.setdefault(pair.mixed.run_id, record(pair.mixed, precision, size=size))
    accuracy = accuracy_of([records[item.run_id] for item in baselines], [records[pair.mixed.run_id] for pair in pairs])
    runs = len(pairs)
    saved = 2 * (base[0] - mine[0]) / base[0]
    speed = base[2] / mine[2]
    sixteen = precision.endswith("16")
    wide = (
        missing("share", "it computes in 32 bits: nothing shrinks"),
        missing("x", "it computes in 32 bits: nothing shrinks"),
    )
    saving = figure(saved, "share", runs=runs, source=ALLOCATOR, method="saved bytes / half of the baseline's")
    least = figure(1 - base[0] / 2 / base[1], "x", runs=runs, source=ALLOCATOR)
    attained, attainable_peak = (saving, least) if sixteen else wide
    state = compared(size * 24.2, size * 24.2, "MiB", runs=runs, spread=0, source="counted: elements x bytes")
    return Row(
        precision=precision,
        label=label or precision,
        settings={},
        pairs=tuple(pairs),
        excluded=(),
        batch_size=compared(64, 64, "samples", runs=runs, spread=0, source="config"),
        training_memory=compared(size * base[0], size * mine[0], "MiB", runs=runs, spread=0.01, source=ALLOCATOR),
        peak_memory=compared(size * base[1], size * mine[1], "MiB", runs=runs, spread=0.008, source=ALLOCATOR),
        state_memory=state,
        attained=attained,
        attainable_peak=attainable_peak,
        step_time=compared(size * base[2], size * mine[2], "ms", runs=runs, source="clock"),
        speed=figure(
            speed, "x", runs=runs, spread=0.03 if runs > 1 else 0, source="clock", method="1 / step-time ratio"
        ),
        throughput=compared(64e3 / base[2] / size, 64e3 / mine[2] / size, "samples/s", runs=runs, source="clock"),
        first_step=compared(base[3], mine[3], "s", runs=runs, spread=0.1, source="clock"),
        energy=not_compared("J", NOT_ON_CPU),
        skipped=figure(2.0 if precision == "mixed_float16" else 0.0, "steps", runs=runs, source="optimizer"),
        steps=figure(float(STEPS), "steps", runs=runs, source="optimizer"),
        accuracy=accuracy,
        recommendation=Recommendation(
            Advice.use if accuracy.verdict == "equivalent" else Advice.undecided,
            f"{precision}: {mine[0] / base[0]:.2f}x training memory, {speed:.1f}x faster, accuracy {accuracy.verdict} "
            f"at {MARGIN} points",
        ),
    )


def group(
    label: str, records: dict[str, RunRecord], *, seeds: int = 3, size: float = 1.0, rows: Sequence[str] = ()
) -> Group:
    precisions = rows or ("mixed_bfloat16", "mixed_float16")
    baselines = tuple(run(f"fp32-{label}-{seed}", seed) for seed in range(seeds))
    for item in baselines:
        records[item.run_id] = record(item, "fp32", size=size)
    made = tuple(row(precision, baselines, records, size=size) for precision in precisions)
    best = Recommendation(made[0].recommendation.advice, made[0].recommendation.sentence + "; use it")
    settings = dict(part.split("=") for part in label.split() if "=" in part)
    return Group(label, settings, "fp32", baselines, made, (), "", (), best)


def comparison(*groups: Group, records: dict[str, RunRecord] | None = None, **others: Any) -> Comparison:
    title = others.pop("title", "sweep happy-hare-12")
    return Comparison(title, "fp32", MARGIN, LEVEL, 0.95, groups, records=records or {}, **others)


def ordinary() -> Comparison:
    """One group, two precisions, three seeds."""
    records: dict[str, RunRecord] = {}
    return comparison(group("model=cnn dataset=digits", records), records=records)


def one_seed() -> Comparison:
    records: dict[str, RunRecord] = {}
    return comparison(group("model=cnn dataset=digits", records, seeds=1), records=records)


def no_baseline() -> Comparison:
    """Runs that finished, with nothing to compare them with."""
    problem = "no fp32 baseline; add precision=fp32 to the sweep"
    made = unmeasured_row("mixed_bfloat16", [Pair("0", run("lonely"), None, "no fp32 baseline with seed 0")], problem)
    best = Recommendation(Advice.undecided, f"model=cnn: nothing to say: {problem}")
    return comparison(Group("model=cnn", {"model.name": "cnn"}, "fp32", (), (made,), (), problem, (), best))


def unmeasured_row(precision: str, pairs: Sequence[Pair], reason: str) -> Row:
    whole = {
        "batch_size": "samples",
        "training_memory": "MiB",
        "peak_memory": "MiB",
        "state_memory": "MiB",
        "step_time": "ms",
        "throughput": "samples/s",
        "first_step": "s",
        "energy": "J",
    }
    return Row(
        precision=precision,
        label=precision,
        settings={},
        pairs=tuple(pairs),
        excluded=(),
        **{name: not_compared(unit, reason) for name, unit in whole.items()},  # type: ignore[arg-type]
        attained=missing("share", reason),
        attainable_peak=missing("x", reason),
        speed=missing("x", reason),
        skipped=missing("steps", reason),
        steps=missing("steps", reason),
        accuracy=Accuracy(
            missing("share", reason), missing("share", reason), missing("points", reason), None, missing("", reason)
        ),
        recommendation=Recommendation(Advice.undecided, f"{precision}: undecided: {reason}"),
    )


def all_failed() -> Comparison:
    """Every run ended badly, each in its own way."""
    memory = "ran out of memory: 12.4 GiB were asked for, 3.1 GiB were there"
    base = run("fp32-0", outcome="out_of_memory", reason=memory)
    ends = {"mixed_bfloat16": ("error", "ValueError: no such layer"), "mixed_float16": ("killed", "")}
    rows = []
    for precision, (outcome, reason) in ends.items():
        mixed = run(f"{precision}-0", outcome=outcome, reason=reason)
        rows.append(unmeasured_row(precision, [Pair("0", mixed, base, mixed.ending)], "no pair of runs to compare"))
    problem = f"no fp32 baseline has finished: {base.ending}"
    best = Recommendation(Advice.undecided, f"nothing to say: {problem}")
    return comparison(Group("model=vit", {}, "fp32", (base,), tuple(rows), (), problem, (), best))


def mixed_fates() -> Comparison:
    """Of three seeds one diverged and one ran out of memory; some runs are excluded; some figures are missing."""
    records: dict[str, RunRecord] = {}
    whole = group("model=resnet dataset=synthetic", records, seeds=3)
    first, second = whole.rows
    diverged = dataclasses.replace(first.pairs[1].mixed, outcome="diverged", reason="test/loss is nan")
    full = run("mixed_bfloat16-big", 2, "out_of_memory", "12 GiB were asked for")
    pairs = (
        first.pairs[0],
        dataclasses.replace(first.pairs[1], mixed=diverged),
        dataclasses.replace(first.pairs[2], mixed=full, problem=full.ending),
    )
    first = dataclasses.replace(
        first,
        pairs=pairs,
        skipped=missing("steps", "loss_scale/skipped_steps was not recorded"),
        first_step=not_compared("s", "time/first_step_seconds was not recorded"),
        remarks=("Two of three seeds could be compared.",),
    )
    gone = Excluded(
        run("old", 0), "superseded: of the runs with this precision and seed the newest counts, new (1234abcd)"
    )
    other = Excluded(run("elsewhere", 1), "not comparable: device GPU instead of CPU")
    whole = dataclasses.replace(whole, rows=(first, second), excluded=(gone, other))
    stray = Excluded(run("parent"), "it names no precision: no training run of mp_hydra, such as the parent of a sweep")
    remarks = ("1 run was deleted in the UI and is left out.",)
    return comparison(whole, records=records, excluded=(stray,), remarks=remarks)


def three_groups() -> Comparison:
    """Three groups of three precisions and three seeds, in sizes far from each other."""
    records: dict[str, RunRecord] = {}
    rows = ("tf32", "mixed_bfloat16", "mixed_float16")
    sizes = {"model=cnn dataset=digits": 0.04, "model=cnn dataset=mnist": 1.0, "model=resnet dataset=synthetic": 17.0}
    groups = [group(label, records, size=size, rows=rows) for label, size in sizes.items()]
    return comparison(*groups, records=records)


def batches() -> Comparison:
    """Two precisions at equal batch and each at its largest, which differ."""
    runs = [
        made_run(
            precision,
            name=f"{precision}-{size}",
            params={"batch_size": size, "memory.mode": "auto"},
            tags={"mp_hydra.batch_size_requested": None if size == "64" else "max", "mp_hydra.memory_resolved": mode},
            metrics={"energy/joules": None},
        )
        for precision, size, mode in (
            ("fp32", "64", "stock"),
            ("mixed_bfloat16", "64", "lean"),
            ("fp32", "72", "stock"),
            ("mixed_bfloat16", "128", "lean"),
        )
    ]
    return judge(paired(runs), runs, title="equal and largest batches")


HOSTILE = "<script>alert('x')</script> & \"q\" |`*_[a](b)"


def hostile() -> Comparison:
    """Names and reasons that would do harm unless they are escaped."""
    records: dict[str, RunRecord] = {}
    whole = group("model=cnn", records)
    pair = dataclasses.replace(
        whole.rows[0].pairs[0], mixed=run(HOSTILE, outcome="error", reason=HOSTILE), problem=f"error ({HOSTILE})"
    )
    bad = dataclasses.replace(
        whole.rows[0], label=HOSTILE, pairs=(pair, *whole.rows[0].pairs[1:]), energy=not_compared("J", HOSTILE)
    )
    advice = Recommendation(Advice.use, HOSTILE)
    whole = dataclasses.replace(
        whole,
        label=HOSTILE,
        rows=(bad, whole.rows[1]),
        remarks=(HOSTILE,),
        excluded=(Excluded(run(HOSTILE), HOSTILE),),
        recommendation=advice,
    )
    return comparison(whole, records=records, title=HOSTILE, remarks=(HOSTILE,))


def many(groups: int = 120) -> Comparison:
    """A large sweep: many groups of three precisions and three seeds."""
    records: dict[str, RunRecord] = {}
    return comparison(*(group(f"model=cnn batch_size={n + 1}", records) for n in range(groups)), records=records)


ALL = (ordinary, one_seed, no_baseline, all_failed, mixed_fates, three_groups, batches, hostile)
