"""Why loss scaling is needed for a model: where its gradients lie in the range of float16.

The idea is figure 3 of Micikevicius et al., "Mixed Precision Training", ICLR 2018. Gradients are computed in float32 and then
placed in float16's range, so that nothing is lost before it is counted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from types import MethodType
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.errors import ModelError, PrecisionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    import numpy.typing as npt

SMALLEST = 2.0**-24  # the smallest positive float16; what lies at or below half of it rounds to zero
NORMAL = 2.0**-14  # the smallest float16 with full precision
LARGEST = 65504.0
BINS = np.arange(-60, 41)  # powers of two


@dataclass(frozen=True)
class GradientRange:
    """The gradients of one layer, of its outputs or of its weights, in float16's range.

    Attributes:
        layer: path of the layer.
        kind: "outputs" (what flows backward in 16 bits) or "weights".
        count: values seen, zeros included.
        zero: share that is zero in float32 already.
        underflow: share that is not, and becomes zero in float16 without scaling.
        subnormal: share that keeps less than float16's full precision without scaling.
        smallest: the smallest magnitude above zero; None if all are zero.
        largest: the largest magnitude.
        exponents: how many non-zero values have each power of two as floor(log2 |g|), for `BINS`; outliers in the end bins.
    """

    layer: str
    kind: str
    count: int
    zero: float
    underflow: float
    subnormal: float
    smallest: float | None
    largest: float
    exponents: tuple[int, ...]

    @property
    def scales(self) -> tuple[float, float] | None:
        """The scales from which no value becomes zero, and up to which none overflows; the first may lie above the second.

        None if all gradients are zero.
        """
        if self.smallest is None:
            return None
        return SMALLEST / self.smallest, LARGEST / self.largest

    def asdict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**asdict(self), "scales": self.scales}


def float16_range(layer: str, kind: str, values: Iterable[npt.NDArray[np.float32]]) -> GradientRange:
    """Count gradients by where they lie in float16's range.

    Raises:
        ValueError: where there is no value at all.
        ModelError: for inf or nan.

    >>> r = float16_range("dense", "weights", [np.array([0.0, 2.0**-26, 2.0**-20, 1.0], "float32")])
    >>> r.zero, r.underflow, r.subnormal, r.smallest == 2.0**-26, r.largest
    (0.25, 0.25, 0.25, True, 1.0)
    """
    parts = [np.ravel(np.asarray(part, dtype="float64")) for part in values]
    magnitudes = np.abs(np.concatenate([np.zeros(0), *parts]))
    total = len(magnitudes)
    if not total:
        raise ValueError(f"there are no gradients of the {kind} of layer {layer}")
    if not np.isfinite(magnitudes).all():
        raise ModelError(
            f"the gradient of the {kind} of layer {layer} holds inf or nan in float32 already: look at loss and data first"
        )
    nonzero = magnitudes[magnitudes > 0]
    with np.errstate(over="ignore", under="ignore"):
        as_float16 = nonzero.astype("float16")
    powers = np.clip(np.floor(np.log2(nonzero)), BINS[0], BINS[-1]).astype(int) - BINS[0]
    return GradientRange(
        layer=layer,
        kind=kind,
        count=total,
        zero=(total - len(nonzero)) / total,
        underflow=float(np.sum(as_float16 == 0)) / total,
        subnormal=float(np.sum((as_float16 > 0) & (nonzero < NORMAL))) / total,
        smallest=float(nonzero.min()) if len(nonzero) else None,
        largest=float(nonzero.max()) if len(nonzero) else 0.0,
        exponents=tuple(int(n) for n in np.bincount(powers, minlength=len(BINS))),
    )


def common_scales(ranges: Sequence[GradientRange]) -> tuple[float, float] | None:
    """The scales that would keep every gradient of every layer representable; None if all gradients are zero.

    The first number may lie above the second: then no single scale keeps everything.
    """
    scales = [r.scales for r in ranges if r.scales is not None]
    if not scales:
        return None
    return max(low for low, _ in scales), min(high for _, high in scales)


def gradient_ranges(model: Any, batches: Iterable[tuple[Any, Any]]) -> list[GradientRange]:
    """Gradients of every layer's outputs and weights over some batches.

    Args:
        model: compiled and built under the policy float32.
        batches: (x, y) as training feeds them.

    Returns:
        One record a layer for its outputs, in the order in which layers are called, then one for its weights.

    Raises:
        PrecisionError: for a layer that computes in 16 bits: its gradients would have lost already what is to be counted.
        ModelError: for gradients that are inf or nan in float32.
    """
    import tensorflow as tf

    for layer in _leaves(model):
        if layer.compute_dtype in ("float16", "bfloat16"):
            raise PrecisionError(
                f"layer {layer.path or layer.name} ({type(layer).__name__}) computes in {layer.compute_dtype} whatever the "
                f"policy; gradients can be placed in float16's range only where all layers compute in float32"
            )
    found: dict[tuple[str, str], list[npt.NDArray[np.float32]]] = defaultdict(list)
    for x, y in batches:
        outputs: list[tuple[str, Any]] = []
        with ExitStack() as stack, tf.GradientTape() as tape:
            for layer in _leaves(model):
                stack.enter_context(_recorded(layer, outputs, tape))
            predictions = model(x, training=True) if model._call_has_training_arg else model(x)  # noqa: SLF001
            loss = model.compute_loss(x=x, y=y, y_pred=predictions)
        weights = [(variable.path.rpartition("/")[0], variable) for variable in model.trainable_variables]
        tensors = [tensor for _, tensor in outputs] + [variable.value for _, variable in weights]
        gradients = tape.gradient(loss, tensors)
        kinds = ["outputs"] * len(outputs) + ["weights"] * len(weights)
        for (path, _), kind, gradient in zip([*outputs, *weights], kinds, gradients, strict=True):
            if gradient is not None:
                found[path, kind].append(np.asarray(tf.convert_to_tensor(gradient)))
    return [float16_range(*key, values) for key, values in found.items() if any(part.size for part in values)]


def _leaves(model: Any) -> list[Any]:
    import keras

    return [
        layer
        for layer in model._flatten_layers(include_self=False)  # noqa: SLF001 - the one recursive walk that Keras has
        if not layer._layers and not isinstance(layer, keras.layers.InputLayer)  # noqa: SLF001
    ]


@contextmanager
def _recorded(layer: Any, outputs: list[tuple[str, Any]], tape: Any) -> Iterator[None]:
    """Keep what the layer returns; the override lives on the instance only."""
    import keras

    original = layer.call

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        for tensor in keras.tree.flatten(result):
            if keras.backend.is_float_dtype(tensor.dtype):
                tape.watch(tensor)
                outputs.append((self.path or self.name, tensor))
        return result

    object.__setattr__(layer, "call", MethodType(call, layer))
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def plot(ranges: Sequence[GradientRange], path: Path) -> None:
    """Draw how the magnitudes of each layer's output gradients spread over powers of two, against float16's range."""
    from matplotlib.colors import LogNorm
    from matplotlib.figure import Figure

    rows = [r for r in ranges if r.kind == "outputs" and any(r.exponents)]
    height = max(2.5, 0.24 * len(rows) + 1.6)
    figure = Figure(figsize=(9, height), layout="constrained")
    axes = figure.subplots()
    shares = np.array([np.array(r.exponents) / sum(r.exponents) for r in rows]) if rows else np.zeros((1, len(BINS)))
    shown = np.ma.masked_equal(shares, 0)
    image = axes.imshow(
        shown,
        aspect="auto",
        cmap="viridis_r",
        norm=LogNorm(1e-5, 1.0),  # the few that are lost should show as well
        extent=(BINS[0], BINS[-1] + 1, len(shares), 0),
        interpolation="nearest",
    )
    axes.set_yticks(np.arange(len(rows)) + 0.5, [r.layer for r in rows], fontsize=8)
    marks = (
        (math.log2(SMALLEST / 2), "zero below ", "right"),
        (math.log2(NORMAL), " subnormal below", "left"),
        (16.0, "inf above", "center"),
    )
    for power, label, side in marks:
        axes.axvline(power, color="#d55e00", linewidth=1.2)
        axes.text(power, -0.25, label, ha=side, va="bottom", fontsize=8, color="#d55e00")
    seen = np.flatnonzero(shares.sum(axis=0))
    axes.set_xlim(min(BINS[seen[0]] if len(seen) else 0, -26) - 1, 19)
    axes.set_xlabel("magnitude of the gradient of the layer's output, power of two")
    figure.colorbar(image, ax=axes, label="share of non-zero values", shrink=min(1.0, 5 / height))
    figure.savefig(path, dpi=140)
