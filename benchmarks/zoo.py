"""The models that `memory.py` and `forecast_error.py` measure: random weights, float32 logits, sizes for whole steps on a CPU.

Each is the model of a run too, from the root of the repository:

    python train.py model=custom model._target_=benchmarks.zoo.build +model.which=ViT dataset=synthetic batch_size=128
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import keras
    import numpy.typing as npt

CLASSES = 10


@dataclass(frozen=True)
class Entry:
    """One model.

    Attributes:
        name: in tables and on command lines.
        make: from shape of one sample, classes and vocabulary to the model, in the global dtype policy.
        shape: of one sample.
        batch: samples of a step in which activations outweigh gradients by far.
        vocabulary: number of token ids; None for images.
    """

    name: str
    make: Callable[[Sequence[int], int, int | None], keras.Model]
    shape: tuple[int, ...]
    batch: int
    vocabulary: int | None = None

    @property
    def title(self) -> str:
        """Name and size of a sample."""
        size = "x".join(map(str, self.shape[:2])) if self.vocabulary is None else f"{self.shape[0]} tokens"
        return f"{self.name}, {size}"

    def model(self) -> keras.Model:
        """Build it for its own shape."""
        return self.make(self.shape, CLASSES, self.vocabulary)

    def samples(self, count: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int32]]:
        """Random inputs, float32 images in [0, 1] or int32 token ids, and classes."""
        random = np.random.default_rng(0)
        classes = random.integers(0, CLASSES, count, dtype=np.int32)
        if self.vocabulary is None:
            return random.random((count, *self.shape), dtype=np.float32), classes
        return random.integers(0, self.vocabulary, (count, *self.shape), dtype=np.int32), classes

    def overrides(self, size: int) -> list[str]:
        """What makes it the model of a run, on `size` training samples like those above."""
        kind = "image" if self.vocabulary is None else "tokens"
        data = {"kind": kind, "classes": CLASSES, "size": size, "test_size": size, "validation_fraction": 0}
        if self.vocabulary is not None:
            data["vocabulary"] = self.vocabulary
        return [
            *("model=custom", "model._target_=benchmarks.zoo.build", f"+model.which={self.name}"),
            *("dataset=synthetic", f"dataset.shape=[{','.join(map(str, self.shape))}]"),
            *(f"dataset.{key}={value}" for key, value in data.items()),
        ]


def build(input_shape: Sequence[int], outputs: int, which: str, vocabulary: int | None = None) -> keras.Model:
    """The model of that name, for the data of a run.

    Raises:
        KeyError: there is no such model.
    """
    return ZOO[which].make(input_shape, outputs, vocabulary)


def _resnet(shape: Sequence[int], outputs: int, _vocabulary: int | None) -> keras.Model:
    from mp_hydra.models import resnet

    return resnet(shape, outputs, depth=14, width=64)


def _vit(shape: Sequence[int], outputs: int, _vocabulary: int | None) -> keras.Model:
    from mp_hydra.models import vit

    return vit(shape, outputs, width=192, depth=6)


def _encoder(shape: Sequence[int], outputs: int, vocabulary: int | None) -> keras.Model:
    from mp_hydra.models import transformer

    return transformer(shape, outputs, vocabulary or 1, width=128, depth=4, dropout=0.1)


def _application(architecture: str) -> Callable[[Sequence[int], int, int | None], keras.Model]:
    def make(shape: Sequence[int], outputs: int, _vocabulary: int | None) -> keras.Model:
        from mp_hydra.models import application

        return application(shape, outputs, architecture=architecture)

    return make


_ENTRIES = (
    Entry("ResNet-14", _resnet, (32, 32, 3), batch=128),
    Entry("ResNet50", _application("ResNet50"), (96, 96, 3), batch=32),
    Entry("MobileNetV2", _application("MobileNetV2"), (96, 96, 3), batch=64),
    Entry("EfficientNetB0", _application("EfficientNetB0"), (96, 96, 3), batch=48),
    Entry("ConvNeXtTiny", _application("ConvNeXtTiny"), (96, 96, 3), batch=32),
    Entry("ViT", _vit, (32, 32, 3), batch=128),
    Entry("encoder", _encoder, (128,), batch=64, vocabulary=1000),
)
ZOO = {entry.name: entry for entry in _ENTRIES}
