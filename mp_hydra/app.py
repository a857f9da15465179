"""The Hydra application: composes the config, checks it, runs it, and answers bad input with one line."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mp_hydra import config
from mp_hydra.errors import UserError
from mp_hydra.explain import explain, is_about_composing
from mp_hydra.outcome import Terminated, sigterm_raises
from mp_hydra.paths import conf_dir

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from omegaconf import DictConfig

log = logging.getLogger(__name__)

INTERRUPTED = 130
TERMINATED = 143
FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Run the application on `sys.argv`; exits with 0, or with another code after one line on stderr."""
    config.register()
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(
            0, here
        )  # a user's modules lie where the command is typed; a console script does not look there
    try:
        with _hydra_raises(), sigterm_raises():
            _job()
    except (UserError, config.InvalidConfigError) as error:
        _quit(str(error))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        if not is_about_composing(error):
            raise
        _quit(explain(error))
    except KeyboardInterrupt:
        _quit("interrupted", code=INTERRUPTED)
    except Terminated:
        _quit("terminated", code=TERMINATED)


@hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def _job(composed: DictConfig) -> float | None:
    """One run, as Hydra's launchers call it: the objective, for sweepers."""
    try:
        return _run(composed)
    except (UserError, config.InvalidConfigError) as error:
        if HydraConfig.get().mode is RunMode.MULTIRUN:
            # Hydra goes on with the other jobs, and re-raises the first error alone when all are done.
            log.error(error)  # noqa: TRY400 - one line is the point
            raise
        _quit(str(error))


def composed(overrides: Sequence[str]) -> dict[str, Any]:
    """The resolved config for some overrides, without running anything.

    Raises:
        UserError: one line for what is wrong with them.
        InvalidConfigError: one line for each value that cannot be used.
    """
    config.register()
    try:
        with initialize_config_dir(str(conf_dir()), version_base="1.3"):
            return config.resolve(compose("config", overrides=list(overrides)))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        if not is_about_composing(error):
            raise
        raise UserError(explain(error)) from error


def _run(composed: DictConfig) -> float:
    resolved = config.resolve(composed)
    # Imported late: TensorFlow takes seconds, and a config that is wrong should be answered at once.
    from mp_hydra.training import train

    runtime = HydraConfig.get()
    return train(
        resolved,
        output_dir=Path(runtime.runtime.output_dir),
        working_dir=Path(runtime.runtime.cwd),
        sweep=str(runtime.sweep.dir) if runtime.mode is RunMode.MULTIRUN else None,
    )


@contextmanager
def _hydra_raises() -> Iterator[None]:
    """Let Hydra raise instead of printing a traceback of its own and exiting; the user's own setting stays in force."""
    before = os.environ.get(FULL_ERROR)
    os.environ[FULL_ERROR] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[FULL_ERROR]
        else:
            os.environ[FULL_ERROR] = before


def _quit(message: str, *, code: int = 1) -> NoReturn:
    for line in message.splitlines():
        print(f"mp_hydra: {line}", file=sys.stderr)  # noqa: T201 - logging may not be set up yet
    sys.exit(code)
