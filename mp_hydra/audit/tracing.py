"""A model traced as a graph, forward and backward: what each layer really computes in, and what it keeps for the backward pass.

Nothing is run and no variable changes. The operations that a layer adds to the graph are its own; what its sublayers add is
theirs. A tensor counts as kept if an operation of the backward pass reads it; views of it, such as a reshape, count once.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mp_hydra.audit import operations
from mp_hydra.layer_calls import dtypes_of, intercepted
from mp_hydra.seeds import seeds_kept

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


@dataclass
class Traced:
    """What one layer does in a training step, sublayers not counted.

    Attributes:
        input_dtypes: of the tensors that arrive in `call`, after Keras' autocast.
        output_dtypes: of what it returns.
        output_elements: of a whole batch.
        work: elements computed in each floating-point dtype, moves and casts not counted.
        flops: multiplications and additions of matrix products and convolutions, forward, for a whole batch, by dtype.
        kept_bytes: of a batch, kept for the backward pass.
        kept_bytes_float32: the same, if everything computed in float32: each tensor once, however often it was cast.
        kernels: what runs in 16 bits, forward and backward.
        infinite: operations that make a 16-bit constant of inf or nan.
        hazards: operations that overflow float16 easily: "exp", "sum of squares".
        kept_bytes_stock: `kept_bytes` with the layers as Keras has them; None where the model trains just so.
    """

    input_dtypes: tuple[str, ...] = ()
    output_dtypes: tuple[str, ...] = ()
    output_elements: int = 0
    work: Counter[str] = field(default_factory=Counter)
    flops: Counter[str] = field(default_factory=Counter)
    kept_bytes: int = 0
    kept_bytes_float32: int = 0
    kernels: set[operations.Kernel] = field(default_factory=set)
    infinite: set[str] = field(default_factory=set)
    hazards: set[str] = field(default_factory=set)
    kept_bytes_stock: int | None = None

    @property
    def computes_in(self) -> str | None:
        """The dtype of most of the work; of the outputs, where a layer only moves numbers; None without numbers."""
        if self.work:
            return self.work.most_common(1)[0][0]
        return next((dtype for dtype in self.output_dtypes if dtype in operations.FLOATS), None)


@dataclass(frozen=True)
class Trace:
    """A traced model: by `id` what each layer or operation did, and the rest, which is the model's own."""

    layers: Mapping[int, Traced]
    names: Mapping[int, str]

    def total(self) -> Traced:
        """Everything together."""
        total = Traced()
        for part in self.layers.values():
            total.work += part.work
            total.flops += part.flops
            total.kept_bytes += part.kept_bytes
            if part.kept_bytes_stock is not None:
                total.kept_bytes_stock = (total.kept_bytes_stock or 0) + part.kept_bytes_stock
            total.kept_bytes_float32 += part.kept_bytes_float32
        return total


class UntraceableError(Exception):
    """A model that cannot be traced as a graph; `str` says why."""


@dataclass(frozen=True)
class _Span:
    """Operations that were added to a graph during one call, from `first` on; `repeats` where they are in a loop's body."""

    owner: int
    graph: Any
    first: int
    end: int
    repeats: int


def trace(model: Any, inputs: Any, batch_size: int) -> Trace:
    """Trace a training step of a built model, from its inputs to the gradients of its weights.

    Args:
        model: built.
        inputs: some batch of inputs, which gives structure, sample shapes and dtypes.
        batch_size: that of training.

    Raises:
        UntraceableError: for a model whose code needs numbers, not symbols.
    """
    import keras
    import tensorflow as tf

    graph = tf.__internal__.FuncGraph("mp_hydra_audit")
    recorder = _Recorder(graph)
    with _side_effects_undone(model), graph.as_default(), intercepted(recorder.around, recorder.entering):
        given = keras.tree.map_structure(
            lambda t: tf.compat.v1.placeholder(t.dtype, (batch_size, *t.shape[1:])), inputs
        )
        try:
            with tf.GradientTape() as tape:
                outputs = model(given, training=True) if model._call_has_training_arg else model(given)  # noqa: SLF001
                outputs = [out for out in keras.tree.flatten(outputs) if out.dtype.is_floating]
            forward = graph.num_operations()
            gradients = []
            if model.trainable_variables and outputs:
                gradients = tape.gradient(outputs, [variable.value for variable in model.trainable_variables])
        except Exception as error:
            raise UntraceableError(" ".join(str(error).split())[:300] or type(error).__name__) from error
    wanted = [t for t in (*outputs, *keras.tree.flatten(gradients)) if hasattr(t, "op")]
    return _Reading(recorder, model, forward, _needed(graph, wanted)).trace()


