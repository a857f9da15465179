"""`batch_size=max`: from the request to the largest batch that fits, found by forecast and tried out before the run.

sized = settle(config, directory=Path.cwd())   # config: resolved, its precision settled
sized.config["batch_size"]                     # 512
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from mp_hydra.forecast import LargestBatch

log = logging.getLogger(__name__)

FILE = "forecast.json"


@dataclass(frozen=True)
class Sized:
    """A config whose batch size is a number.

    Attributes:
        config: the resolved config.
        found: how the number was found; None where it was given.
    """

    config: Mapping[str, Any]
    found: LargestBatch | None = None

    def tags(self) -> dict[str, str]:
        """The request and the reason of the result, as a run records them; `batch_size` itself is a parameter."""
        if self.found is None:
            return {}
        return {"mp_hydra.batch_size_requested": "max", "mp_hydra.batch_size_reason": self.found.reason}

    def save(self, directory: Path) -> None:
        """Write forecast.json, if the batch size was asked for as max."""
        if self.found is not None:
            (directory / FILE).write_text(json.dumps(asdict(self.found), indent=2) + "\n", encoding="utf-8")


def settle(config: Mapping[str, Any], *, directory: Path, find: Callable[..., LargestBatch] | None = None) -> Sized:
    """Settle the batch size of a resolved config, and say in the log what max came to.

    Args:
        config: a resolved config; its precision must be settled.
        directory: what a relative `resume` refers to.
        find: finds the largest batch, as `mp_hydra.forecast.largest_batch`; None for that one.

    Raises:
        UserError: if not even the smallest batch fits, or the model cannot be trained.
    """
    if config["batch_size"] != "max":
        return Sized(config)
    from mp_hydra.forecast import largest_batch
    from mp_hydra.sizes import parse, shown

    limit = config["memory"]["limit"]
    _say("starting a dry run in a process of its own")
    found = (find or largest_batch)(
        config,
        memory=None if limit is None else parse(limit),
        directory=directory,
        heard=lambda point: _say(f"a batch of {point.batch_size} took {shown(point.peak_bytes)}"),
        trying=lambda size: _say(f"trying out a batch of {size}"),
    )
    log.info("batch_size=max comes to %s: %s", found.batch_size, found.reason)
    return Sized({**config, "batch_size": found.batch_size}, found)


def _say(what: str) -> None:
    """Let the user see that something goes on, in the log and in the table of a sweep's jobs: it may take minutes."""
    from mp_hydra.isolation.jobs import Progress
    from mp_hydra.isolation.progress import report

    log.info("batch_size=max: %s", what)
    report(Progress(0.0, what))
