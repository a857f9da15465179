"""Made-up data of any size and shape that can be learned, though not perfectly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from mp_hydra.errors import ConfigError

if TYPE_CHECKING:
    import numpy.typing as npt

_DEFAULT_SHAPES = {"image": (32, 32, 3), "vector": (64,), "tokens": (64,)}
_AXES = {"image": "[height, width, channels]", "vector": "[features]", "tokens": "[length]"}
_COARSE = 4  # class images are enlarged from 4x4 cells, so that neighbouring pixels agree as in photographs
_PIXEL_NOISE = 16  # standard deviation, of 0..255
_VECTOR_NOISE = 0.3  # standard deviation; the patterns have 1
_BACKGROUND = 0.5  # share of tokens that say nothing about the class
_CHUNK = 1024  # samples made at once, to keep the float32 intermediates small


def synthetic(
    kind: str = "image",
    *,
    shape: Sequence[int] | None = None,
    classes: int = 10,
    size: int = 2000,
    test_size: int = 500,
    vocabulary: int = 1000,
    noise: float = 0.55,
    data_seed: int = 0,
) -> dict[str, Any]:
    """Samples that mix the pattern of their own class with that of another one.

    A sample of class c is a * pattern[c] + (1 - a) * pattern[another class] + small white noise, with a uniform in
    [1 - noise, 1]. Above a noise of 0.5 the other pattern outweighs the own one in a share (noise - 0.5) / noise of the
    samples, so that no classifier can be expected to get more than 0.5 / noise of them right: 0.91 at 0.55. Token
    sequences mix the tokens that are typical of the classes in the same way, with half of all tokens drawn at random.

    Args:
        kind: image (uint8), vector (float32) or tokens (int32 ids).
        shape: of one sample: [height, width, channels], [features] or [length]; None for 32x32x3, 64 or 64.
        classes: number of classes.
        size: training samples, validation included.
        test_size: test samples.
        vocabulary: number of token ids; id 0 is left to padding and does not occur.
        noise: largest share of another class's pattern, in [0, 1].
        data_seed: the data follow from it, not from the seed of the run.

    Raises:
        ConfigError: an argument out of range.
    """
    if kind not in _DEFAULT_SHAPES:
        raise ConfigError("dataset.kind", kind, f"give one of {', '.join(_DEFAULT_SHAPES)}")
    sample_shape = _shape(kind, shape)
    _at_least("classes", classes, 2)
    _at_least("size", size, 2)
    _at_least("test_size", test_size, 1)
    _at_least("data_seed", data_seed, 0)
    if isinstance(noise, bool) or not isinstance(noise, (int, float)) or not 0 <= noise <= 1:
        raise ConfigError("dataset.noise", noise, "give a number from 0 to 1")
    if kind == "tokens":
        _at_least("vocabulary", vocabulary, 2 * classes + 1)
    random = np.random.default_rng(data_seed)
    patterns: _Patterns
    if kind == "image":
        patterns = _ImagePatterns(random, sample_shape, classes)
    elif kind == "vector":
        patterns = _VectorPatterns(random, sample_shape, classes)
    else:
        patterns = _TokenPatterns(random, sample_shape, classes, vocabulary)
    x_train, y_train = _draw(random, patterns, classes, size, noise)
    x_test, y_test = _draw(random, patterns, classes, test_size, noise)
    made = {"x_train": x_train, "y_train": y_train, "x_test": x_test, "y_test": y_test}
    extra = {"vocabulary": vocabulary} if kind == "tokens" else {}
    return {**made, **extra, "classes": classes, "source": f"synthetic {kind}, data_seed {data_seed}"}


class _Patterns(Protocol):
    def mix(self, own: npt.NDArray[Any], other: npt.NDArray[Any], share: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Samples of the classes `own`, each with `share` (n,) of its own pattern and the rest of that of `other`."""


class _ImagePatterns:
    def __init__(self, random: np.random.Generator, shape: tuple[int, ...], classes: int) -> None:
        self.random = random
        height, width, channels = shape
        cells = random.uniform(0, 255, (classes, _COARSE, _COARSE, channels)).astype(np.float32)
        rows, columns = np.arange(height) * _COARSE // height, np.arange(width) * _COARSE // width
        self.images = cells[:, rows][:, :, columns]

    def mix(self, own: npt.NDArray[Any], other: npt.NDArray[Any], share: npt.NDArray[Any]) -> npt.NDArray[Any]:
        share = share[:, np.newaxis, np.newaxis, np.newaxis]
        mixed = share * self.images[own] + (1 - share) * self.images[other]
        noise = self.random.standard_normal(mixed.shape, dtype=np.float32) * _PIXEL_NOISE
        pixels: npt.NDArray[np.uint8] = np.clip(np.rint(mixed + noise), 0, 255).astype(np.uint8)
        return pixels


class _VectorPatterns:
    def __init__(self, random: np.random.Generator, shape: tuple[int, ...], classes: int) -> None:
        self.random = random
        self.vectors = random.standard_normal((classes, *shape), dtype=np.float32)

    def mix(self, own: npt.NDArray[Any], other: npt.NDArray[Any], share: npt.NDArray[Any]) -> npt.NDArray[Any]:
        share = share[:, np.newaxis]
        mixed = share * self.vectors[own] + (1 - share) * self.vectors[other]
        noisy: npt.NDArray[Any] = mixed + self.random.standard_normal(mixed.shape, dtype=np.float32) * _VECTOR_NOISE
        return noisy


class _TokenPatterns:
    def __init__(self, random: np.random.Generator, shape: tuple[int, ...], classes: int, vocabulary: int) -> None:
        self.random = random
        self.length, self.vocabulary = shape[0], vocabulary
        each = max(1, (vocabulary - 1) // (2 * classes))
        self.typical = 1 + random.permutation(vocabulary - 1)[: classes * each].reshape(classes, each)

    def mix(self, own: npt.NDArray[Any], other: npt.NDArray[Any], share: npt.NDArray[Any]) -> npt.NDArray[Any]:
        size = (len(own), self.length)
        from_own = self.random.random(size, dtype=np.float32) < share[:, np.newaxis]
        topic = np.where(from_own, own[:, np.newaxis], other[:, np.newaxis])
        token = self.typical[topic, self.random.integers(self.typical.shape[1], size=size)]
        background = self.random.integers(1, self.vocabulary, size=size)
        return np.where(self.random.random(size) < _BACKGROUND, background, token).astype(np.int32)


def _draw(
    random: np.random.Generator, patterns: _Patterns, classes: int, size: int, noise: float
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    chunks: list[npt.NDArray[Any]] = []
    labels = random.permutation(np.arange(size) % classes)
    for start in range(0, size, _CHUNK):
        own = labels[start : start + _CHUNK]
        other = (own + random.integers(1, classes, size=len(own))) % classes
        share = (1 - noise * random.random(len(own))).astype(np.float32)
        chunks.append(patterns.mix(own, other, share))
    return np.concatenate(chunks), labels


def _shape(kind: str, shape: Any) -> tuple[int, ...]:
    if shape is None:
        return _DEFAULT_SHAPES[kind]
    axes = len(_DEFAULT_SHAPES[kind])
    if (
        isinstance(shape, str)
        or not isinstance(shape, Sequence)
        or len(shape) != axes
        or not all(isinstance(side, int) and not isinstance(side, bool) and side >= 1 for side in shape)
    ):
        raise ConfigError("dataset.shape", shape, f"kind={kind} takes {_AXES[kind]}, integers of at least 1, or null")
    return tuple(shape)


def _at_least(key: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"dataset.{key}", value, f"give an integer of at least {least}")
