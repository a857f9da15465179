"""Delta debugging: from many things that together cure a failure to a few of which none can be spared.

A. Zeller, R. Hildebrandt, Simplifying and isolating failure-inducing input, IEEE Transactions on Software Engineering 28
(2002) 183-200: the algorithm ddmin.
"""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

T = TypeVar("T")


def minimised(things: Sequence[T], cures: Callable[[Sequence[T]], bool]) -> list[T]:
    """A subset that cures and would not without any one of its elements.

    Each question is asked once. Where more than one such subset exists, which one is found depends on the order.

    Args:
        things: all of them together cure; neighbours are tried together.
        cures: whether a subset, in the order of `things`, cures.

    >>> minimised(range(8), lambda kept: {2, 5} <= set(kept))
    [2, 5]
    """
    asked: dict[tuple[int, ...], bool] = {}

    def enough(kept: Sequence[int]) -> bool:
        key = tuple(kept)
        if key not in asked:
            asked[key] = cures([things[index] for index in key])
        return asked[key]

    kept = list(range(len(things)))
    parts = 2
    while len(kept) > 1:
        chunks = _split(kept, parts)
        smaller = next((chunk for chunk in chunks if enough(chunk)), None)
        if smaller is not None:
            kept, parts = smaller, 2
            continue
        without = ([index for index in kept if index not in set(chunk)] for chunk in chunks)
        rest = next((others for others in without if enough(others)), None) if parts > 2 else None  # noqa: PLR2004 - else the chunks
        if rest is not None:
            kept, parts = rest, max(parts - 1, 2)
        elif parts < len(kept):
            parts = min(2 * parts, len(kept))
        else:
            break
    return [things[index] for index in kept]


def _split(items: Sequence[int], parts: int) -> list[list[int]]:
    """Contiguous pieces of about equal length, none of them empty."""
    bounds = [len(items) * number // parts for number in range(parts + 1)]
    return [list(items[low:high]) for low, high in pairwise(bounds)]
