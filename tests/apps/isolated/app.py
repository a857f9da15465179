"""A Hydra app whose jobs wait, each with a process of its own, until something ends them."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.experimental.callback import Callback

STUBBORN = "import os, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); os.setsid(); time.sleep(100)"


class Diary(Callback):
    """Writes down what the launcher tells, and leaves a will."""

    def __init__(self, file: str) -> None:
        self.file = Path(file).absolute()

    def write(self, line: str) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            file.write(f"{line}\n")

    def job_started(self, job: Any) -> None:
        self.write(f"started {job.number}")

    def job_ended(self, job: Any, end: Any) -> None:
        self.write(f"ended {job.number} {end.cause.value}")

    def last_will(self) -> Any:
        return lambda: self.write(f"will in {Path.cwd()}")


@hydra.main(version_base="1.3", config_path=None)
def main(config: Any) -> int:
    stubborn = config.get("stubborn", False)
    subprocess.Popen([sys.executable, "-c", STUBBORN] if stubborn else ["sleep", "100"])
    if stubborn:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(HydraConfig.get().runtime.output_dir, "ready").touch()
    if config.n in config.get("wait", [0, 1, 2]):
        time.sleep(100)
    return int(config.n)


if __name__ == "__main__":
    main()
