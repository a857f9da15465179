"""Tells Hydra callbacks of jobs, as far as they want to know."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Observers:
    """The callbacks of a Hydra app, any of which may have methods of `mp_hydra.isolation.jobs.Observer`."""

    def __init__(self, callbacks: Iterable[Any]) -> None:
        self._callbacks = list(callbacks)

    def tell(self, method: str, *arguments: Any) -> list[Any]:
        """Call the method of each one that has it; an exception from it is a warning, as with Hydra's own hooks.

        Returns:
            What they returned.
        """
        answers = []
        for callback in self._callbacks:
            function: Callable[..., Any] | None = getattr(callback, method, None)
            if function is None:
                continue
            try:
                answers.append(function(*arguments))
            except Exception as error:  # noqa: BLE001 - any callback may do anything
                warnings.warn(
                    f"Callback {type(callback).__name__}.{method} raised {type(error).__name__}: {error}", stacklevel=2
                )
        return answers
