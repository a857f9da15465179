"""What is wrong with a model's precision, or could be: pure rules from facts to findings.

Each rule is a function from `Model` to findings; `RULES` lists them. docs/audit.md says for each what it means.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Any

from mp_hydra.audit.facts import reach
from mp_hydra.audit.kernels import FAILS
from mp_hydra.audit.operations import SIXTEEN_BIT
from mp_hydra.precision import COMPUTE_DTYPES
from mp_hydra.probe import ID_LIMITS, SATURATING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from mp_hydra.audit.facts import Layer, Model

FLOAT16_OVERFLOW = 65520.0  # from here on numbers round to inf
LARGE_WINDOW = 256  # values: float16 adds them up without error only while the sum is below 2048 times the smallest
_MULTIPLE = 8  # of channels, features and batch, for tensor cores (NVIDIA, "Train With Mixed Precision", section 4)
_PADDED = 4  # input channels of a first convolution, which cuDNN pads by itself
_LITTLE = 0.9
_MATTERS = 2**24  # bytes; below, memory is nobody's problem
_SHOWN = 3


class Severity(str, Enum):
    """How bad it is: an error is refused or gives wrong results; a warning may; a note costs speed or memory."""

    error = "error"
    warning = "warning"
    note = "note"


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Attributes:
        code: names the rule, such as "sixteen_bit_head".
        severity: how bad it is.
        places: paths of the layers; empty where it is about the whole model.
        reason: what is wrong, and what comes of it.
        cure: what to do.
    """

    code: str
    severity: Severity
    places: tuple[str, ...]
    reason: str
    cure: str

    def line(self) -> str:
        """Everything in one line."""
        return f"{self.where()}{self.reason}; {self.cure}"

    def where(self) -> str:
        """The places, shortened."""
        if not self.places:
            return ""
        more = f" and {len(self.places) - _SHOWN} more" if len(self.places) > _SHOWN else ""
        return f"{', '.join(self.places[:_SHOWN])}{more}: "

    def asdict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**vars(self), "severity": self.severity.value, "places": list(self.places)}


def findings(model: Model) -> list[Finding]:
    """All findings, the worst first."""
    order = list(Severity)
    return sorted((found for rule in RULES for found in rule(model)), key=lambda f: order.index(f.severity))


def overrides_block(paths: Iterable[str]) -> str:
    """The config value that lets these layers compute in float32.

    >>> overrides_block(["encoder/norm", "head"])
    'precision.overrides={encoder/norm: float32, head: float32}'
    """
    entries = ", ".join(
        f"{re.escape(path) if re.search(r'[^A-Za-z0-9_/-]', path) else path}: float32" for path in paths
    )
    return f"precision.overrides={{{entries}}}"


def _paths(layers: Iterable[Layer]) -> tuple[str, ...]:
    return tuple(layer.path for layer in layers)


def _policy_too_late(model: Model) -> Iterator[Finding]:
    asked = COMPUTE_DTYPES[model.policy]
    untold = [
        la for la in model.layers if la.record.compute_dtype != asked and not la.record.dtype_given and not la.pinned
    ]
    early = [layer for layer in untold if layer.record.dtype_given is None]
    other = [layer for layer in untold if layer.record.dtype_given is False]
    if early:
        reason = (
            f"constructed before the policy was set, so computes in {early[0].record.compute_dtype}, not in {asked}"
        )
        cure = "build the model inside the function that model._target_ names"
        yield Finding("policy_too_late", Severity.error, _paths(early), reason, cure)
    if other:
        reason = f"took another policy than {model.policy}: one set inside the model's code, or that of another thread"
        cure = 'leave the global policy alone there; construct layers that are to differ with dtype="float32"'
        yield Finding("other_policy", Severity.error, _paths(other), reason, cure)


def _out_of_reach(model: Model) -> Iterator[Finding]:
    if model.policy == "float32":
        return
    asked = COMPUTE_DTYPES[model.policy]
    weighted = [layer for layer in model.layers if layer.record.parameters]
    missed = [layer for layer in weighted if layer.record.compute_dtype != asked]
    total, lost = (sum(layer.record.parameters for layer in some) for some in (weighted, missed))
    if total and lost > total / 2:
        share = 100 * lost / total
        reason = f"{share:.0f} % of the parameters are in layers with a dtype of their own: {model.policy} does not reach them"
        severity = Severity.error if lost == total else Severity.warning  # a run refuses a policy that reaches nothing
        overridden = any(layer.record.overridden for layer in missed)
        yield Finding("out_of_reach", severity, _paths(missed), reason, _TAKE_OUT if overridden else _REBUILD)
        return
    for part in dict.fromkeys(layer.part for layer in weighted if layer.part):
        inside = [layer for layer in weighted if layer.part == part]
        told = any(layer.record.overridden or layer.pinned for layer in inside)
        if not told and all(layer.record.compute_dtype != asked for layer in inside):
            found = inside[0].record.compute_dtype
            reason = f"this part of the model computes in {found} throughout: {model.policy} does not reach it"
            yield Finding("pinned_part", Severity.warning, (part,), reason, _REBUILD)


