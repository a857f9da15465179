"""`dataset.path`, for the builders that read files."""

from __future__ import annotations

from pathlib import Path

from mp_hydra.errors import ConfigError


def absolute(path: object, problem: str) -> Path:
    """The absolute form of `dataset.path`; a relative one counts from where the program was started.

    Raises:
        ConfigError: no path given; `problem` says what the key is for.
    """
    from hydra.utils import to_absolute_path

    if not isinstance(path, (str, Path)) or str(path) in ("", "???"):
        raise ConfigError("dataset.path", path, problem)
    return Path(to_absolute_path(str(Path(path).expanduser()))).resolve()
