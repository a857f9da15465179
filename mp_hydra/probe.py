"""One batch through a model, to see what dtypes really flow: rounded token ids, and heads in 16 bits."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import PrecisionError
from mp_hydra.precision import path_of

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIXTEEN_BIT = ("float16", "bfloat16")
ID_LIMITS = {"float16": 2048, "bfloat16": 256}  # the largest up to which every integer is exact
SATURATING = ("softmax", "sigmoid", "hard_sigmoid", "tanh", "log_softmax")


def probe(model: Any, batch: Any) -> Any:
    """Run one batch forward in inference mode: builds what builds late, and shows what dtypes really flow.

    Args:
        model: a Keras model.
        batch: one batch of inputs, as training will feed it.

    Returns:
        The outputs.

    Raises:
        PrecisionError: if integer ids reach an Embedding as 16-bit floats, which rounds ids above 2048 (float16) or 256
            (bfloat16), or if an output or its activation is computed in 16 bits.
    """
    seen = observe(model, batch)
    require_sound(model, seen)
    return seen.outputs


@dataclass(frozen=True)
class Observed:
    """What one batch showed.

    Attributes:
        outputs: of the model.
        rounded_ids: Embedding layers that received their ids in 16 bits, with that dtype.
        heads: layers whose results the model returns.
        passed: layers behind them that only hand these on.
    """

    outputs: Any
    rounded_ids: list[tuple[Any, str]]
    heads: list[Any]
    passed: list[Any]

    def output_dtypes(self) -> list[str]:
        """Of each output of the model."""
        import keras

        return [_dtype(output) for output in keras.tree.flatten(self.outputs)]

    def rounding_heads(self) -> list[Any]:
        """The layers that compute the outputs, or hand them on, in 16 bits."""
        return [layer for layer in (*self.heads, *self.passed) if layer.compute_dtype in SIXTEEN_BIT]


def observe(model: Any, batch: Any) -> Observed:
    """Run one batch forward in inference mode, and judge nothing."""
    outputs, calls = _forward(model, batch)
    rounded = [(layer, arrived) for layer, arrived, _ in calls if isinstance(layer, _embedding_class())]
    heads, passed = _heads(model, outputs, calls)
    return Observed(outputs, [pair for pair in rounded if pair[1] in SIXTEEN_BIT], heads, passed)


def observe_graph(model: Any) -> Observed:
    """What the graph of a functional or sequential model tells without running it; ids are not looked at."""
    return Observed(model.outputs, [], *_heads_by_graph(model))


def require_sound(model: Any, seen: Observed) -> None:
    """Refuse what `probe` refuses.

    Raises:
        PrecisionError: as `probe` does.
    """
    for layer, arrived in seen.rounded_ids:
        raise PrecisionError(
            f"layer {path_of(layer)} (Embedding) receives its ids as {arrived}, which rounds those above "
            f'{ID_LIMITS[arrived]}; begin the model with keras.Input(..., dtype="int32")'
        )
    _require_float32_outputs(model, seen)


def float32_head(model: Any, batch: Any) -> list[Any]:
    """Let the layers that give the outputs compute in float32, where they compute in 16 bits.

    A layer in front of a softmax stays as it is: the softmax is the head then. What only hands the head's numbers on, such
    as a Reshape, is changed with it: it would cast them back.

    Args:
        model: a Keras model; it is built by this.
        batch: one batch of inputs.

    Returns:
        The layers that were changed.
    """
    outputs, calls = _forward(model, batch)
    heads, passed = _heads(model, outputs, calls)
    parts = [part for layer in (*passed, *heads) for part in layer._flatten_layers()]  # noqa: SLF001
    changed = list(dict.fromkeys(part for part in parts if part.compute_dtype in SIXTEEN_BIT))
    for layer in changed:
        layer.dtype_policy = "float32"
    return changed


_Call = tuple[Any, str, Any]  # a layer, the dtype that arrived in its `call`, and what it returned


def _forward(model: Any, batch: Any) -> tuple[Any, list[_Call]]:
    """The outputs for a batch, and what the layers that `_watch` picks did on the way."""
    calls: list[_Call] = []
    with ExitStack() as stack:
        watched: set[int] = set()
        _watch(model, watched, calls, stack)
        built = len(watched)
        outputs = model(batch)
        # What was constructed only now was not watched, and may have hidden an Embedding or the head: run it again.
        _watch(model, watched, calls, stack)
        if len(watched) > built:
            calls.clear()
            outputs = model(batch)
    return outputs, calls


def _embedding_class() -> Any:
    import keras

    return keras.layers.Embedding


def _watch(model: Any, watched: set[int], calls: list[_Call], stack: ExitStack) -> None:
    """Watch the layers that are needed: Embeddings, and where no graph tells the head, all layers without sublayers."""
    graph = bool(getattr(model, "outputs", None))
    for layer in model._flatten_layers(include_self=False):  # noqa: SLF001 - the one recursive walk that Keras has
        needed = isinstance(layer, _embedding_class()) or not (graph or layer._layers)  # noqa: SLF001
        if needed and id(layer) not in watched:
            watched.add(id(layer))
            stack.enter_context(_watched(layer, calls))


@contextmanager
def _watched(layer: Any, calls: list[_Call]) -> Iterator[None]:
    """Note the dtype that arrives in `call`, after Keras' autocast; the override lives on the instance only."""
    if "call" in layer.__dict__:
        yield
        return
    original = layer.call

    # Keras looks into the signature of `call` for what it passes on.
    @wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        calls.append((layer, _dtype(next(iter((*args, *kwargs.values())), None)), result))
        return result

    object.__setattr__(layer, "call", call)
    try:
        yield
    finally:
        object.__delattr__(layer, "call")


