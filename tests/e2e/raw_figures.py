"""Every number on the page of a comparison of one group and one row, worked out again from MLflow's raw data.

It shares no code with mp_hydra.compare: numpy and scipy, and the definitions in docs/statistics.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from scipy import optimize, stats

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mlflow import MlflowClient

RATIOS = {
    "training_memory": "memory/training_mib",
    "peak_memory": "memory/peak_mib",
    "state_memory": "memory/state_mib",
    "step_time": "time/step_ms",
    "throughput": "time/samples_per_second",
    "first_step": "time/first_step_seconds",
}
MARGIN, ACCURACY_LEVEL, RATIO_LEVEL = 0.1, 0.90, 0.95
GROUP, ROW = "0", "0.0"


@dataclass(frozen=True)
class Raw:
    """One run as MLflow and its files have it."""

    client: MlflowClient
    run: Any

    def last(self, metric: str) -> float:
        """The last value of a series: of several at the last step the one that came last."""
        history = self.client.get_metric_history(self.run.info.run_id, metric)
        return float(max(history, key=lambda one: (one.step, one.timestamp, one.value)).value)

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        path = Path(self.run.info.artifact_uri.removeprefix("file://")) / name
        with np.load(path) as file:
            return dict(file.items())

    @property
    def precision(self) -> str:
        return str(self.run.data.params["precision.name"])

    @property
    def seed(self) -> int:
        return int(self.run.data.params["seed"])

    @cached_property
    def correct(self) -> np.ndarray:
        return self.arrays("predictions.npz")["correct"]

    def value(self, metric: str) -> float:
        """A metric; the median step from the steps themselves."""
        if metric == "time/step_ms":
            return float(np.median(self.arrays("step_times.npz")["milliseconds"]))
        return self.last(metric)


def page_figures(baseline: list[Raw], mixed: list[Raw]) -> dict[tuple[str, str], float]:
    """By name and row what the page must show; the runs are in order of seeds, pair by pair."""
    return {
        ("runs", ""): len(baseline) + len(mixed),
        ("groups", ""): 1,
        ("margin", ""): MARGIN,
        ("ratio_level", ""): RATIO_LEVEL,
        ("accuracy_level", ""): ACCURACY_LEVEL,
        ("baselines", GROUP): len(baseline),
        ("pairs", ROW): len(mixed),
        **{(name, ROW): value for name, value in _row(baseline, mixed)},
    }


def _row(baseline: list[Raw], mixed: list[Raw]) -> Iterator[tuple[str, float]]:
    for name, metric in RATIOS.items():
        first, second = (np.array([run.value(metric) for run in arm]) for arm in (baseline, mixed))
        yield f"{name}.baseline", stats.gmean(first)
        yield f"{name}.mixed", stats.gmean(second)
        logs = np.log(second / first)
        low, high = _t_interval(logs)
        yield f"{name}.ratio", stats.gmean(second / first)
        yield from ((f"{name}.ratio.low", low), (f"{name}.ratio.high", high))
        if name == "step_time":
            yield from (("speed", np.exp(-logs.mean())), ("speed.low", 1 / high), ("speed.high", 1 / low))
        if name == "training_memory":
            half = stats.gmean(first) / 2
            yield "attained", (stats.gmean(first) - stats.gmean(second)) / half
    counts = [(run.last("loss_scale/skipped_steps"), run.last("loss_scale/applied_steps")) for run in mixed]
    yield "skipped", max(counts)[0]
    yield "steps", sum(max(counts))
    yield from _accuracy(np.array([run.correct for run in baseline]), np.array([run.correct for run in mixed]))
    yield (
        "accuracy.loss",
        float(np.mean([b.last("test/loss") - a.last("test/loss") for a, b in zip(baseline, mixed, strict=True)])),
    )


def _t_interval(logs: np.ndarray) -> tuple[float, float]:
    if np.ptp(logs) == 0:
        return math.exp(logs[0]), math.exp(logs[0])
    low, high = stats.t.interval(RATIO_LEVEL, logs.size - 1, loc=logs.mean(), scale=stats.sem(logs))
    return math.exp(low), math.exp(high)


def _accuracy(baseline: np.ndarray, mixed: np.ndarray) -> Iterator[tuple[str, float]]:
    outcomes = mixed.astype(int) - baseline.astype(int)
    noise = Noise.of(outcomes)
    low, high = noise.interval()
    yield from (("accuracy.baseline", baseline.mean()), ("accuracy.mixed", mixed.mean()))
    yield "accuracy.difference", 100 * (mixed.mean() - baseline.mean())
    yield from (("accuracy.difference.low", low), ("accuracy.difference.high", high))
    yield from (("accuracy.comparison.seeds", len(outcomes)), ("accuracy.comparison.samples", outcomes.shape[1]))
    yield "accuracy.comparison.discordant.0", (outcomes == 1).sum()
    yield "accuracy.comparison.discordant.1", (outcomes == -1).sum()
    yield "accuracy.comparison.detectable", max(high - 100 * outcomes.mean(), 100 * outcomes.mean() - low)
    if not noise.decided():
        for name, count in (("more_seeds", noise.more_seeds()), ("more_samples", noise.more_samples())):
            if count is not None:
                yield f"accuracy.comparison.{name}", count


@dataclass(frozen=True)
class Noise:
    """Shares of outcomes, and components of variance of one outcome: of seeds, of samples, and of the rest."""

    seeds: int
    samples: int
    gained: float
    lost: float
    of_seeds: float
    of_samples: float
    of_rest: float

    @classmethod
    def of(cls, outcomes: np.ndarray) -> Noise:
        seeds, samples = outcomes.shape
        mean, rows, columns = outcomes.mean(), outcomes.mean(axis=1), outcomes.mean(axis=0)
        rest = outcomes - rows[:, None] - columns[None, :] + mean
        of_rest = (rest**2).sum() / (seeds - 1) / (samples - 1)
        of_seeds = (rows.var(ddof=1) * samples - of_rest) / samples
        of_samples = (columns.var(ddof=1) * seeds - of_rest) / seeds
        shares = (outcomes == 1).mean(), (outcomes == -1).mean()
        return cls(seeds, samples, *map(float, (*shares, of_seeds, of_samples, of_rest)))

    def resized(self, seeds: int, samples: int) -> Noise:
        known = (max(self.of_seeds, 0), max(self.of_samples, 0), self.of_rest)
        return Noise(seeds, samples, self.gained, self.lost, *known)

    def interval(self) -> tuple[float, float]:
        """In points."""
        count = self.seeds * self.samples
        estimate = self.gained - self.lost
        square_of_seeds = self.samples * self.of_seeds + self.of_rest
        square_of_samples = self.seeds * self.of_samples + self.of_rest
        noise = max(square_of_samples, self.of_rest) / count
        size = float(self.samples)
        if noise > 1e-15:
            size = min(max((self.gained + self.lost - estimate**2) / noise, self.samples), count)
        low, high = tango(self.gained * size, self.lost * size, size)
        tail = (1 + ACCURACY_LEVEL) / 2
        t, z = stats.t.ppf(tail, self.seeds - 1), stats.norm.ppf(tail)
        added = max(0.0, t**2 * square_of_seeds - z**2 * self.of_rest) / count
        floor = 1 - (1 - tail) ** (1 / self.samples)
        below, above = (max(math.sqrt(arm**2 + added), floor) for arm in (estimate - low, high - estimate))
        return 100 * max(estimate - below, -1), 100 * min(estimate + above, 1)

    def decided(self) -> bool:
        low, high = self.interval()
        return (low > -MARGIN and high < MARGIN) or high < -MARGIN or low > MARGIN

    def more_seeds(self) -> int | None:
        return _fewest(lambda more: self.resized(self.seeds + more, self.samples).decided(), 1_000 - self.seeds)

    def more_samples(self) -> int | None:
        return _fewest(lambda more: self.resized(self.seeds, self.samples + more).decided(), 10**8 - self.samples)


def _fewest(enough: Any, most: int) -> int | None:
    if not enough(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def tango(gained: float, lost: float, size: float) -> tuple[float, float]:
    """The ends of Tango's interval: where the score statistic equals the normal quantile; its variance by maximum likelihood."""
    z = stats.norm.ppf((1 + ACCURACY_LEVEL) / 2)
    estimate = (gained - lost) / size

    def score(difference: float) -> float:
        # q, the share of samples that are lost, maximises the trinomial likelihood under this difference.
        a, b = 2 * size, (2 * size - gained + lost) * difference - gained - lost
        roots = np.roots([a, b, -lost * difference * (1 - difference)]).real
        q = max(roots)
        return float((estimate - difference) / math.sqrt((2 * q + difference * (1 - difference)) / size))

    step = 1e-12
    low = optimize.brentq(lambda at: score(at) - z, -1 + step, estimate - step, xtol=1e-14)
    high = optimize.brentq(lambda at: score(at) + z, estimate + step, 1 - step, xtol=1e-14)
    return low, high
