"""The limits: when a training is ended, when the floor is reported, and which variable a skipped step is blamed on."""

from __future__ import annotations

import logging
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from mp_hydra.errors import NoUpdatesError
from mp_hydra.loss_scale import Rule
from mp_hydra.precision import scoped_policy
from mp_hydra.scaled_optimizer import ScaledOptimizer
from mp_hydra.scaling_limits import ScalingLimits, advice


def model_of(mode: str = "dynamic", scale: float = 8.0, **settings: Any) -> Any:
    rule = {key: settings.pop(key) for key in ("minimum", "growth_interval") if key in settings}
    model = keras.Sequential([keras.Input((2,)), layers.Dense(1)])
    model.compile("sgd", "mse", auto_scale_loss=False, **{"jit_compile": False, **settings})
    model.optimizer = ScaledOptimizer(keras.optimizers.SGD(1e-3), mode=mode, scale=scale, rule=Rule(**rule))
    model.optimizer.build(model.trainable_variables)
    return model


def rows(steps: str) -> Any:
    """One batch of one row for each letter: g(ood) or b(ad)."""
    x = np.array([[1.0, np.inf if letter == "b" else 1.0] for letter in steps], "float32")
    return tf.data.Dataset.from_tensor_slices((x, np.ones((len(steps), 1), "float32"))).batch(1)


def fit(model: Any, steps: str, *, limit: int | None = None, every: int = 100, epochs: int = 1) -> ScalingLimits:
    limits = ScalingLimits(model.optimizer, max_skipped_in_a_row=limit, every=every)
    model.fit(rows(steps), epochs=epochs, callbacks=[limits], verbose=0, shuffle=False)
    return limits


def said(caplog: pytest.LogCaptureFixture, level: int = logging.INFO) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "mp_hydra.scaling_limits" and r.levelno == level]


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return said(caplog, logging.WARNING)


# --- the end of a training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["dynamic", "fixed", "none"])
def test_more_than_n_skipped_in_a_row_end_the_training_in_every_mode(mode: str) -> None:
    model = model_of(mode, 1.0 if mode == "none" else 8.0)
    with pytest.raises(
        NoUpdatesError, match=r"steps in a row were skipped, more than loss_scale.max_skipped_in_a_row=3"
    ):
        fit(model, "g" + "b" * 20, limit=3)
    # A limit of 3 is looked at every 3 batches: seen at the latest after 3 more.
    assert 3 < model.optimizer.counters().skipped_in_a_row <= 6


def test_message_gives_the_scale_and_what_to_try() -> None:
    with pytest.raises(NoUpdatesError) as raised:
        fit(model_of("fixed", 1024.0), "bbbbbbbb", limit=2)
    assert "at a loss scale of 1024: their gradients were inf or nan" in str(raised.value)
    assert str(raised.value).endswith(advice("fixed"))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("steps", ["bbbg" * 4, "g" + "bbb" * 1 + "gg"])
def test_exactly_n_in_a_row_are_allowed_however_often(steps: str) -> None:
    model = model_of()
    fit(model, steps, limit=3)
    assert model.optimizer.counters().skipped == steps.count("b")


def test_row_that_reaches_over_two_epochs_counts_as_one() -> None:
    with pytest.raises(NoUpdatesError, match="in a row"):
        fit(model_of(), "bbbgbbb", limit=3, epochs=2)


def test_limit_of_zero_ends_the_training_at_the_first_skipped_step_it_sees() -> None:
    model = model_of()
    with pytest.raises(NoUpdatesError, match=r"^1 steps in a row"):
        fit(model, "ggbggg", limit=0)
    assert model.optimizer.counters().steps == 3


@pytest.mark.parametrize("mode", ["dynamic", "fixed"])
def test_epoch_without_an_update_ends_the_training_where_there_is_no_other_limit(mode: str) -> None:
    model = model_of(mode)
    with pytest.raises(
        NoUpdatesError, match=r"^none of the 4 steps of epoch 1 was applied: every gradient was inf or nan"
    ):
        fit(model, "bbbb", limit=None, epochs=2)