class _Recorder:
    """Notes which operations of which graph were added during which call."""

    def __init__(self, graph: Any) -> None:
        self.graph = graph
        self.spans: list[_Span] = []
        self.parts: dict[int, Traced] = defaultdict(Traced)
        self.names: dict[int, str] = {}
        self._steps: list[int] = []
        self._entered: dict[int, tuple[int, int]] = {}  # layer to graph and first operation, its casts included

    def entering(self, layer: Any) -> None:
        """A layer is about to cast its inputs."""
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        self._entered[id(layer)] = id(graph), graph.num_operations()

    def around(self, operation: Any, arguments: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        """Stand in for one call."""
        import keras
        import tensorflow as tf

        graph = tf.compat.v1.get_default_graph()
        entered, first = self._entered.pop(id(operation), (None, 0))
        if entered != id(graph):
            first = graph.num_operations()
        loops = isinstance(operation, keras.layers.RNN)
        if loops:
            steps = getattr(arguments[0], "shape", (0, None))[1]
            self._steps.append(int(steps or 1))
        try:
            result = call()
        finally:
            repeats = math.prod(self._steps) if graph is not self.graph else 1
            if loops:
                self._steps.pop()
        self.spans.append(_Span(id(operation), graph, first, graph.num_operations(), max(repeats, 1)))
        self.names[id(operation)] = str(getattr(operation, "path", None) or operation.name)
        part = self.parts[id(operation)]
        part.input_dtypes = tuple(dict.fromkeys((*part.input_dtypes, *dtypes_of(arguments))))
        part.output_dtypes = tuple(dict.fromkeys((*part.output_dtypes, *dtypes_of(result))))
        part.output_elements += sum(operations.elements(t) for t in keras.tree.flatten(result) if hasattr(t, "shape"))
        return result


class _Reading:
    """From spans and graphs to what each layer did."""

    def __init__(self, recorder: _Recorder, model: Any, forward: int, needed: set[str]) -> None:
        self._parts, self._names, self._main, self._forward = recorder.parts, recorder.names, recorder.graph, forward
        self._needed = needed
        self._graphs = {id(span.graph): span.graph for span in recorder.spans} | {id(self._main): self._main}
        self._operations = {key: graph.get_operations() for key, graph in self._graphs.items()}
        self._owners: dict[tuple[int, str], int] = {}
        self._repeats: dict[tuple[int, str], int] = {}
        # Inner calls end, and are noted, before the outer ones, whose spans hold theirs: the first owner is the innermost.
        for span in recorder.spans:
            for op in self._operations[id(span.graph)][span.first : span.end]:
                self._owners.setdefault((id(span.graph), op.name), span.owner)
                self._repeats.setdefault((id(span.graph), op.name), span.repeats)
        self._model = id(model)

    def trace(self) -> Trace:
        """Read it all."""
        for key, added in self._operations.items():
            for index, op in enumerate(added):
                if key == id(self._main) and op.name not in self._needed:
                    continue
                owner = self._owners.get((key, op.name))
                if owner is not None:
                    self._read(op, self._parts[owner], self._repeats[key, op.name])
                elif key == id(self._main) and index >= self._forward:
                    self._read_backward(op)
        self._keep()
        return Trace(dict(self._parts), self._names)

    def _read(self, op: Any, part: Traced, repeats: int) -> None:
        dtype = operations.dtype_of(op)
        part.infinite |= operations.infinite(op)
        if dtype is None:
            return
        if dtype in operations.SIXTEEN_BIT:
            part.kernels |= operations.kernels([op])
        if op.type in operations.MOVES:
            return
        part.work[dtype] += repeats * max((operations.elements(t) for t in (*op.inputs, *op.outputs)), default=0)
        part.flops[dtype] += repeats * operations.flops(op)
        if dtype == "float16":
            part.hazards |= operations.hazards(op)

    def _read_backward(self, op: Any) -> None:
        """An operation of the backward pass belongs to the layer whose tensors it reads."""
        if operations.dtype_of(op) not in operations.SIXTEEN_BIT:
            return
        owner = next(
            (o for t in op.inputs if (o := self._owners.get((id(self._main), t.op.name))) is not None), self._model
        )
        self._parts[owner].kernels |= operations.kernels([op])

    def _keep(self) -> None:
        """Count what the backward pass reads of the forward pass; in loops, what they push for it at each turn."""
        backward = self._operations[id(self._main)][self._forward :]
        read = [t for op in backward if op.name in self._needed for t in op.inputs]
        pushed = [
            op.inputs[1]
            for key, added in self._operations.items()
            if key != id(self._main)
            for op in added
            if op.type == "TensorListPushBack"
        ]
        kept: dict[tuple[int, str], Any] = {}
        for tensor in (*read, *pushed):
            root = operations.root(tensor, casts=False)
            if (id(root.graph), root.op.name) in self._owners and root.op.type not in operations.GIVEN:
                kept[id(root.graph), root.name] = root
        once: dict[tuple[int, str], Any] = {}
        for tensor in kept.values():
            owner, repeats = self._owner(tensor)
            if tensor.dtype.is_floating or tensor.dtype.is_bool:
                self._parts[owner].kept_bytes += repeats * operations.elements(tensor) * tensor.dtype.size
            root = operations.root(tensor, casts=True)
            if root.op.type not in operations.GIVEN:
                once[id(root.graph), root.name] = root
        for tensor in once.values():
            if tensor.dtype.is_floating or tensor.dtype.is_bool:
                owner, repeats = self._owner(tensor)
                size = 4 if tensor.dtype.is_floating else tensor.dtype.size
                self._parts[owner].kept_bytes_float32 += repeats * operations.elements(tensor) * size

    def _owner(self, tensor: Any) -> tuple[int, int]:
        key = (id(tensor.graph), tensor.op.name)
        return self._owners.get(key, self._model), self._repeats.get(key, 1)


def _needed(graph: Any, wanted: Iterable[Any]) -> set[str]:
    """Names of the operations that some tensors, and the assignments of a graph, depend on; TensorFlow runs no others."""
    waiting = [t.op for t in wanted] + [op for op in graph.get_operations() if op.type.startswith("Assign")]
    found: set[str] = set()
    while waiting:
        op = waiting.pop()
        if op.name not in found:
            found.add(op.name)
            waiting += [t.op for t in op.inputs]
            waiting += op.control_inputs
    return found


@contextmanager
def _side_effects_undone(model: Any) -> Iterator[None]:
    """Put back what tracing may change outside the graph: seeds, and losses that layers add."""
    with seeds_kept():
        try:
            yield
        finally:
            model._clear_losses()  # noqa: SLF001 - they would be symbols of our graph
