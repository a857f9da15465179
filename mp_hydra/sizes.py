"""Amounts of memory as people write them."""

from __future__ import annotations

import re

from mp_hydra.errors import ConfigError

_UNITS = {
    "": 1, "b": 1,
    **{f"{letter}{rest}": 1000**power for power, letter in enumerate("kmgt", 1) for rest in ("", "b")},
    **{f"{letter}i{rest}": 1024**power for power, letter in enumerate("kmgt", 1) for rest in ("", "b")},
}  # fmt: skip


def parse(text: str, key: str = "memory.limit") -> int:
    """Bytes from a number with a unit: decimal ones (kB, MB, GB, TB) or binary ones (KiB, MiB, GiB, TiB), in any case.

    Args:
        text: such as "12GB" or "800 MiB"; a bare number is bytes.
        key: what is named in the error.

    Raises:
        ConfigError: for anything else, and for less than one byte.

    >>> parse("12GB"), parse("1.5 GiB"), parse("512")
    (12000000000, 1610612736, 512)
    """
    size = _bytes(text)
    if size is None or size < 1:
        raise ConfigError(key, text, "give a number with a unit, such as 12GB, 800MiB or 1.5GiB")
    return size


def parse_or_zero(text: str, key: str) -> int:
    """As `parse`, with nothing at all as a possible amount.

    >>> parse_or_zero("0", "--allowance")
    0
    """
    return 0 if _bytes(text) == 0 else parse(text, key)


def _bytes(text: str) -> int | None:
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]*)\s*", str(text).lower(), re.ASCII)
    if not found or found[2] not in _UNITS:
        return None
    return int(float(found[1]) * _UNITS[found[2]]) if "." in found[1] else int(found[1]) * _UNITS[found[2]]


def shown(size: float) -> str:
    """Bytes for people, in binary units and three digits.

    >>> shown(0), shown(768), shown(53.75 * 2**20), shown(12e9), shown(1023.9 * 2**20)
    ('0 B', '768 B', '53.8 MiB', '11.2 GiB', '1.00 GiB')
    """
    for unit, scale in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        value = size / scale
        if value >= 0.9995:  # noqa: PLR2004 - rounds to 1.00
            return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f} {unit}"  # noqa: PLR2004 - three digits
    return f"{size:.0f} B"
