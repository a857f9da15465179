"""Methods of a Keras model overridden on the instance: its class, and so what is saved, stays the user's."""

from __future__ import annotations

from contextlib import contextmanager
from types import MethodType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping


@contextmanager
def overridden(model: Any, methods: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """While in force, `model` has these methods; blocks may be nested.

    Functions that Keras has traced with the methods before are forgotten, on the way in and out; a `train_step` alone leaves
    the traced evaluation, which takes as long to trace again as a short run.

    Args:
        model: a Keras model.
        methods: functions by name; each receives the model as its first argument.
    """
    before = {name: model.__dict__[name] for name in methods if name in model.__dict__}
    # Past Keras' __setattr__, which would look into what is set.
    model.__dict__.update({name: MethodType(function, model) for name, function in methods.items()})
    _forget_traces(model, methods)
    try:
        yield
    finally:
        for name in methods:
            del model.__dict__[name]
        model.__dict__.update(before)
        _forget_traces(model, methods)


def _forget_traces(model: Any, changed: Iterable[str]) -> None:
    model.train_function = None
    if set(changed) != {"train_step"}:
        model.test_function = None
