"""What a tensor was made of, where that is kept anyway: its user then need not keep the tensor itself for its backward pass.

Batch normalisation keeps its own input x, of which its result is (x - mean) * slope + offset; an activation that needs this
result in its backward pass computes it again at the cost of a multiplication. A convolution of a padded tensor pads it again:
the tensor without its margins is what the activation before has given, and keeps.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable

_NAME = "_mp_hydra_origin"


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


@dataclass(frozen=True)
class Padded:
    """A tensor with margins of zeros: `paddings` has those before and after, axis by axis."""

    x: Any
    paddings: tuple[tuple[int, int], ...]


Kind = TypeVar("Kind", Affine, Padded)


def remember(result: Any, origin: Affine | Padded) -> None:
    """Note on a tensor what it was made of; only where `origin.x` is kept anyway, as a rule."""
    setattr(result, _NAME, origin)


def origin_of(tensor: Any, kind: type[Kind]) -> Kind | None:
    """What a tensor was made of, if it is of this kind; None if nothing is known."""
    origin = getattr(tensor, _NAME, None)
    return origin if isinstance(origin, kind) else None


def computed_again(x: Any, mean: Any, slope: Any, offset: Any) -> Any:
    """The result of an `Affine`, in x's dtype; for use inside a backward kernel."""
    import tensorflow as tf

    return tf.cast((tf.cast(x, tf.float32) - mean) * slope + offset, x.dtype)


def pad_of(original: Callable[..., Any]) -> Callable[..., Any]:
    """`numpy.pad` of Keras' backend, which notes what it has padded with zeros."""
    signature = inspect.signature(original)

    def pad(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        result = original(*args, **kwargs)
        paddings = _paddings(given["pad_width"])
        if given["mode"] == "constant" and not given["constant_values"] and paddings is not None:
            remember(result, Padded(given["x"], paddings))
        return result

    return pad


def _paddings(width: Any) -> tuple[tuple[int, int], ...] | None:
    """Margins that are known as numbers, a pair for each axis; None for others."""
    if not isinstance(width, (tuple, list)) or not all(isinstance(pair, (tuple, list)) for pair in width):
        return None
    known = all(len(pair) == 2 and all(isinstance(n, int) for n in pair) for pair in width)  # noqa: PLR2004 - a pair
    return tuple((pair[0], pair[1]) for pair in width) if known else None
