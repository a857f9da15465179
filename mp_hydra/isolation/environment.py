"""Which environment variables a forked job can still change, and which were read when its server did the imports.

Measured with TensorFlow 2.21 on a CPU, by interposing getenv: what is read at the first op, at the first compilation or
when the devices are listed (TF_NUM_INTEROP_THREADS, XLA_FLAGS, TF_XLA_FLAGS, CUDA_VISIBLE_DEVICES, ...) is each job's own.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

# Read when an interpreter starts, when a library is loaded, or when TensorFlow or Keras is imported.
_READ_AT_IMPORT = re.compile(
    r"""(LD|DYLD|MALLOC|TCMALLOC|OMP|GOMP|KMP|MKL|OPENBLAS|GOTO|BLIS|NUMEXPR|VECLIB)_\w+
      | PYTHON(HASHSEED|HOME|PATH|SAFEPATH|STARTUP|UTF8|MALLOC|OPTIMIZE|WARNINGS|NOUSERSITE|USERBASE|DEVMODE|TRACEMALLOC)
      | TF_(CPP_\w+|ENABLE_ONEDNN_OPTS|USE_LEGACY_KERAS)
      | TF2_BEHAVIOR
      | KERAS_(BACKEND|HOME)""",
    re.VERBOSE,
)


def read_at_import(name: str) -> bool:
    """Whether a forked job would not notice that the variable changed.

    >>> read_at_import("KERAS_BACKEND"), read_at_import("CUDA_VISIBLE_DEVICES")
    (True, False)
    """
    return _READ_AT_IMPORT.fullmatch(name) is not None


def too_late(server: Mapping[str, str], job: Mapping[str, str]) -> list[str]:
    """The variables, sorted, that a job wants otherwise than the server, which has read them.

    >>> too_late({"KERAS_BACKEND": "jax"}, {"TZ": "UTC"})
    ['KERAS_BACKEND']
    """
    return sorted(name for name in {*server, *job} if read_at_import(name) and server.get(name) != job.get(name))
