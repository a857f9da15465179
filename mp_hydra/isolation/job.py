"""What runs in a job's process, forked or fresh: it takes on the launcher's surroundings, and ends as Python does."""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import logging
import os
import pickle
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mp_hydra.errors import UserError
from mp_hydra.isolation import main_module, progress
from mp_hydra.isolation.request import JobFiles, Kind, Request, Result

if TYPE_CHECKING:
    from collections.abc import Callable

    from hydra.core.utils import JobReturn

log = logging.getLogger(__name__)

# The directory of a job was settled when it was planned, and is not evaluated again.
DIRECTORY_KEY = "hydra.runtime.output_dir"


def run(directory: str, *, descriptors: tuple[int, ...] = (), forked: bool = False) -> NoReturn:
    """Run the job whose files are in `directory`, and end the process.

    Args:
        directory: see `mp_hydra.isolation.request.JobFiles`.
        descriptors: standard output and error, where the request names no file for them.
        forked: whether this process is a copy of one that has done the imports.
    """
    files = JobFiles(Path(directory))
    _to_the_end(lambda: _run(files, descriptors, forked=forked))


def run_wills(directory: str) -> NoReturn:
    """Call what the launcher left to be called in the case of its death, and end the process."""
    _to_the_end(lambda: _run_wills(JobFiles(Path(directory))))


def _run(files: JobFiles, descriptors: tuple[int, ...], *, forked: bool) -> int:
    request = files.read_request()
    _redirect(request.output, descriptors)
    progress.report_to(files.progress)
    try:
        _enter(request, forked=forked)
        result = _returned(_run_job(files, request))
    except SystemExit as error:
        files.write_result(Result(Kind.exited, text="" if error.code is None else str(error.code)))
        return _exit_code(error)
    except BaseException as error:  # noqa: BLE001 - all of them are the launcher's to judge
        result = _raised(error)
    files.write_result(result)
    return 0


def _run_job(files: JobFiles, request: Request) -> JobReturn:
    import hydra.core.utils

    if request.main is not None:
        main_module.import_again(request.main)
    context, task_function, state = pickle.loads(Path(request.task).read_bytes())  # noqa: S301 - from our launcher
    config = pickle.loads(files.config.read_bytes())  # noqa: S301 - likewise
    _restore(state)
    return hydra.core.utils.run_job(
        hydra_context=context,
        task_function=task_function,
        config=config,
        job_dir_key=DIRECTORY_KEY,
        job_subdir_key=None,
    )


def _restore(state: dict[str, Any]) -> None:
    """As Hydra's Singleton.set_state, which would look for all plugins again."""
    from hydra.core.plugins import Plugins
    from hydra.core.singleton import Singleton
    from omegaconf.basecontainer import BaseContainer

    Singleton._instances = {**state["instances"], Plugins: Plugins.instance()}  # type: ignore[dict-item]  # noqa: SLF001
    BaseContainer._resolvers = state["omegaconf_resolvers"]  # noqa: SLF001


def _returned(job_return: JobReturn) -> Result:
    import cloudpickle
    from hydra.core.utils import JobStatus

    value = job_return._return_value  # noqa: SLF001 - the property would raise it
    job_return.return_value = None
    rest = cloudpickle.dumps(job_return)
    if job_return.status is not JobStatus.COMPLETED:
        return _raised(value, rest)
    try:
        return Result(Kind.returned, job_return=rest, value=cloudpickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - any object may refuse in its own way
        return Result(Kind.unpicklable, text=one_line(error), job_return=rest)


def _raised(error: BaseException, job_return: bytes | None = None) -> Result:
    import cloudpickle

    text = "".join(traceback.format_exception(error))
    if not isinstance(error, UserError):
        sys.stderr.write(text)
    try:
        value: bytes | None = cloudpickle.dumps(error)
    except Exception:  # noqa: BLE001 - its type and text have to do
        value = None
    return Result(Kind.raised, text=one_line(error), traceback=text, job_return=job_return, value=value)


def one_line(error: BaseException) -> str:
    """An exception in one line: its type unless it is made for users, and the first line of what it says."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    said = lines[0].strip()[:500] if lines else ""
    if isinstance(error, UserError) and said:
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__


def _run_wills(files: JobFiles) -> int:
    request = files.read_request()
    _enter(request, forked=True)
    wills: list[Callable[[], None]] = pickle.loads(Path(request.task).read_bytes())  # noqa: S301 - from our launcher
    for will in wills:
        try:
            will()
        except Exception:  # noqa: PERF203 - the others count as much
            log.exception("after the launcher's death")
    return 0


def _enter(request: Request, *, forked: bool) -> None:
    sys.path[:], sys.argv[:] = request.path, request.argv
    os.chdir(request.cwd)
    if request.cores is not None:
        os.sched_setaffinity(0, request.cores)
    if not forked:
        return
    os.environ.clear()
    os.environ.update(request.environ)
    time.tzset()
    tempfile.tempdir = None
    if "numpy" in sys.modules:
        import numpy as np

        np.random.seed()  # noqa: NPY002 - the global state is what a fork copies


def _redirect(output: str | None, descriptors: tuple[int, ...]) -> None:
    """Let file descriptors 1 and 2, which C++ writes to past Python, lead where they should, and leave nothing to read."""
    sys.stdout.flush()
    sys.stderr.flush()
    if output is not None:
        Path(output).parent.mkdir(parents=True, exist_ok=True)
        opened = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        descriptors = (opened, opened)
    for target, source in zip((1, 2), descriptors, strict=True):
        os.dup2(source, target)
    for source in set(descriptors):
        os.close(source)
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(line_buffering=True)  # type: ignore[union-attr]
        if output is not None:
            stream.reconfigure(encoding="utf-8", errors="backslashreplace")  # type: ignore[union-attr]
    faulthandler.enable()  # a crash in C++ then says where Python was


def _exit_code(error: SystemExit) -> int:
    if error.code is None:
        return 0
    if isinstance(error.code, int):
        return error.code & 0xFF
    sys.stderr.write(f"{error.code}\n")
    return 1


def _to_the_end(work: Callable[[], int]) -> NoReturn:
    """Do the work and end the process: as the interpreter does, but for taking itself apart."""
    code = 1
    try:
        code = work()
    except BaseException:  # noqa: BLE001 - nothing may unwind into the server that this is a copy of
        traceback.print_exc()
    try:
        threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001 - waits for the threads that are no daemons
        atexit._run_exitfuncs()  # noqa: SLF001
    except BaseException:  # noqa: BLE001
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        os._exit(code)
