"""How long the comparison takes to read a large sweep from one sqlite store, and how much memory.

    python benchmarks/compare_scale.py --runs 1000 --metrics 20 --points 100

The store is made by MLflow, in a temporary directory, and filled through sqlite3. It is read in a fresh process, as
`mp-hydra compare` does: `find` by the id of the parent run, `read_records` with some of the series, verdicts, page. Importing
MLflow is timed by itself, because every command that opens a store pays for it. Once without artifacts, once with those that
every run leaves.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sqlite3
import subprocess
import sys
import tempfile
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

PARENT = uuid.UUID(int=0).hex
SERIES = ("train/loss", "val/loss", "loss_scale/value")
JUDGED = (
    "memory/training_mib",
    "memory/peak_mib",
    "memory/state_mib",
    "time/step_ms",
    "time/samples_per_second",
    "test/accuracy",
)
SEEDS = 10
PRECISIONS = ("fp32", "mixed_float16", "mixed_bfloat16")
TEST_SAMPLES = 10_000
STEADY_STEPS = 2_000


def run_ids(count: int) -> list[str]:
    """The ids of the children, in order of their start."""
    return [uuid.UUID(int=number).hex for number in range(1, count + 1)]


def metric_names(count: int) -> list[str]:
    """The metrics of every run, those first that the comparison draws, then those that it judges."""
    return [*SERIES, *JUDGED, *(f"other/metric_{number:02}" for number in range(count))][:count]


def fill(database: Path, *, runs: int, metrics: int, points: int, params: int, tags: int) -> None:
    """Put a parent and its children into the tables of a store that MLflow has made."""
    artifacts = database.parent / "artifacts"
    names = metric_names(metrics)
    ids = run_ids(runs)
    with contextlib.closing(sqlite3.connect(database)) as store:
        store.execute("PRAGMA synchronous = OFF")
        insert(store, "runs", (_run(run, number, artifacts) for number, run in enumerate([PARENT, *ids])))
        insert(store, "params", (param for number, run in enumerate(ids) for param in _params(run, number, params)))
        insert(store, "tags", [("mp_hydra.kind", "sweep", PARENT)])
        insert(store, "tags", (tag for number, run in enumerate(ids) for tag in _tags(run, number, tags)))
        insert(store, "metrics", _points(ids, names, points))
        insert(store, "latest_metrics", ((n, 1.0 / points, points, points, False, run) for run in ids for n in names))
        insert(store, "datasets", [("d", 0, "digits", "0123456789abcdef", "mp_hydra", "{}", None, None)])
        insert(store, "inputs", ((f"i{run}"[:36], "DATASET", "d", "RUN", run, 0) for run in ids))
        store.commit()


def insert(store: sqlite3.Connection, table: str, rows: Iterable[Sequence[Any]]) -> None:
    """Add whole rows, with values in the order of the table's columns."""
    columns = store.execute("SELECT count(*) FROM pragma_table_info(?)", (table,)).fetchone()[0]
    store.executemany(f"INSERT INTO {table} VALUES ({', '.join('?' * columns)})", rows)  # noqa: S608 - names of our own


def leave_artifacts(directory: Path, ids: Sequence[str]) -> None:
    """What every run leaves, in the sizes of a test set of 10,000 samples and 2,000 steady steps."""
    random = np.random.default_rng(0)
    for run in ids:
        own = directory / run / "artifacts"
        own.mkdir(parents=True)
        label = random.integers(0, 10, TEST_SAMPLES)
        predicted = np.where(random.random(TEST_SAMPLES) < 0.02, 0, label)  # noqa: PLR2004 - a 2 % error
        np.savez_compressed(own / "predictions.npz", label=label, predicted=predicted, correct=predicted == label)
        np.savez_compressed(own / "step_times.npz", milliseconds=random.normal(5, 0.1, STEADY_STEPS))
        (own / "environment.json").write_text(json.dumps({"versions": {"tensorflow": "2.21"}}), encoding="utf-8")


def _run(run: str, number: int, artifacts: Path) -> tuple[Any, ...]:
    location = (artifacts / run / "artifacts").as_uri()
    return (
        *(run, f"run {number}", "LOCAL", "train.py", "", "me", "FINISHED", 1000 + number, 2000 + number, ""),
        *("active", location, 0, None),
    )


