"""Memory sources: TensorFlow's allocator on the CPU, /proc, and bytes of variables counted by hand."""

from __future__ import annotations

import gc
import sys
import time
from typing import TYPE_CHECKING

import numpy as np
import pytest

from mp_hydra.telemetry.memory import AllocatorMemory, HostMemory, variables_bytes

if TYPE_CHECKING:
    from pathlib import Path

MIB = 2**20

needs_linux = pytest.mark.skipif(sys.platform != "linux", reason="/proc is Linux's")


def known(number: int | None) -> int:
    assert number is not None
    return number


@pytest.fixture(scope="module")
def allocator() -> AllocatorMemory:
    memory = AllocatorMemory("CPU:0")
    if memory.unavailable is not None:
        pytest.skip(memory.unavailable)
    return memory


def wait_until_quiet(allocator):
    """Let pipelines of earlier tests in this process end: nothing is measured while others allocate."""
    gc.collect()
    held = [allocator.current_bytes()]
    while len(held) < 5 or (len(set(held[-5:])) > 1 and len(held) < 100):
        time.sleep(0.02)
        held.append(allocator.current_bytes())


def test_current_and_peak_rise_by_a_tensor_and_the_peak_stays_when_it_is_freed(allocator):
    import tensorflow as tf

    wait_until_quiet(allocator)
    with tf.device("CPU:0"):
        # A hole that earlier tests left is handed out whole if it is less than twice as large: these take such holes.
        plugs = [tf.fill([2, MIB], 1.0) for _ in range(16)]
        allocator.reset()
        before = allocator.current_bytes()
        tensor = tf.fill([2, MIB], 1.0)  # 8 MiB of float32
    held = allocator.current_bytes()
    assert 8 * MIB <= held - before < 9 * MIB
    assert allocator.peak_bytes() >= held
    del tensor
    assert allocator.current_bytes() < held - 7 * MIB
    assert allocator.peak_bytes() >= held
    del plugs


def test_reset_lowers_the_peak_to_what_is_in_use(allocator):
    import tensorflow as tf

    with tf.device("CPU:0"):
        tensor = tf.fill([2, MIB], 1.0)
    high = allocator.peak_bytes()
    del tensor
    allocator.reset()
    assert allocator.peak_bytes() <= high - 7 * MIB
    assert allocator.peak_bytes() == allocator.current_bytes()


def test_allocator_says_where_its_numbers_come_from(allocator):
    assert allocator.source == "TensorFlow allocator, CPU:0"


def test_a_device_that_tensorflow_lacks_has_a_reason_and_no_numbers() -> None:
    memory = AllocatorMemory("GPU:99")
    assert memory.unavailable is not None
    assert "TensorFlow has no allocator statistics for GPU:99" in memory.unavailable
    memory.reset()
    assert (memory.current_bytes(), memory.peak_bytes()) == (None, None)


@pytest.mark.parametrize(
    ("device", "setting", "expected"),
    [
        ("CPU:0", None, "keeps no statistics (it does with TF_CPU_ALLOCATOR_USE_BFC=1)"),
        ("GPU:0", "cuda_malloc_async", "cuda_malloc_async keeps no statistics (unset TF_GPU_ALLOCATOR)"),
        ("GPU:0", None, "TensorFlow has no allocator statistics for GPU:0"),
    ],
)
@pytest.mark.parametrize("refuses", ["get_memory_info", "reset_memory_stats"])
def test_an_allocator_without_statistics_is_unavailable_with_what_to_change(
    monkeypatch, refuses, device, setting, expected
):
    import tensorflow as tf

    def refuse(device):
        raise ValueError(f"Allocator stats not available for device '{device}'")

    monkeypatch.setattr(tf.config.experimental, "get_memory_info", lambda device: {"current": 1, "peak": 2})
    monkeypatch.setattr(tf.config.experimental, "reset_memory_stats", lambda device: None)
    monkeypatch.setattr(tf.config.experimental, refuses, refuse)
    monkeypatch.delenv("TF_GPU_ALLOCATOR", raising=False)
    if setting is not None:
        monkeypatch.setenv("TF_GPU_ALLOCATOR", setting)
    memory = AllocatorMemory(device)
    assert expected in str(memory.unavailable)
    assert (memory.current_bytes(), memory.peak_bytes()) == (None, None)


