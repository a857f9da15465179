"""How far a forecast of peak memory lies from the truth, on the models of `zoo.py`.

    python benchmarks/forecast_error.py [--models ViT ResNet50] [--precisions fp32 mixed_bfloat16] [--memory lean] [--markdown]

For each model, precision and memory mode, dry runs of three small batches in one process give a forecast, as `mp-hydra forecast`
makes it, for four times the largest of them; another process then trains and evaluates with that batch. The error is the
forecast's, as a share of the peak that was measured.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as from the repository's root, installed or not

from benchmarks.tables import markdown, text
from benchmarks.zoo import ZOO, Entry
from mp_hydra.app import composed
from mp_hydra.errors import UserError
from mp_hydra.forecast.dry_run import measure
from mp_hydra.forecast.ladder import FIRST, Goal
from mp_hydra.forecast.line import REACH, Line

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

ROOT = Path(__file__).resolve().parents[1]
PRECISIONS = ("fp32", "mixed_bfloat16", "mixed_float16")
MODES = ("stock", "lean", "recompute")
MEDIAN, WORST = 0.03, 0.08  # the errors that are asked for, at most
MB = 1e6


@dataclass(frozen=True)
class Case:
    """A forecast and what became of it.

    Attributes:
        model: its name.
        precision: its name.
        memory: "stock", "lean" or "recompute".
        batch_size: that was forecast and run.
        line: through the dry runs.
        measured_bytes: the peak.
    """

    model: str
    precision: str
    memory: str
    batch_size: int
    line: Line
    measured_bytes: int

    @property
    def predicted_bytes(self) -> int:
        """The forecast of the peak."""
        return self.line.bytes_at(self.batch_size)

    @property
    def band(self) -> float:
        """How far the peak may lie from it, by the forecast's own words, as a share."""
        return self.line.band_at(self.batch_size)

    @property
    def error(self) -> float:
        """By which share of the measured peak the forecast lies above it."""
        return self.predicted_bytes / self.measured_bytes - 1

    @classmethod
    def of(cls, values: dict[str, Any]) -> Case:
        """From what `asdict` gave, after JSON made lists of its tuples."""
        points = tuple((size, peak) for size, peak in values["line"]["points"])
        return cls(**{**values, "line": Line(**{**values["line"], "points": points})})


def forecast_and_run(entry: Entry, precision: str, memory: str, dry_runs: Sequence[int]) -> Case:
    """Forecast from dry runs, then run.

    Raises:
        UserError: if the model cannot be trained.
    """
    size = REACH * max(dry_runs)
    config = composed([*entry.overrides(size), f"precision={precision}", f"memory={memory}", "tracking=off"])
    line = measure(config, Goal(exactly=tuple(dry_runs)), directory=ROOT).line
    truth = measure(config, Goal(exactly=(size,)), directory=ROOT).points[0]
    return Case(entry.name, precision, memory, size, line, truth.peak_bytes)


def cases(models: Sequence[str], precisions: Sequence[str], modes: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    """Model, precision and memory mode: lean and recompute are for the mixed policies."""
    for model in models:
        for precision in precisions:
            for mode in modes:
                if mode == "stock" or precision != "fp32":
                    yield model, precision, mode


def table(found: Sequence[Case]) -> list[list[str]]:
    """Rows of megabytes and errors."""
    rows = [["model", "precision", "memory", "batch", "forecast, MB", "measured, MB", "error", "band"]]
    for case in found:
        sizes = (f"{case.predicted_bytes / MB:.0f}", f"{case.measured_bytes / MB:.0f}")
        rows.append(
            [
                case.model,
                case.precision,
                case.memory,
                str(case.batch_size),
                *sizes,
                f"{case.error:+.1%}",
                f"{case.band:.0%}",
            ]
        )
    return rows


def summary(found: Sequence[Case]) -> list[list[str]]:
    """Rows of the median and the worst error, of everything and by precision."""
    rows = [
        [
            "",
            "forecasts",
            f"median error (asked: {MEDIAN:.0%})",
            f"worst error (asked: {WORST:.0%})",
            "within their band",
        ]
    ]
    groups = {"all": list(found)} | {p: [c for c in found if c.precision == p] for p in PRECISIONS}
    for name, group in groups.items():
        if group:
            errors = [abs(case.error) for case in group]
            within = sum(error <= case.band for error, case in zip(errors, group, strict=True))
            rows.append([name, str(len(group)), f"{statistics.median(errors):.1%}", f"{max(errors):.1%}", str(within)])
    return rows


def main() -> None:
    """Forecast, run and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=ZOO, default=list(ZOO), metavar="MODEL", help=", ".join(ZOO))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    parser.add_argument("--memory", nargs="+", choices=MODES, default=["stock", "lean"])
    parser.add_argument("--dry-runs", nargs="+", type=int, default=list(FIRST), metavar="BATCH", help="batch sizes")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--json", type=Path, help="write the figures to this file")
    parser.add_argument(
        "--read", nargs="+", type=Path, metavar="FILE", help="files of --json: their figures instead of new ones"
    )
    options = parser.parse_args()
    found: list[Case] = []
    failed: list[str] = []
    for file in options.read or ():
        found += [Case.of(values) for values in json.loads(file.read_text(encoding="utf-8"))]
    wanted = () if options.read else cases(options.models, options.precisions, options.memory)
    for model, precision, mode in wanted:
        try:
            case = forecast_and_run(ZOO[model], precision, mode, options.dry_runs)
        except UserError as error:  # noqa: PERF203 - the others go on
            failed.append(f"{model} {precision} {mode} failed: {error}")
            print(failed[-1], file=sys.stderr)
        else:
            found.append(case)
            print(f"{model} {precision} {mode}: {case.error:+.1%}", file=sys.stderr)
            if options.json:  # after each: an hour's figures outlive an interruption
                options.json.write_text(json.dumps([asdict(case) for case in found], indent=1), encoding="utf-8")
    form = markdown if options.markdown else text
    print("\n\n".join(form(rows) for rows in (table(found), summary(found))))
    for line in failed:
        print(line)


if __name__ == "__main__":
    main()
