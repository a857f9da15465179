"""From the `model` node of a config and what the data set says of itself to a `keras.Model`, ours or anybody's."""

from __future__ import annotations

import difflib
import inspect
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from mp_hydra.errors import ConfigError, ModelError, UserError
from mp_hydra.models._parts import one_line

if TYPE_CHECKING:
    import functools
    from collections.abc import Mapping

    import keras

_OURS = "mp_hydra.models."
_MISSING = "???"
_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_CATCH_ALLS = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
_WANTED = "the dotted path of a function or class that returns a keras.Model, such as my_module.my_model"
_CURES = {
    "input_shape": "a dataset whose inputs have one fixed shape",
    "classes": "a classification dataset",
    "num_classes": "a classification dataset",
    "vocabulary": "a dataset of token sequences",
}


@dataclass(frozen=True)
class DataSpec:
    """What a model has to know of the data it is built for.

    Args:
        input_shape: shape of one sample, without the batch; None where the data set cannot tell.
        input_dtype: dtype of the inputs as batches bring them, such as "float32" or "int32".
        outputs: classes, or regression targets.
        classes: number of classes; None for regression.
        vocabulary: number of token ids; None where the inputs are no tokens.
    """

    input_shape: tuple[int, ...] | None
    input_dtype: str
    outputs: int
    classes: int | None
    vocabulary: int | None

    def arguments(self) -> dict[str, Any]:
        """Everything that a target may name among its parameters."""
        return {
            "input_shape": self.input_shape,
            "input_dtype": self.input_dtype,
            "outputs": self.outputs,
            "classes": self.classes,
            "num_classes": self.classes,
            "vocabulary": self.vocabulary,
        }


def build(config: Mapping[str, Any], spec: DataSpec) -> keras.Model:
    """The model that `config` describes, for the data that `spec` describes, in the global dtype policy.

    The target gets its arguments from `config`, and from `spec` those of `input_shape`, `input_dtype`, `outputs`,
    `classes`, `num_classes` and `vocabulary` that its signature names and `config` does not set. `name` in `config` is
    a label for people: it is passed on only to a target that names it.

    Args:
        config: the resolved `model` node, with `_target_`: a function or class that gives a `keras.Model`, compiled or
            not, functional, sequential or subclassed.
        spec: what the data set says of itself.

    Raises:
        ConfigError: the target cannot be found, or its arguments are unknown, missing or out of range.
        ModelError: this data set lacks what the target needs, one of our models does not suit it, or what came back is
            no `keras.Model`.
        Exception: whatever a user's own code raises, unchanged.
    """
    import keras

    target = config.get("_target_")
    if not isinstance(target, str) or target in ("", _MISSING):
        raise ConfigError("model._target_", target, f"give {_WANTED}")
    partial = _resolved({key: value for key, value in config.items() if key != "name"})
    arguments = _arguments(partial, target, spec, config.get("name"))
    try:
        model = partial(**arguments)
    except (TypeError, ValueError) as error:
        if not getattr(partial.func, "__module__", "").startswith(_OURS):
            raise
        raise ModelError(f"model._target_={target}: {one_line(error)}") from error
    if not isinstance(model, keras.Model):
        raise ModelError(f"model._target_={target}: it must return a keras.Model, but {_described(model)} came back")
    return model


def _resolved(config: dict[str, Any]) -> functools.partial[Any]:
    """The target with the arguments of the config, nested targets instantiated, not called yet."""
    try:
        partial: functools.partial[Any] = instantiate(config, _partial_=True, _convert_="all")
    except InstantiationException as error:
        raise _cause(error, str(config["_target_"])) from error
    return partial


def _cause(error: InstantiationException, target: str) -> Exception:
    """The answer to Hydra's failure: one line for a wrong name, the user's own exception where their code raised it."""
    message, _, nested = str(error).partition("\nfull_key: ")
    key, cure = "model._target_", f"give {_WANTED}"
    if nested:
        named = re.search(r"target '([^']*)'", message)
        key, cure = "model", "correct this _target_ inside the model's config"
        target = named.group(1) if named else target
    cause = error.__cause__
    if cause is None:
        return ConfigError(key, target, f"{message}; {cure}")
    if isinstance(cause, (ImportError, ValueError)) and str(cause).startswith("Error loading"):
        reason = cause.__cause__ or cause
        if isinstance(reason, (ImportError, AttributeError, ValueError)):
            return ConfigError(
                key, target, f"cannot be imported: {one_line(reason)}; {cure}{_path_hint(reason, target)}"
            )
        cause = reason
    return cause if isinstance(cause, Exception) else error


def _path_hint(reason: BaseException, target: str) -> str:
    module = target.partition(".")[0]
    absent = isinstance(reason, ModuleNotFoundError) and reason.name == module
    return f" (the directory of {module} must be on PYTHONPATH, or be where you type the command)" if absent else ""


def _arguments(partial: functools.partial[Any], target: str, spec: DataSpec, label: object) -> dict[str, Any]:
    """What the target gets on top of its config; checks first that the call will fit its signature."""
    signature = _signature(partial.func)
    if signature is None:
        return {}
    given = _given(partial, signature, target)
    offered = spec.arguments() | {"name": label}
    extra = {}
    for key, parameter in signature.parameters.items():
        if key in given or parameter.kind in _CATCH_ALLS:
            continue
        if parameter.kind is not parameter.POSITIONAL_ONLY and offered.get(key) is not None:
            extra[key] = offered[key]
        elif parameter.default is parameter.empty:
            raise _lacking(parameter, target)
    return extra


def _given(partial: functools.partial[Any], signature: inspect.Signature, target: str) -> Mapping[str, Any]:
    """The arguments that the config sets, by parameter."""
    parameters = signature.parameters.values()
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        named = [parameter.name for parameter in parameters if parameter.kind in _NAMED]
        for key, value in partial.keywords.items():
            if key not in named:
                raise ConfigError(f"model.{key}", value, f"{target} takes no such argument; {_hint(key, named)}")
    try:
        return signature.bind_partial(*partial.args, **partial.keywords).arguments
    except TypeError as error:
        raise ConfigError("model._args_", list(partial.args), f"they do not fit {target}: {error}") from error


def _lacking(parameter: inspect.Parameter, target: str) -> UserError:
    key = parameter.name
    if parameter.kind is parameter.POSITIONAL_ONLY:
        return ConfigError("model._args_", _MISSING, f"{target} needs {key} by position; give +model._args_=[...]")
    if key in _CURES:
        return ModelError(
            f"model._target_={target} needs {key}, which this dataset does not have: choose {_CURES[key]}, "
            "or another model"
        )
    return ConfigError(f"model.{key}", _MISSING, f"{target} needs this argument; give it with +model.{key}=...")


def _signature(target: Any) -> inspect.Signature | None:
    """The call signature; None where Python does not know it, as for some compiled functions."""
    try:
        if not inspect.isclass(target):
            return inspect.signature(target)
        # Keras classes have a __new__(*args, **kwargs) that would hide the names of __init__.
        signature = inspect.signature(target.__init__)
        return signature.replace(parameters=list(signature.parameters.values())[1:])
    except (TypeError, ValueError):
        return None


def _hint(word: str, known: list[str]) -> str:
    close = difflib.get_close_matches(word, known, n=1)
    return f"did you mean {close[0]}?" if close else f"it takes {', '.join(known) or 'none'}"


def _described(value: object) -> str:
    if value is None:
        return "None"
    kind = value if inspect.isclass(value) else type(value)
    return f"{'the class' if inspect.isclass(value) else 'an object of'} {kind.__module__}.{kind.__qualname__}"