@needs_linux
def test_host_peak_rises_with_memory_that_is_touched_and_falls_at_the_next_reset() -> None:
    host = HostMemory()
    if host.unavailable is not None:
        pytest.skip(host.unavailable)
    before = known(host.peak_bytes())
    block = np.ones(64 * MIB, np.uint8)
    high = known(host.peak_bytes())
    assert high - before >= 60 * MIB
    del block
    assert known(host.peak_bytes()) >= high - 2 * MIB  # the kernel's counters are exact to some pages for each CPU
    host.reset()
    assert known(host.peak_bytes()) <= high - 60 * MIB


def proc(root: Path, status: str = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n") -> Path:
    (root / "status").write_text(status)
    (root / "clear_refs").write_text("")
    return root


def test_host_peak_is_vmhwm_in_bytes_and_reset_writes_5_to_clear_refs(tmp_path):
    host = HostMemory(proc(tmp_path))
    assert (tmp_path / "clear_refs").read_text() == "5"
    assert host.peak_bytes() == 2048 * 1024
    assert host.unavailable is None
    assert host.source == "VmHWM of /proc/self/status"


def test_a_peak_that_cannot_be_reset_is_not_the_trainings(tmp_path):
    root = proc(tmp_path)
    (root / "clear_refs").unlink()
    host = HostMemory(root)
    assert host.peak_bytes() is None
    assert "cannot be reset before training" in str(host.unavailable)
    assert "clear_refs" in str(host.unavailable)
    assert not (root / "clear_refs").exists()


def test_a_reset_refused_later_ends_the_numbers(tmp_path):
    host = HostMemory(proc(tmp_path))
    (tmp_path / "clear_refs").unlink()
    (tmp_path / "clear_refs").mkdir()
    host.reset()
    assert host.peak_bytes() is None
    assert "Is a directory" in str(host.unavailable)


def test_a_kernel_that_tells_no_peak_is_unavailable(tmp_path):
    host = HostMemory(proc(tmp_path, status="Name:\tpython\nVmRSS:\t1024 kB\n"))
    assert host.peak_bytes() is None
    assert str(host.unavailable).endswith("has no VmHWM")


def test_without_proc_the_host_peak_is_unavailable(tmp_path):
    host = HostMemory(tmp_path / "nowhere")
    assert host.peak_bytes() is None
    assert host.unavailable is not None


def test_variables_bytes_of_a_small_model_with_its_optimizer() -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(5, dtype="mixed_bfloat16")])
    # Kernel 3x5 and bias 5, kept in float32 by a mixed policy.
    assert variables_bytes(model.variables) == 20 * 4
    optimizer = keras.optimizers.SGD(momentum=0.9)
    optimizer.build(model.trainable_variables)
    # One momentum per weight, an iteration count, and a float32 learning rate.
    iterations = np.dtype(keras.backend.standardize_dtype(optimizer.iterations.dtype)).itemsize
    assert variables_bytes([*model.variables, *optimizer.variables]) == 20 * 4 + 20 * 4 + iterations + 4


def test_variables_bytes_counts_by_dtype_and_each_variable_once() -> None:
    import keras

    half = keras.Variable(np.zeros((4, 2)), dtype="bfloat16")
    whole = keras.Variable(np.zeros(3), dtype="int64", trainable=False)
    scalar = keras.Variable(1.0, dtype="float32")
    assert variables_bytes([half, whole, half, scalar]) == 4 * 2 * 2 + 3 * 8 + 4
    assert variables_bytes(iter([])) == 0


def test_what_was_in_use_before_a_run_is_left_out_of_its_figures() -> None:
    import tensorflow as tf

    allocator = AllocatorMemory("CPU:0")
    wait_until_quiet(allocator)
    earlier = tf.fill([512, 1024], 1.0)  # 2 MiB that an earlier run in the process left behind
    before = allocator.current_bytes()
    assert before is not None
    memory = AllocatorMemory("CPU:0", leftover=before)
    own = tf.fill([256, 1024], 1.0)  # 1 MiB, and nothing on the way to it
    current, peak = memory.current_bytes(), memory.peak_bytes()
    assert current is not None
    assert peak is not None
    # The allocator may hand out a free chunk that is somewhat larger; with the earlier 2 MiB it would be 3 and more.
    assert MIB <= current < 2 * MIB
    assert current <= peak < 3 * MIB
    del earlier, own
