"""`recompute(model)`: activation recomputation in a Keras model, in place; what is saved stays the user's model.

A functional model, a sequential one too, is cut along its graph; a subclassed one by layer. Only methods of the instances are
replaced. Keras' own `RematScope` is of no use here: on the TensorFlow backend its modes fail in `fit`, and it would update
moving statistics and draw seeds twice.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.graph_costs import blocks, divisible, graph_of, pieces_of
from mp_hydra.activation_memory.recomputation import recomputed, wanted
from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.precision import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from mp_hydra.activation_memory.segments import Segment

KEY = "memory.recompute"
BLOCK = "block"
_REPORT = "_mp_hydra_recompute"
_LAST = "its backward pass follows at once"
_NO_GAIN = "it would keep as much as it gives up"


@dataclass(frozen=True)
class Part:
    """Layers that run as one.

    Attributes:
        layers: their Keras paths; operations that are no layers by name.
        kept_bytes: per sample, what stays of it for the backward pass; None if not known.
        recomputed: whether the rest is computed again.
        reason: why not; None if it is.
    """

    layers: tuple[str, ...]
    kept_bytes: int | None
    recomputed: bool
    reason: str | None = None


@dataclass(frozen=True)
class RecomputeReport:
    """What `recompute` did.

    Attributes:
        parts: in the order in which they run, as far as the model's structure tells.
    """

    parts: tuple[Part, ...]
    _undo: tuple[tuple[Any, str, Any], ...] = field(default=(), repr=False)

    @property
    def segments(self) -> tuple[Part, ...]:
        """The parts that are recomputed."""
        return tuple(part for part in self.parts if part.recomputed)

    @property
    def not_recomputed(self) -> tuple[Part, ...]:
        """The parts that are not, each with its reason."""
        return tuple(part for part in self.parts if not part.recomputed)

    def __str__(self) -> str:
        kept = [part.kept_bytes for part in self.segments]
        size = "" if None in kept else f", {sum(filter(None, kept)) / 2**20:.2f} MiB kept per sample at their ends"
        return f"{len(kept)} segments recomputed{size}; {len(self.not_recomputed)} not"


def recompute(model: Any, every: str | int | Sequence[str] = BLOCK) -> RecomputeReport:
    """Let a model compute its activations again in the backward pass instead of keeping them, in place.

    One step's updates stay what they are without it: seeds are drawn again as they were, moving statistics and other state
    change once. A second call replaces the first.

    Args:
        model: built. Call it after `lean`, if both are wanted.
        every: "block" for the segments which need least memory, as the bytes of the model's tensors tell; for a subclassed
            model the largest of its own layers which hold layers. An integer k joins k neighbouring segments each. A tuple of
            regular expressions names layers, by whole Keras paths, to recompute each as one; what a named layer holds
            belongs to it.

    Raises:
        ConfigError: for another value, a pattern that matches no layer, or k where the model has no graph.
        ModelError: for a model that is not built, or in which nothing can be recomputed.
    """
    if not model.built:
        raise ModelError(f"{model.name}: build the model before recompute(): its layers are not known yet")
    restore(model)
    install = _Installation()
    if isinstance(every, (tuple, list)):
        for layer in _named(model, every):
            install.layer(layer)
    elif every == BLOCK or (isinstance(every, int) and not isinstance(every, bool) and every > 0):
        count = every if isinstance(every, int) else 1
        if graph_of(model) is None and count != 1:
            raise ConfigError(KEY, every, "a model without a graph has no segments to join; give 'block' or patterns")
        install.inside(model, every=count, outermost=True)
    else:
        raise ConfigError(KEY, every, "give 'block', an integer of at least 1, or a list of patterns")
    if not any(part.recomputed for part in install.parts):
        for owner, name, before in reversed(install.undo):
            _put_back(owner, name, before)
        raise ModelError(
            f"{model.name}: nothing to recompute: no part keeps less than it gives up; name layers with patterns in {KEY}"
        )
    report = RecomputeReport(tuple(install.parts), tuple(install.undo))
    object.__setattr__(model, _REPORT, report)
    forget_traces(model)
    return report


def restore(model: Any) -> None:
    """Undo `recompute`; nothing happens to a model that it was not called on."""
    report: RecomputeReport | None = model.__dict__.pop(_REPORT, None)
    if report is not None:
        for owner, name, before in reversed(report._undo):  # noqa: SLF001 - of this module
            _put_back(owner, name, before)
        forget_traces(model)


def recomputes(model: Any) -> bool:
    """Whether `recompute` is in force on a model."""
    return _REPORT in model.__dict__


def forget_traces(model: Any) -> None:
    """Let a model trace its steps anew: those it has are of what its layers did before."""
    import keras

    if isinstance(model, keras.Model):
        model.train_function = model.test_function = model.predict_function = None


class _Installation:
    """Methods replaced so far, and what is said of them."""

    def __init__(self) -> None:
        self.parts: list[Part] = []
        self.undo: list[tuple[Any, str, Any]] = []
        self._seen: set[int] = set()

    def inside(self, model: Any, *, every: int = 1, outermost: bool = False) -> None:
        """Recompute what a model or container holds, in segments of its graph or by layer."""
        graph = graph_of(model)
        if graph is not None:
            self._graph(graph, every, outermost=outermost)
            return
        for layer in blocks(model):
            if divisible(layer):
                self.inside(layer, every=every)
            else:
                self.layer(layer)

    def layer(self, layer: Any) -> None:
        """Recompute a layer as one."""
        layers, where, call = _all_of([layer]), path_of(layer), layer.call

        def recomputing(*args: Any, **kwargs: Any) -> Any:
            if _symbolic((args, kwargs)) or not wanted(training=kwargs.get("training") or _training_around()):
                return call(*args, **kwargs)
            return recomputed(call, layers, args, kwargs, where=where)

        self._replace(layer, "call", recomputing)
        self.parts.append(Part((where,), None, recomputed=True))

    def _graph(self, graph: Any, every: int, *, outermost: bool) -> None:
        nodes, pieces = pieces_of(graph, every=every, outermost=outermost)
        for piece in pieces:
            operations = [node.operation for node in nodes[piece.first : piece.end]]
            if piece.alone:
                if id(operations[0]) not in self._seen:  # a model in two places of the graph is one instance
                    self._seen.add(id(operations[0]))
                    self.inside(operations[0], every=every)
                continue
            reason = None if piece.recomputed else _NO_GAIN if piece.inside <= piece.kept else _LAST
            paths = tuple(dict.fromkeys(path_of(x) for x in operations))
            self.parts.append(Part(paths, piece.kept, piece.recomputed, reason))
        self._replace(graph, "_run_through_graph", _runner(graph, nodes, pieces))

    def _replace(self, owner: Any, name: str, function: Callable[..., Any]) -> None:
        self.undo.append((owner, name, owner.__dict__.get(name)))
        # Past Keras' __setattr__, which would look into what is set.
        object.__setattr__(owner, name, function)


class _GraphPart:
    """Nodes of a graph that run as one."""

    def __init__(self, nodes: Sequence[Any], *, recompute: bool) -> None:
        self._nodes, self._recompute = nodes, recompute
        self._layers = _all_of([node.operation for node in nodes])
        self._where = f"the segment from {path_of(nodes[0].operation)} to {path_of(nodes[-1].operation)}"
        made = {id(x) for node in nodes for x in node.outputs}
        self.uses = list(dict.fromkeys(id(x) for node in nodes for x in node.input_tensors if id(x) not in made))
        self.gives: list[int] = []

    def keep(self, wanted_later: set[int]) -> None:
        """Say which tensors later parts or the caller use."""
        self.gives = [id(x) for node in self._nodes for x in node.outputs if id(x) in wanted_later]

    def run(self, tensors: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
        """Run the nodes; take tensors from the dictionary and add what they give."""
        if not self._recompute:
            self._run(tensors, operation_fn)
            return

        def function(*given: Any) -> list[Any]:
            inner = dict(zip(self.uses, given, strict=True))
            self._run(inner, operation_fn)
            return [inner[key] for key in self.gives]

        given = [tensors[key] for key in self.uses]
        results = recomputed(function, self._layers, given, {}, where=self._where)
        tensors.update(zip(self.gives, results, strict=True))

    def _run(self, tensors: dict[int, Any], operation_fn: Callable[[Any], Any]) -> None:
        import keras

        for node in self._nodes:
            args, kwargs = node.arguments.fill_in(tensors)
            outputs = operation_fn(node.operation)(*args, **kwargs)
            tensors.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=True))


def _runner(graph: Any, nodes: Sequence[Any], pieces: Sequence[Segment]) -> Callable[..., Any]:
    """What runs a functional model's graph: its segments one after the other."""
    import keras

    original = graph._run_through_graph  # noqa: SLF001 - the one place that nodes are run in
    parts = [_GraphPart(nodes[piece.first : piece.end], recompute=piece.recomputed) for piece in pieces]
    later = {id(x) for x in graph.outputs}
    for part in reversed(parts):
        part.keep(later)
        later.update(part.uses)

    def run(inputs: Any, operation_fn: Callable[[Any], Any] = lambda op: op, **others: Any) -> Any:
        flat = keras.tree.flatten(inputs)
        if others or _symbolic(flat) or not wanted(training=_training_around()):
            return original(inputs, operation_fn=operation_fn, **others)
        tensors = {id(x): y for x, y in zip(graph.inputs, flat, strict=True)}
        for part in parts:
            part.run(tensors, operation_fn)
        return keras.tree.pack_sequence_as(graph._outputs_struct, [tensors[id(x)] for x in graph.outputs])  # noqa: SLF001

    return run


