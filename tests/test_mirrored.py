"""Two replicas of a MirroredStrategy, in one process that runs every case: a bad row on either makes both skip.

By hand: 6 batches, of which 1 and 4 (counted from 0) hold a nan, so 4 of 6 steps are applied and step 5 is the last skipped one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

APP = Path(__file__).parent / "apps" / "mirrored" / "mirrored_app.py"
COUNTS = [6, 4, 0, 5]  # steps, applied, skipped in a row, last skipped
REPLICAS = (0, 1)

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(APP)],
        cwd=tmp_path_factory.mktemp("mirrored"),
        env={**os.environ, "PYTHONPATH": str(APP.parents[3])},
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["replicas"] == 2
    return found


def assert_close(found: list[list[Any]], expected: list[list[Any]]) -> None:
    """Every replica's value of every variable is finite and that of the single device, to 1e-5."""
    for replicas, (reference, *_) in zip(found, expected, strict=True):
        for value in replicas:
            assert np.isfinite(value).all()
            np.testing.assert_allclose(value, reference, rtol=0, atol=1e-5)


@pytest.mark.parametrize("replica", REPLICAS)
def test_stock_keras_looks_at_the_first_replica_only_so_that_a_nan_on_the_other_one_ends_in_the_weights(
    answers: dict[str, Any], replica: int
) -> None:
    weights_finite = answers[f"stock {replica}"]
    assert weights_finite == (replica == 0)


@pytest.mark.parametrize("way", ["graph", "eager"])
@pytest.mark.parametrize("replica", REPLICAS)
def test_nan_on_either_replica_makes_both_skip_and_the_rest_is_training_on_one_device(
    answers: dict[str, Any], replica: int, way: str
) -> None:
    mirrored, single = answers[f"{way} {replica}"], answers["single"]
    assert single["counts"] == [COUNTS]
    assert mirrored["counts"] == [COUNTS, COUNTS]
    assert all(len(replicas) == 2 for replicas in mirrored["weights"])
    assert_close(mirrored["weights"], single["weights"])
    assert_close(mirrored["slots"], single["slots"])
    assert mirrored["norm_sum"] == pytest.approx(single["norm_sum"], rel=1e-5)
    assert mirrored["norm_max"] == pytest.approx(single["norm_max"], rel=1e-5)


@pytest.mark.parametrize("way", ["graph", "eager"])
@pytest.mark.parametrize("replica", REPLICAS)
def test_good_half_of_a_bad_batch_is_left_out_of_the_means_too(answers: dict[str, Any], replica: int, way: str) -> None:
    mirrored = answers[f"{way} {replica}"]
    assert mirrored["batches"] == [6, 2]
    assert mirrored["history"] == pytest.approx(answers["single"]["history"], rel=1e-5)
    assert np.isfinite(list(mirrored["history"].values())).all()


@pytest.mark.parametrize("replica", REPLICAS)
def test_variables_whose_gradient_was_not_finite_are_named_whichever_replica_it_was_on(
    answers: dict[str, Any], replica: int
) -> None:
    # A nan in the input is in the gradients of all four: two kernels, two biases.
    named = answers[f"graph {replica}"]["nonfinite"]
    assert [path.rpartition("/")[2] for path in named] == ["kernel", "bias"] * 2


@pytest.mark.parametrize("replica", REPLICAS)
def test_moving_statistics_and_means_are_those_of_a_training_without_the_bad_batches(
    answers: dict[str, Any], replica: int
) -> None:
    bad, clean = answers[f"normalized {replica}"], answers["normalized without"]
    assert clean["counts"] == [[4, 4, 0, 0]] * 2
    assert bad["counts"] == [COUNTS] * 2
    # Each replica has moving statistics of its own, so they are compared one by one.
    for mine, theirs in zip(bad["weights"], clean["weights"], strict=True):
        assert np.isfinite(mine).all()
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-6)
    assert bad["history"] == pytest.approx(clean["history"], rel=1e-6)


@pytest.mark.parametrize("replica", REPLICAS)
def test_dynamic_scale_backs_off_and_grows_alike_on_both_replicas_and_on_one_device(
    answers: dict[str, Any], replica: int
) -> None:
    # Growth after 2 finite steps: good, bad (512), good, good (1024), bad (512), good.
    assert answers["single dynamic"]["scale"] == [512.0]
    mirrored = answers[f"dynamic {replica}"]
    assert mirrored["scale"] == [512.0, 512.0]
    assert mirrored["counts"] == [COUNTS, COUNTS]
    assert_close(mirrored["weights"], answers["single dynamic"]["weights"])


@pytest.mark.parametrize("name", ["steps_per_execution", "jit_compile", "gradient_accumulation_steps"])
def test_what_keras_cannot_do_on_several_replicas_is_refused_by_name(answers: dict[str, Any], name: str) -> None:
    refusal = answers["refused"][name]
    assert refusal.startswith(f"ValueError: {name}")
    assert "does not work under a strategy of several replicas" in refusal
