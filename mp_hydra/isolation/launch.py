"""A launch of the launcher `isolated`: plan, choose how to start, run, and hand back what became of each job."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hydra.core.singleton import Singleton
from hydra.core.utils import configure_log, setup_globals

from mp_hydra.isolation import devices, main_module, method
from mp_hydra.isolation.batch import Batch, Surroundings
from mp_hydra.isolation.client import search_path
from mp_hydra.isolation.environment import too_late
from mp_hydra.isolation.interrupts import Interrupts
from mp_hydra.isolation.observers import Observers
from mp_hydra.isolation.plan import job_return, plan
from mp_hydra.isolation.request import Request, Will
from mp_hydra.isolation.servers import servers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from hydra.core.utils import JobReturn

    from mp_hydra.isolation.plan import Plan, Sweep
    from mp_hydra.isolation.settings import Settings

log = logging.getLogger(__name__)


def launch(
    sweep: Sweep, settings: Settings, job_overrides: Sequence[Sequence[str]], first_number: int
) -> list[JobReturn]:
    """Run jobs, each in a process of its own.

    A job that fails gives a JobReturn with its exception, or with a `mp_hydra.isolation.ending.JobDiedError`, and the others
    go on.

    Raises:
        UserError: something cannot be used, before any job has started.
        KeyboardInterrupt, SystemExit: on SIGINT, and on SIGTERM and SIGHUP; no job runs any more by then.
    """
    setup_globals()
    configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose)
    plans = plan(sweep, job_overrides, first_number, to_file=settings.to_file)
    observers = Observers(sweep.context.callbacks.callbacks)
    with Interrupts() as interrupts:
        observers.tell("jobs_planned", [plan.job for plan in plans])
        try:
            batch = Batch(settings, _surroundings(sweep, settings, plans, observers), observers, interrupts)
            endings = batch.run(plans)
        finally:
            servers.release()
    return [job_return(plan.job, ending) for plan, ending in zip(plans, endings, strict=True)]


def _surroundings(sweep: Sweep, settings: Settings, plans: Sequence[Plan], observers: Observers) -> Surroundings:
    environ = {**os.environ, **settings.preload_env, **settings.env}
    task = (sweep.context, sweep.task_function, Singleton.get_state())  # type: ignore[no-untyped-call]
    main = main_module.current() if settings.import_main else None
    pickled = main_module.dumps(task, by_reference=settings.import_main)
    surroundings = Request(environ, str(Path.cwd()), tuple(search_path()), tuple(sys.argv), task="", main=main)
    functions = [function for function in observers.tell("last_will") if function is not None]
    pickled_functions = main_module.dumps(functions, by_reference=settings.import_main)
    will = Will(pickled_functions, surroundings) if functions else None
    chosen = method.choose(settings, will)
    late = {plan.job.number: too_late({**chosen.server.environ}, {**environ, **plan.environ}) for plan in plans}
    forked = method.forked(settings, chosen, late)
    slots = devices.slots(settings.n_jobs, devices.gpus(environ) if settings.n_jobs > 1 else [], devices.cores())
    log.info("Launching %s, %s: %s", _jobs(len(plans)), _at_a_time(settings.n_jobs, slots), chosen.text)
    return Surroundings(
        method=chosen,
        forked=frozenset(forked),
        slots=slots,
        request=surroundings,
        task=pickled,
        will=will,
    )


def _jobs(count: int) -> str:
    return "1 job" if count == 1 else f"{count} jobs"


def _at_a_time(n_jobs: int, slots: Sequence[devices.Slot]) -> str:
    if n_jobs == 1:
        return "one at a time"
    return f"{n_jobs} at a time, on {'; '.join(slot.text for slot in slots)}"
