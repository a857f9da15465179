"""Lean forms of functions of Keras' TensorFlow backend, in force where one asks for them.

    with lean_functions():
        y = model(x, training=True)    # gelu, attention, dropout keep less for the backward pass
    y = model(x, training=True)        # stock Keras

The functions are replaced once in a process, by ones that ask a context variable and otherwise call Keras' own: entering and
leaving changes nothing that another thread could see.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.activation_memory import activations, attention, depthwise, dropout, origin

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

_LEAN: ContextVar[bool] = ContextVar("mp_hydra_lean_functions", default=False)
_LOCK = threading.Lock()


@dataclass(frozen=True)
class _Target:
    """A function of Keras, where Keras looks it up at each call.

    Attributes:
        owner: the module, and the class in it after a colon.
        name: of the function.
        lean: what takes its place; NotImplemented for arguments that it leaves to Keras.
        made_of: whether `lean` makes that function of Keras' own, whatever its parameters; else both have the same parameters.
        required: parameters without which `lean` cannot be made.
    """

    owner: str
    name: str
    lean: Callable[..., Any]
    made_of: bool = False
    required: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return f"{self.owner.replace(':', '.')}.{self.name}"


_NN = "keras.src.backend.tensorflow.nn"
_MHA = "keras.src.layers.attention.multi_head_attention:MultiHeadAttention"
_GQA = "keras.src.layers.attention.grouped_query_attention:GroupedQueryAttention"
_ATTENTION_PARAMETERS = ("self", "query", "key", "value", "attention_mask", "training")
_CONVOLUTION_PARAMETERS = ("inputs", "kernel", "strides", "padding", "data_format", "dilation_rate")
_PAD_PARAMETERS = ("x", "pad_width", "mode", "constant_values")
_TARGETS = (
    _Target(_NN, "gelu", activations.gelu),
    _Target(_NN, "silu", activations.silu),
    _Target(_NN, "hard_silu", activations.hard_silu),
    _Target(_NN, "hard_tanh", activations.hard_tanh),
    _Target(_NN, "celu", activations.celu),
    _Target("keras.src.activations.activations:Mish", "static_call", activations.mish),
    _Target(_NN, "dot_product_attention", attention.dot_product_attention_of, made_of=True, required=("key", "scale")),
    _Target(_NN, "_dot_product_attention_xla", attention.dot_product_attention_xla),
    _Target(_MHA, "_compute_attention", attention.compute_attention_of, made_of=True, required=_ATTENTION_PARAMETERS),
    _Target(_GQA, "_compute_attention", attention.compute_attention_of, made_of=True, required=_ATTENTION_PARAMETERS),
    _Target("keras.src.backend.tensorflow.random", "dropout", dropout.dropout),
    _Target("keras.src.backend.tensorflow.numpy", "pad", origin.pad_of, made_of=True, required=_PAD_PARAMETERS),
    _Target(_NN, "depthwise_conv", depthwise.depthwise_conv_of, made_of=True, required=_CONVOLUTION_PARAMETERS),
)


@contextmanager
def lean_functions(on: bool = True) -> Iterator[None]:
    """While in force, in this thread, Keras' functions keep less for the backward pass; with `on=False`, they are stock.

    It matters while a function is called, or traced into a graph: a graph stays as it was traced. Blocks may be nested.
    """
    missing()
    token = _LEAN.set(on)
    try:
        yield
    finally:
        _LEAN.reset(token)


def missing() -> list[str]:
    """Functions that this version of Keras does not have, or has with other parameters; they stay as they are."""
    with _LOCK:
        return list(_installed())


@functools.cache
def _installed() -> tuple[str, ...]:
    """Put the switches in place, once; the targets that could not be had."""
    return tuple(target.path for target in _TARGETS if not _install(target))


def _install(target: _Target) -> bool:
    owner = _owner(target.owner)
    original = inspect.getattr_static(owner, target.name, None) if owner is not None else None
    as_static = isinstance(original, staticmethod)
    function = original.__func__ if isinstance(original, staticmethod) else original
    if not inspect.isfunction(function) or not _fits(target, function):
        return False
    switch = _switch(function, target.lean(function) if target.made_of else target.lean)
    setattr(owner, target.name, staticmethod(switch) if as_static else switch)
    return True


def _owner(path: str) -> Any:
    module_name, _, class_name = path.partition(":")
    try:
        module = importlib.import_module(module_name)
    except ImportError:
        return None
    return getattr(module, class_name, None) if class_name else module


def _fits(target: _Target, function: Callable[..., Any]) -> bool:
    has = list(inspect.signature(function).parameters)
    if target.made_of:
        return set(target.required) <= set(has)
    wants = list(inspect.signature(target.lean).parameters)
    return has == wants


def _switch(original: Callable[..., Any], lean: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _LEAN.get():
            result = lean(*args, **kwargs)
            if result is not NotImplemented:
                return result
        return original(*args, **kwargs)

    return function
