"""Running a part of a model so that the backward pass computes its tensors again, instead of the step keeping them.

A custom gradient keeps the part's inputs alone. Its backward pass runs the part a second time, under a tape of its own, with the
values that each Keras variable had at the start of the first run. Both runs are inside a `keras.StatelessScope`: seeds are then
drawn again as they were, and of what the two runs assign (seeds, moving statistics) only the first run's values reach the
variables, once.
"""

from __future__ import annotations

import contextvars
import re
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory.call_state import Structure, Surroundings, differentiable, fixed_variables, value_of
from mp_hydra.activation_memory.second_run import second_run
from mp_hydra.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

# Operations with a state of TensorFlow's own: a second run would change it again, or see it changed.
_STATEFUL = re.compile(
    r"(Assign\w*|ResourceScatter\w*|ResourceApply\w*|Random\w*|(Parameterized)?TruncatedNormal|Multinomial|Rng\w*"
    r"|Stateful(Uniform|StandardNormal|TruncatedNormal|Random)\w*)"
)


_PLAIN: contextvars.ContextVar[bool] = contextvars.ContextVar("mp_hydra_plain_calls", default=False)


@contextmanager
def plain_calls() -> Iterator[None]:
    """While in force, in this thread, nothing is recomputed: for looking at a model as its layers are."""
    token = _PLAIN.set(True)
    try:
        yield
    finally:
        _PLAIN.reset(token)


def wanted(*, training: bool | None) -> bool:
    """Whether a gradient may be taken of what runs now; if not, a part may as well run as it is."""
    if _PLAIN.get():
        return False
    import tensorflow as tf
    from tensorflow.python.eager import record  # a tape's own methods tell of that tape alone

    # A function that is traced may be differentiated as a whole later, without a tape seen here.
    return bool(record.could_possibly_record() or (training and not tf.executing_eagerly()))


def recomputed(
    function: Callable[..., Any], layers: Sequence[Any], args: Sequence[Any], kwargs: Mapping[str, Any], *, where: str
) -> Any:
    """`function(*args, **kwargs)`, of which the backward pass keeps only the tensors among the arguments.

    Keras masks of arguments and results are carried. Losses that layers add are added to them again as results of the whole,
    so that gradients pass through them.

    Args:
        function: calls the layers; whatever it depends on must be in the arguments, or in Keras variables.
        layers: all that it calls, inner ones included. A frozen variable gets no gradient.
        args: structures of tensors and other values.
        kwargs: likewise.
        where: what runs, for messages.

    Raises:
        ModelError: for a part with a state that a second run could not have again: operations which assign to variables of
            TensorFlow's own or draw from its generators (seen when a graph is traced), and Keras variables which are assigned
            to inside a loop or branch.
    """
    import tensorflow as tf

    part = _Part(function, layers, args, kwargs, where)

    @tf.custom_gradient  # type: ignore[untyped-decorator]
    def run(*tensors: Any) -> Any:
        from tensorflow.python.eager import record

        inputs, values = part.split(tensors)
        with record.stop_recording(), part.without_state():
            first = part.first = part.run(inputs, values, None)

        def gradient(*incoming: Any, variables: Sequence[Any] | None = None) -> Any:
            return part.gradient(tensors, incoming, variables)

        return first.tensors, gradient

    tensors = run(*part.begin())
    return part.finish(tensors)


@dataclass
class _Run:
    """What one run gave: all its tensors, the structure they came in, and what it assigned."""

    tensors: list[Any]
    structure: Any
    owners: list[Any]
    scope: Any


