"""Precision of a model: the policy in force while it is built, and the census of what its layers compute in.

with scoped_policy("mixed_bfloat16", tf32=True) as scope:
    model = build_model()
    probe(model, batch)                                   # builds what builds late; catches rounded ids
    require(census(model, scope), "mixed_bfloat16")       # raises PrecisionError, naming the layer
"""

from __future__ import annotations

import math
import re
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from mp_hydra.errors import PrecisionError

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

COMPUTE_DTYPES = {"float32": "float32", "mixed_float16": "float16", "mixed_bfloat16": "bfloat16"}


@dataclass
class Scope:
    """What `scoped_policy` saw while in force: layers constructed, whether each was given a dtype, which were overridden."""

    policy: str
    dtype_given: WeakKeyDictionary[Any, bool] = field(default_factory=WeakKeyDictionary)
    overridden: WeakSet[Any] = field(default_factory=WeakSet)


@contextmanager
def scoped_policy(policy: str, *, tf32: bool) -> Iterator[Scope]:
    """Set Keras' global dtype policy, float32 as floatx and the TF32 switch; restore all three whatever happens.

    Keras' session state is cleared first, so that layer names and policy do not depend on what ran before. The policy
    is per thread: layers constructed in another thread do not get it, and `require` names them.

    Args:
        policy: "float32", "mixed_float16" or "mixed_bfloat16".
        tf32: whether float32 matrix products may use TF32 where the hardware has it.

    Raises:
        PrecisionError: for any other policy name.
    """
    import keras
    import tensorflow as tf

    if policy not in COMPUTE_DTYPES:
        raise PrecisionError(f"policy {policy!r} is unknown; choose one of {', '.join(COMPUTE_DTYPES)}")
    previous = (
        keras.config.dtype_policy(),
        keras.config.floatx(),
        tf.config.experimental.tensor_float_32_execution_enabled(),
    )
    keras.utils.clear_session()
    scope = Scope(policy)
    try:
        keras.config.set_floatx("float32")
        keras.config.set_dtype_policy(policy)
        tf.config.experimental.enable_tensor_float_32_execution(tf32)
        with _recorded_constructions(scope.dtype_given):
            yield scope
    finally:
        keras.config.set_dtype_policy(previous[0])
        keras.config.set_floatx(previous[1])
        tf.config.experimental.enable_tensor_float_32_execution(previous[2])


