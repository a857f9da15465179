"""Timing of operations: the interleaving and its figures by hand, and one short real measurement."""

from __future__ import annotations

from typing import Any

import pytest

from mp_hydra.doctor import measure as measuring
from mp_hydra.doctor.measure import interleaved


class Clock:
    """A clock that calls advance."""

    def __init__(self) -> None:
        self.now = 0.0
        self.order: list[str] = []

    def call(self, name: str, seconds: float) -> object:
        def advance() -> None:
            self.order.append(name)
            self.now += seconds

        return advance


def test_calls_take_turns_there_and_back_and_each_sample_lasts_about_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 3.0)
    clock = Clock()
    calls = {"slow": clock.call("slow", 4.0), "fast": clock.call("fast", 1.0)}
    times = interleaved(calls, lambda: None, seconds=0.0, clock=lambda: clock.now)  # type: ignore[arg-type]
    assert times == {"slow": [4.0] * 5, "fast": [1.0] * 5}  # no time at all, and so the least number of rounds
    there, back = ["slow", "fast", "fast", "fast"], ["fast", "fast", "fast", "slow"]
    assert clock.order == ["slow", "fast", *there, *back, *there, *back, *there]


def test_rounds_go_on_until_the_time_is_over_or_there_are_enough() -> None:
    clock = Clock()
    times = interleaved({"a": clock.call("a", 1.0)}, lambda: None, seconds=20.0, clock=lambda: clock.now)  # type: ignore[dict-item]
    assert len(times["a"]) == 20
    clock = Clock()
    times = interleaved({"a": clock.call("a", 1.0)}, lambda: None, seconds=1e6, clock=lambda: clock.now)  # type: ignore[dict-item]
    assert len(times["a"]) == 50
    assert interleaved({}, lambda: None, seconds=1.0) == {}


def test_a_ratio_is_the_median_of_the_rounds_own_and_is_not_moved_by_load_that_hits_both() -> None:
    reference = [2.0, 2.0, 20.0, 2.0, 2.0]
    times = [1.0, 1.0, 10.0, 1.0, 4.0]
    found = measuring._figures("matmul", "bfloat16", "2x2", times, reference)
    assert found.ratio == 2.0
    assert found.quartiles == (2.0, 2.0)
    assert found.milliseconds == 1000.0
    assert found.samples == 5


def test_every_operation_is_timed_in_every_dtype_and_the_tf32_switch_is_put_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import tensorflow as tf

    small = {"matmul": (16, 16), "convolution": (1, 4, 4, 8), "BatchNorm": (2, 4, 4, 8), "softmax": (4, 8)}
    monkeypatch.setattr(measuring, "_SIZES", {"CPU": small})
    monkeypatch.setattr(measuring, "SAMPLE_SECONDS", 1e-5)
    before = tf.config.experimental.tensor_float_32_execution_enabled()
    found = measuring.measure("CPU:0", tf32=True, seconds=0.0)
    assert tf.config.experimental.tensor_float_32_execution_enabled() is before
    timed = [(one.operation, one.dtype) for one in found]
    products = [
        (name, dtype) for name in ("matmul", "convolution") for dtype in ("float32", "tf32", "bfloat16", "float16")
    ]
    others = [(name, dtype) for name in ("BatchNorm", "softmax") for dtype in ("float32", "bfloat16", "float16")]
    assert timed == [*products, *others]
    assert [one.problem for one in found] == [None] * len(found)
    assert all(one.ratio == 1.0 for one in found if one.dtype == "float32")
    assert all(one.milliseconds is not None and one.milliseconds > 0 for one in found)


@pytest.mark.parametrize("dtype", ["float32", "tf32", "bfloat16"])
@pytest.mark.parametrize(
    ("operation", "weights"), [("matmul", 1), ("convolution", 1), ("BatchNorm", 2), ("softmax", 0)]
)
def test_a_call_makes_the_output_of_a_layer_under_the_policy_and_its_gradients(
    monkeypatch: pytest.MonkeyPatch, operation: str, weights: int, dtype: str
) -> None:
    size = (2, 4, 4, 8) if operation in ("convolution", "BatchNorm") else (8, 8)
    monkeypatch.setattr(measuring, "_SIZES", {"CPU": {operation: size}})
    call: Any = measuring._prepared(operation, dtype, "CPU:0")
    output, (of_input, *of_weights) = call()
    compute = "bfloat16" if dtype == "bfloat16" else "float32"
    assert (output.dtype, tuple(output.shape)) == (compute, size)
    assert (of_input.dtype, tuple(of_input.shape)) == (compute, size)
    assert [gradient.dtype.name for gradient in of_weights] == ["float32"] * weights


def test_the_gradient_that_comes_back_to_a_layer_is_no_constant_that_could_be_folded(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With ones, BatchNorm's gradient for its input is 0 up to rounding, and the one for its offset a count."""
    monkeypatch.setattr(measuring, "_SIZES", {"CPU": {"BatchNorm": (2, 4, 4, 8)}})
    call: Any = measuring._prepared("BatchNorm", "float32", "CPU:0")
    _, (of_input, _, of_offset) = call()
    assert float(abs(of_input.numpy()).max()) > 0.1
    assert len(set(of_offset.numpy().tolist())) == 8


def test_an_operation_that_fails_is_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    def prepared(_operation: str, dtype: str, _device: str) -> object:
        if dtype == "float16":
            raise NotImplementedError("no kernel\nsecond line")
        return lambda: None

    monkeypatch.setattr(measuring, "_prepared", prepared)
    found = {(one.operation, one.dtype): one for one in measuring.measure("CPU:0", tf32=False, seconds=0.0)}
    assert found["matmul", "float16"].problem == "NotImplementedError: no kernel"
    assert found["matmul", "float16"].ratio is None
    assert found["matmul", "bfloat16"].ratio is not None