class _Part:
    """One call of a part of a model: what its two runs share."""

    def __init__(
        self,
        function: Callable[..., Any],
        layers: Sequence[Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        where: str,
    ) -> None:
        self.function, self.layers, self.where = function, layers, where
        unique = {id(v): v for layer in layers for v in layer.variables}
        self.variables = [v for v in unique.values() if v._value is not None]  # noqa: SLF001 - not built yet
        self.arguments = Structure((tuple(args), dict(kwargs)))
        self.surroundings = Surroundings()
        self.first: _Run | None = None

    def begin(self) -> list[Any]:
        """The tensors that the part depends on: its arguments', then its variables' values."""
        return [*self.arguments.tensors, *(value_of(v) for v in self.variables)]

    def split(self, tensors: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        count = len(self.arguments.tensors)
        return list(tensors[:count]), list(tensors[count:])

    def run(self, inputs: Sequence[Any], values: Sequence[Any], tape: Any) -> _Run:
        """Run the function on these tensors, with these values of the variables."""
        args, kwargs = self.arguments.filled(inputs)
        strays = {} if self.first is None else self.first.scope.strays
        scope = fixed_variables(self.where, zip(self.variables, values, strict=True), strays, tape)
        with scope:
            outputs = self.function(*args, **kwargs)
        losses = list(scope.losses)
        owners = [next((x for x in self.layers if id(loss) in x._loss_ids), None) for loss in losses]  # noqa: SLF001
        for owner, loss in zip(owners, losses, strict=True):
            if owner is not None:
                owner._loss_ids.discard(id(loss))  # noqa: SLF001
        structure = Structure((outputs, losses))
        return _Run(structure.tensors, structure, owners, scope)

    def gradient(self, tensors: Sequence[Any], incoming: Sequence[Any], strangers: Sequence[Any] | None) -> Any:
        """The gradients of the part's tensors, by running it again.

        Args:
            tensors: as in `begin`.
            incoming: the gradients of the results.
            strangers: trainable variables that the function used and no layer holds.
        """
        import tensorflow as tf

        given = [g for g in incoming if g is not None]
        tensors, incoming, later = _after(list(tensors), list(incoming), given)
        inputs, values = self.split(tensors)
        with ExitStack() as stack:
            stack.enter_context(later)
            tape = tf.GradientTape()
            # In a copy of the context: a part inside this one may enter the same one again.
            again = self.surroundings.context.copy().run(self._again, tape, inputs, values)
            sources = [
                *(x for x in inputs if x.dtype.is_floating),
                *(x for v, x in zip(self.variables, values, strict=True) if differentiable(v)),
            ]
            assigned = again.scope.assigned
            pairs = [
                (y, g) for y, g in zip(again.tensors, incoming, strict=True) if y.dtype.is_floating and g is not None
            ]
            leaves = [leaf for _, leaf in assigned]
            found = tape.gradient(
                [y for y, _ in pairs],
                [*sources, *leaves, *(strangers or ())],
                [g for _, g in pairs],
            )
        by_tensor = dict(zip(map(id, sources), found, strict=False))
        by_leaf = found[len(sources) : len(sources) + len(leaves)]
        of_strangers = found[len(sources) + len(leaves) :]
        place = {id(v): x for v, x in zip(self.variables, values, strict=True)}
        for (variable, _), g in zip(assigned, by_leaf, strict=True):
            tensor = place[id(variable)]
            before = by_tensor.get(id(tensor))
            by_tensor[id(tensor)] = g if before is None else before if g is None else tf.convert_to_tensor(before) + g
        of_inputs, of_values = ([by_tensor.get(id(x)) for x in some] for some in (inputs, values))
        grads = [*_together(of_inputs, of_values), *of_values]
        return grads if strangers is None else (grads, of_strangers)

    def _again(self, tape: Any, inputs: Sequence[Any], values: Sequence[Any]) -> _Run:
        with self.surroundings.entered(), second_run(), tape:
            tape.watch([x for x in inputs if x.dtype.is_floating])
            tape.watch([x for v, x in zip(self.variables, values, strict=True) if differentiable(v)])
            return self.run(inputs, values, tape)

    def finish(self, tensors: Sequence[Any]) -> Any:
        """Let the first run's assignments and losses take effect; give its outputs."""
        first: Any = self.first
        for variable, value in first.scope.updates.values():
            variable.assign(value)
        outputs, losses = first.structure.filled(tensors)
        for owner, loss in zip(first.owners, losses, strict=True):
            (self.layers[0] if owner is None else owner).add_loss(loss)
        return outputs

    @contextmanager
    def without_state(self) -> Iterator[None]:
        """Look at the operations that are added to a graph meanwhile.

        Raises:
            ModelError: for one with a state of TensorFlow's own.
        """
        import tensorflow as tf

        if tf.executing_eagerly():
            yield
            return
        graph = tf.compat.v1.get_default_graph()
        before = len(graph.get_operations())
        yield
        for operation in graph.get_operations()[before:]:
            if _STATEFUL.fullmatch(operation.type):
                raise ModelError(
                    f"{self.where} cannot be computed again: {operation.name} ({operation.type}) has a state of TensorFlow's "
                    f"own; use Keras variables and seed generators, or leave the layer out with patterns in memory.recompute"
                )


def _after(tensors: list[Any], incoming: list[Any], given: list[Any]) -> tuple[list[Any], list[Any], Any]:
    """Let a second run wait for the gradients that come in: started early, or merged with the first, it would save nothing.

    Returns:
        Tensors and gradients to use from here on; a context in which operations wait.
    """
    import tensorflow as tf

    if tf.executing_eagerly():
        return [tf.identity(x) for x in tensors], incoming, ExitStack()
    if _xla():
        # XLA drops control dependencies, and merges what is equal.
        held = _barrier([*tensors, *given])
        rest = iter(held[len(tensors) :])
        return held[: len(tensors)], [None if g is None else next(rest) for g in incoming], ExitStack()
    waiting = partial(tf.control_dependencies, given)
    with waiting():
        return [tf.identity(x) for x in tensors], incoming, waiting()


def _together(of_inputs: list[Any], of_values: list[Any]) -> list[Any]:
    """Let the part before wait until this one is done with its tensors: the gradients of its variables need them too."""
    import tensorflow as tf

    weights = [g for g in of_values if g is not None]
    if tf.executing_eagerly() or not weights:
        return of_inputs
    if _xla():
        dense = [g for g in of_inputs if isinstance(g, tf.Tensor)]
        held = iter(_barrier([*dense, *(g for g in weights if isinstance(g, tf.Tensor))]) if dense else ())
        return [next(held) if isinstance(g, tf.Tensor) else g for g in of_inputs]
    with tf.control_dependencies([g.values if isinstance(g, tf.IndexedSlices) else g for g in weights]):
        return [tf.identity(g) if isinstance(g, tf.Tensor) else g for g in of_inputs]


def _barrier(tensors: list[Any]) -> list[Any]:
    from tensorflow.compiler.tf2xla.python import xla  # where Keras has it from, too

    return list(xla.optimization_barrier(*tensors))


def _xla() -> bool:
    """Whether what is traced now will be compiled by XLA."""
    import tensorflow as tf
    from tensorflow.python.ops import control_flow_util

    return bool(control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()))
