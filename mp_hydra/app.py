"""The Hydra application: composes the config, checks it, runs it, and answers bad input with one line."""

from __future__ import annotations

import logging
import math
import os
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose, initialize_config_dir
from hydra import main as hydra_main
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from mp_hydra import config, tracking
from mp_hydra.errors import ConfigError, SweepFailedError, UserError, quit_with
from mp_hydra.explain import explain, is_about_composing
from mp_hydra.outcome import MemoryExhaustedError, Terminated, sigterm_raises
from mp_hydra.paths import conf_dir
from mp_hydra.sweep import membership
from mp_hydra.sweep.closing import closing_sweep

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

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
        with _hydra_raises(), sigterm_raises(), closing_sweep():
            _job()
    except (UserError, config.InvalidConfigError, SweepFailedError) as error:
        quit_with(str(error))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        if not is_about_composing(error):
            raise
        quit_with(explain(error))
    except KeyboardInterrupt:
        quit_with("interrupted", code=INTERRUPTED)
    except Terminated:
        quit_with("terminated", code=TERMINATED)


@hydra_main(version_base="1.3", config_path=str(conf_dir()), config_name="config")
def _job(composed: DictConfig) -> float | None:
    """One run, as Hydra's launchers call it: the objective, for sweepers; nan if the memory did not suffice."""
    swept = HydraConfig.get().mode is RunMode.MULTIRUN
    try:
        return _run(composed)
    except (UserError, config.InvalidConfigError) as error:
        if not swept:
            quit_with(str(error))
        log.error(error)  # noqa: TRY400 - one line is the point
        if isinstance(error, MemoryExhaustedError):
            return math.nan  # for a sweep that is a result, which the run's outcome records
        raise
    except Exception:
        if swept:  # a sweep goes on, and names the failed jobs at its end, each with one line
            log.exception("the job failed")
        raise


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
    runtime, sweep = HydraConfig.get(), membership.current()
    if runtime.mode is RunMode.RUN and (resume := resolved["sweep"]["resume"]) is not None:
        raise ConfigError("sweep.resume", resume, "only a sweep can go on: add --multirun (-m)")
    if sweep is not None and sweep.job_key in sweep.finished:
        log.info("an earlier sweep has finished this job")
        return sweep.finished[sweep.job_key]
    # Imported late: TensorFlow takes seconds, and a config that is wrong should be answered at once.
    from mp_hydra.training import train

    working_dir = Path(runtime.runtime.cwd)
    return train(
        resolved,
        output_dir=Path(runtime.runtime.output_dir),
        working_dir=working_dir,
        tags={} if sweep is None else sweep.tags(_store(resolved, working_dir)),
    )


def _store(resolved: Mapping[str, Any], working_dir: Path) -> str | None:
    """The address of the run's store; None if it is not tracked."""
    settings = tracking.Settings(**resolved["tracking"])
    return None if settings.kind == "off" else tracking.store_uri(settings, working_dir)


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
