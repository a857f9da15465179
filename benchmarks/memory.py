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
from benchmarks.tables import markdown, text
from benchmarks.zoo import ZOO, Entry
from mp_hydra.telemetry.memory import AllocatorMemory, count_every_cpu_allocation, take_one_region, variables_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

POLICIES = {"fp32": "float32", "bf16": "mixed_bfloat16", "fp16": "mixed_float16"}
REFERENCE, STOCK, LEAN, RECOMPUTE = "stock:fp32", "stock:bf16", "lean:bf16", "recompute:bf16"
VARIANTS = {
    REFERENCE: "stock fp32",
    STOCK: "stock mixed_bfloat16",
    LEAN: "lean mixed_bfloat16",
    RECOMPUTE: "lean + recompute mixed_bfloat16",
    "stock:fp16": "stock mixed_float16",
    "lean:fp16": "lean mixed_float16",
}
UNTIMED, UNTIMED_STEPS = "fp16", 1
NEEDS: dict[str, tuple[str, ...]] = {"stock": (), "lean": ("lean",), "recompute": ("lean", "recompute")}
STEPS, SECONDS = 6, 4.0  # at least, of a timed variant

MB = 1e6
MEMORY_TARGETS = {
    LEAN: {
        "ResNet-14": 0.53,
        "MobileNetV2": 0.50,
        "EfficientNetB0": 0.49,
        "ConvNeXtTiny": 0.45,
        "ViT": 0.33,
        "encoder": 0.36,
    },
    RECOMPUTE: {"ResNet-14": 0.26, "ViT": 0.10},
}
AT_THE_BOUND = ("ResNet50",)
TIME_OF_STOCK, TIME_OF_FP32, TIME_OF_LEAN = 1.0, 1.0, 1.45
FAST = dict.fromkeys(("ResNet-14", "ViT"), 0.7)

Found = dict[str, Any]
Results = dict[tuple[str, str], list[Found]]  # by model and variant, one for each round that succeeded


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


class Figures:
    """Ratios between the variants of the models."""

    def __init__(self, results: Results) -> None:
        self._results = results

    def middle(self, name: str, variant: str, quantity: str) -> float | None:
        """Median over the rounds."""
        values = self._values(name, variant, quantity)
        return statistics.median(values) if values else None

    def ratio(self, name: str, variant: str, base: str, quantity: str) -> float | None:
        """Of the medians."""
        above, below = (self.middle(name, which, quantity) for which in (variant, base))
        return above / below if above is not None and below is not None else None

    def by_round(self, name: str, variant: str, base: str, quantity: str) -> list[float]:
        """The same, of each round alone."""
        pairs = zip(self._values(name, variant, quantity), self._values(name, base, quantity), strict=False)
        return [above / below for above, below in pairs]

    def bound(self, name: str) -> float | None:
        """Share of stock fp32 that is left when everything halves but the gradients, which stay float32."""
        gradients, full = (self.middle(name, REFERENCE, quantity) for quantity in ("gradients", "training"))
        return (gradients + 0.5 * (full - gradients)) / full if gradients is not None and full is not None else None

    def _values(self, name: str, variant: str, quantity: str) -> list[float]:
        return [found[quantity] for found in self._results.get((name, variant), []) if found[quantity] is not None]


def memory_table(figures: Figures, models: Sequence[str], variants: Sequence[str]) -> list[list[str]]:
    """Rows of MB, with the share of stock fp32 in brackets."""
    rows = [["training memory, MB", "batch", "gradients", "bound", *(VARIANTS[variant] for variant in variants)]]
    for name in models:
        cells = []
        for variant in variants:
            value, ratio = (
                figures.middle(name, variant, "training"),
                figures.ratio(name, variant, REFERENCE, "training"),
            )
            share = "" if ratio is None or variant == REFERENCE else f" ({ratio:.2f})"
            cells.append("-" if value is None else f"{value / MB:.0f}{share}")
        gradients, bound = figures.middle(name, REFERENCE, "gradients"), figures.bound(name)
        rows.append(
            [
                name,
                str(ZOO[name].batch),
                _shown(gradients and gradients / MB, ".0f"),
                _shown(bound, ".2f"),
                *cells,
            ]
        )
    return rows


