"""`mp-hydra audit --gradients`: gradient ranges of a configured model as a table, a plot and a JSON file."""

from __future__ import annotations

import json
import math
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from rich.console import Console

    from mp_hydra.gradient_ranges import GradientRange

# What makes the configured model one that computes in float32 throughout.
IN_FLOAT32 = ("precision=fp32", "loss_scale=none", "callbacks=none", "precision.overrides=null")


def measure(config: Mapping[str, Any], batches: int) -> list[GradientRange]:
    """Build the configured model in float32 and take gradients over the first batches of its training data.

    Args:
        config: a resolved config; its precision must be fp32.
        batches: how many batches, at most.
    """
    import keras

    from mp_hydra.gradient_ranges import gradient_ranges
    from mp_hydra.precision import scoped_policy
    from mp_hydra.preparation import load_data, prepare
    from mp_hydra.startup import start_tensorflow

    start_tensorflow()
    with scoped_policy("float32", tf32=False) as scope:
        keras.utils.set_random_seed(config["seed"])
        data = load_data(config)
        prepared = prepare(config, data, scope)
        taken = islice(data.train.batches(config["batch_size"], shuffle_seed=config["seed"]), batches)
        return gradient_ranges(prepared.model, taken)


def conclusion(ranges: Sequence[GradientRange]) -> str:
    """One sentence: is scaling needed, and which scales would keep every gradient representable?"""
    from mp_hydra.gradient_ranges import common_scales

    scales = common_scales(ranges)
    if scales is None:
        return "Every gradient is zero: nothing can be said about scaling."
    worst = max(ranges, key=lambda r: r.underflow)
    loudest = max(ranges, key=lambda r: r.largest)
    lost = []
    if worst.underflow:
        lost.append(f"up to {worst.underflow:.2%} of a layer's gradients become zero ({worst.layer}, {worst.kind})")
    if scales[1] < 1.0:
        lost.append(f"gradients up to {loudest.largest:.2g} become inf ({loudest.layer}, {loudest.kind})")
    if not lost:
        return "No scaling is needed: float16 holds every gradient as it is."
    without = f"without scaling {' and '.join(lost)}"
    lowest, highest = _powers(scales)
    if lowest <= highest:
        return f"Scales from 2^{lowest} to 2^{highest} keep every gradient; {without}."
    crossing = f"some become inf above 2^{highest}, some zero below 2^{lowest}"
    return f"No power of two as a scale keeps every gradient: {crossing}; {without}."


def _powers(scales: tuple[float, float]) -> tuple[int, int]:
    """The smallest and the largest power of two among scales; the first may lie above the second."""
    return math.ceil(math.log2(scales[0])), math.floor(math.log2(scales[1]))


def show(ranges: Sequence[GradientRange], console: Console) -> None:
    """Print a table for the outputs, one for the weights, and the conclusion."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    for kind in dict.fromkeys(r.kind for r in ranges):
        table = Table(title=f"Gradients of {kind} in float16's range, without loss scaling", title_justify="left")
        table.box, table.padding = SIMPLE_HEAD, (0, 1, 0, 0)
        table.add_column("layer", overflow="fold")
        for name in ("zero\nanyway", "becomes\nzero", "subnormal", "largest", "scales\nthat keep all"):
            table.add_column(name, justify="right", no_wrap=True)
        for r in ranges:
            if r.kind == kind:
                shares = [f"{share:.2%}" for share in (r.zero, r.underflow, r.subnormal)]
                table.add_row(r.layer, *shares, f"{r.largest:.2g}", _span(r.scales))
        console.print(table)
    console.print(conclusion(ranges), highlight=False)


def _span(scales: tuple[float, float] | None) -> str:
    if scales is None:
        return "-"
    lowest, highest = _powers(scales)
    return f"2^{lowest}…2^{highest}" if lowest <= highest else "none"


def save(ranges: Sequence[GradientRange], directory: Path) -> list[Path]:
    """Write gradients.json and gradients.png into `directory`, which is made where it is missing."""
    from mp_hydra.gradient_ranges import plot

    directory.mkdir(parents=True, exist_ok=True)
    numbers, picture = directory / "gradients.json", directory / "gradients.png"
    numbers.write_text(json.dumps([r.asdict() for r in ranges], indent=2) + "\n", encoding="utf-8")
    plot(ranges, picture)
    return [numbers, picture]
