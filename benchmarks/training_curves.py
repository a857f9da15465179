"""Whether training curves in lean memory agree with those of stock Keras within the noise of seeds.

    python benchmarks/training_curves.py model=resnet model.depth=8 epochs=8 precision=mixed_bfloat16
    python benchmarks/training_curves.py --seeds 3 dataset=npz dataset.path=mnist.npz model=resnet model.depth=8 epochs=2

The overrides are those of a run. One sweep trains every seed in every memory mode; the table has, epoch by epoch, mean and
standard deviation over the seeds, and the difference of the means in standard errors (Welch, as if the two modes had seeds of
their own: the noise of seeds is what the difference is held against).
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as from the repository's root, installed or not

from benchmarks.tables import markdown, text

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ROOT = Path(__file__).resolve().parents[1]
METRICS = ("train/loss", "val/loss", "val/accuracy")
EXPERIMENT = "training curves"
Curves = dict[tuple[str, str], dict[str, list[float]]]  # of (metric, memory mode): a curve for each seed


def sweep(overrides: Sequence[str], modes: Sequence[str], seeds: int, directory: Path) -> str:
    """Train all of them; the address of the store that holds the runs.

    Raises:
        CalledProcessError: if a run failed.
    """
    store = f"sqlite:///{directory / 'store.db'}"
    grid = [f"memory={','.join(modes)}", f"seed={','.join(map(str, range(seeds)))}"]
    where = [f"tracking.uri={store}", f"tracking.experiment={EXPERIMENT}", f"hydra.sweep.dir={directory / 'sweep'}"]
    command = [sys.executable, str(ROOT / "train.py"), "-m", *overrides, *grid, *where]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return store


def curves(store: str) -> Curves:
    """What the runs recorded."""
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    found: Curves = defaultdict(dict)
    for run in client.search_runs([experiment.experiment_id], max_results=1000):
        if "memory.mode" in run.data.params:  # the sweep's own run has none
            for metric in METRICS:
                history = sorted(client.get_metric_history(run.info.run_id, metric), key=lambda point: point.step)
                values = [point.value for point in history]
                found[metric, run.data.params["memory.mode"]][run.data.params["seed"]] = values
    return found


def difference(one: Sequence[float], other: Sequence[float]) -> tuple[float, float]:
    """The difference of the means, `other` less `one`, and its standard error by Welch's formula; nan of single values."""
    if min(len(one), len(other)) < 2:  # noqa: PLR2004 - no variance
        return statistics.fmean(other) - statistics.fmean(one), math.nan
    error = math.sqrt(sum(statistics.variance(values) / len(values) for values in (one, other)))
    return statistics.fmean(other) - statistics.fmean(one), error


def table(found: Mapping[tuple[str, str], Mapping[str, Sequence[float]]], one: str, other: str) -> list[list[str]]:
    """Rows of every metric and epoch."""
    rows = [["metric", "epoch", one, other, "difference", "standard errors"]]
    for metric in METRICS:
        pairs = [list(zip(*found[metric, mode].values(), strict=True)) for mode in (one, other)]
        for epoch, (ones, others) in enumerate(zip(*pairs, strict=True), start=1):
            shift, error = difference(ones, others)
            cells = [
                f"{statistics.fmean(values):.4f} ± {statistics.stdev(values):.4f}"
                if len(values) > 1
                else f"{values[0]:.4f}"
                for values in (ones, others)
            ]
            ratio = f"{abs(shift) / error:.1f}" if error else "0.0" if shift == 0 else "inf"
            rows.append([metric, str(epoch), *cells, f"{shift:+.4f}", ratio])
    return rows


def main() -> None:
    """Train and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="of a run, such as model=resnet epochs=8")
    parser.add_argument("--modes", nargs=2, default=["stock", "lean"], metavar="MODE", help="memory modes to compare")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each mode")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mp_hydra_curves_") as folder:
        found = curves(sweep(options.overrides, options.modes, options.seeds, Path(folder)))
    rows = table(found, *options.modes)
    print((markdown if options.markdown else text)(rows))
    print(f"\nlargest of {len(rows) - 1} differences: {max(float(row[-1]) for row in rows[1:]):.1f} standard errors")


if __name__ == "__main__":
    main()