def _tags(run: str, number: int, count: int) -> Iterator[tuple[str, str, str]]:
    own = {
        "mlflow.parentRunId": PARENT,
        "mlflow.runName": f"run {number}",
        "mp_hydra.outcome": "ok",
        "mp_hydra.precision": PRECISIONS[number % len(PRECISIONS)],
    }
    own |= {f"t.key_{n:02}": f"{n}" for n in range(count - len(own))}
    return ((key, value, run) for key, value in own.items())


def _params(run: str, number: int, count: int) -> Iterator[tuple[str, str, str]]:
    block = number // len(PRECISIONS)
    own = {
        "precision.name": PRECISIONS[number % len(PRECISIONS)],
        "seed": f"{block % SEEDS}",
        "optimizer.learning_rate": f"{(1 + block // SEEDS) / 1000}",
    }
    own |= {f"p.key_{n:02}": f"{n}" for n in range(count - len(own))}
    return ((key, value, run) for key, value in own.items())


def _points(ids: Sequence[str], names: Sequence[str], points: int) -> Iterator[tuple[Any, ...]]:
    for number, run in enumerate(ids):
        for step in range(1, points + 1):  # as training logs: all metrics of a step together
            for name in names:
                yield name, 1.0 / step + number * 1e-6, step, run, step, False


def read(uri: str, names: Sequence[str]) -> None:
    """Find and read the sweep in this process, and print what it took."""
    before = _peak_mib()
    start = time.perf_counter()
    from mp_hydra.compare.collect import Store, find, read_records

    store = Store.open(uri)
    opened = time.perf_counter()
    peak_open = _peak_mib()
    selection = find(PARENT, store, cwd=Path.cwd())
    found = time.perf_counter()
    records = read_records(store, selection.runs, series=names)
    done = time.perf_counter()
    values = sum(len(series.values) for record in records for series in record.series.values())
    lines = sum(len(record.missing) for record in records)
    print(f"  {len(records)} records, {values} points of {len(names)} series, {lines} lines on what is missing")
    print(f"  import mlflow and open  {opened - start:6.2f} s   peak RSS {before:.0f} -> {peak_open:.0f} MiB")
    print(f"  find                    {found - opened:6.2f} s")
    print(f"  read_records            {done - found:6.2f} s")
    from mp_hydra.compare.judge import judge
    from mp_hydra.compare.pairing import pair
    from mp_hydra.compare.report import markdown, page

    comparison = judge(pair(records), records)
    judged = time.perf_counter()
    size = len(page.render(comparison)) + len(markdown.render(comparison))
    rendered = time.perf_counter()
    pairs = sum(len(row.compared) for _, row in comparison.rows())
    print(f"  pair and judge          {judged - done:6.2f} s   {len(comparison.groups)} groups, {pairs} pairs")
    print(f"  page and Markdown       {rendered - judged:6.2f} s   {size / 2**10:.0f} KiB")
    print(f"  all after opening       {rendered - opened:6.2f} s   peak RSS {_peak_mib():.0f} MiB")


def _peak_mib() -> float:
    """Peak resident memory of this process; getrusage would start with that of the process that forked it."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    raise OSError("the kernel does not tell the peak memory of a process")


def main() -> None:
    """Make the store, read it twice."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"runs": 1000, "metrics": 20, "points": 100, "params": 60, "tags": 15}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--series", type=int, default=len(SERIES), help="how many of the metrics to read in full")
    parser.add_argument("--read", metavar="URI", help=argparse.SUPPRESS)
    arguments = vars(parser.parse_args())
    uri, series = arguments.pop("read"), arguments.pop("series")
    if uri:
        read(uri, metric_names(arguments["metrics"])[:series])
        return
    from mp_hydra.tracking import open_client
    from mp_hydra.tracking.store import sqlite_uri

    with tempfile.TemporaryDirectory(prefix="mp_hydra_scale_") as directory:
        database = Path(directory) / "mlflow.db"
        uri = sqlite_uri(database)
        open_client(uri)
        start = time.perf_counter()
        fill(database, **arguments)
        print(f"store of {database.stat().st_size / 2**20:.0f} MiB filled in {time.perf_counter() - start:.0f} s")
        for title, make in (("without artifacts", False), ("with artifacts", True)):
            if make:
                leave_artifacts(database.parent / "artifacts", run_ids(arguments["runs"]))
            print(title, flush=True)
            subprocess.run([sys.executable, __file__, "--read", uri, "--series", str(series)], check=True)


if __name__ == "__main__":
    main()
