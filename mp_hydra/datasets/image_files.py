"""Images in class folders, read from disk batch by batch."""

from __future__ import annotations

import hashlib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mp_hydra.datasets.data import Samples, Shuffle, in_order
from mp_hydra.datasets.messages import reason
from mp_hydra.datasets.paths import absolute
from mp_hydra.errors import ConfigError, DataError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    import numpy.typing as npt
    import tensorflow as tf

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".gif"})
_TEST_SEED = 20250117  # a constant: the test set is the same in every run


@dataclass(frozen=True, eq=False)
class FileSamples(Samples):
    """Image files with their labels; only the paths are held in memory."""

    paths: npt.NDArray[np.str_]
    labels: npt.NDArray[np.int64]
    shape: tuple[int | None, ...]
    lowest: float
    highest: float
    digest: str

    @property
    def dtype(self) -> np.dtype[Any]:  # type: ignore[override]
        """Decoded images are uint8."""
        return np.dtype(np.uint8)

    def batches(
        self,
        index: npt.NDArray[np.int64],
        targets: npt.NDArray[Any],
        prepare: Callable[[Any], Any],
        *,
        batch_size: int,
        shuffle: Shuffle | None,
    ) -> tf.data.Dataset:
        """See `Samples.batches`; files are decoded in parallel and delivered in order."""
        import tensorflow as tf

        channels = self.shape[-1]
        with tf.device("CPU:0"):
            paths, y = tf.constant(self.paths.tolist()), tf.constant(targets)

        def read(chosen: Any) -> tuple[Any, Any]:
            image = tf.ensure_shape(_decode(tf.io.read_file(paths[chosen]), channels), self.shape)
            return prepare(image), y[chosen]

        images = in_order(index, shuffle).map(read, num_parallel_calls=tf.data.AUTOTUNE, deterministic=True)
        return images.batch(batch_size)


def image_directory(path: str | None = None, *, channels: int = 3, test_fraction: float = 0.2) -> dict[str, Any]:
    """Images below `path` in one folder a class, the class names in alphabetical order.

    Either `path/train/CLASS/*`, `path/test/CLASS/*` and perhaps `path/validation/CLASS/*`, or `path/CLASS/*`, of which
    a fixed `test_fraction` of each class is the test set, whatever the seed of the run. Every file is read and decoded
    once before training, to check it and to compute the digest. Names that begin with a dot are passed over.

    Args:
        path: the directory; a relative one counts from where the program was started.
        channels: 1 (grey) or 3 (RGB); files are converted.
        test_fraction: share of each class, in (0, 1), for the second layout.

    Raises:
        ConfigError: an argument out of range.
        DataError: a missing or empty folder, a file that is no image.
    """
    if channels not in (1, 3) or isinstance(channels, bool):
        raise ConfigError("dataset.channels", channels, "give 1 (grey) or 3 (RGB)")
    if isinstance(test_fraction, bool) or not isinstance(test_fraction, (int, float)) or not 0 < test_fraction < 1:
        raise ConfigError("dataset.test_fraction", test_fraction, "give a number between 0 and 1")
    root = absolute(path, "give the path of a directory with one folder of images a class")
    if not root.is_dir():
        raise DataError(f"dataset image_directory: {root} is no directory")
    if (root / "train").is_dir():
        names, files = _separate(root)
    else:
        names, files = _divided(root, test_fraction)
    parts = {
        part: _samples([path for path, _ in found], [label for _, label in found], channels)
        for part, found in files.items()
    }
    return {**parts, "classes": len(names), "source": str(root)}


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
    except OSError as error:
        raise DataError(f"dataset image_directory: {folder} cannot be read: {error.strerror}") from error


def _class_names(folder: Path) -> list[str]:
    names = [entry.name for entry in _entries(folder) if entry.is_dir()]
    if not names:
        raise DataError(f"dataset image_directory: {folder} has no class folders; put the images into {folder}/CLASS/")
    return names


def _images(folder: Path) -> list[Path]:
    entries = _entries(folder)
    for entry in entries:
        if entry.suffix.lower() not in SUFFIXES or not entry.is_file():
            raise DataError(
                f"dataset image_directory: {entry} is no PNG, JPEG, BMP or GIF file; class folders hold nothing else"
            )
    if not entries:
        raise DataError(f"dataset image_directory: {folder} is empty; give every class at least one image")
    return entries


def _separate(root: Path) -> tuple[list[str], dict[str, list[tuple[Path, int]]]]:
    if not (root / "test").is_dir():
        raise DataError(f"dataset image_directory: {root} has train/ but no test/; add test/CLASS/ folders")
    names = _class_names(root / "train")
    files = {}
    for part in ("train", "validation", "test"):
        if not (root / part).is_dir():
            continue
        found = _class_names(root / part)
        if unknown := sorted(set(found) - set(names)):
            raise DataError(
                f"dataset image_directory: {root / part / unknown[0]} is a class that {root / 'train'} does not have"
            )
        files[part] = [(file, names.index(name)) for name in found for file in _images(root / part / name)]
    return names, files


def _divided(root: Path, test_fraction: float) -> tuple[list[str], dict[str, list[tuple[Path, int]]]]:
    names = _class_names(root)
    random = np.random.default_rng(_TEST_SEED)
    files: dict[str, list[tuple[Path, int]]] = {"train": [], "test": []}
    for label, name in enumerate(names):
        images = _images(root / name)
        count = max(1, round(test_fraction * len(images)))
        if count >= len(images):
            raise DataError(
                f"dataset image_directory: {root / name} has {len(images)} images, of which "
                f"test_fraction={test_fraction} leaves none for training; add images or lower dataset.test_fraction"
            )
        held_out = set(random.permutation(len(images))[:count].tolist())
        for position, image in enumerate(images):
            files["test" if position in held_out else "train"].append((image, label))
    return names, files


def _decode(contents: Any, channels: int | None) -> Any:
    import tensorflow as tf

    return tf.io.decode_image(contents, channels=channels, expand_animations=False)


@dataclass(frozen=True)
class _Inspection:
    height: int
    width: int
    lowest: int
    highest: int
    digest: bytes


def _inspect(path: Path, channels: int) -> _Inspection:
    import tensorflow as tf

    try:
        contents = path.read_bytes()
        with tf.device("CPU:0"):
            image = _decode(contents, channels).numpy()
    except (OSError, tf.errors.OpError) as error:
        why = error.strerror if isinstance(error, OSError) else reason(error)
        raise DataError(f"dataset image_directory: {path} cannot be read as an image: {why}") from error
    height, width = image.shape[:2]
    return _Inspection(height, width, int(image.min()), int(image.max()), hashlib.sha256(contents).digest())


def _samples(paths: Sequence[Path], labels: Sequence[int], channels: int) -> FileSamples:
    """Read every file once, with the decoder that training uses, so that no file can fail there."""
    with ThreadPoolExecutor() as pool:
        seen = list(pool.map(lambda path: _inspect(path, channels), paths))
    digest = hashlib.sha256(f"{channels} ".encode())
    for label, file in zip(labels, seen, strict=True):
        digest.update(f"{label} ".encode() + file.digest)
    heights, widths = {file.height for file in seen}, {file.width for file in seen}
    return FileSamples(
        paths=np.array([str(path) for path in paths]),
        labels=np.array(labels, dtype=np.int64),
        shape=(heights.pop() if len(heights) == 1 else None, widths.pop() if len(widths) == 1 else None, channels),
        lowest=min(file.lowest for file in seen),
        highest=max(file.highest for file in seen),
        digest=digest.hexdigest(),
    )
