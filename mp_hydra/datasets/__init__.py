"""Data sets: what `conf/dataset` names, checked alike whoever made them, as batches for a Keras model.

`load` calls the builder that the config names in `_target_` (one of ours or a user's own function), checks what it
returns, cuts a validation set off the training set and gives back a `Data`.
"""

from __future__ import annotations

from mp_hydra.datasets.data import Data, Split
from mp_hydra.datasets.image_files import image_directory
from mp_hydra.datasets.loading import load
from mp_hydra.datasets.npz_file import npz
from mp_hydra.datasets.stock import cifar10, cifar100, digits, fashion_mnist, mnist
from mp_hydra.datasets.synthetic_data import synthetic

__all__ = [
    "Data",
    "Split",
    "cifar10",
    "cifar100",
    "digits",
    "fashion_mnist",
    "image_directory",
    "load",
    "mnist",
    "npz",
    "synthetic",
]
