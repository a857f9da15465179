"""The MLflow UI on a store: started lean, on this machine alone, and stopped with everything that it started."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from typing import TYPE_CHECKING
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from mp_hydra.errors import ConfigError, TrackingError

if TYPE_CHECKING:
    from collections.abc import Iterator

HOST = "127.0.0.1"
START_SECONDS = 90.0
STOP_SECONDS = 10.0
# One worker and no job execution: 0.5 GB and 8 s to start, against 2.5 GB and 22 s.
_LEAN = {"MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false", "MLFLOW_DISABLE_TELEMETRY": "true", "DO_NOT_TRACK": "true"}


@contextlib.contextmanager
def served(uri: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    """Serve the MLflow UI while the block runs; it answers by the time the block begins.

    Args:
        uri: the address of a local store.
        port: where it listens, on 127.0.0.1.

    Yields:
        The server's process.

    Raises:
        ConfigError: the port is taken.
        TrackingError: the server ended, or gave no answer within 90 s.
    """
    _check_free(port)
    with _hanging_up_interrupts(), _started(uri, port) as server:
        yield server


@contextlib.contextmanager
def _started(uri: str, port: int) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "mlflow", "ui", "--workers", "1", "--host", HOST, "--port", str(port)]
    server = subprocess.Popen(
        [*command, "--backend-store-uri", uri],
        env={**os.environ, **_LEAN},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # its workers are in its session, and Ctrl-C is ours to hand on
    )
    try:
        _wait_until_it_answers(server, port)
        yield server
    finally:
        _stop(server)


@contextlib.contextmanager
def _hanging_up_interrupts() -> Iterator[None]:
    """Let a terminal that is closed end the block as Ctrl-C does: the server is in a session of its own, and would stay."""
    before = signal.getsignal(signal.SIGHUP)
    if before is not signal.SIG_DFL or threading.current_thread() is not threading.main_thread():
        yield  # nohup ignores it
        return
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def _check_free(port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError as error:
            problem = f"{error.strerror}; choose another port, such as {port + 1 if port < 65_535 else 5000}"  # noqa: PLR2004 - the last
            raise ConfigError("--port", port, problem) from None


def _wait_until_it_answers(server: subprocess.Popen[bytes], port: int) -> None:
    local = build_opener(ProxyHandler({}))  # a proxy of the user's is not for this machine
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if server.poll() is not None:
            raise TrackingError(
                f"the MLflow server ended at once, with exit status {server.returncode}; try: mlflow ui"
            )
        with contextlib.suppress(URLError, OSError), local.open(f"http://{HOST}:{port}/health", timeout=2):
            return
        time.sleep(0.2)
    raise TrackingError(f"the MLflow server gave no answer within {START_SECONDS:g} s")


def _stop(server: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(server.pid, signal.SIGTERM)
    try:
        server.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGKILL)
        server.wait()
