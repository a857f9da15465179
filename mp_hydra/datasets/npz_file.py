"""Arrays in an .npz file."""

from __future__ import annotations

import zipfile
import zlib
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.datasets.paths import absolute
from mp_hydra.errors import DataError

if TYPE_CHECKING:
    from pathlib import Path

_NEEDED = ("x_train", "y_train", "x_test", "y_test")
_OPTIONAL = ("x_validation", "y_validation", "x_val", "y_val", "classes", "vocabulary")


def npz(path: str | None = None) -> dict[str, Any]:
    """The arrays x_train, y_train, x_test, y_test and optionally x_validation, y_validation of an .npz file.

    x_val and y_val will do for the validation arrays; scalars `classes` and `vocabulary` are heeded; other arrays are
    left unread. Pickled objects are refused, as reading them runs code from the file.

    Args:
        path: the file; a relative path counts from where the program was started.

    Raises:
        ConfigError: no path given.
        DataError: a file that is missing or unreadable, or lacks an array.
    """
    file = absolute(path, "give the path of an .npz file with x_train, y_train, x_test and y_test")
    try:
        with file.open("rb") as stream:
            found = _read(np.load(stream, allow_pickle=False), file)
    except FileNotFoundError as error:
        raise DataError(f"dataset npz: there is no file {file}") from error
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        reason = getattr(error, "strerror", None) or "it is no .npz file, or a damaged one"
        raise DataError(f"dataset npz: {file} cannot be read: {reason}") from error
    return {**found, "source": str(file)}


def _read(archive: Any, file: Path) -> dict[str, Any]:
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise DataError(f"dataset npz: {file} holds a single array; save several with numpy.savez")
    if missing := [name for name in _NEEDED if name not in archive.files]:
        raise DataError(
            f"dataset npz: {file} has no {', '.join(missing)}; it holds {', '.join(archive.files) or 'no arrays'}"
        )
    return {name: _member(archive, name, file) for name in (*_NEEDED, *_OPTIONAL) if name in archive.files}


def _member(archive: Any, name: str, file: Path) -> Any:
    try:
        return archive[name]
    except ValueError as error:
        if "allow_pickle" in str(error):
            raise DataError(
                f"dataset npz: {name} in {file} holds pickled objects; save plain numeric arrays"
            ) from error
        raise DataError(f"dataset npz: {name} in {file} is damaged ({error})") from error
    except (OSError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise DataError(f"dataset npz: {name} in {file} is damaged ({error})") from error
