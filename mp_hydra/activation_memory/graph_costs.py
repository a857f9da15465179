"""A functional model's graph as steps of known bytes, from which the segments to recompute follow.

nodes, pieces = pieces_of(graph_of(model), every=1, outermost=True)
"""

from __future__ import annotations

from collections import Counter
from math import prod
from typing import Any

from mp_hydra.activation_memory.segments import Segment, Step, segments

# TensorFlow operations whose results are views or copies that the backward pass does not read.
_FREE = {"Reshape", "Identity", "IdentityN", "ExpandDims", "Squeeze", "StopGradient"}
_VIEWS = {"Reshape", "Flatten", "Identity", "ExpandDims", "Squeeze"}  # layers and operations of Keras


def graph_of(model: Any) -> Any:
    """The functional model that runs a model's graph; None if it has no graph."""
    from keras import Sequential
    from keras.src.models.functional import Functional

    graph = model._functional if isinstance(model, Sequential) else model  # noqa: SLF001
    return graph if isinstance(graph, Functional) and hasattr(graph, "_run_through_graph") else None


def _nodes(graph: Any) -> list[Any]:
    """The nodes of a graph, as Keras runs them."""
    by_depth = graph._nodes_by_depth  # noqa: SLF001
    return [node for depth in sorted(by_depth, reverse=True) for node in by_depth[depth] if not node.is_input]


def pieces_of(graph: Any, *, every: int, outermost: bool) -> tuple[list[Any], list[Segment]]:
    """A graph's nodes in the order in which they run, and the segments they fall into.

    Args:
        graph: as `graph_of` gives it.
        every: so many neighbouring segments are joined.
        outermost: whether the graph's last segment is the model's, too; its backward pass follows at once.
    """
    nodes = _nodes(graph)
    steps = [_step(node) for node in nodes]
    return nodes, segments(steps, [id(x) for x in graph.outputs], last_too=not outermost, every=every)


def divisible(operation: Any) -> bool:
    """Whether to look inside: it has several segments of its own, or holds several blocks of one class of the user's."""
    import keras

    if not isinstance(operation, keras.layers.Layer):
        return False
    graph = graph_of(operation)
    if graph is not None:
        _, pieces = pieces_of(graph, every=1, outermost=False)
        return sum(piece.recomputed or piece.alone for piece in pieces) > 1
    classes = Counter(type(x) for x in blocks(operation) if not type(x).__module__.startswith("keras."))
    return any(count > 1 for count in classes.values())


def blocks(container: Any) -> list[Any]:
    """The layers held directly that hold layers themselves."""
    return [layer for layer in container._layers if layer._layers]  # noqa: SLF001


def _step(node: Any) -> Step:
    if divisible(node.operation):
        return Step([id(x) for x in node.input_tensors], [(id(x), _bytes(x)) for x in node.outputs], 0, alone=True)
    return Step([id(x) for x in node.input_tensors], [(id(x), _bytes(x)) for x in node.outputs], _inside(node))


def _inside(node: Any) -> int:
    """About the bytes per sample that a node's backward pass needs, its results included."""
    operation, results = node.operation, sum(_bytes(x) for x in node.outputs)
    if type(operation).__name__ in _VIEWS:
        return 0
    if getattr(operation, "_layers", None):
        # About half of a layer's operations have gradients that read them.
        return max(results, _traced_bytes(node) // 2)
    activation = getattr(operation, "activation", None)
    fused = activation is not None and getattr(activation, "__name__", "") != "linear" and len(operation.weights) > 0
    return 2 * results if fused else results


def _bytes(tensor: Any) -> int:
    """Per sample; an unknown dimension counts as 1."""
    import tensorflow as tf

    return int(prod(d or 1 for d in tensor.shape[1:]) * tf.as_dtype(tensor.dtype).size)


def _traced_bytes(node: Any) -> int:
    """The bytes per sample of all floating-point tensors that come of a node's inputs, by tracing it."""
    import keras
    import tensorflow as tf

    samples, unknown = 4, 16

    def stand_in(x: Any) -> Any:
        if not isinstance(x, keras.KerasTensor):
            return x
        shape = [samples, *(d or unknown for d in x.shape[1:])]
        return tf.compat.v1.placeholder(x.dtype, shape)

    operation, arguments = node.operation, node.arguments
    graph = tf.__internal__.FuncGraph("traced_bytes")
    with graph.as_default(), keras.StatelessScope():
        args, kwargs = keras.tree.map_structure(stand_in, (arguments.args, arguments.kwargs))
        try:
            operation(*args, **kwargs | ({"training": True} if operation._call_has_training_arg else {}))  # noqa: SLF001
        except Exception:  # noqa: BLE001 - a layer that cannot be traced has its results for an estimate
            return 0
    captures = {x.op for x in graph.internal_captures}
    dependent = {op for op in graph.get_operations() if op.type == "Placeholder" and op not in captures}
    total = 0
    for op in graph.get_operations():
        if any(x.op in dependent for x in op.inputs):
            dependent.add(op)
            floats = [x for x in op.outputs if x.dtype.is_floating and x.shape.is_fully_defined()]
            total += 0 if op.type in _FREE else sum(x.shape.num_elements() * x.dtype.size for x in floats)
    return int(total // samples)