_TAKE_OUT = "take some of them out of precision.overrides, or choose the precision that they compute in"
_REBUILD = (
    "a part loaded from a file keeps the precision that it was saved in: build it anew under the policy and copy its weights, "
    "or list it in precision.pinned if it is meant"
)


def _heads(model: Model) -> Iterator[Finding]:
    rounded = [dtype for dtype in model.output_dtypes if dtype in SIXTEEN_BIT]
    cure = 'construct it with dtype="float32", its activation included, or set precision.float32_head=true'
    if rounded:
        reason = f"the head gives {rounded[0]} outputs: loss and metrics would be computed from rounded predictions"
        yield Finding("sixteen_bit_head", Severity.error, tuple(model.rounding_heads), reason, cure)
    for layer in model.layers:
        if layer.path in model.heads and layer.record.compute_dtype in SIXTEEN_BIT and layer.activation in SATURATING:
            reason = (
                f"the head computes its {layer.activation} in {layer.record.compute_dtype}, where confident mistakes get no "
                f"gradient; a cast afterwards does not mend that"
            )
            yield Finding("head_activation", Severity.error, (layer.path,), reason, cure)


def _inputs(model: Model) -> Iterator[Finding]:
    for path, dtype in model.rounded_ids:
        reason = f"receives its ids as {dtype}, which rounds those above {ID_LIMITS[dtype]}: wrong rows are looked up"
        cure = 'begin the model with keras.Input(..., dtype="int32")'
        yield Finding("rounded_ids", Severity.error, (path,), reason, cure)
    float16 = [layer for layer in model.layers if layer.record.compute_dtype == "float16"]
    if float16 and model.peak_input is not None and model.peak_input >= FLOAT16_OVERFLOW:
        reason = f"inputs reach {model.peak_input:g}, which float16 (largest 65504) turns into inf"
        cure = f"give dataset.scale, such as dataset.scale={1 / model.peak_input:.1e}"
        yield Finding("input_overflow", Severity.error, (), reason, cure)


def _scaler(model: Model) -> Iterator[Finding]:
    float16 = [layer for layer in model.layers if layer.record.compute_dtype == "float16"]
    if float16 and model.scaling == "none":
        reason = "layers compute in float16 without loss scaling: gradients below 6e-8 become zero"
        yield Finding("scaler_missing", Severity.warning, (), reason, "use loss_scale=auto")
    if not float16 and model.scaling != "none":
        reason = f"loss scaling ({model.scaling}) has no purpose: no layer computes in float16"
        yield Finding("scaler_without_purpose", Severity.warning, (), reason, "use loss_scale=auto")


_HAZARDS = {
    "exp": "exp overflows float16 from 11.1 on",
    "sum of squares": "a sum of squares overflows float16 above 65504 and vanishes below 6e-8",
}


def _risky(model: Model) -> Iterator[Finding]:
    by_reason: dict[str, list[str]] = {}
    for layer in model.layers:
        if layer.computes_in != "float16":
            continue
        reasons = [_HAZARDS[name] for name in sorted(layer.traced.hazards)] if layer.traced else []
        if layer.hazard and not reasons:
            reasons = [layer.hazard]
        if layer.window >= LARGE_WINDOW and model.device == "CPU":
            reasons.append(f"on a CPU averages {layer.window} values in float16, which loses digits and may overflow")
        for reason in reasons:
            by_reason.setdefault(reason, []).append(layer.path)
    for reason, paths in by_reason.items():
        cure = f"pin with {overrides_block(paths)}"
        yield Finding("risky_in_float16", Severity.warning, tuple(paths), reason, cure)
    for layer in model.layers:
        if layer.traced and layer.traced.infinite:
            values = ", ".join(sorted(layer.traced.infinite))
            reason = (
                f"a constant of its code ({values}) is not finite in {layer.record.compute_dtype}: 0 times it is nan"
            )
            cure = (
                f"mask with keras.ops.where and a number that 16 bits hold, or pin with {overrides_block([layer.path])}"
            )
            yield Finding("infinite_constant", Severity.warning, (layer.path,), reason, cure)