@contextmanager
def _recorded_constructions(dtype_given: WeakKeyDictionary[Any, bool]) -> Iterator[None]:
    """Note for every layer whether its base constructor received a dtype: nothing on a finished layer tells."""
    import keras

    original = keras.layers.Layer.__init__

    def recording(self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        dtype_given[self] = kwargs.get("dtype") is not None

    keras.layers.Layer.__init__ = recording
    try:
        yield
    finally:
        keras.layers.Layer.__init__ = original


@dataclass(frozen=True)
class LayerRecord:
    """One layer of a built model.

    Attributes:
        path: the layer's path in the model, such as "encoder/dense_1".
        class_name: its class.
        policy: the name of its dtype policy.
        compute_dtype: what the policy makes it compute in.
        parameters: the elements of its own weights, without those of its sublayers.
        dtype_given: True if it was constructed with a dtype of its own, False if it took the global policy, None if it
            was constructed outside the scope.
        overridden: whether `precision.overrides` decides what it computes in.
    """

    path: str
    class_name: str
    policy: str
    compute_dtype: str
    parameters: int
    dtype_given: bool | None
    overridden: bool = False

    def asdict(self) -> dict[str, Any]:
        """The record as JSON-ready values."""
        return dict(vars(self))


def census(model: Any, scope: Scope) -> list[LayerRecord]:
    """Every layer of a built model, nested and sub-layers too, with what it computes in; in the order of `layers_of`."""
    return [
        LayerRecord(
            path=path_of(layer),
            class_name=type(layer).__name__,
            policy=layer.dtype_policy.name,
            compute_dtype=layer.compute_dtype,
            parameters=sum(math.prod(variable.shape) for variable in _own(layer)),
            dtype_given=scope.dtype_given.get(layer),
            overridden=layer in scope.overridden,
        )
        for layer in layers_of(model)
    ]


def layers_of(model: Any) -> list[Any]:
    """Every layer of a model, nested and sub-layers too, without containers.

    Containers (Functional and Sequential models, input layers) compute nothing.
    """
    import keras

    def container(layer: Any) -> bool:
        return isinstance(layer, (keras.layers.InputLayer, keras.Sequential)) or type(layer).__name__ == "Functional"

    # The one recursive walk that Keras has.
    return [layer for layer in model._flatten_layers() if not container(layer)]  # noqa: SLF001


def path_of(layer: Any) -> str:
    """The path of a layer in its model; the name of one that is not built, or of an operation that is no layer."""
    return str(getattr(layer, "path", None) or layer.name)


def _own(layer: Any) -> Iterable[Any]:
    return [*layer._trainable_variables, *layer._non_trainable_variables]  # noqa: SLF001 - without the sublayers'


def needs_loss_scaling(records: Sequence[LayerRecord]) -> bool:
    """Whether some layer computes in float16, whose smallest positive number is 6e-8: gradients below it become zero."""
    return any(record.compute_dtype == "float16" for record in records)


def require(records: Sequence[LayerRecord], policy: str, *, pinned: Sequence[str] = ()) -> None:
    """Check that every layer computes in what `policy` asks for, unless it was told otherwise.

    A layer was told otherwise if it was constructed with a dtype of its own, or its path matches one of `pinned`.

    Args:
        records: the census of the model.
        policy: the policy that was asked for.
        pinned: regular expressions, each matched against whole layer paths.

    Raises:
        PrecisionError: naming the first layer that computes in something else, or the fact that the policy reaches no
            weights at all.
    """
    asked = COMPUTE_DTYPES[policy]
    patterns = [_pattern(text, records) for text in pinned]
    others = [record for record in records if record.compute_dtype != asked]
    untold = [r for r in others if not r.dtype_given and not any(p.fullmatch(r.path) for p in patterns)]
    if untold:
        raise PrecisionError(_untold(untold, asked))
    weighted = [record for record in records if record.parameters]
    reached = [record for record in weighted if record.compute_dtype == asked]
    if weighted and not reached and policy != "float32":
        if any(record.overridden for record in weighted):
            raise PrecisionError(
                f"precision.overrides leaves no layer with weights that computes in {asked}; "
                f"choose the precision that they compute in"
            )
        raise PrecisionError(
            f"no layer with weights computes in {asked}: all {len(weighted)} of them carry a dtype of their own. A model "
            f"loaded from a file keeps the precision it was saved in; build it anew under the policy and copy its weights"
        )


def _pattern(text: str, records: Sequence[LayerRecord]) -> re.Pattern[str]:
    try:
        pattern = re.compile(text)
    except re.error as error:
        raise PrecisionError(f"precision.pinned: {text!r} is not a regular expression: {error}") from error
    if not any(pattern.fullmatch(record.path) for record in records):
        paths = ", ".join(record.path for record in records[:5])
        raise PrecisionError(f"precision.pinned: {text!r} matches no layer; the first paths are {paths}")
    return pattern


def _untold(untold: Sequence[LayerRecord], asked: str) -> str:
    first = untold[0]
    more = f" (and {len(untold) - 1} more)" if len(untold) > 1 else ""
    if first.dtype_given is None:
        why = "it was constructed before the policy was set, so build the model inside the function that model._target_ names"
    else:
        why = "it took another policy: one set inside the model's code, or that of a thread where this one is not in force"
    return (
        f"layer {first.path} ({first.class_name}){more} computes in {first.compute_dtype}, not in {asked}: {why}; "
        f'if it is meant, construct it with dtype="{first.compute_dtype}" or list its path in precision.pinned'
    )


def resolved_name(name: str, devices: Iterable[Mapping[str, Any]]) -> tuple[str, str | None]:
    """What a named precision comes to on these devices, and a sentence where that is not what the name says.

    Args:
        name: the option of the group `precision`.
        devices: as in `mp_hydra.hardware.environment()["devices"]`.
    """
    from mp_hydra.hardware import tf32_pays

    if name == "tf32" and not tf32_pays(devices):
        return (
            "fp32",
            "precision=tf32 comes to fp32 here: no GPU of compute capability 8.0 or above, and TF32 is theirs alone",
        )
    return name, None
