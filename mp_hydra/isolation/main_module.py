"""What the started script itself defines: how functions of its module `__main__` get into another process.

By value, cloudpickle copies them with the globals that they use; the script is not run again. By reference, the script is
imported there, as multiprocessing does, and the functions are looked up by name.
"""

from __future__ import annotations

import inspect
import io
import runpy
import sys
from functools import reduce
from types import CodeType, FunctionType, ModuleType
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError, UserError
from mp_hydra.isolation.request import Main
from mp_hydra.isolation.settings import KEY

if TYPE_CHECKING:
    from collections.abc import Callable

_IMPORTED_AS = "__mp_main__"


def dumps(what: Any, *, by_reference: bool) -> bytes:
    """Pickle what jobs need.

    Raises:
        UserError: one line that names what cannot be pickled.
    """
    import cloudpickle

    try:
        if not by_reference:
            return bytes(cloudpickle.dumps(what))
        file = io.BytesIO()
        _pickler(file).dump(what)
        return file.getvalue()
    except Exception as error:
        raise UserError(_culprit(error, by_reference=by_reference)) from error


def current() -> Main:
    """The script of this process.

    Raises:
        ConfigError: there is none that could be imported.
    """
    main = sys.modules["__main__"]
    spec, file = getattr(main, "__spec__", None), getattr(main, "__file__", None)
    if spec is None and file is None:
        raise ConfigError(f"{KEY}.main", "import", "the code was not started from a file; use value")
    sys.modules.setdefault(_IMPORTED_AS, main)  # where classes that come back from jobs are looked up
    return Main(file=file, module=None if spec is None else spec.name)


def import_again(main: Main) -> None:
    """Run the script of another process here, under another name than `__main__`, so that it does not start over."""
    module = ModuleType(_IMPORTED_AS)
    if main.module is not None:
        names = runpy.run_module(main.module, run_name=_IMPORTED_AS, alter_sys=True)
    else:
        names = runpy.run_path(str(main.file), run_name=_IMPORTED_AS)
    vars(module).update(names)
    sys.modules["__main__"] = sys.modules[_IMPORTED_AS] = module


def find(qualname: str) -> Any:
    """What the script calls so."""
    return reduce(getattr, qualname.split("."), sys.modules["__main__"])


def find_decorated(qualname: str) -> Any:
    """What a decorator such as hydra.main was put on."""
    return inspect.unwrap(find(qualname))


def _pickler(file: io.BytesIO) -> Any:
    import cloudpickle

    class ByReference(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if isinstance(obj, (type, FunctionType)) and obj.__module__ == "__main__":
                for lookup in (find, find_decorated):
                    if _gives(lookup, obj):
                        return lookup, (obj.__qualname__,)
            return super().reducer_override(obj)

    return ByReference(file)


def _gives(lookup: Callable[[str], Any], obj: Any) -> bool:
    try:
        return lookup(obj.__qualname__) is obj
    except AttributeError:
        return False


def _culprit(error: Exception, *, by_reference: bool) -> str:
    import cloudpickle

    script = vars(sys.modules["__main__"])
    used = {
        name
        for value in script.values()
        if isinstance(value, FunctionType)
        for name in _names(inspect.unwrap(value).__code__)
    }
    for name in () if by_reference else sorted(used & script.keys()):
        value = script[name]
        if isinstance(value, (type, FunctionType, ModuleType)):
            continue
        try:
            cloudpickle.dumps(value)
        except Exception as refusal:  # noqa: BLE001 - any object may refuse in its own way
            kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
            return (
                f"the global {name} of the script, a {kind}, cannot be sent to the processes of the jobs "
                f"({refusal}): make it inside the function that uses it, or set {KEY}.main=import"
            )
    said = f"{type(error).__name__}: {error}"
    return f"the function, a callback or a resolver cannot be sent to the processes of the jobs: {said}"


def _names(code: CodeType) -> set[str]:
    """The global names that a function and those within it mention."""
    inner = [_names(constant) for constant in code.co_consts if isinstance(constant, CodeType)]
    return set(code.co_names).union(*inner)
