"""Values of nested plain containers by dotted keys, such as optimizer.learning_rate."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

ABSENT = object()


def leaves(node: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value with its dotted key; the elements of lists count as `key.0`, `key.1`, ....

    >>> list(leaves({"a": {"b": 1}, "c": [2, {"d": 3}]}))
    [('a.b', 1), ('c.0', 2), ('c.1.d', 3)]
    """
    if isinstance(node, Mapping):
        items: Iterable[tuple[Any, Any]] = node.items()
    elif isinstance(node, (list, tuple)):
        items = enumerate(node)
    else:
        yield prefix, node
        return
    for key, value in items:
        yield from leaves(value, f"{prefix}.{key}" if prefix else str(key))


def find(config: Mapping[str, Any], key: str) -> Any:
    """The value at a dotted key; `ABSENT` where there is none.

    >>> find({"a": {"b": 1}}, "a.b"), find({"a": 1}, "a.b") is ABSENT
    (1, True)
    """
    node: Any = config
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return ABSENT
        node = node[part]
    return node
