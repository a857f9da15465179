"""From a built and compiled Keras model to the facts that the rules look at."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.install import is_lean, stock_calls
from mp_hydra.activation_memory.recomputation import plain_calls
from mp_hydra.audit.facts import Layer, Model, Recomputed
from mp_hydra.audit.kernels import missing
from mp_hydra.audit.operations import SIXTEEN_BIT
from mp_hydra.audit.tracing import Trace, Traced, UntraceableError, trace
from mp_hydra.layer_overrides import located
from mp_hydra.precision import census, layers_of, path_of
from mp_hydra.probe import activation_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_hydra.activation_memory.recompute import RecomputeReport
    from mp_hydra.memory_mode import Applied
    from mp_hydra.precision import Scope
    from mp_hydra.probe import Observed

log = logging.getLogger(__name__)

# By class name, from its settings: what it computes that float16 bears badly. FACTS: what runs in 16 bits, and how it fails.
_HAZARDS = {
    "UnitNormalization": "sums squares, which overflow float16 above 65504 and vanish below 6e-8",
    "Normalization": "subtracts the mean of raw features in 16 bits, which can erase them",
}


def gather(
    model: Any,
    inputs: Any,
    seen: Observed,
    scope: Scope,
    *,
    batch_size: int,
    device: str,
    scaling: str,
    peak_input: float | None,
    pinned: Sequence[str] = (),
    memory: Applied | None = None,
) -> Model:
    """The facts of a model.

    Args:
        model: built and compiled.
        inputs: one batch of its inputs.
        seen: what `mp_hydra.probe.observe` saw of it.
        scope: of the policy in force.
        batch_size: of training.
        device: that it will train on, "CPU" or "GPU".
        scaling: mode of the loss scaling.
        peak_input: the largest magnitude among all inputs; None where it is not known, and then that of this batch counts.
        pinned: `precision.pinned`.
        memory: what was done to the model so that it keeps less.
    """
    traced, problem = _traced(model, inputs, batch_size)
    recomputed = None
    if memory is not None and memory.recompute is not None:
        share = _give_up(traced, model, memory.recompute, batch_size) if traced is not None else None
        recomputed = Recomputed(len(memory.recompute.segments), share)
    parts = _parts(model)
    patterns = [re.compile(text) for text in pinned]
    stock = memory.lean.stock if memory and memory.lean else {}
    layers = []
    for layer, record in zip(layers_of(model), census(model, scope), strict=True):
        found = traced.layers.get(id(layer)) if traced else None
        layers.append(
            Layer(
                record=record,
                part=parts.get(id(layer)),
                pinned=any(pattern.fullmatch(record.path) for pattern in patterns),
                traced=found,
                widths=_widths(layer),
                window=_window(layer),
                activation=activation_of(layer),
                hazard=_hazard(layer),
                stays_stock=stock.get(record.path),
                missing=()
                if found is None or getattr(model, "jit_compile", False) is True
                else _missing(found, device),
            )
        )
    return Model(
        policy=scope.policy,
        layers=layers,
        batch_size=batch_size,
        total=traced.total() if traced else None,
        untraceable=problem,
        device=device,
        scaling=scaling,
        output_dtypes=seen.output_dtypes(),
        heads=[path_of(layer) for layer in seen.heads],
        rounding_heads=[path_of(layer) for layer in seen.rounding_heads()],
        rounded_ids=[(path_of(layer), dtype) for layer, dtype in seen.rounded_ids],
        peak_input=_peak(inputs) if peak_input is None else peak_input,
        recomputed=recomputed,
    )


def _missing(traced: Traced, device: str) -> tuple[tuple[str, str], ...]:
    """Operations without a kernel. XLA makes its own, so a model that it compiles is not asked."""
    return tuple(sorted({(k.op, what) for k in traced.kernels if (what := missing(k, device))}))


def _traced(model: Any, inputs: Any, batch_size: int) -> tuple[Trace | None, str | None]:
    """What layers compute is seen in Keras' own operations; what is kept, in those that the training runs."""
    try:
        with plain_calls():
            with stock_calls():
                found = trace(model, inputs, batch_size)
            lean = trace(model, inputs, batch_size) if is_lean(model) else None
    except UntraceableError as error:
        log.debug("the model could not be traced", exc_info=error)
        return None, str(error)
    if lean is not None:
        for key, part in found.layers.items():
            part.kept_bytes_stock = part.kept_bytes
            part.kept_bytes = lean.layers[key].kept_bytes if key in lean.layers else 0
    return found, None


