"""Where conf/ lies: inside the installed package, or beside it in a clone or an editable install."""

from __future__ import annotations

from pathlib import Path


def conf_dir() -> Path:
    """The absolute path of the config directory.

    Raises:
        FileNotFoundError: if the installation lacks it.
    """
    package = Path(__file__).resolve().parent
    for candidate in (package / "conf", package.parent / "conf"):
        if (candidate / "config.yaml").is_file():
            return candidate
    raise FileNotFoundError(f"mp_hydra's conf/ is neither in {package} nor beside it; install mp_hydra again")
