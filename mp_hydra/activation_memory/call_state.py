"""What a part of a model is called with and finds around it, held so that a second run finds the same.

Arguments and results, Keras masks on them included (`Structure`); context variables, autocast and Keras' call context
(`Surroundings`); and the values of its variables (`fixed_variables`).
"""

from __future__ import annotations

import contextvars
import copy
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ModelError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence


class Structure:
    """A nested structure, its tensors taken out, and the Keras masks on them."""

    def __init__(self, structure: Any) -> None:
        import tensorflow as tf
        from keras.src import backend

        leaves = tf.nest.flatten(structure)
        self._whole = (structure, [backend.get_keras_mask(leaf) for leaf in leaves])
        self._flat = tf.nest.flatten(self._whole, expand_composites=True)
        # A float that a layer adds as a loss is no tensor, and stays what it is.
        self._places = [i for i, x in enumerate(self._flat) if isinstance(x, tf.Tensor)]
        self.tensors = [self._flat[i] for i in self._places]
        self._flat = [None if isinstance(x, tf.Tensor) else x for x in self._flat]

    def filled(self, tensors: Sequence[Any]) -> Any:
        """The structure with other tensors in it, which carry the masks."""
        import tensorflow as tf
        from keras.src import backend

        flat = list(self._flat)
        for place, tensor in zip(self._places, tensors, strict=True):
            flat[place] = tensor
        structure, masks = tf.nest.pack_sequence_as(self._whole, flat, expand_composites=True)
        for leaf, mask in zip(tf.nest.flatten(structure), masks, strict=True):
            if mask is not None:
                backend.set_keras_mask(leaf, mask)
        return structure


class Surroundings:
    """What a layer's call sees around it, so that a second run sees the same: context variables, autocast, call context."""

    def __init__(self) -> None:
        from keras.src.backend.common import global_state

        self.context = contextvars.copy_context()
        scope = global_state.get_global_attribute("autocast_scope")
        self._autocast = None if scope is None else scope.dtype
        self._call = copy.copy(global_state.get_global_attribute("current_call_ctx"))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Be in the same surroundings again; the context variables are `context`'s affair."""
        from keras.src.backend import AutocastScope
        from keras.src.backend.common import global_state
        from keras.src.layers.layer import CallContext

        before = global_state.get_global_attribute("current_call_ctx")
        # With none at all the first layer would take itself for the outermost, and clear losses.
        call = copy.copy(self._call) or CallContext(entry_layer=None)
        global_state.set_global_attribute("current_call_ctx", call)
        try:
            with AutocastScope(self._autocast):
                yield
        finally:
            global_state.set_global_attribute("current_call_ctx", before)


def fixed_variables(where: str, values: Any, strays: Mapping[int, Any], tape: Any) -> Any:
    """A scope in which variables have these values.

    Args:
        where: for messages.
        values: pairs of variable and tensor.
        strays: values of variables that no layer of the part holds, by id, as the first run met them; the first run's is empty.
        tape: the one that records a second run; None in a first.
    """
    import keras
    import tensorflow as tf

    class Scope(keras.StatelessScope):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__(state_mapping=values, collect_losses=True, initialize_variables=False)
            self.strays = dict(strays)
            self.updates: dict[int, tuple[Any, Any]] = {}
            self.assigned: list[tuple[Any, Any]] = []
            self._held = set(self.state_mapping)
            self._graph = None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()

        def add_update(self, update: tuple[Any, Any]) -> None:
            variable, value = update
            if self._graph is not None and tf.compat.v1.get_default_graph() is not self._graph:
                raise ModelError(
                    f"{where} cannot be computed again: variable {variable.path} is assigned to inside a loop or branch; "
                    f"leave the layer that does so out with patterns in memory.recompute"
                )
            # What is read from a variable after an assignment has its gradient as that variable, not through the assignment.
            value = tf.stop_gradient(value)
            if tape is not None and id(variable) in self._held and differentiable(variable):
                tape.watch(value)
                self.assigned.append((variable, value))
            self.updates[id(variable)] = variable, value
            super().add_update((variable, value))

        def get_current_value(self, variable: Any) -> Any:
            value = super().get_current_value(variable)
            if value is None and not differentiable(variable) and variable._value is not None:  # noqa: SLF001
                # Such as the global seed generator's: what it was is read once, and is the same in the second run.
                if id(variable) not in self.strays:
                    with keras.src.backend.AutocastScope(None):
                        self.strays[id(variable)] = tf.convert_to_tensor(variable._value)  # noqa: SLF001
                value = self.strays[id(variable)]
            return value

    return Scope()


def value_of(variable: Any) -> Any:
    """What a Keras variable holds now, in its own dtype; a tensor."""
    import keras
    import tensorflow as tf

    with keras.src.backend.AutocastScope(None):
        return tf.convert_to_tensor(variable.value)


def differentiable(variable: Any) -> bool:
    """Whether a Keras variable gets a gradient."""
    import keras

    # Not the variable's dtype as seen under autocast.
    return bool(variable.trainable and keras.backend.is_float_dtype(variable._dtype))  # noqa: SLF001
