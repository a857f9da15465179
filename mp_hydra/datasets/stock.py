"""Well-known data sets that come with scikit-learn or that Keras downloads."""

from __future__ import annotations

from typing import Any

import numpy as np

from mp_hydra.errors import DataError

_TEST_SEED = 0  # a constant: the test set is the same in every run


def digits() -> dict[str, Any]:
    """1797 handwritten digits of 8x8x1 pixels from scikit-learn, as uint8 in 0..16; needs no network.

    The test set is a fixed stratified fifth (360 images).
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    images = bunch.images.astype(np.uint8)[..., np.newaxis]
    x_train, x_test, y_train, y_test = train_test_split(
        images, bunch.target, test_size=0.2, stratify=bunch.target, random_state=_TEST_SEED
    )
    return {
        "x_train": x_train,
        "y_train": y_train,
        "x_test": x_test,
        "y_test": y_test,
        "classes": 10,
        "source": "sklearn.datasets.load_digits",
    }


def mnist() -> dict[str, Any]:
    """70000 handwritten digits, 28x28x1, 10 classes."""
    return _download("mnist", classes=10)


def fashion_mnist() -> dict[str, Any]:
    """70000 pieces of clothing, 28x28x1, 10 classes."""
    return _download("fashion_mnist", classes=10)


def cifar10() -> dict[str, Any]:
    """60000 photographs, 32x32x3, 10 classes."""
    return _download("cifar10", classes=10)


def cifar100() -> dict[str, Any]:
    """60000 photographs, 32x32x3, 100 classes."""
    return _download("cifar100", classes=100)


def _download(name: str, *, classes: int) -> dict[str, Any]:
    import keras

    try:
        (x_train, y_train), (x_test, y_test) = getattr(keras.datasets, name).load_data()
    except Exception as error:  # Keras raises a bare Exception for a failed download
        raise DataError(
            f"dataset {name}: keras.datasets.{name} could not be downloaded ({error}); with the arrays "
            "x_train, y_train, x_test, y_test in a file, use dataset=npz dataset.path=FILE.npz"
        ) from error
    return {
        "x_train": x_train,
        "y_train": y_train,
        "x_test": x_test,
        "y_test": y_test,
        "classes": classes,
        "source": f"keras.datasets.{name}",
    }
