"""Ratios and tables of what `memory.py` measured, and the targets that its figures are held to."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING, Any

from benchmarks.zoo import ZOO

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

REFERENCE, STOCK, LEAN, RECOMPUTE = "stock:fp32", "stock:bf16", "lean:bf16", "recompute:bf16"
VARIANTS = {
    REFERENCE: "stock fp32",
    STOCK: "stock mixed_bfloat16",
    LEAN: "lean mixed_bfloat16",
    RECOMPUTE: "lean + recompute mixed_bfloat16",
    "stock:fp16": "stock mixed_float16",
    "lean:fp16": "lean mixed_float16",
}
UNTIMED = "fp16"

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