def _dtype(tensor: Any) -> str:
    dtype = getattr(tensor, "dtype", "")
    return str(getattr(dtype, "name", dtype))


def activation_of(layer: Any) -> str:
    """The name of what a layer computes last: its activation, or its own kind."""
    return str(getattr(getattr(layer, "activation", None), "__name__", type(layer).__name__.lower()))


def _require_float32_outputs(model: Any, seen: Observed) -> None:
    rounding = seen.rounding_heads()
    for dtype in seen.output_dtypes():
        if dtype in SIXTEEN_BIT:
            name = f"layer {path_of(rounding[0])} ({type(rounding[0]).__name__})" if rounding else f"model {model.name}"
            raise PrecisionError(
                f"the head, {name}, gives {dtype} outputs: loss and metrics would be computed from rounded predictions; "
                f'construct it with dtype="float32", its activation included, or set precision.float32_head=true'
            )
    for head in seen.heads:
        activation = activation_of(head)
        if head.compute_dtype in SIXTEEN_BIT and activation in SATURATING:
            raise PrecisionError(
                f"the head, layer {path_of(head)} ({type(head).__name__}), computes its {activation} in {head.compute_dtype}, "
                f"where confident mistakes get no gradient, and a cast afterwards does not mend that; "
                f'construct it with dtype="float32"'
            )


_PASSING = ("Identity", "Reshape", "Flatten", "Cast", "Squeeze", "ExpandDims", "Dropout", "ActivityRegularization")


def _heads(model: Any, outputs: Any, calls: Sequence[_Call]) -> tuple[list[Any], list[Any]]:
    """The layers whose results a model returns, and those behind them that only hand these on, such as a reshape or cast."""
    return _heads_by_graph(model) if getattr(model, "outputs", None) else _heads_by_value(outputs, calls)


def _heads_by_graph(model: Any) -> tuple[list[Any], list[Any]]:
    import keras

    tensors = keras.tree.flatten(getattr(model, "outputs", None) or [])
    found: list[Any] = []
    passed: list[Any] = []
    seen: set[int] = set()
    while tensors:
        tensor = tensors.pop()
        history = getattr(tensor, "_keras_history", None)
        if history is None or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        operation = history.operation
        if isinstance(operation, keras.Model):
            tensors += keras.tree.flatten(getattr(operation, "outputs", None) or [])
        elif _passes(operation):
            passed += [operation] if isinstance(operation, keras.layers.Layer) else []
            tensors += list(operation._inbound_nodes[history.node_index].input_tensors)  # noqa: SLF001
        elif isinstance(operation, keras.layers.Layer):
            found.append(operation)
    return found, passed


def _heads_by_value(outputs: Any, calls: Sequence[_Call]) -> tuple[list[Any], list[Any]]:
    """For a model without a graph: for each output the last layer that returned these very numbers."""
    import keras
    import numpy as np

    def numbers(tensor: Any) -> Any:
        # float32 holds every 16-bit number; tensors inside a loop have no numbers.
        return np.asarray(tensor.numpy(), "float32").ravel() if hasattr(tensor, "numpy") else None

    found: list[Any] = []
    passed: list[Any] = []
    for output in keras.tree.flatten(outputs):
        wanted = numbers(output)
        for layer, _, result in reversed(calls):
            if not any(np.array_equal(wanted, numbers(r)) for r in keras.tree.flatten(result)):
                continue
            (passed if _passes(layer) else found).append(layer)
            if not _passes(layer):
                break
    return found, passed


def _passes(operation: Any) -> bool:
    import keras

    linear = isinstance(operation, keras.layers.Activation) and operation.activation is keras.activations.linear
    return linear or type(operation).__name__ in _PASSING
