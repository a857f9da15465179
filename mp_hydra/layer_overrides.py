"""Per-layer precision from the config: `precision.overrides`, patterns over layer paths to the dtype to compute in.

A dtype policy is set on the built layer. Variables are float32 under each of the policies that can be chosen, and Keras reads
a layer's compute dtype anew at each call, so this gives what constructing the layer with that dtype gives; `verify` looks.
"""

from __future__ import annotations

import difflib
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError, PrecisionError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from mp_hydra.precision import Scope

KEY = "precision.overrides"
POLICIES = {"float32": "float32", "float16": "mixed_float16", "bfloat16": "mixed_bfloat16"}
_SHOWN = 5


@dataclass(frozen=True)
class Place:
    """Where a layer is in a model.

    Attributes:
        path: its Keras path, or its name as long as it has none.
        nesting: the names of the models and layers that hold it, and its own, joined by slashes; without the outermost model.
            A layer of a nested functional model has a path without that model's name, but a nesting with it.
        parent: the index of what holds it directly; None for the outermost model.
    """

    path: str
    nesting: str
    parent: int | None


def assign(places: Sequence[Place], overrides: Mapping[str, str]) -> dict[int, str]:
    """Which layers compute in what: index in `places` to dtype.

    A pattern matches a layer if it matches its whole path or its whole nesting. What a layer holds follows it, unless it is
    matched itself.

    Args:
        places: parents before what they hold.
        overrides: regular expressions to "float32", "float16" or "bfloat16".

    Raises:
        ConfigError: for a pattern that is no regular expression or matches no layer, naming near misses; for two patterns
            that match the same layer with different dtypes.

    >>> encoder = [Place("encoder", "encoder", None), Place("dense", "encoder/dense", 0), Place("head", "head", None)]
    >>> assign(encoder, {"encoder": "float32"})
    {0: 'float32', 1: 'float32'}
    """
    own: dict[int, tuple[str, str]] = {}
    for text, dtype in overrides.items():
        try:
            pattern = re.compile(text)
        except re.error as error:
            raise ConfigError(KEY, text, f"is not a regular expression: {error}") from error
        matched = [i for i, p in enumerate(places) if pattern.fullmatch(p.path) or pattern.fullmatch(p.nesting)]
        if not matched:
            raise ConfigError(KEY, text, f"matches no layer; {_near_misses(text, pattern, places)}")
        for index in matched:
            other, given = own.setdefault(index, (text, dtype))
            if given != dtype:
                what = f"{places[index].path} is to be {given} by {other} and {dtype} by {text}"
                raise ConfigError(KEY, {other: given, text: dtype}, f"ambiguous: {what}; let only one of them match it")
    found: dict[int, str] = {}
    for index, place in enumerate(places):
        if index in own:
            found[index] = own[index][1]
        elif place.parent in found:
            found[index] = found[place.parent]
    return found


def _near_misses(text: str, pattern: re.Pattern[str], places: Sequence[Place]) -> str:
    """Layers of which the pattern matches a part, or whose paths look like it; else the first paths."""
    paths = list(dict.fromkeys(path for place in places for path in (place.nesting, place.path) if path))
    partly = [path for path in paths if pattern.search(path)]
    if partly:
        return f"it must match whole paths, such as {', '.join(partly[:_SHOWN])}"
    close = difflib.get_close_matches(text.replace(".*", ""), paths, n=_SHOWN, cutoff=0.5)
    return f"did you mean {' or '.join(close)}?" if close else f"the first paths are {', '.join(paths[:_SHOWN])}"


def located(model: Any) -> list[tuple[Any, Place]]:
    """Every layer of a built model, itself and containers included, with where it is; parents before what they hold."""
    import keras

    from mp_hydra.precision import path_of

    found: list[tuple[Any, Place]] = []
    seen: set[int] = set()

    def walk(layer: Any, nesting: str, parent: int | None) -> None:
        seen.add(id(layer))
        index = len(found)
        found.append((layer, Place(path_of(layer), nesting, parent)))
        for inner in layer._layers:  # noqa: SLF001 - what it holds directly
            if id(inner) not in seen and not isinstance(inner, keras.layers.InputLayer):
                walk(inner, f"{nesting}/{inner.name}".lstrip("/"), index)

    walk(model, "", None)
    return found


def apply(model: Any, overrides: Mapping[str, str], scope: Scope) -> list[Any]:
    """Let layers of a built model compute in what `precision.overrides` says.

    Args:
        model: built; compiled or not.
        overrides: as in `assign`. Empty: nothing changes.
        scope: of the policy in force; it notes that these layers were given a dtype.

    Returns:
        The layers that were matched.

    Raises:
        ConfigError: as in `assign`.
    """
    if not overrides:
        return []
    layers = located(model)
    chosen = assign([place for _, place in layers], overrides)
    for index, dtype in chosen.items():
        layer = layers[index][0]
        if layer.compute_dtype != dtype:
            layer.dtype_policy = POLICIES[dtype]
        scope.dtype_given[layer] = True
        scope.overridden.add(layer)
    # A model that was used before holds functions that were traced with the old dtypes.
    model.train_function = model.test_function = model.predict_function = None
    return [layers[index][0] for index in chosen]


def verify(model: Any, inputs: Any, layers: Sequence[Any]) -> None:
    """Run a batch, and check that layers give what they were told to.

    Args:
        model: built.
        inputs: one batch of its inputs.
        layers: those that `apply` returned.

    Raises:
        PrecisionError: naming the first layer whose floating-point outputs are of another dtype.
    """
    from mp_hydra.layer_calls import dtypes_of, intercepted
    from mp_hydra.precision import path_of

    told = {id(layer) for layer in layers if not layer._layers}  # noqa: SLF001 - what it holds may have been told otherwise
    others: list[tuple[Any, str]] = []

    def look(layer: Any, _: tuple[Any, ...], call: Callable[[], Any]) -> Any:
        result = call()
        if id(layer) in told:
            others.extend((layer, d) for d in dtypes_of(result) if d in POLICIES and d != layer.compute_dtype)
        return result

    with intercepted(look):
        model(inputs)
    for layer, dtype in others:
        raise PrecisionError(
            f"{KEY}: layer {path_of(layer)} ({type(layer).__name__}) was told to compute in {layer.compute_dtype} "
            f"but returns {dtype}: its code fixes the dtype; take it out of the overrides"
        )
