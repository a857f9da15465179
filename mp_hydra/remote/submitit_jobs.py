"""What the launchers `slurm` and `slurm_local` add to those of hydra-submitit-launcher.

Those raise at the first job that has no result, and so lose what the others returned; and they leave jobs running on Ctrl-C.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import JobReturn, JobStatus, configure_log, filter_overrides, setup_globals

from mp_hydra.isolation.ending import lost
from mp_hydra.isolation.interrupts import Interrupts
from mp_hydra.isolation.jobs import Cause, End
from mp_hydra.isolation.observers import Observers
from mp_hydra.isolation.plan import job_return, plan

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from mp_hydra.isolation.jobs import Job
    from mp_hydra.isolation.plan import Sweep

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0  # as submitit's own waiting; it asks the queue less often than that
STOPPING_SECONDS = 10.0  # submitit's local executor kills a job one second after it has asked it to end
# States of SLURM that say more than that a job has no result.
_CAUSES = {"OUT_OF_MEMORY": Cause.out_of_memory, "TIMEOUT": Cause.timeout}


def launch(
    submit: Callable[[list[tuple[Any, ...]]], Sequence[Any]],
    sweep: Sweep,
    job_overrides: Sequence[Sequence[str]],
    first_number: int,
) -> list[JobReturn]:
    """Submit the jobs, wait for them, and return what they returned, in order.

    Args:
        submit: given the arguments of each job, as the stock launcher's `__call__` takes them; returns submitit's jobs.
        sweep: what Hydra handed over.
        job_overrides: the overrides of each job.
        first_number: the number of the first job.

    Raises:
        HydraException: a job's config cannot be composed.
        KeyboardInterrupt, SystemExit: on SIGINT, and on SIGTERM and SIGHUP; the jobs have been cancelled by then.
    """
    setup_globals()
    configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose)
    jobs = [planned.job for planned in plan(sweep, job_overrides, first_number, to_file=False)]
    for job in jobs:
        log.info("\t#%d : %s", job.number, " ".join(filter_overrides(job.overrides)))
    observers = Observers(sweep.context.callbacks.callbacks)
    observers.tell("jobs_planned", jobs)
    state = Singleton.get_state()  # type: ignore[no-untyped-call]
    arguments = [
        (list(job.overrides), "hydra.sweep.dir", job.number, f"job_id_for_{job.number}", state) for job in jobs
    ]
    running: list[_Submitted] = []
    returned: dict[int, JobReturn] = {}
    with Interrupts() as interrupts:
        try:
            with interrupts.held():  # what is submitted must be known, or it could not be cancelled
                running += [_Submitted(*pair, observers) for pair in zip(jobs, submit(arguments), strict=True)]
            while running:
                for submitted in [one for one in running if one.has_ended()]:
                    returned[submitted.job.number] = submitted.result()
                    running.remove(submitted)
                if running:
                    time.sleep(POLL_SECONDS)
        except BaseException:
            with interrupts.counted():
                _cancel(running)
            raise
    return [returned[job.number] for job in jobs]


class _Submitted:
    """A job that has been submitted.

    Args:
        job: what observers are told of it.
        handle: submitit's.
        observers: who is told.
    """

    def __init__(self, job: Job, handle: Any, observers: Observers) -> None:
        self.job, self.handle, self._observers = job, handle, observers
        self._started_at: float | None = None

    def has_ended(self) -> bool:
        """Whether it has; observers are told of its start as soon as the queue tells."""
        ended: bool = self.handle.done()
        if self._started_at is None and (ended or self.handle.state.upper() == "RUNNING"):
            self._started_at = time.monotonic()
            self._observers.tell("job_started", self.job)
        return ended

    def result(self) -> JobReturn:
        """What Hydra is to be given for the job, which has ended; observers are told of that."""
        from submitit.core.utils import FailedJobError, UncompletedJobError

        handle, returned = self.handle, None
        try:
            returned = handle.results()[0]
        except UncompletedJobError:
            said = f"it ended without a result, state {handle.state}: it was killed, crashed, or called sys.exit"
            cause = _CAUSES.get(handle.state.upper(), Cause.exited)
            end = End(cause, f"{said}; see {handle.paths.stdout} and {handle.paths.stderr}")
        except FailedJobError as error:
            end = End(Cause.raised, f"{_last_line(str(error))}; see {handle.paths.stderr}")
        else:
            end = _end(returned)
        self.ended(end)
        return job_return(self.job, lost(end.cause, end.reason, None)) if returned is None else returned

    def ended(self, end: End) -> None:
        """Tell of the job's end."""
        if not end.ok:
            log.error("job %d: %s", self.job.number, end.reason)
        seconds = 0.0 if self._started_at is None else time.monotonic() - self._started_at
        self._observers.tell("job_ended", self.job, End(end.cause, end.reason, seconds))


def _cancel(running: Iterable[_Submitted]) -> None:
    """Cancel jobs, and wait until they are gone, as far as the queue tells in time."""
    left = [job for job in running if not job.handle.done()]
    log.warning("cancelling %d jobs", len(left))
    for job in left:
        job.handle.cancel(check=False)
    deadline = time.monotonic() + STOPPING_SECONDS
    while time.monotonic() < deadline and not all(job.handle.done() for job in left):
        time.sleep(0.1)
    for job in left:
        job.ended(End(Cause.stopped, "it was cancelled with the sweep"))


def _end(returned: JobReturn) -> End:
    if returned.status is JobStatus.COMPLETED:
        return End(Cause.completed)
    raised = returned._return_value  # noqa: SLF001 - the property raises it
    return End(Cause.raised, f"{type(raised).__name__}: {raised}")


def _last_line(traceback: str) -> str:
    """The line of a traceback, with submitit's words around it, that names the exception."""
    lines = [line for line in traceback.splitlines() if line.strip() and not line.startswith("---")]
    named = [line for line in lines if ": " in line and not line.startswith((" ", "You can"))]
    return named[-1] if named else lines[0]