def test_epoch_without_an_update_is_named_by_its_number() -> None:
    model = model_of()
    fit(model, "g")
    limits = ScalingLimits(model.optimizer, max_skipped_in_a_row=None)
    with pytest.raises(NoUpdatesError, match="none of the 2 steps of epoch 8 was applied"):
        model.fit(rows("bb"), epochs=8, initial_epoch=7, callbacks=[limits], verbose=0, shuffle=False)


def test_one_applied_step_in_an_epoch_is_enough() -> None:
    fit(model_of(), "bbbbbbbg", limit=None, epochs=2)


def test_step_that_never_asks_the_optimizer_is_not_called_a_failure() -> None:
    class Idle(keras.Model):
        def train_step(self, data: Any) -> Any:
            return {"loss": ops.zeros(())}

    inputs = keras.Input((2,))
    model = Idle(inputs, layers.Dense(1)(inputs))
    model.compile("sgd", "mse", auto_scale_loss=False, jit_compile=False)
    model.optimizer = ScaledOptimizer(keras.optimizers.SGD(), mode="dynamic", scale=8.0)
    model.optimizer.build(model.trainable_variables)
    fit(model, "gg")


def test_fixed_scale_that_always_overflows_float16_ends_as_no_updates_and_leaves_the_weights() -> None:
    # Kernels of ones make 4 of two ones; the scaled gradient before the head is 2 * (4 - 1) * 2^20, in float16 inf.
    with scoped_policy("mixed_float16", tf32=False):
        ones: dict[str, Any] = {"kernel_initializer": "ones"}
        model = keras.Sequential([keras.Input((2,)), layers.Dense(2, **ones), layers.Dense(1, dtype="float32", **ones)])
        model.compile("sgd", "mse", auto_scale_loss=False, jit_compile=False)
    model.optimizer = ScaledOptimizer(keras.optimizers.SGD(), mode="fixed", scale=2.0**20)
    model.optimizer.build(model.trainable_variables)
    before = model.get_weights()
    with pytest.raises(
        NoUpdatesError, match=r"more than loss_scale.max_skipped_in_a_row=2, at a loss scale of 1.04858e.06"
    ):
        fit(model, "gggggggg", limit=2)
    for one, other in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("every", [1, 100])
def test_steps_per_execution_does_not_hide_a_row(every: int) -> None:
    model = model_of(steps_per_execution=4)
    with pytest.raises(NoUpdatesError, match="in a row were skipped"):
        fit(model, "g" + "b" * 23, limit=6, every=every)
    assert 6 < model.optimizer.counters().skipped_in_a_row <= 6 + 2 * 4


# --- the floor -------------------------------------------------------------------------------------------------------


def test_first_visit_to_the_floor_is_one_warning_with_the_share(caplog: pytest.LogCaptureFixture) -> None:
    # 8, 4, 2 at the floor: two of four steps so far when it is seen at the end of the first epoch.
    model = model_of(minimum=2.0)
    fit(model, "gbgb", epochs=3)
    (line,) = warnings(caplog)
    assert line.startswith("the loss scale has come down to its floor, ")
    assert "2 of 4 steps so far (50.0 %) were skipped" in line
    assert line.endswith(advice("dynamic"))


def test_advice_is_not_to_do_what_is_done_already() -> None:
    assert "loss_scale=dynamic" in advice("fixed")
    assert "loss_scale=dynamic" not in advice("dynamic") + advice("none")


def test_floor_in_the_warning_is_the_floor_and_not_the_scale_of_the_last_step(caplog: pytest.LogCaptureFixture) -> None:
    fit(model_of(minimum=4.0), "ggb")
    (line,) = warnings(caplog)
    assert "down to its floor, 4: 1 of 3" in line