def _kernels(model: Model) -> Iterator[Finding]:
    grouped: dict[tuple[str, str, str], list[str]] = {}
    for layer in model.layers:
        for operation, consequence in layer.missing:
            grouped.setdefault((operation, layer.record.compute_dtype, consequence), []).append(layer.path)
    for (operation, dtype, consequence), paths in grouped.items():
        severity = Severity.error if consequence == FAILS else Severity.warning
        reason = f"TensorFlow has no {dtype} kernel of {operation} for the {model.device}: {consequence}"
        cure = f"pin with {overrides_block(paths)}"
        yield Finding("no_kernel", severity, tuple(paths), reason, cure)


def _multiples(model: Model) -> Iterator[Finding]:
    if not any(layer.computes_in in SIXTEEN_BIT for layer in model.layers):
        return
    odd = [layer for layer in model.layers if layer.computes_in in SIXTEEN_BIT and _odd(layer.widths)]
    if odd:
        widths = ", ".join(map(str, sorted({width for layer in odd for width in _odd(layer.widths)})[:_SHOWN]))
        reason = f"channels or features ({widths}) that are no multiples of {_MULTIPLE} leave tensor cores partly idle"
        yield Finding(
            "width_not_multiple", Severity.note, _paths(odd), reason, f"round them up to a multiple of {_MULTIPLE}"
        )
    if model.batch_size % _MULTIPLE:
        best = max(_MULTIPLE, round(model.batch_size / _MULTIPLE) * _MULTIPLE)
        reason = f"a batch of {model.batch_size} is no multiple of {_MULTIPLE}: tensor cores stay partly idle"
        yield Finding("batch_not_multiple", Severity.note, (), reason, f"use batch_size={best}")


def _odd(widths: Sequence[int]) -> list[int]:
    inputs, *_ = widths or (0,)
    return [w for i, w in enumerate(widths) if w % _MULTIPLE and not (i == 0 and inputs <= _PADDED)]


def _little_gain(model: Model) -> Iterator[Finding]:
    extent = reach(model)
    if model.policy == "float32" or extent is None or extent.kept_bytes_float32 < _MATTERS:
        return
    if extent.kept_ratio is None or extent.kept_ratio < _LITTLE:
        return
    reason = f"what a batch keeps for the backward pass comes to {extent.kept_ratio:.0%} of what float32 keeps"
    heavy = sorted(
        (layer for layer in model.layers if layer.traced and layer.computes_in == "float32"),
        key=lambda layer: -(layer.traced.kept_bytes if layer.traced else 0),
    )
    cure = (
        "16-bit copies of the weights, and what these layers keep in float32, use the saving up: a larger batch outgrows the "
        "former"
    )
    yield Finding("little_to_gain", Severity.note, _paths(heavy[:_SHOWN]), reason, cure)


def _stays_stock(model: Model) -> Iterator[Finding]:
    """Layers that memory=lean could not replace, by reason."""
    places: dict[str, list[str]] = {}
    for layer in model.layers:
        if layer.stays_stock is not None:
            places.setdefault(layer.stays_stock, []).append(layer.path)
    for why, paths in places.items():
        reason = f"memory=lean leaves it as Keras has it: {why}"
        cure = "it is right, but may keep float32 tensors for the backward pass"
        yield Finding("stays_stock", Severity.note, tuple(paths), reason, cure)


def _recomputes(model: Model) -> Iterator[Finding]:
    if model.recomputed is not None:
        what = f"{model.recomputed.segments} segments are computed again in the backward pass instead of being kept"
        if model.recomputed.flops is not None and model.recomputed.price is not None:
            what += f": {model.recomputed.flops:.0%} of the forward pass, about {model.recomputed.price:.0%} more work in a step"
        yield Finding("recomputes", Severity.note, (), what, "memory=lean spares the time of it")


def _not_traced(model: Model) -> Iterator[Finding]:
    if model.untraceable:
        reason = f"the model could not be traced, so what layers really compute in is not known: {model.untraceable}"
        cure = "make its call work on symbolic tensors, as jit and graph mode need, too"
        yield Finding("not_traced", Severity.note, (), reason, cure)


RULES: tuple[Callable[[Model], Iterator[Finding]], ...] = (
    _policy_too_late,
    _out_of_reach,
    _heads,
    _inputs,
    _scaler,
    _risky,
    _kernels,
    _multiples,
    _little_gain,
    _stays_stock,
    _recomputes,
    _not_traced,
)
