from __future__ import annotations

import re
from enum import Enum

import pytest
from omegaconf import OmegaConf

from mp_hydra.tracking.params import MAX_KEY, MAX_PARAM_VALUE, clean_key, flatten


class _Colour(Enum):
    red = 1


def test_flatten_joins_nested_keys_with_dots_and_keeps_the_order() -> None:
    config = {"b": {"y": 1, "x": {"deep": 2.5}}, "a": "text"}
    assert list(flatten(config).items()) == [("b.y", "1"), ("b.x.deep", "2.5"), ("a", "text")]


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "null"),
        (True, "true"),
        (False, "false"),
        ("", ""),
        ([], "[]"),
        ({}, "{}"),
        ([1, None, {"a": True}, (2, 3)], '[1, null, {"a": true}, [2, 3]]'),
        (_Colour.red, "red"),
        (float("inf"), "inf"),
    ],
)
def test_flatten_shows_each_type_as_yaml_or_json_would(value: object, shown: str) -> None:
    assert flatten({"key": value}) == {"key": shown}


def test_flatten_takes_omegaconf_containers_without_converting_them_first() -> None:
    config = OmegaConf.create({"model": {"layers": [{"units": 4}, {"units": 2}]}, "seed": 0})
    assert flatten(config) == {"model.layers": '[{"units": 4}, {"units": 2}]', "seed": "0"}


def test_flatten_gives_the_same_keys_for_configs_that_differ_in_values_alone() -> None:
    assert flatten({"a": {"b": None}, "c": [1]}).keys() == flatten({"a": {"b": 1}, "c": []}).keys()


def test_flatten_of_a_flat_result_changes_nothing() -> None:
    once = flatten({"a[0]": "x" * 7000, "b": {"c": None}})
    assert flatten(once) == once


def test_flatten_keeps_both_values_when_two_keys_become_the_same_one() -> None:
    flat = flatten({"a@b": 1, "a=b": 2})
    assert sorted(flat.values()) == ["1", "2"]
    assert flat == flatten({"a@b": 1, "a=b": 2})


def test_a_value_over_the_limit_is_cut_and_says_so() -> None:
    value = flatten({"key": "x" * (MAX_PARAM_VALUE + 1)})["key"]
    assert len(value) == MAX_PARAM_VALUE
    assert value.endswith("x ... [cut, 6001 characters]")
    assert flatten({"key": "x" * MAX_PARAM_VALUE})["key"] == "x" * MAX_PARAM_VALUE


AWKWARD_KEYS = [
    "a[0]",
    "a,b",
    "a=b",
    "+a",
    "~a",
    "@a",
    "a:b",
    "",
    ".",
    "..",
    "../a",
    "/a",
    "a/",
    "a//b",
    "a/./b",
    "x" * 300,
]


@pytest.mark.parametrize("key", AWKWARD_KEYS)
def test_clean_key_gives_a_key_that_mlflow_takes(key: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    cleaned = clean_key(key)
    _validate_metric_name(cleaned)
    assert 0 < len(cleaned) <= MAX_KEY
    assert clean_key(cleaned) == cleaned


def test_clean_key_leaves_good_keys_alone() -> None:
    for key in ("train/loss", "optimizer.learning_rate", "two words", "größe", ".hidden", "_target_"):
        assert clean_key(key) == key


def test_clean_key_tells_long_keys_with_the_same_start_apart() -> None:
    first, second = clean_key("x" * 300), clean_key("x" * 301)
    assert first != second
    assert re.fullmatch(r"x{241}_[0-9a-f]{8}", first)
