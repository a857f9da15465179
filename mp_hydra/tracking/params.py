"""Nested configs, names and values in the form that every MLflow store accepts.

>>> flatten({"optimizer": {"learning_rate": 0.001, "clip": None}, "layers": [32, 64]})
{'optimizer.learning_rate': '0.001', 'optimizer.clip': 'null', 'layers': '[32, 64]'}
"""

from __future__ import annotations

import hashlib
import json
import posixpath
import re
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_KEY = 250
MAX_PARAM_VALUE = 6000
MAX_TAG_VALUE = 5000  # the limit of MLflow's older stores; newer ones take 8000


def flatten(config: Mapping[Any, Any]) -> dict[str, str]:
    """Turn a nested mapping into MLflow parameters.

    Keys are joined with dots. Sequences become JSON, None becomes ``null``, booleans ``true`` and ``false``, an empty
    mapping ``{}``. Flattening a flat result again changes nothing.

    Args:
        config: a nested mapping; OmegaConf containers will do.

    Returns:
        Parameters in the order of ``config``. Keys hold only characters that MLflow allows; where two keys would
        become the same one, the later one carries a digest of its original spelling. Values over 6000 characters
        are cut and say so.
    """
    flat: dict[str, str] = {}
    for key, value in _leaves(config, ""):
        name = clean_key(key)
        if name in flat:
            name = f"{name[: MAX_KEY - 9]}_{_digest(key)}"
        flat[name] = cut(text(value), MAX_PARAM_VALUE)
    return flat


def clean_key(key: str) -> str:
    """The nearest key that MLflow takes for a parameter, a metric or a tag.

    >>> clean_key("gpu[0]@node=a,b")
    'gpu_0__node_a_b'
    >>> clean_key("../escape")
    '_._escape'
    """
    name = re.sub(r"[^/\w.\- ]", "_", key)
    if posixpath.normpath(name) != name or name.startswith(("..", "/")) or name == ".":
        # MLflow may use names as file paths and refuses those that would resolve to another path.
        name = name.replace("/", "_")
        name = f"_{name[1:]}" if name.startswith(".") or not name else name
    if len(name) > MAX_KEY:
        name = f"{name[: MAX_KEY - 9]}_{_digest(key)}"
    return name


def cut(value: str, limit: int) -> str:
    """Shorten a value to ``limit`` characters, with a mark that tells its true length.

    >>> cut("a" * 100, 50)
    'aaaaaaaaaaaaaaaaaaaaaaaa ... [cut, 100 characters]'
    """
    if len(value) <= limit:
        return value
    mark = f" ... [cut, {len(value)} characters]"
    return value[: limit - len(mark)] + mark


def text(value: object) -> str:
    """One config value as text, as YAML and JSON would show it.

    >>> [text(value) for value in (None, True, 1e-3, "a", [1, None], {})]
    ['null', 'true', '0.001', 'a', '[1, null]', '{}']
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, Enum):
        return value.name
    if isinstance(value, (Mapping, Sequence)) and not isinstance(value, (str, bytes)):
        return json.dumps(value, default=_plain, ensure_ascii=False)
    return str(value)


def _leaves(config: Mapping[Any, Any], prefix: str) -> Iterator[tuple[str, object]]:
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{name}.")
        else:
            yield name, value


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): item for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return list(value)
    return text(value)


def _digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()[:8]
