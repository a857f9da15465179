"""What the launcher `ray` does: each job is a task of its own, in a worker that runs nothing else before or after it.

A task is a generator: its first item says that it has started, so that waiting for room is no part of its time; its second is
the answer. Whatever else comes back is Ray's account of a worker that died.
"""

from __future__ import annotations

import logging
import math
import os
import secrets
import signal
import sys
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.singleton import Singleton
from hydra.core.utils import configure_log, filter_overrides, setup_globals
from omegaconf import OmegaConf

from mp_hydra.errors import ConfigError, UserError
from mp_hydra.isolation.ending import lost
from mp_hydra.isolation.interrupts import Interrupts
from mp_hydra.isolation.jobs import Cause, End, Job
from mp_hydra.isolation.observers import Observers
from mp_hydra.isolation.plan import job_return, plan
from mp_hydra.remote.ray_worker import Answer, Shipment, entry

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from hydra.core.utils import JobReturn

    from mp_hydra.isolation.plan import Sweep

log = logging.getLogger(__name__)

KEY = "hydra.launcher"
POLL_SECONDS = 0.5
STOPPING_SECONDS = 5.0
FIXED = ("max_calls", "max_retries", "num_returns", "runtime_env")


@dataclass(frozen=True)
class Settings:
    """What `hydra_plugins.mp_hydra_ray_launcher.RayLauncherConf` describes."""

    init: Mapping[str, Any]
    remote: Mapping[str, Any]
    n_jobs: int | None
    timeout: float | None
    env: Mapping[str, str]

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> Settings:
        """The settings as the config gives them.

        Raises:
            ConfigError: a value that cannot be used.
        """
        plain: dict[str, Any] = {
            key: OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
            for key, value in given.items()
        }
        settings = cls(**plain)
        if settings.n_jobs is not None and settings.n_jobs < 1:
            raise ConfigError(
                f"{KEY}.n_jobs", settings.n_jobs, "give a number of jobs, at least 1, or null for no limit"
            )
        if settings.timeout is not None and not 0 < settings.timeout < math.inf:
            raise ConfigError(
                f"{KEY}.timeout", settings.timeout, "give a number of seconds above 0, or null for no limit"
            )
        for option in FIXED:
            if option in settings.remote:
                value = settings.remote[option]
                raise ConfigError(
                    f"{KEY}.remote.{option}", value, "the launcher sets it itself: one fresh worker for each job"
                )
        return settings


def launch(
    sweep: Sweep, settings: Settings, job_overrides: Sequence[Sequence[str]], first_number: int
) -> list[JobReturn]:
    """Run the jobs, and return what they returned, in order.

    Raises:
        UserError: Ray is not installed, no cluster can be had, or the jobs cannot be sent.
        HydraException: a job's config cannot be composed.
        KeyboardInterrupt, SystemExit: on SIGINT, and on SIGTERM and SIGHUP; no job runs any more by then.
    """
    setup_globals()
    configure_log(sweep.config.hydra.hydra_logging, sweep.config.hydra.verbose)
    ray = _connect(settings)
    log.info("Launching %d jobs on Ray", len(job_overrides))
    jobs = [planned.job for planned in plan(sweep, job_overrides, first_number, to_file=False)]
    for job in jobs:
        log.info("\t#%d : %s", job.number, " ".join(filter_overrides(job.overrides)))
    shipments = [_shipment(job, sweep) for job in jobs]
    observers = Observers(sweep.context.callbacks.callbacks)
    with Interrupts() as interrupts:
        return _Batch(settings, jobs, shipments, observers, ray, interrupts).run()


@dataclass(eq=False)
class _Running:
    """A job that has been handed to Ray."""

    job: Job
    task: Any
    since: float | None = None
    answer: bytes | None = None
    stopped: End | None = None  # why it has been told to end


