"""A job in a Ray worker: it runs what the sweeping process has shipped, and always answers with something to unpickle."""

from __future__ import annotations

import logging
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobStatus, run_job, setup_globals

from mp_hydra.errors import UserError
from mp_hydra.isolation.jobs import Cause

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from types import ModuleType

    from hydra.core.utils import JobReturn
    from hydra.types import HydraContext, TaskFunction
    from omegaconf import DictConfig

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shipment:
    """Everything that a job needs.

    Attributes:
        context: Hydra's, with its callbacks.
        task_function: the application.
        config: the job's composed config.
        singletons: Hydra's state, resolvers included.
    """

    context: HydraContext
    task_function: TaskFunction
    config: DictConfig
    singletons: dict[Any, Any]


@dataclass(frozen=True)
class Answer:
    """How a job ended, as its worker tells it.

    Attributes:
        cause: what ended it.
        reason: one line; empty if it completed.
        returned: what Hydra is to be given; None if there is nothing.
        cpu_seconds: processor time of the worker.
    """

    cause: Cause
    reason: str
    returned: JobReturn | None
    cpu_seconds: float


def run(shipment: bytes, argv: Sequence[str], cwd: str, pickle: ModuleType) -> bytes:
    """Run a job.

    Args:
        shipment: a pickled `Shipment`.
        argv: `sys.argv` of the sweeping process.
        cwd: its working directory; where there is no such directory the job stays in Ray's.
        pickle: what it was pickled with.

    Returns:
        A pickled `Answer`.
    """
    sys.argv[:] = argv
    try:
        os.chdir(cwd)
    except OSError:
        print(f"{cwd} is not on this machine: the job runs in {os.getcwd()}", file=sys.stderr)  # noqa: PTH109, T201
    try:
        shipped = pickle.loads(shipment)
    except Exception as error:  # noqa: BLE001 - whatever the user's modules raise when they are imported
        reason = f"could not be started on the worker: {_one_line(error)}; the same code must be installed there"
        return bytes(pickle.dumps(Answer(Cause.raised, reason, None, _cpu_seconds())))
    answer = _run(shipped)
    try:
        sent: bytes = pickle.dumps(answer)
        pickle.loads(sent)
    except Exception as error:  # noqa: BLE001 - pickling runs the user's code
        returned = answer.returned
        if answer.cause is Cause.raised and returned is not None:
            returned.return_value = UserError(answer.reason)
            return bytes(pickle.dumps(answer))
        reason = f"what it returned cannot be sent between processes: {_one_line(error)}"
        return bytes(pickle.dumps(Answer(Cause.raised, reason, None, _cpu_seconds())))
    return sent


def _run(shipped: Shipment) -> Answer:
    Singleton.set_state(shipped.singletons)
    setup_globals()
    try:
        returned = run_job(
            hydra_context=shipped.context,
            task_function=shipped.task_function,
            config=shipped.config,
            job_dir_key="hydra.sweep.dir",
            job_subdir_key="hydra.sweep.subdir",
        )
    except SystemExit as leaving:
        return Answer(Cause.exited, f"it called sys.exit({leaving.code!r})", None, _cpu_seconds())
    except Exception as error:  # noqa: BLE001 - Hydra's own, such as a directory that cannot be made
        return Answer(Cause.raised, _one_line(error), None, _cpu_seconds())
    if returned.status is JobStatus.COMPLETED:
        return Answer(Cause.completed, "", returned, _cpu_seconds())
    raised = returned._return_value  # noqa: SLF001 - the property raises it
    if not isinstance(raised, UserError):
        log.error("the job failed", exc_info=raised)  # a traceback does not survive pickling
    return Answer(Cause.raised, _one_line(raised), returned, _cpu_seconds())


def _one_line(error: BaseException) -> str:
    said = next((line for line in str(error).splitlines() if line.strip()), "")
    return said if isinstance(error, UserError) and said else f"{type(error).__name__}: {said}".rstrip(": ")


def _cpu_seconds() -> float:
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def entry() -> Any:
    """The function that Ray runs, which needs nothing of mp_hydra to be unpickled: its first act is to extend the path."""

    def job(shipment: bytes, path: Sequence[str], argv: Sequence[str], cwd: str) -> Iterator[Any]:
        import sys  # noqa: PLC0415, RUF100
        from pathlib import Path

        from ray import cloudpickle

        sys.path.extend(place for place in path if place not in sys.path and Path(place).exists())
        yield None  # tells the sweeping process that the job has started
        from mp_hydra.remote.ray_worker import run

        yield run(shipment, argv, cwd, cloudpickle)

    return job
