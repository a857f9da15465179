"""Callbacks that stand for what happens in the middle of a training."""

from __future__ import annotations

from typing import Any

import keras


class Raise(keras.callbacks.Callback):
    """Raises at the end of the first epoch: a full device, a full host, or a bug."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Raise."""
        import tensorflow as tf

        if self.what == "device":
            message = "OOM when allocating tensor with shape[1024,1024]\nand many lines more"
            raise tf.errors.ResourceExhaustedError(None, None, message)
        if self.what == "host":
            raise MemoryError
        raise RuntimeError(f"a bug called {self.what}")