def time_table(figures: Figures, models: Sequence[str], variants: Sequence[str], rounds: int) -> list[list[str]]:
    """Rows of seconds, and of ratios with each round's own beside it."""
    timed = [variant for variant in variants if not variant.endswith(UNTIMED)]
    pairs = [(STOCK, REFERENCE), (LEAN, REFERENCE), (LEAN, STOCK), (RECOMPUTE, LEAN)]
    pairs = [pair for pair in pairs if set(pair) <= set(timed)]
    rows = [["step time, s", *(VARIANTS[variant] for variant in timed), *(f"{a} / {b}" for a, b in pairs)]]
    for name in models:
        cells = [_shown(figures.middle(name, variant, "step_s"), ".3f") for variant in timed]
        for variant, base in pairs:
            ratio = _shown(figures.ratio(name, variant, base, "step_s"), ".2f")
            each = " ".join(f"{value:.2f}" for value in figures.by_round(name, variant, base, "step_s"))
            cells.append(f"{ratio} ({each})" if rounds > 1 and each else ratio)
        rows.append([name, *cells])
    return rows


def kept_table(figures: Figures, models: Sequence[str], variants: Sequence[str]) -> list[list[str]]:
    """Rows of MB that must live from the forward pass to the backward pass."""
    rows = [["kept for the backward pass, MB", *(VARIANTS[variant] for variant in variants)]]
    for name in models:
        values = [figures.middle(name, variant, "kept") for variant in variants]
        rows.append([name, *(_shown(value and value / MB, ".0f") for value in values)])
    return rows


def checks(figures: Figures, models: Sequence[str]) -> Iterable[tuple[str, float | None, float | None]]:
    """What is asked of the figures: description, figure, the most that it may be."""
    for variant, targets in MEMORY_TARGETS.items():
        for name in models:
            most = figures.bound(name) if variant == LEAN and name in AT_THE_BOUND else targets.get(name)
            if name in targets or (variant == LEAN and name in AT_THE_BOUND):
                yield (
                    f"{name}: memory of {VARIANTS[variant]} / stock fp32",
                    figures.ratio(name, variant, REFERENCE, "training"),
                    most,
                )
    for name in models:
        limits = [(LEAN, STOCK, TIME_OF_STOCK), (LEAN, REFERENCE, FAST.get(name, TIME_OF_FP32))]
        if name in MEMORY_TARGETS[RECOMPUTE]:
            limits.append((RECOMPUTE, LEAN, TIME_OF_LEAN))
        for variant, base, most in limits:
            yield (
                f"{name}: step time of {VARIANTS[variant]} / {VARIANTS[base]}",
                figures.ratio(name, variant, base, "step_s"),
                most,
            )


def check_table(figures: Figures, models: Sequence[str]) -> list[list[str]]:
    """Rows of targets, met or not."""
    rows = [["target", "figure", "at most", ""]]
    for what, figure, most in checks(figures, models):
        rows.append([what, _shown(figure, ".2f"), _shown(most, ".2f"), _verdict(figure, most)])
    return rows


def _verdict(figure: float | None, most: float | None) -> str:
    if figure is None or most is None:
        return "not measured"
    return "met" if round(figure, 2) <= round(most, 2) else "NOT MET"


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def summary_table(figures: Figures, models: Sequence[str]) -> list[list[str]]:
    """Rows of training memory and step time as shares of stock fp32: the table of README.md."""
    variants = (STOCK, LEAN, RECOMPUTE)
    rows = [
        ["training memory (step time), times stock fp32", *(VARIANTS[variant] for variant in (REFERENCE, *variants))]
    ]
    for name in models:
        full, seconds = (figures.middle(name, REFERENCE, quantity) for quantity in ("training", "step_s"))
        cells = [f"{_shown(full and full / MB, ',.0f')} MB ({_shown(seconds, '.2f')} s)"]
        for variant in variants:
            memory, time = (figures.ratio(name, variant, REFERENCE, quantity) for quantity in ("training", "step_s"))
            cells.append(f"{_shown(memory, '.2f')} ({_shown(time, '.2f')})")
        rows.append([f"{ZOO[name].title}, batch {ZOO[name].batch}", *cells])
    return rows


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
