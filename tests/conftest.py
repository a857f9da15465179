"""Settings that every test shares: no store but a temporary one, the allocator as in a run, no network."""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

os.environ["MP_HYDRA_HOME"] = tempfile.mkdtemp(prefix="mp_hydra_home_")
os.environ.pop("MLFLOW_TRACKING_URI", None)
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

from mp_hydra.telemetry.memory import count_every_cpu_allocation  # noqa: E402 - must come before TensorFlow

count_every_cpu_allocation()

import absl.logging  # noqa: E402
import hypothesis  # noqa: E402

# The same examples each time, so that what fails is the change; --hypothesis-profile=default looks for new ones.
hypothesis.settings.register_profile("reproducible", derandomize=True)
hypothesis.settings.load_profile("reproducible")

# Hydra's logging setup closes the handlers it finds; absl's may hold pytest's captured stderr.
absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__
