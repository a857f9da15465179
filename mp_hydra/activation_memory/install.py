"""`lean(model)`: a Keras model that keeps less for its backward pass, and computes the same.

    report = lean(model)     # any built or unbuilt Keras model, in place; compile and train it as always
    report.lines()           # what stays as Keras has it, and why
    restore(model)           # as it was

Each layer gets a `call` of its own on the instance, so that its class, its config and what is saved stay stock Keras.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory import functions, recompute
from mp_hydra.activation_memory.kernels import xla_problem
from mp_hydra.activation_memory.layers import replacement
from mp_hydra.precision import path_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

_STOCK: ContextVar[bool] = ContextVar("mp_hydra_stock_calls", default=False)
_MARK = "_mp_hydra_own_call"  # on a `call` of ours: the one that it stands for


@dataclass(frozen=True)
class LeanReport:
    """What `lean` did to a model.

    Attributes:
        lean: paths of the layers whose own computation was replaced.
        stock: by path of a layer that could have been replaced, why it was not.
        missing: functions that this version of Keras does not have under the name that we know.
        without_xla: why lean layers run as single operations, with larger temporaries; None where they are XLA kernels.
    """

    lean: tuple[str, ...] = ()
    stock: Mapping[str, str] = field(default_factory=dict)
    missing: tuple[str, ...] = ()
    without_xla: str | None = None

    def lines(self) -> list[str]:
        """What is not lean, a line each."""
        lines = [f"layer {path} stays as Keras has it: {reason}" for path, reason in self.stock.items()]
        if self.missing:
            lines.append(f"this version of Keras has no {', '.join(self.missing)}: what goes through it stays as it is")
        if self.without_xla:
            lines.append(f"XLA cannot compile here, so lean layers take larger temporaries: {self.without_xla}")
        return lines


def lean(model: Any) -> LeanReport:
    """Let a model keep only what its backward pass needs: 16-bit tensors where it computes in 16 bits.

    Normalisation layers are computed on tensors of their compute dtype with float32 statistics and parameters; gelu, attention,
    dropout and others keep their input or output alone. It applies to every layer that the model holds now, and wherever the
    model or one of them is called: training, evaluation, loops of one's own. Calling it again is harmless.

    Args:
        model: a Keras model or layer; functional, sequential, subclassed or nested; compiled or not.

    Raises:
        ModelError: for what is no Keras layer, a model that recomputes already (lean comes first), or with a Keras backend
            other than TensorFlow.
    """
    _require_usable(model)
    restore(model)
    replaced: list[str] = []
    stock: dict[str, str] = {}
    for layer in [model, *model._flatten_layers(include_self=False)]:  # noqa: SLF001 - the one recursive walk that Keras has
        found = replacement(layer)
        if found is not None and found.call is None:
            stock[path_of(layer)] = str(found.reason)
        elif found is not None:
            replaced.append(path_of(layer))
        _install(layer, found.call if found is not None else None)
    recompute.forget_traces(model)
    return LeanReport(tuple(replaced), stock, tuple(functions.missing()), xla_problem())


def restore(model: Any) -> None:
    """Undo `lean`, and `recompute`, which stands on it."""
    recompute.restore(model)
    for layer in [model, *model._flatten_layers(include_self=False)]:  # noqa: SLF001
        call = layer.__dict__.get("call")
        if hasattr(call, _MARK):
            del layer.__dict__["call"]
            own = getattr(call, _MARK)
            if getattr(own, "__func__", None) is not type(layer).call:
                layer.__dict__["call"] = own
    recompute.forget_traces(model)


def is_lean(layer: Any) -> bool:
    """Whether `lean` has been applied to a layer."""
    return hasattr(layer.__dict__.get("call"), _MARK)


@contextmanager
def stock_calls() -> Iterator[None]:
    """While in force, in this thread, lean models compute as Keras does."""
    token = _STOCK.set(True)
    try:
        with functions.lean_functions(on=False):
            yield
    finally:
        _STOCK.reset(token)


def _install(layer: Any, replaced: Callable[..., Any] | None) -> None:
    own = layer.call
    lean_call = replaced or own

    @functools.wraps(own)
    def call(*args: Any, **kwargs: Any) -> Any:
        if _STOCK.get():
            return own(*args, **kwargs)
        with functions.lean_functions():
            return lean_call(*args, **kwargs)

    setattr(call, _MARK, own)
    object.__setattr__(layer, "call", call)  # past Keras, which would look into what is set


def _require_usable(model: Any) -> None:
    import keras

    from mp_hydra.errors import ModelError

    if not isinstance(model, keras.layers.Layer):
        raise ModelError(f"lean() takes a Keras model or layer, not {type(model).__name__}")
    if keras.backend.backend() != "tensorflow":
        raise ModelError(f"lean() needs Keras' TensorFlow backend, not {keras.backend.backend()}")
    if recompute.recomputes(model):
        raise ModelError(f"lean() comes before recompute(), and {model.name} recomputes already")
