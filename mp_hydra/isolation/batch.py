"""Runs planned jobs on a job server, a few at a time, and tells display and observers what happens to them."""

from __future__ import annotations

import os
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from mp_hydra.isolation import main_module, method, progress
from mp_hydra.isolation.client import Ended, ServerLostError
from mp_hydra.isolation.display import make_display
from mp_hydra.isolation.ending import Ending, ending, lost
from mp_hydra.isolation.jobs import Cause
from mp_hydra.isolation.processes import JOB_VARIABLE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mp_hydra.isolation.client import Server
    from mp_hydra.isolation.devices import Slot
    from mp_hydra.isolation.display import Display
    from mp_hydra.isolation.interrupts import Interrupts
    from mp_hydra.isolation.jobs import Progress
    from mp_hydra.isolation.observers import Observers
    from mp_hydra.isolation.plan import Plan
    from mp_hydra.isolation.request import JobFiles, Request, Will
    from mp_hydra.isolation.settings import Settings

_TICK = 0.25  # seconds between looks at what the jobs report


@dataclass(frozen=True)
class Surroundings:
    """What the jobs of a launch have in common.

    Attributes:
        method: how they start.
        forked: numbers of those that are forked; the others are fresh interpreters.
        slots: places for jobs, as many as run at a time.
        request: what each job is told, but for its own.
        task: context, task function and Hydra's state, pickled.
        will: what to call if this process is killed.
    """

    method: method.Method
    forked: frozenset[int]
    slots: tuple[Slot, ...]
    request: Request
    task: bytes
    will: Will | None


@dataclass
class _Running:
    plan: Plan
    files: JobFiles
    slot: Slot
    started: bool = False
    reported_at: int = 0  # modification time of the latest report, nanoseconds

    def report(self) -> Progress | None:
        """What the job has said since this was last asked; None for nothing new."""
        try:
            modified = os.stat(self.files.progress).st_mtime_ns  # noqa: PTH116 - four times a second
        except OSError:
            return None
        found = progress.read(self.files.progress) if modified != self.reported_at else None
        if found is not None:
            self.reported_at = modified
        return found


class Batch:
    """The jobs of one launch."""

    def __init__(
        self, settings: Settings, surroundings: Surroundings, observers: Observers, interrupts: Interrupts
    ) -> None:
        self._settings = settings
        self._common = surroundings
        self._observers = observers
        self._interrupts = interrupts
        self._free = list(reversed(surroundings.slots))
        self._waiting: deque[Plan] = deque()
        self._running: dict[int, _Running] = {}  # by the server's number
        self._endings: dict[int, Ending] = {}  # by the job's number
        # Not yet told: the ending, None at the start, and the last word of the job itself.
        self._news: deque[tuple[Plan, Ending | None, Progress | None]] = deque()
        self._server: Server = surroundings.method.server
        self._task = ""
        self._put_back: set[int] = set()  # numbers of jobs that a server died before starting

    def run(self, plans: Sequence[Plan]) -> list[Ending]:
        """Run all jobs; returns how each one ended, in the order given.

        Whatever exception comes from outside a job, signals included: running jobs are stopped before it goes on.
        """
        self._waiting.extend(plans)
        with make_display() as display:
            display.planned([plan.job for plan in plans])
            try:
                self._equip(self._server)
                while self._waiting or self._running:
                    with self._interrupts.held():
                        self._fill()
                        self._receive()
                    self._tell(display)
                    self._watch(display)
            except BaseException:
                self._stop(display)
                raise
        return [self._endings[plan.job.number] for plan in plans]

    def _equip(self, server: Server) -> None:
        self._server = server
        self._task = str(server.share("task", self._common.task))

    def _fill(self) -> None:
        while self._waiting and self._free:
            if not self._running and not self._server.alive:
                self._equip(method.choose(self._settings, self._common.will).server)
            self._start(self._waiting.popleft(), self._free.pop())

    def _start(self, plan: Plan, slot: Slot) -> None:
        job, settings = plan.job, self._settings
        number, files = self._server.new_job()
        environ = {
            **self._common.request.environ,
            **slot.environ,
            **plan.environ,
            JOB_VARIABLE: self._server.token(number),
        }
        output = None if job.output is None else str(job.output)
        request = replace(self._common.request, environ=environ, task=self._task, cores=slot.cores, output=output)
        files.write_request(request)
        files.config.write_bytes(main_module.dumps(job.config, by_reference=settings.import_main))
        self._running[number] = _Running(plan, files, slot)
        self._server.start(
            number,
            fork=job.number in self._common.forked,
            timeout=settings.timeout,
            grace=settings.grace,
            terminal=job.output is None,
        )

    def _receive(self) -> None:
        try:
            events = self._server.events(_TICK)
        except ServerLostError:
            self._lose()
            return
        for event in events:
            running = self._running.get(event.job)
            if running is None:
                continue
            if isinstance(event, Ended):
                result = running.files.read_result()
                judged = ending(event, result, timeout=self._settings.timeout, output=running.plan.job.output)
                self._end(event.job, judged)
            else:
                running.started = True
                self._news.append((running.plan, None, None))

    def _end(self, number: int, ending: Ending) -> None:
        running = self._running.pop(number)
        self._free.append(running.slot)
        last = running.report()
        self._server.forget(number)
        self._endings[running.plan.job.number] = ending
        self._news.append((running.plan, ending, last))

    def _lose(self) -> None:
        """The server died: so have its jobs; those that it did not come to start wait for the next one, once."""
        how = self._server.last_words()
        self._server.bury()
        for number, running in reversed(list(self._running.items())):
            if running.started or running.plan.job.number in self._put_back:
                self._end(number, lost(Cause.lost, f"lost, because the job server {how}", running.plan.job.output))
            else:
                self._put_back.add(running.plan.job.number)
                self._waiting.appendleft(running.plan)
                self._free.append(self._running.pop(number).slot)

    def _tell(self, display: Display) -> None:
        while self._news:
            plan, ending, last = self._news.popleft()
            if ending is None:
                display.started(plan.job)
                self._observers.tell("job_started", plan.job)
            else:
                if last is not None:  # written after the last look at it
                    display.progress(plan.job, last)
                display.ended(plan.job, ending.end)
                self._observers.tell("job_ended", plan.job, ending.end)

    def _watch(self, display: Display) -> None:
        for running in self._running.values():
            if (report := running.report()) is not None:
                display.progress(running.plan.job, report)

    def _stop(self, display: Display) -> None:
        """End the running jobs; a second signal meanwhile ends them at once."""
        with self._interrupts.counted():
            self._server.stop(at_once=False)
            while self._running:
                if self._interrupts.noted:
                    self._interrupts.noted.clear()
                    self._server.stop(at_once=True)
                self._receive()
        self._tell(display)
