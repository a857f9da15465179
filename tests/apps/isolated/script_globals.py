"""A Hydra app whose function refers to a global that cannot be pickled."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any

import hydra

LOCK = threading.Lock()
WORDS = "words of the script"


@dataclass
class Answer:
    """What a job returns."""

    number: int


@hydra.main(version_base="1.3", config_path=None)
def main(config: Any) -> Answer:
    with LOCK:
        print(WORDS, __name__, sys.argv[1:])
    return Answer(config.n)


if __name__ == "__main__":
    main()
