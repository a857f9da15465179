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
    lowest, highest = scales
    worst = max(ranges, key=lambda r: r.underflow)
    if lowest <= 1.0 <= highest:
        return "No scaling is needed: float16 holds every gradient as it is."
    lost = (
        f"without scaling up to {worst.underflow:.2%} of a layer's gradients become zero ({worst.layer}, {worst.kind})"
    )
    if lowest <= highest:
        return f"Scales from {_power(lowest, math.ceil)} to {_power(highest, math.floor)} keep every gradient; {lost}."
    return f"No single scale keeps every gradient; from {_power(highest, math.floor)} on some overflow, and {lost}."


def _power(scale: float, rounding: Any) -> str:
    return f"2^{rounding(math.log2(scale))}"


def show(ranges: Sequence[GradientRange], console: Console) -> None:
    """Print the table and the conclusion."""
    from rich.table import Table

    table = Table(title="Gradients in float16's range, without loss scaling", title_justify="left")
    table.add_column("layer", overflow="fold")
    table.add_column("gradient of")
    for name in ("zero anyway", "becomes zero", "subnormal", "largest", "scales that keep all"):
        table.add_column(name, justify="right")
    for r in ranges:
        scales = f"{_power(r.scales[0], math.ceil)} … {_power(r.scales[1], math.floor)}" if r.scales else "-"
        shares = [f"{share:.2%}" for share in (r.zero, r.underflow, r.subnormal)]
        table.add_row(r.layer, r.kind, *shares, f"{r.largest:.2g}", scales)
    console.print(table)
    console.print(conclusion(ranges), highlight=False)


def save(ranges: Sequence[GradientRange], directory: Path) -> list[Path]:
    """Write gradients.json and gradients.png into `directory`, which is made where it is missing."""
    from mp_hydra.gradient_ranges import plot

    directory.mkdir(parents=True, exist_ok=True)
    numbers, picture = directory / "gradients.json", directory / "gradients.png"
    numbers.write_text(json.dumps([r.asdict() for r in ranges], indent=2) + "\n", encoding="utf-8")
    plot(ranges, picture)
    return [numbers, picture]
