"""What a run adds to TensorBoard where the callback is asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.e2e.app_driver import BRIEF, train

if TYPE_CHECKING:
    from pathlib import Path


def test_loss_scale_and_gradient_norms_stand_in_tensorboard_as_in_mlflow(tmp_path: Path) -> None:
    import tensorflow as tf

    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    words = (*BRIEF, "precision=mixed_float16", "callbacks=tensorboard", f"hydra.run.dir={tmp_path}/out")
    run = train(*words, cwd=tmp_path)
    events = accumulator.EventAccumulator(str(tmp_path / "out/tensorboard/mp_hydra")).Reload()
    for name in ("loss_scale/value", "loss_scale/skipped_steps", "gradients/global_norm"):
        (event,) = events.Tensors(name)
        assert event.step == 21  # batches of one epoch: 1294 digits, 64 at a time
        assert float(tf.make_ndarray(event.tensor_proto)) == pytest.approx(run.metrics[name], rel=1e-6)