@dataclass(eq=False)
class _Batch:
    """Jobs on their way through a cluster."""

    settings: Settings
    jobs: Sequence[Job]
    shipments: Sequence[bytes]
    observers: Observers
    ray: Any
    interrupts: Interrupts
    live: list[_Running] = field(default_factory=list)
    returned: dict[int, JobReturn] = field(default_factory=dict)

    def run(self) -> list[JobReturn]:
        """Run all of them; on every other way out none is left running."""
        self.observers.tell("jobs_planned", self.jobs)
        submit = self._task()
        waiting = list(zip(self.jobs, self.shipments, strict=True))
        where = ([str(Path(place or ".").absolute()) for place in sys.path], list(sys.argv), str(Path.cwd()))
        try:
            while waiting or self.live:
                with self.interrupts.held():  # raised within Ray's own code, an exception would lose its kind
                    while waiting and len(self.live) < (self.settings.n_jobs or len(self.jobs)):
                        job, shipment = waiting.pop(0)
                        self.live.append(_Running(job, submit.remote(shipment, *where)))
                    self._step()
        except BaseException:
            self._abandon()
            raise
        return [self.returned[job.number] for job in self.jobs]

    def _task(self) -> Any:
        fixed: dict[str, Any] = {"max_calls": 1, "max_retries": 0, "num_returns": "streaming"}
        if self.settings.env:
            fixed["runtime_env"] = {"env_vars": {name: str(value) for name, value in self.settings.env.items()}}
        try:
            return self.ray.remote(**self.settings.remote, **fixed)(entry())
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{KEY}.remote", dict(self.settings.remote), f"Ray says: {error}") from error

    def _step(self) -> None:
        """Wait a moment for news, and act on them."""
        ready, _ = self.ray.wait([running.task for running in self.live], timeout=POLL_SECONDS, fetch_local=False)
        for running in [running for running in self.live if any(running.task is task for task in ready)]:
            self._hear(running)
        limit = self.settings.timeout
        late = [
            running
            for running in self.live
            if limit and running.since and not running.stopped and time.monotonic() - running.since > limit
        ]
        self._stop(late, End(Cause.timeout, f"it took longer than {KEY}.timeout={limit:g} seconds" if limit else ""))

    def _hear(self, running: _Running) -> None:
        """Take the next thing that a job's worker, or Ray in its place, says."""
        try:
            said = self.ray.get(next(running.task))
        except StopIteration:
            self._end(running, *_read(running, self.ray))
        except Exception as error:  # noqa: BLE001 - told apart by class
            self._end(running, _death(error, self.ray.exceptions), None)
        else:
            if said is None:
                running.since = time.monotonic()
                self.observers.tell("job_started", running.job)
            else:
                running.answer = said

    def _end(self, running: _Running, end: End, returned: JobReturn | None) -> None:
        if running.stopped is not None and not end.ok:
            end, returned = running.stopped, None
        self.live.remove(running)
        end = replace(end, seconds=0.0 if running.since is None else time.monotonic() - running.since)
        if not end.ok:
            log.error("job %d: %s", running.job.number, end.reason)
        self.observers.tell("job_ended", running.job, end)
        if returned is None:
            returned = job_return(running.job, lost(end.cause, end.reason, None))
        self.returned[running.job.number] = returned

    def _stop(self, some: Sequence[_Running], why: End) -> None:
        """Kill jobs: Ray's gentler way would make a task's generator block until the job has ended."""
        for running in some:
            running.stopped = why
            self.ray.cancel(running.task, force=True)

    def _abandon(self) -> None:
        """Stop everything, because the sweep itself is being stopped."""
        log.warning("stopping %d jobs", len(self.live))
        stopped = End(Cause.stopped, "it was stopped with the sweep")
        with self.interrupts.counted():
            self._stop(list(self.live), stopped)
            deadline = time.monotonic() + STOPPING_SECONDS
            while self.live and time.monotonic() < deadline:
                self._step()
            for running in list(self.live):
                self._end(running, stopped, None)


def _read(running: _Running, ray: Any) -> tuple[End, JobReturn | None]:
    if running.answer is None:
        return End(Cause.exited, "its Ray worker ended without an answer"), None
    try:
        answer: Answer = ray.cloudpickle.loads(running.answer)
    except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
        return End(Cause.raised, f"what it returned cannot be read here: {type(error).__name__}: {error}"), None
    return End(answer.cause, answer.reason, cpu_seconds=answer.cpu_seconds), answer.returned