def _give_up(traced: Trace, model: Any, report: RecomputeReport, batch_size: int) -> float | None:
    """Of recomputed layers is kept what later ones use of them: it counts as the last one's. Gives their share of the FLOPs."""
    flops, total = 0, sum(traced.total().flops.values())
    layers = [(path_of(layer), traced.layers.get(id(layer))) for layer in layers_of(model)]
    for part in report.segments:
        inside = [found for path, found in layers if found and any(f"{path}/".startswith(f"{p}/") for p in part.layers)]
        for found in inside:
            found.kept_bytes = 0
        if not inside:
            continue
        flops += sum(sum(found.flops.values()) for found in inside)
        last = inside[-1]
        size = 2 if set(last.output_dtypes) & set(SIXTEEN_BIT) else 4
        last.kept_bytes = last.output_elements * size if part.kept_bytes is None else part.kept_bytes * batch_size
    return flops / total if total else None


def _parts(model: Any) -> dict[int, str]:
    """By `id` of a layer the nested model that holds it, the innermost one."""
    import keras

    layers = located(model)
    found: dict[int, str] = {}
    for layer, place in layers:
        parent = place.parent
        while parent is not None and not isinstance(layers[parent][0], keras.Model):
            parent = layers[parent][1].parent
        if parent:  # 0 is the model itself
            found[id(layer)] = layers[parent][1].nesting
    return found


def _widths(layer: Any) -> tuple[int, ...]:
    """Features or channels in and out, for layers whose work runs on tensor cores."""
    import keras

    if isinstance(layer, (keras.layers.DepthwiseConv1D, keras.layers.DepthwiseConv2D)) or layer._layers:  # noqa: SLF001
        return ()
    weight = getattr(layer, "_kernel", None)
    shape = getattr(weight, "shape", ())
    if isinstance(layer, keras.layers.EinsumDense):
        terms, _, result = layer.equation.replace("...", "").partition("->")
        sides = {False: 1, True: 1}  # what is summed over, and what stays
        for label, size in zip(terms.split(",")[1], shape, strict=True):
            sides[label in result] *= int(size)
        return sides[False], sides[True]
    return tuple(int(d) for d in shape[-2:]) if len(shape) > 1 else ()


def _window(layer: Any) -> int:
    """How many values an average-pooling layer adds up; global pooling goes through float32 in Keras."""
    import keras

    pooling = (keras.layers.AveragePooling1D, keras.layers.AveragePooling2D, keras.layers.AveragePooling3D)
    if not isinstance(layer, pooling):
        return 0
    window = 1
    for side in layer.pool_size:
        window *= int(side)
    return window


def _hazard(layer: Any) -> str | None:
    if type(layer).__module__.startswith("keras."):
        if type(layer).__name__ in _HAZARDS:
            return _HAZARDS[type(layer).__name__]
        if activation_of(layer) == "exponential":
            return "its activation exp overflows float16 from 11.1 on"
    return None


def _peak(inputs: Any) -> float | None:
    """The largest magnitude among the floating-point inputs of a batch."""
    import keras
    import numpy as np

    values = [np.asarray(part) for part in keras.tree.flatten(inputs)]
    peaks = [float(np.max(np.abs(v.astype("float64")))) for v in values if v.size and v.dtype.kind == "f"]
    return max(peaks, default=None)
