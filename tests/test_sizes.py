"""Amounts of memory as people write them."""

from __future__ import annotations

import pytest

from mp_hydra.errors import ConfigError
from mp_hydra.sizes import parse, parse_or_zero, shown


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("12GB", 12 * 10**9),
        ("12 gb", 12 * 10**9),
        ("12G", 12 * 10**9),
        ("800MiB", 800 * 2**20),
        ("1.5GiB", 3 * 2**29),
        ("1.5 gib", 3 * 2**29),
        ("64kB", 64_000),
        ("2TiB", 2**41),
        ("512", 512),
        ("512B", 512),
    ],
)
def test_decimal_and_binary_units_in_any_case(text: str, size: int) -> None:
    assert parse(text) == size


@pytest.mark.parametrize(
    "text", ["", "GB", "12XB", "-1GB", "1,5GB", "12 GB RAM", "0", "0GB", "1e9", "nan", "0.1B", "\u0661GB"]
)
def test_anything_else_is_one_line_that_names_key_value_and_cure(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "--memory")
    assert caught.value.key == "--memory"
    assert str(caught.value).endswith("give a number with a unit, such as 12GB, 800MiB or 1.5GiB")


def test_only_an_allowance_may_be_nothing() -> None:
    assert parse_or_zero("0", "--allowance") == parse_or_zero("0GB", "--allowance") == 0
    assert parse_or_zero("1GB", "--allowance") == 10**9
    with pytest.raises(ConfigError, match="--allowance=some"):
        parse_or_zero("some", "--allowance")


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (99.96 * 2**20, "100 MiB"), (9.996 * 2**20, "10.0 MiB"),
     (999.6 * 2**20, "1000 MiB"), (1023.9 * 2**20, "1.00 GiB"), (139 * 2**30, "139 GiB")],
)  # fmt: skip
def test_three_digits_in_binary_units(size: float, text: str) -> None:
    assert shown(size) == text