def _death(error: Exception, kinds: Any) -> End:
    """What it means that Ray raised `error` in the place of an answer."""
    if isinstance(error, kinds.OutOfMemoryError):
        return End(Cause.out_of_memory, "Ray killed it, because its machine had no memory left")
    if isinstance(error, kinds.WorkerCrashedError):
        reason = "its Ray worker died before it had a result: it was killed, as when memory runs out, crashed, or called os._exit"
        return End(Cause.exited, reason)
    cause = error.cause if isinstance(error, kinds.RayTaskError) else error  # type: ignore[attr-defined]
    if isinstance(cause, kinds.TaskCancelledError):
        return End(Cause.stopped, "it was cancelled")
    said = " ".join(next((line for line in str(cause).splitlines() if line.strip()), "").split())
    if cause is error:
        return End(Cause.lost, f"Ray lost it: {type(error).__name__}: {said}")
    where = (
        "its Ray worker has no mp_hydra or lacks a part of it" if isinstance(cause, ImportError) else "its Ray worker"
    )
    return End(Cause.raised, f"{where}: {type(cause).__name__}: {said}")


def _shipment(job: Job, sweep: Sweep) -> bytes:
    from ray import cloudpickle

    shipment = Shipment(sweep.context, sweep.task_function, job.config, Singleton.get_state())  # type: ignore[no-untyped-call]
    try:
        return bytes(cloudpickle.dumps(shipment))
    except Exception as error:
        problem = f"the job cannot be sent to a Ray worker: {type(error).__name__}: {error}"
        raise UserError(f"{problem}; make what cannot be pickled inside the task function") from error


def _connect(settings: Settings) -> Any:
    """Ray, connected to a cluster. One that is started here serves later batches too, and Ray stops it when this process ends."""
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")  # lines that several jobs print are lines of each of them
    try:
        import ray
    except ImportError as error:
        raise UserError("hydra/launcher=ray needs Ray: pip install 'mp_hydra[ray]'") from error
    if ray.is_initialized():
        return ray
    arguments = dict(settings.init)
    if arguments.get("address") is None and not os.environ.get("RAY_ADDRESS"):
        arguments["address"] = "local"
    if starts_here := arguments.get("address") == "local":
        _set_token()
    try:
        with _sigterm_kept():
            ray.init(**arguments)
    except (ConnectionError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f"{KEY}.init", arguments, f"Ray says: {error}") from error
    _check_resources(ray, settings.remote, starts_here=starts_here)
    return ray


def _set_token() -> None:
    """Give the cluster that is about to start a token in the environment, unless the user has one or wants none.

    A cluster listens on ports that everyone on the machine can reach, and runs what it is sent. So Ray asks for a token; it
    would make one for all clusters of the user, and leave it in ~/.ray.
    """
    own = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
    if not any(name in os.environ for name in own) and not Path.home().joinpath(".ray", "auth_token").exists():
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def _sigterm_kept() -> Iterator[None]:
    """Keep the application's handler of SIGTERM, which `ray.init` replaces with one that exits with code 15."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    except SystemExit:
        signal.signal(signal.SIGTERM, before)
        signal.raise_signal(signal.SIGTERM)
        raise
    finally:
        signal.signal(signal.SIGTERM, before)


def _check_resources(ray: Any, remote: Mapping[str, Any], *, starts_here: bool) -> None:
    """Refuse what a cluster on this machine can never give; warn of GPUs that no job asks for."""
    there = ray.cluster_resources()
    needed = {"CPU": remote.get("num_cpus") or 0, "GPU": remote.get("num_gpus") or 0, **(remote.get("resources") or {})}
    for name, amount in needed.items():
        if starts_here and amount > there.get(name, 0):
            raise ConfigError(
                f"{KEY}.remote", dict(remote), f"this machine has {there.get(name, 0):g} {name}: no job would start"
            )
    if there.get("GPU") and not needed["GPU"]:
        log.warning("the cluster has %g GPUs, and no job sees them: set %s.remote.num_gpus=1", there["GPU"], KEY)
