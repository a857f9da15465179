"""What is known of a model before it trains, as plain values: what the rules of `findings` look at."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mp_hydra.audit.operations import SIXTEEN_BIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_hydra.audit.tracing import Traced
    from mp_hydra.precision import LayerRecord


@dataclass(frozen=True)
class Layer:
    """One layer.

    Attributes:
        record: its row of the census.
        part: the nested model that holds it; None where that is the model itself.
        pinned: whether its path matches one of `precision.pinned`.
        traced: what it really does; None where the model could not be traced.
        widths: features or channels that its weights take and give, for matrix products and convolutions.
        window: values that a pooling layer averages.
        activation: the name of its activation, or of its class in lower case.
        hazard: what its class or settings compute that float16 bears badly; None if nothing is known.
        stays_stock: why `memory=lean` leaves it as Keras has it; None where there is nothing to leave.
        missing: per operation in 16 bits for which the device has no kernel, what TensorFlow does then.
    """

    record: LayerRecord
    part: str | None = None
    pinned: bool = False
    traced: Traced | None = None
    widths: tuple[int, ...] = ()
    window: int = 0
    activation: str = ""
    hazard: str | None = None
    stays_stock: str | None = None
    missing: tuple[tuple[str, str], ...] = ()

    @property
    def path(self) -> str:
        """Its path in the model."""
        return self.record.path

    @property
    def computes_in(self) -> str:
        """The dtype that it really computes in; what its policy says, where it was not traced or only moves numbers."""
        return (self.traced and self.traced.computes_in) or self.record.compute_dtype

    @property
    def inside(self) -> str | None:
        """The dtype that Keras computes this layer in whatever its policy says; None where both agree."""
        work = self.traced.work if self.traced else {}
        return self.computes_in if work and self.computes_in != self.record.compute_dtype else None

    def asdict(self, batch_size: int) -> dict[str, Any]:
        """JSON-ready values; None for what was not traced."""
        names = ("computes_in", "input_dtypes", "output_dtypes", "output_elements", "flops", "kept")
        row: dict[str, Any] = {**self.record.asdict(), **dict.fromkeys(names)}
        if self.traced is None:
            return row
        t = self.traced
        return row | {
            "computes_in": self.computes_in,
            "input_dtypes": list(t.input_dtypes),
            "output_dtypes": list(t.output_dtypes),
            "output_elements": t.output_elements // batch_size,
            "flops": dict(t.flops),
            "kept": {
                "bytes": t.kept_bytes,
                "bytes_stock": t.kept_bytes if t.kept_bytes_stock is None else t.kept_bytes_stock,
                "bytes_float32": t.kept_bytes_float32,
            },
        }


@dataclass(frozen=True)
class Recomputed:
    """What is computed twice.

    Attributes:
        segments: how many parts of the model.
        flops: their share of the multiplications and additions of the forward pass; None where that is not known.
    """

    segments: int
    flops: float | None

    @property
    def price(self) -> float | None:
        """More work in a step: a backward pass has twice the products of a forward pass."""
        return None if self.flops is None else self.flops / 3


@dataclass(frozen=True)
class Model:
    """A model, its data and how it will be trained.

    Attributes:
        policy: the dtype policy that was asked for.
        layers: all of them.
        total: what all layers do together, the model's own code included; None where it could not be traced.
        untraceable: why it could not be traced; None if it was, or was not asked for.
        batch_size: of training.
        device: "CPU" or "GPU".
        scaling: "dynamic", "fixed" or "none".
        output_dtypes: of the model's outputs.
        heads: paths of the layers that compute the outputs.
        rounding_heads: paths of those that compute the outputs, or hand them on, in 16 bits.
        rounded_ids: paths of Embedding layers that receive ids in 16 bits, with the dtype.
        peak_input: the largest magnitude among the inputs; None where it is not known.
        recomputed: of a model that recomputes activations, what; None for one that does not.
    """

    policy: str
    layers: Sequence[Layer]
    batch_size: int = 8
    total: Traced | None = None
    untraceable: str | None = None
    device: str = "CPU"
    scaling: str = "none"
    output_dtypes: Sequence[str] = ("float32",)
    heads: Sequence[str] = ()
    rounding_heads: Sequence[str] = ()
    rounded_ids: Sequence[tuple[str, str]] = field(default_factory=list)
    peak_input: float | None = None
    recomputed: Recomputed | None = None


@dataclass(frozen=True)
class Reach:
    """How much of a model a policy reaches, and the saving to expect.

    Attributes:
        parameters: share of the parameters in layers whose work is in 16 bits.
        flops: share of the multiplications and additions in 16 bits; None without matrix products.
        kept_bytes: estimate of what a batch keeps for the backward pass, under the policy.
        kept_bytes_float32: the same in float32, as stock Keras.
        kept_bytes_stock: the same under the policy, as stock Keras.
    """

    parameters: float
    flops: float | None
    kept_bytes: int
    kept_bytes_float32: int
    kept_bytes_stock: int

    @property
    def kept_ratio(self) -> float | None:
        """Memory for the backward pass as a multiple of float32's; None where nothing is kept."""
        return self.kept_bytes / self.kept_bytes_float32 if self.kept_bytes_float32 else None

    def asdict(self) -> dict[str, Any]:
        """JSON-ready values."""
        return {**vars(self), "kept_ratio": self.kept_ratio}


def reach(model: Model) -> Reach | None:
    """The reach of the policy; None where the model was not traced.

    >>> reach(Model("float32", []))
    """
    if model.total is None:
        return None
    parameters = sum(layer.record.parameters for layer in model.layers)
    reached = sum(layer.record.parameters for layer in model.layers if layer.computes_in in SIXTEEN_BIT)
    flops = sum(model.total.flops.values())
    stock = model.total.kept_bytes_stock
    return Reach(
        parameters=reached / parameters if parameters else 0.0,
        flops=sum(model.total.flops[dtype] for dtype in SIXTEEN_BIT) / flops if flops else None,
        kept_bytes=model.total.kept_bytes,
        kept_bytes_float32=model.total.kept_bytes_float32,
        kept_bytes_stock=model.total.kept_bytes if stock is None else stock,
    )