@pytest.mark.parametrize(("mode", "scale"), [("dynamic", 1.0), ("fixed", 8.0), ("fixed", 1.0), ("none", 1.0)])
def test_scale_that_began_at_the_floor_or_never_moves_is_no_warning(
    mode: str, scale: float, caplog: pytest.LogCaptureFixture
) -> None:
    fit(model_of(mode, scale), "gbgb")
    assert warnings(caplog) == []


# --- whose gradient it was -------------------------------------------------------------------------------------------


@ops.custom_gradient
def _blowing_up(x: Any) -> Any:
    def grad(*args: Any, upstream: Any = None) -> Any:
        (upstream,) = args or (upstream,)
        return upstream * np.inf

    return x, grad


class BlowsUp(layers.Layer):
    """Passes its input on, and an infinite gradient back."""

    def call(self, x: Any) -> Any:
        return _blowing_up(x)


def four_layers(*, blown_up_before: str | None) -> Any:
    stack: list[Any] = [keras.Input((2,))]
    for name in "abcd":
        stack += [BlowsUp()] if name == blown_up_before else []
        stack.append(layers.Dense(2, name=name, kernel_initializer="ones"))
    model = keras.Sequential(stack)
    model.compile("sgd", "mse", auto_scale_loss=False, jit_compile=False)
    model.optimizer = ScaledOptimizer(keras.optimizers.SGD(1e-3), mode="fixed", scale=8.0)
    model.optimizer.build(model.trainable_variables)
    return model


def blamed(model: Any, x: Any) -> str | None:
    limits = ScalingLimits(model.optimizer, max_skipped_in_a_row=None)
    with pytest.raises(NoUpdatesError):
        model.fit(np.asarray(x, "float32"), np.zeros((1, 2)), callbacks=[limits], verbose=0, shuffle=False)
    return limits.nonfinite


@pytest.mark.parametrize(("before", "layer"), [("b", "a"), ("c", "b"), ("d", "c")])
def test_overflow_on_the_way_back_is_blamed_on_the_layer_nearest_to_the_loss(
    before: str, layer: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "mp_hydra")
    model = four_layers(blown_up_before=before)
    named = blamed(model, [[1.0, 1.0]])
    assert named is not None
    assert named.split("/")[-2:] == [layer, "bias"]
    flagged = [path.split("/")[-2] for path in model.optimizer.nonfinite_variables()]
    assert flagged == [name for name in "abcd" if name < before for _ in range(2)]
    (line,) = said(caplog)
    assert line.startswith(f"step 1 was skipped: the gradient of {named} was not finite")


def test_forward_pass_that_is_not_finite_names_every_variable() -> None:
    model = four_layers(blown_up_before=None)
    blamed(model, [[1.0, np.nan]])
    assert len(model.optimizer.nonfinite_variables()) == 8


def test_nothing_is_blamed_where_every_step_was_applied() -> None:
    assert fit(model_of(), "gggg").nonfinite is None


def test_log_names_at_most_three_skipped_steps(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "mp_hydra")
    model = model_of()
    fit(model, "bg" * 8, every=1)
    lines = said(caplog)
    assert [line.split()[1] for line in lines] == ["1", "3", "5"]


# --- going on --------------------------------------------------------------------------------------------------------


def test_counts_of_an_earlier_training_neither_end_a_later_one_nor_are_blamed_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "mp_hydra")
    model = model_of("fixed")
    fit(model, "gg" + "b" * 5)  # ends five skipped steps into a row
    caplog.clear()
    limits = fit(model, "gggg", limit=6)
    assert limits.nonfinite is None
    assert said(caplog) == []
    assert model.optimizer.counters().steps == 11


def test_share_in_the_warning_counts_the_steps_before_a_resume(caplog: pytest.LogCaptureFixture) -> None:
    model = model_of(minimum=4.0)
    model.fit(rows("ggg"), verbose=0, shuffle=False)
    fit(model, "b" + "g" * 4)
    (line,) = warnings(caplog)
    assert "1 of 8 steps so far (12.5 %)" in line