def _named(model: Any, patterns: Sequence[str]) -> list[Any]:
    """The layers that patterns name, without what these hold."""
    from mp_hydra.layer_overrides import Place, assign, located

    layers = located(model)[1:]
    # The model itself is no layer to choose.
    places = [Place(p.path, p.nesting, p.parent - 1 if p.parent else None) for _, p in layers]
    try:
        chosen = assign(places, dict.fromkeys(patterns, ""))
    except ConfigError as error:
        raise ConfigError(KEY, error.value, error.problem) from error
    return [layers[i][0] for i in chosen if places[i].parent not in chosen]


def _all_of(operations: Sequence[Any]) -> list[Any]:
    """The layers among operations, with all that they hold."""
    import keras

    layers = [x for op in operations if isinstance(op, keras.layers.Layer) for x in op._flatten_layers()]  # noqa: SLF001
    return list({id(x): x for x in layers}.values())


def _training_around() -> bool:
    """Whether the layers that are being called are told to train."""
    from keras.src.backend.common import global_state

    return bool(getattr(global_state.get_global_attribute("current_call_ctx"), "training", False))


def _symbolic(structure: Any) -> bool:
    import keras

    return any(isinstance(x, keras.KerasTensor) for x in keras.tree.flatten(structure))


def _put_back(owner: Any, name: str, before: Any) -> None:
    if before is None:
        owner.__dict__.pop(name, None)
    else:
        object.__setattr__(owner, name, before)
