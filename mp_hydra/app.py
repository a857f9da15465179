"""The Hydra application: composes the config, checks it, runs it, and answers bad input with one line."""

from __future__ import annotations

import logging
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import Container, DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException, ValidationError

from mp_hydra import config
from mp_hydra.errors import ConfigError, UserError
from mp_hydra.paths import conf_dir

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

INTERRUPTED = 130
TERMINATED = 143
FULL_ERROR = "HYDRA_FULL_ERROR"


def main() -> None:
    """Run the application on `sys.argv`; exits with 0, or with another code after one line on stderr."""
    config.register()
    try:
        with _hydra_raises():
            _job()
    except (UserError, config.InvalidConfigError) as error:
        _quit(str(error))
    except (HydraException, OmegaConfBaseException) as error:
        _quit(explain(error))
    except ValueError:
        nulled = [group for group in config.GROUPS if f"{group}=null" in sys.argv]
        if not nulled:
            raise
        # Hydra answers a group that is set to null with a ValueError that does not say which.
        _quit(str(ConfigError(nulled[0], None, "choose an option of the group; --help lists them")))
    except KeyboardInterrupt:
        _quit("interrupted", code=INTERRUPTED)


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


def explain(error: Exception) -> str:
    """One line for what Hydra or OmegaConf found wrong with the command line or a config file."""
    if isinstance(error, MissingConfigException):
        return _explain_option(error)
    cause = error.__cause__ if isinstance(error.__cause__, OmegaConfBaseException) else error
    if isinstance(cause, (ConfigKeyError, ConfigAttributeError)):
        return _explain_key(cause)
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        return _explain_value(cause)
    lines = [line.strip() for text in (error, cause) for line in str(text).splitlines()]
    return " ".join(dict.fromkeys(line for line in lines if line))


def _explain_value(error: OmegaConfBaseException) -> str:
    key, found = str(error.full_key), str(error.msg or error).splitlines()[0]
    if isinstance(error, ValidationError):
        value = getattr(error, "value", None)
        return str(ConfigError(key, value, config.advice(key, value) or found))
    return f"{key}: {found}"


def _explain_option(error: MissingConfigException) -> str:
    missing = str(error.missing_cfg_file)
    options = list(error.options or [])
    if not options:
        return " ".join(str(error).split())
    group, _, option = missing.rpartition("/")
    return str(ConfigError(group, option, f"no such option; {config.suggestion(option, options)}"))


def _explain_key(error: ConfigKeyError | ConfigAttributeError) -> str:
    parent = error.parent_node
    known = [str(key) for key in parent] if isinstance(parent, Container) else list(config.GROUPS)
    key = str(error.full_key or error.key)
    wrong = key.rpartition(".")[2]
    hint = config.suggestion(wrong, known)
    return f"{key}: no such key; {hint}; to add a key that is not in the config write +{key}=..."


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
