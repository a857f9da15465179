"""Memory and time of a training step: stock Keras, lean, and lean with recomputation, on the models of `zoo.py`.

    python benchmarks/memory.py [--models ViT ResNet50] [--rounds 2] [--markdown] [--check] [--json FILE]

Each figure is from a fresh process that builds a model with random weights, compiles it with Adam as Keras does, and calls
`train_on_batch` on one random batch that is on the device already. The variants of a model take turns in every round.

The allocator is set up as in a run (`mp_hydra.telemetry.memory.take_one_region`). It counts a tensor with the place that it gets,
which is up to twice its size where a hole is reused: up to some 12 % of a peak, seen in the profiler's allocation events. It
differs from process to process, and is why small differences between ratios mean nothing.

    memory      the allocator's peak during a step less what it held before it (weights, optimizer state and the batch): the
                largest of the steps after the first. It is what a step adds: activations, gradients, temporaries
    bound       gradients stay float32 and the rest halves, as a share of stock fp32. What drops tensors that float32 keeps,
                as lean does with those inside gelu and attention, goes below it; recomputation does too
    kept        what the traced backward pass reads of the forward pass: tensors that must live from one to the other
    time        median of the steps after the first, at least six and four seconds of them. mixed_float16 has none: CPUs have
                no float16 arithmetic

MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # as from the repository's root, installed or not

import mp_hydra
from benchmarks.memory_figures import (
    MB,
    UNTIMED,
    VARIANTS,
    Figures,
    Found,
    Results,
    check_table,
    kept_table,
    memory_table,
    summary_table,
    time_table,
)
from benchmarks.tables import markdown, text
from benchmarks.zoo import ZOO, Entry
from mp_hydra.telemetry.memory import AllocatorMemory, count_every_cpu_allocation, take_one_region, variables_bytes

if TYPE_CHECKING:
    from collections.abc import Sequence

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
UNTIMED_STEPS = 1
NEEDS: dict[str, tuple[str, ...]] = {"stock": (), "lean": ("lean",), "recompute": ("lean", "recompute")}
STEPS, SECONDS = 6, 4.0  # at least, of a timed variant


def measure(entry: Entry, variant: str, *, timed: bool) -> Found:
    """Train in this process and say what a step took."""
    count_every_cpu_allocation()
    import keras
    import tensorflow as tf

    memory, _, precision = variant.partition(":")
    take_one_region()
    keras.utils.set_random_seed(0)
    keras.config.set_dtype_policy(POLICIES[precision])
    model = entry.model()
    for change in NEEDS[memory]:
        getattr(mp_hydra, change)(model)
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    x, y = (tf.constant(array) for array in entry.samples(entry.batch))
    allocator = AllocatorMemory("GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0")
    if allocator.current_bytes() is None:
        raise SystemExit(allocator.unavailable)
    started = time.perf_counter()
    model.train_on_batch(x, y)
    first = time.perf_counter() - started
    base = allocator.current_bytes()
    peaks: list[int] = []
    seconds: list[float] = []
    while len(seconds) < UNTIMED_STEPS or (timed and (len(seconds) < STEPS or sum(seconds) < SECONDS)):
        allocator.reset()
        started = time.perf_counter()
        model.train_on_batch(x, y)
        seconds.append(time.perf_counter() - started)
        peaks.append((allocator.peak_bytes() or 0) - (base or 0))
    return {
        "baseline": base,
        "training": max(peaks[:STEPS]),  # as many in every variant
        "peaks": peaks,
        "gradients": variables_bytes(model.trainable_variables),
        "kept": None
        if memory == "recompute"
        else _kept(model, x, entry.batch),  # the trace takes the second run for the first
        "first_s": first,
        "step_s": statistics.median(seconds) if timed else None,
        "seconds": seconds,
        "source": allocator.source,
    }


def _kept(model: Any, x: Any, batch: int) -> int | None:
    """Bytes that the audit's trace says are kept for the backward pass; None for what it cannot trace."""
    from mp_hydra.audit.tracing import UntraceableError, trace

    try:
        return trace(model, x, batch).total().kept_bytes
    except UntraceableError:
        return None


def run_all(
    models: Sequence[str], variants: Sequence[str], rounds: int, words: Sequence[str]
) -> tuple[Results, dict[tuple[str, str], str]]:
    """A process for every model, round and variant; what failed, with its last line."""
    results: Results = {}
    failed: dict[tuple[str, str], str] = {}
    for name in models:
        for turn in range(rounds):
            for variant in variants if turn % 2 == 0 else reversed(variants):
                key = name, variant
                if key in failed:
                    continue
                found = _child(name, variant, words)
                if isinstance(found, str):
                    failed[key] = found
                    print(f"{name} {variant}: failed: {found}", file=sys.stderr)
                else:
                    results.setdefault(key, []).append(found)
                    print(f"{name} {variant}: {_brief(found)}", file=sys.stderr)
    return results, failed


def _brief(found: Found) -> str:
    seconds = f", {found['step_s']:.3f} s/step" if found["step_s"] is not None else ""
    return f"{found['training'] / MB:.1f} MB{seconds}"


def _child(name: str, variant: str, words: Sequence[str]) -> Found | str:
    done = subprocess.run(
        [sys.executable, __file__, *words, "--child", name, variant], check=False, capture_output=True, text=True
    )
    if done.returncode == 0:
        found: Found = json.loads(done.stdout.splitlines()[-1])
        return found
    lines = (done.stderr.strip() or done.stdout.strip()).splitlines()
    return lines[-1][:300] if lines else f"exit status {done.returncode}"


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=ZOO, default=list(ZOO), metavar="MODEL", help=", ".join(ZOO))
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS), metavar="VARIANT", help=", ".join(VARIANTS)
    )
    parser.add_argument("--rounds", type=int, default=2, help="fresh processes of each variant")
    parser.add_argument("--memory-only", action="store_true", help="one step after the first, no times")
    parser.add_argument("--markdown", action="store_true", help="print Markdown tables")
    parser.add_argument("--check", action="store_true", help="print the targets beside the figures")
    parser.add_argument("--json", type=Path, help="write everything that was measured to this file")
    parser.add_argument("--read", type=Path, metavar="FILE", help="a file of --json: its figures instead of new ones")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, variant = options.child
        timed = not (options.memory_only or variant.endswith(UNTIMED))
        print(json.dumps(measure(ZOO[name], variant, timed=timed)))
        return
    variants = options.variants
    results: Results
    failed: dict[tuple[str, str], str] = {}
    if options.read:
        known = json.loads(options.read.read_text(encoding="utf-8"))
        results = {(found["model"], found["variant"]): found["rounds"] for found in known}
    else:
        words = ["--memory-only"] if options.memory_only else []
        results, failed = run_all(options.models, variants, options.rounds, words)
    if options.json:
        content = [{"model": name, "variant": variant, "rounds": found} for (name, variant), found in results.items()]
        options.json.write_text(json.dumps(content, indent=1), encoding="utf-8")
    figures = Figures(results)
    tables = [memory_table(figures, options.models, variants), kept_table(figures, options.models, variants)]
    if not options.memory_only:
        tables.insert(1, time_table(figures, options.models, variants, max(map(len, results.values()), default=0)))
        tables.insert(0, summary_table(figures, options.models))
    if options.check:
        tables.append(check_table(figures, options.models))
    form = markdown if options.markdown else text
    print("\n\n".join(form(rows) for rows in tables))
    for (name, variant), problem in failed.items():
        print(f"{name} {VARIANTS[variant]} failed: {problem}")


if __name__ == "__main__":
    main()
