"""What a tensor was made of, where that is kept anyway: an activation after batch normalisation then need not keep its input.

Batch normalisation keeps its own input x, of which its result is (x - mean) * slope + offset; an activation that needs this
result in its backward pass can compute it again at the cost of a multiplication.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

_NAME = "_mp_hydra_affine"


@dataclass(frozen=True)
class Affine:
    """(x - mean) * slope + offset, all but x float32 and of a shape that broadcasts with it."""

    x: Any
    mean: Any
    slope: Any
    offset: Any

    @property
    def tensors(self) -> tuple[Any, ...]:
        """All of it, in the order of the formula."""
        return self.x, self.mean, self.slope, self.offset


def remember(result: Any, origin: Affine) -> None:
    """Note on a tensor what it was made of; only where the backward pass keeps `origin.x` anyway."""
    setattr(result, _NAME, origin)


def origin_of(tensor: Any) -> Affine | None:
    """What a tensor was made of; None if nothing is known."""
    return getattr(tensor, _NAME, None)


def computed_again(x: Any, mean: Any, slope: Any, offset: Any) -> Any:
    """The result, in x's dtype; for use inside a backward kernel."""
    import tensorflow as tf

    return tf.cast((tf.cast(x, tf.float32) - mean) * slope + offset, x.dtype)
