"""Audit every architecture of keras.applications at its smallest input; prints the table of docs/audit.md.

    python benchmarks/audit_applications.py [POLICY] [NAME ...]

Models are those of Keras, with random weights and ten classes; what they keep for the backward pass is told for them as they are
and made lean. Nothing is run.
"""

from __future__ import annotations

import gc
import inspect
import sys
import time
from typing import Any

import keras
import numpy as np

from mp_hydra.audit.gathering import gather
from mp_hydra.audit.report import Audit
from mp_hydra.memory_mode import apply
from mp_hydra.precision import scoped_policy
from mp_hydra.probe import observe_graph

SIZES = (32, 64, 71, 75, 96, 128, 224, 299, 331)
POLICY = sys.argv[1] if len(sys.argv) > 1 else "mixed_float16"


def built(constructor: Any) -> tuple[Any, int]:
    """The model and the side of its smallest input among `SIZES`."""
    problem: Exception | None = None
    for size in SIZES:
        try:
            return constructor(weights=None, input_shape=(size, size, 3), classes=10), size
        except ValueError as error:  # noqa: PERF203 - too small
            problem = error
    raise RuntimeError(str(problem))


def main() -> None:
    """Print a row for each architecture."""
    names = sys.argv[2:] or [n for n, c in vars(keras.applications).items() if inspect.isfunction(c)]
    print("| architecture | input | layers | errors, warnings, notes | kept, stock | kept, lean | seconds |")
    print("|---|---:|---:|---|---:|---:|---:|")
    for name in names:
        with scoped_policy(POLICY, tf32=False) as scope:
            model, size = built(getattr(keras.applications, name))
            x = np.zeros((2, size, size, 3), "float32")
            seen = observe_graph(model)
            start = time.process_time()
            scaling = "dynamic" if POLICY == "mixed_float16" else "none"
            memory = apply(model, {"memory": {"mode": "lean"}})
            settings: dict[str, Any] = {"batch_size": 32, "device": "CPU", "scaling": scaling, "memory": memory}
            facts = gather(model, x, seen, scope, peak_input=1.0, **settings)
            audit = Audit.of(facts)
            seconds = time.process_time() - start
        found = ", ".join(f"{f.code} ({len(f.places)})" for f in audit.findings) or "none"
        kept = "not traced | "
        if audit.reach is not None:
            stock, lean = audit.reach.kept_bytes_stock, audit.reach.kept_bytes
            kept = " | ".join(f"{size_ / audit.reach.kept_bytes_float32:.2f}" for size_ in (stock, lean))
        print(f"| {name} | {size} | {len(audit.layers)} | {found} | {kept} | {seconds:.1f} |", flush=True)
        del model, seen, facts, audit
        gc.collect()


if __name__ == "__main__":
    main()
