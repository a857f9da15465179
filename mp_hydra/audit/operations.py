"""What an operation of a TensorFlow graph is: its dtype, its kernel, its work, and what is risky about it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Iterable

FLOATS = ("float16", "bfloat16", "float32", "float64")
SIXTEEN_BIT = ("float16", "bfloat16")

# What moves or makes numbers, without computing them.
MOVES = frozenset(
    {
        "AssignAddVariableOp",
        "AssignSubVariableOp",
        "AssignVariableOp",
        "BroadcastTo",
        "Cast",
        "ConcatV2",
        "Const",
        "ExpandDims",
        "Fill",
        "GatherNd",
        "GatherV2",
        "Identity",
        "IdentityN",
        "If",
        "NoOp",
        "OnesLike",
        "Pack",
        "Pad",
        "PadV2",
        "PartitionedCall",
        "Placeholder",
        "PreventGradient",
        "RandomUniform",
        "Range",
        "ReadVariableOp",
        "Reshape",
        "ResourceGather",
        "ReverseV2",
        "SelectV2",
        "Shape",
        "Slice",
        "Split",
        "SplitV",
        "Squeeze",
        "StatefulPartitionedCall",
        "StatelessIf",
        "StatelessRandomNormalV2",
        "StatelessRandomUniformV2",
        "StatelessWhile",
        "StopGradient",
        "StridedSlice",
        "TensorListFromTensor",
        "TensorListGetItem",
        "TensorListReserve",
        "TensorListSetItem",
        "TensorListStack",
        "Tile",
        "Transpose",
        "Unpack",
        "Where",
        "While",
        "ZerosLike",
    }
)
_VIEWS = frozenset({"Identity", "Reshape", "Squeeze", "ExpandDims", "StopGradient", "PreventGradient", "IdentityN"})
GIVEN = frozenset({"ReadVariableOp", "Const", "Placeholder", "VarHandleOp"})  # there anyway, kept or not


@dataclass(frozen=True)
class Kernel:
    """An operation and the types that decide which kernel runs it: ("MatMul", (("T", "float16"),))."""

    op: str
    types: tuple[tuple[str, str], ...]


def root(tensor: Any, *, casts: bool) -> Any:
    """The tensor that this one is a view of; with `casts`, also what it was cast from, as in float32 no cast would be."""
    while True:
        op = tensor.op
        if op.type in _VIEWS:
            tensor = op.inputs[tensor.value_index if op.type == "IdentityN" else 0]
        elif casts and op.type == "Cast" and tensor.dtype.is_floating and op.inputs[0].dtype.is_floating:
            tensor = op.inputs[0]
        else:
            return tensor


def elements(tensor: Any) -> int:
    """Elements of a tensor; an unknown dimension counts as 1."""
    dims = tuple(tensor.shape) if getattr(tensor.shape, "rank", 0) is not None else ()
    return math.prod(int(d or 1) for d in dims)


def dtype_of(op: Any) -> str | None:
    """The floating-point dtype that an operation works on."""
    for tensor in (*op.inputs, *op.outputs):
        if tensor.dtype.base_dtype.name in FLOATS:
            return str(tensor.dtype.base_dtype.name)
    return None


def kernels(operations: Iterable[Any]) -> set[Kernel]:
    """The kernels that run operations, but for those that only hold or call others."""
    found = set()
    for op in operations:
        if op.type in {
            "Placeholder",
            "Const",
            "While",
            "StatelessWhile",
            "If",
            "StatelessIf",
            "PartitionedCall",
            "NoOp",
        }:
            continue
        types = [(a.name, op.get_attr(a.name).name) for a in op.op_def.attr if a.type == "type"]
        found.add(Kernel(op.type, tuple(sorted(types))))
    return found


def infinite(op: Any) -> set[str]:
    """What turns a finite constant into inf or nan in 16 bits, or is such a constant."""
    import tensorflow as tf

    if not op.outputs or op.outputs[0].dtype.name not in SIXTEEN_BIT:
        return set()
    source = op.inputs[0].op if op.type == "Cast" else op
    if source.type != "Const":
        return set()
    value = np.asarray(tf.make_ndarray(source.get_attr("value")), "float64")
    with np.errstate(over="ignore"):
        cast = value.astype("float16") if op.outputs[0].dtype.name == "float16" else value
    if np.isfinite(cast).all():
        return set()
    finite = value[np.isfinite(value)]
    return {f"{finite[np.argmax(np.abs(finite))]:g}" if source is not op and finite.size else "inf"}


def hazards(op: Any) -> set[str]:
    """What overflows float16 easily: "exp", "sum of squares"."""
    if op.type == "Exp":
        return {"exp"}
    if op.type in {"Sum", "L2Loss"}:
        inner = op.inputs[0].op
        squared = inner.type == "Square" or (inner.type == "Mul" and inner.inputs[0] is inner.inputs[1])
        if op.type == "L2Loss" or squared:
            return {"sum of squares"}
    return set()


def flops(op: Any) -> int:
    """Multiplications and additions of a matrix product or convolution; 0 for anything else."""
    kind = op.type
    if kind in {"MatMul", "BatchMatMulV2", "BatchMatMul"}:
        flag = "transpose_a" if kind == "MatMul" else "adj_x"
        return 2 * elements(op.outputs[0]) * int(op.inputs[0].shape[-2 if op.get_attr(flag) else -1] or 1)
    if kind == "Einsum":
        return _einsum_flops(op)
    if kind in {"Conv2D", "Conv3D"}:
        return 2 * elements(op.outputs[0]) * math.prod(int(d or 1) for d in op.inputs[1].shape[:-1])
    if kind == "DepthwiseConv2dNative":
        return 2 * elements(op.outputs[0]) * math.prod(int(d or 1) for d in op.inputs[1].shape[:2])
    if kind in {"Conv2DBackpropInput", "Conv3DBackpropInputV2"}:  # a transposed convolution
        return 2 * elements(op.inputs[2]) * math.prod(int(d or 1) for d in op.inputs[1].shape[:-1])
    return 0


def _einsum_flops(op: Any) -> int:
    """Two for each combination of all indices; an ellipsis stands for those of the leading dimensions."""
    sizes: dict[str, int] = {}
    for term, tensor in zip(op.get_attr("equation").decode().split("->")[0].split(","), op.inputs, strict=True):
        shape = [int(dim or 1) for dim in tensor.shape]
        before, dots, after = term.partition("...")
        if dots:
            middle = shape[len(before) : len(shape) - len(after)]
            sizes["..."] = max(sizes.get("...", 1), math.prod(middle))
            shape = [*shape[: len(before)], *shape[len(shape) - len(after) :]]
        sizes |= dict(zip(before + after, shape, strict=True))
    return 2 * math.prod(sizes.values())
