"""Dry runs of small models in this process: what they tell of themselves, and when they look at what is kept."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from mp_hydra.app import composed
from mp_hydra.forecast.dry_run import answered
from mp_hydra.forecast.ladder import Goal

SIDE = 1024
HIDDEN = 256


def build(input_shape: Any, outputs: int, *, workspace: bool) -> Any:
    """16 pixels or a multiple to `HIDDEN` units twice; with a product of two matrices of 4 MiB that no batch makes larger."""
    import keras
    import tensorflow as tf

    class Workspace(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            square = tf.random.stateless_uniform((SIDE, SIDE), (0, 0)) @ tf.random.stateless_uniform(
                (SIDE, SIDE), (0, 1)
            )
            return x + 0 * tf.cast(tf.stop_gradient(tf.reduce_mean(square)), x.dtype)

    inputs = keras.Input(input_shape)
    x = keras.layers.Flatten()(inputs)
    x = keras.layers.Dense(HIDDEN, name="one")(x)
    x = keras.layers.Activation("tanh", name="bend")(x)
    if workspace:
        x = Workspace()(x)
    x = keras.layers.Dense(outputs, name="head")(x)
    return keras.Model(inputs, keras.layers.Activation("linear", dtype="float32")(x))


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes the dry runs of a model in this process; what they say on the way, merged, and the points."""
    module = ModuleType("forecast_models")
    module.build = build  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def run(*overrides: str, exactly: tuple[int, ...]) -> tuple[dict[str, Any], list[int]]:
        words = ("model=custom", "model._target_=forecast_models.build", "dataset=digits", "tracking=off", *overrides)
        facts: dict[str, Any] = {}
        sizes: list[int] = []

        def say(message: dict[str, Any]) -> None:
            if "point" in message:
                sizes.append(message["point"]["batch_size"])
            else:
                facts.update(message)

        end = answered((composed(list(words)), str(Path.cwd()), Goal(exactly=exactly)), say)
        assert end == {"stopped": None, "exhausted": False}
        return facts, sizes

    return run


@pytest.mark.parametrize(
    ("overrides", "size", "cast", "fixed"),
    [
        ((), 4, 0, 0),
        # The pixels are cast, and so are the weights of the head, which the gradient of its input wants.
        (("precision=mixed_bfloat16",), 2, 64 * 2, 10 * HIDDEN * 2),
    ],
)
def test_peaks_of_a_workspace_make_it_look_at_what_is_kept(
    told: Any, overrides: tuple[str, ...], size: int, cast: int, fixed: int
) -> None:
    """The input of `one`, the output of `bend` and that of the workspace are read again: 64 pixels and `HIDDEN` units twice."""
    facts, sizes = told("+model.workspace=true", "memory=stock", *overrides, exactly=(8, 16, 32))
    assert sizes == [8, 16, 32]
    # The pixels are the batch, which counts as input.
    assert facts["kept"] == {"sample_bytes": (HIDDEN + HIDDEN) * size + cast, "fixed_bytes": fixed}


def test_fewer_dry_runs_than_a_line_needs_do_not(told: Any) -> None:
    facts, sizes = told("+model.workspace=true", exactly=(8, 16))
    assert sizes == [8, 16]
    assert "kept" not in facts


@pytest.mark.parametrize("overrides", [("compile.jit_compile=true",), ("memory=recompute", "memory.recompute=[one]")])
def test_where_a_trace_does_not_tell_nothing_is_said_to_be_kept(told: Any, overrides: tuple[str, ...]) -> None:
    facts, _ = told("+model.workspace=true", *overrides, exactly=(8, 16, 32))
    assert facts["kept"] == {"sample_bytes": 0, "fixed_bytes": 0}
