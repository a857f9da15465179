"""Peak training memory by precision and batch size, from dry runs at small batches in fresh processes.

    found = largest_batch(config, memory=12 * 10**9, directory=Path.cwd())   # config: resolved, its precision settled
    found.batch_size, found.reason

`mp-hydra forecast` shows it; a run with `batch_size=max` asks for it before it starts.
"""

from __future__ import annotations

from mp_hydra.forecast.largest import LargestBatch, largest_batch

__all__ = ["LargestBatch", "largest_batch"]
