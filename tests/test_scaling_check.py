"""One step at two scales tells whether a model's own `train_step` scales its loss, and leaves no trace."""

from __future__ import annotations

import random
import sys
from typing import TYPE_CHECKING, Any

import absl.logging
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops

from mp_hydra.errors import ModelError
from mp_hydra.precision import scoped_policy
from mp_hydra.scaled_optimizer import ScaledOptimizer
from mp_hydra.scaling_check import overrides_train_step, require_scaled_loss, scale_exponent
from tests.e2e.app_driver import BRIEF, small_images, tracked, type_command

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 2)).astype("float32")
POLICIES = ("float32", "mixed_float16")


class Correct(keras.Model):
    """A step as the docs show it."""

    def gradients(self, loss: Callable[[], Any]) -> Any:
        with tf.GradientTape() as tape:
            value = self.optimizer.scale_loss(loss())
        return tape.gradient(value, self.trainable_variables)

    def train_step(self, data: Any) -> Any:
        x, y = data
        gradients = self.gradients(lambda: self.compute_loss(x, y, self(x, training=True)))
        self.optimizer.apply_gradients(zip(gradients, self.trainable_variables, strict=True))
        return {"seen": ops.shape(x)[0]}


class Keyword(Correct):
    """Hands the variables to `apply` by name."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        gradients = self.gradients(lambda: self.compute_loss(x, y, self(x, training=True)))
        self.optimizer.apply(gradients, trainable_variables=self.trainable_variables)
        return {"seen": ops.shape(x)[0]}


class Forgetful(Correct):
    """Takes the gradient of the bare loss."""

    def gradients(self, loss: Callable[[], Any]) -> Any:
        with tf.GradientTape() as tape:
            value = loss()
        return tape.gradient(value, self.trainable_variables)


class Discarding(Correct):
    """Scales, and throws the result away."""

    def gradients(self, loss: Callable[[], Any]) -> Any:
        with tf.GradientTape() as tape:
            value = loss()
            self.optimizer.scale_loss(value)
        return tape.gradient(value, self.trainable_variables)


class Twice(Correct):
    """Scales a scaled loss."""

    def gradients(self, loss: Callable[[], Any]) -> Any:
        return super().gradients(lambda: self.optimizer.scale_loss(loss()))


class ByHand(Correct):
    """Scales, and divides the gradients by the scale before they are applied."""

    def gradients(self, loss: Callable[[], Any]) -> Any:
        return [g / ops.convert_to_tensor(self.optimizer.dynamic_scale) for g in super().gradients(loss)]


class OnlyByHand(Forgetful):
    """Divides gradients that were never scaled."""

    def gradients(self, loss: Callable[[], Any]) -> Any:
        return [g / ops.convert_to_tensor(self.optimizer.dynamic_scale) for g in super().gradients(loss)]


class Calling(keras.Model):
    """Adds something to the stock step."""

    def train_step(self, data: Any) -> Any:
        return {**super().train_step(data), "mine": 1.0}


class SecondForgotten(Correct):
    """Applies gradients twice, the second time those of a bare loss."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        super().train_step(data)
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply(tape.gradient(loss, self.trainable_variables))
        return {"loss": loss}


class Idle(keras.Model):
    """Applies nothing."""

    def train_step(self, data: Any) -> Any:
        return {"loss": ops.zeros(())}


EXPONENTS = {
    Correct: 1,
    Keyword: 1,
    Calling: 1,
    Forgetful: 0,
    Discarding: 0,
    ByHand: 0,
    Twice: 2,
    OnlyByHand: -1,
    Idle: None,
}
NOT_SCALED = ("calls `self.optimizer.scale_loss`, but its gradients are not scaled", "take the gradient of the loss")
CURES = {
    Forgetful: ("does not scale the loss", "write `loss = self.optimizer.scale_loss(loss)`"),
    Discarding: NOT_SCALED,
    ByHand: (*NOT_SCALED, "leave unscaling to `self.optimizer.apply_gradients`"),
    Twice: ("scales the loss twice", "keep one"),
    OnlyByHand: ("unscales the gradients itself", "leave that to `self.optimizer.apply_gradients`"),
}


def built(kind: type[keras.Model], policy: str = "float32", *, scale: float = 2.0**15, weight: float = 1.0) -> Any:
    """A functional model of the class, with a random layer and moving statistics; the loss is multiplied by `weight`."""
    keras.utils.set_random_seed(0)
    with scoped_policy(policy, tf32=False):
        inputs = keras.Input((4,))
        x = layers.Dense(8)(inputs)
        x = layers.Dropout(0.5)(layers.BatchNormalization()(x))
        model = kind(inputs, layers.Dense(2, dtype="float32")(x))
        model.compile(keras.optimizers.Adam(0.01), "mse", loss_weights=weight, metrics=["mae"], jit_compile=False)
    model.optimizer = ScaledOptimizer(keras.optimizers.Adam(0.01), mode="dynamic", scale=scale)
    model._symbolic_build(data_batch=(X, Y))
    return model


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", EXPONENTS)
def test_exponent_is_found_with_dropout_and_batch_normalization(kind: type[keras.Model], policy: str) -> None:
    model = built(kind, policy)
    assert scale_exponent(model, model.optimizer, (X, Y)) == EXPONENTS[kind]


@pytest.mark.parametrize("kind", CURES)
def test_error_names_the_class_and_the_cure(kind: type[keras.Model]) -> None:
    model = built(kind)
    with pytest.raises(ModelError, match=f"^{kind.__name__}.train_step ") as raised:
        require_scaled_loss(model, model.optimizer, (X, Y))
    for part in CURES[kind]:
        assert part in str(raised.value)


@pytest.mark.parametrize("kind", [Correct, Keyword, Calling])
def test_correct_step_is_accepted_in_silence(kind: type[keras.Model], caplog: pytest.LogCaptureFixture) -> None:
    model = built(kind)
    require_scaled_loss(model, model.optimizer, (X, Y))
    assert caplog.messages == []


def test_second_application_of_gradients_is_looked_at_too() -> None:
    model = built(SecondForgotten)
    assert scale_exponent(model, model.optimizer, (X, Y)) == 0


def test_scale_that_overflows_a_correct_step_is_lowered_until_it_tells() -> None:
    model = built(Correct, "mixed_float16", scale=2.0**32)
    assert scale_exponent(model, model.optimizer, (X, Y)) == 1


def test_gradients_that_float16_loses_at_a_small_scale_do_not_accuse_a_correct_step() -> None:
    # A loss of about 1e-6 has gradients of the first layer near 2^-25, which are zero or rounded at a scale of 1.
    model = built(Correct, "mixed_float16", weight=1e-6)
    assert scale_exponent(model, model.optimizer, (X, Y)) == 1


@pytest.mark.parametrize(
    ("kind", "x"),
    [
        pytest.param(Idle, X, id="nothing applied"),
        pytest.param(Correct, np.full_like(X, np.nan), id="not finite"),
        pytest.param(Correct, X, id="zero"),
    ],
)
def test_inconclusive_step_is_none_and_a_warning_that_says_so(
    kind: type[keras.Model], x: Any, caplog: pytest.LogCaptureFixture, request: pytest.FixtureRequest
) -> None:
    model = built(kind, weight=0.0 if "zero" in request.node.name else 1.0)
    assert scale_exponent(model, model.optimizer, (x, Y)) is None
    require_scaled_loss(model, model.optimizer, (x, Y))
    (line,) = caplog.messages
    assert line.startswith(f"{kind.__name__}.train_step could not be checked for loss scaling: no gradient was applied")


def test_only_a_class_with_a_step_of_its_own_is_looked_at() -> None:
    assert overrides_train_step(built(Calling))
    assert not overrides_train_step(keras.Sequential([layers.Dense(1)]))


# --- no trace --------------------------------------------------------------------------------------------------------


class Drawing(Correct):
    """Uses every source of random numbers that a step may use."""

    def train_step(self, data: Any) -> Any:
        x, y = data
        x = x + keras.random.normal((8, 4)) * 0.1  # Keras' global generator
        x = x * (1.0 + 0.1 * random.random()) + 0.1 * np.random.normal()  # noqa: NPY002
        return super().train_step((x, y))


def all_values(model: Any) -> list[Any]:
    return [np.array(v.value.numpy()) for v in [*model.variables, *model.optimizer.variables, *model.metrics_variables]]


@pytest.mark.parametrize("policy", POLICIES)
def test_everything_is_put_back_and_training_goes_on_as_if_nothing_had_been_tried(policy: str) -> None:
    results = []
    for probed in (False, True):
        model = built(Drawing, policy)
        model.run_eagerly = True
        model.fit(X, Y, epochs=1, verbose=0, shuffle=False)
        before = all_values(model)
        if probed:
            assert scale_exponent(model, model.optimizer, (X, Y)) == 1
            for one, other in zip(before, all_values(model), strict=True):
                np.testing.assert_array_equal(one, other)
        model.fit(X, Y, epochs=2, verbose=0, shuffle=False)
        results.append([*all_values(model), random.random(), np.random.random()])  # noqa: NPY002
    for one, other in zip(*results, strict=True):
        np.testing.assert_array_equal(one, other)


def test_keras_global_seed_is_drawn_where_it_would_have_been_drawn_without_the_check() -> None:
    """Keras makes its global generator when it is first needed, from Python's random numbers."""
    drawn = []
    for probed in (False, True):
        model = built(Drawing)
        if probed:
            scale_exponent(model, model.optimizer, (X, Y))
        drawn.append((keras.random.normal((3,)).numpy().tolist(), random.random()))
    assert drawn[0] == drawn[1]


def test_step_that_raises_leaves_the_optimizer_and_the_variables_as_they_were() -> None:
    class Raising(Correct):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            raise ZeroDivisionError

    model = built(Raising)
    before = all_values(model)
    with pytest.raises(ZeroDivisionError):
        scale_exponent(model, model.optimizer, (X, Y))
    assert not {"apply", "scale_loss"} & set(model.optimizer.__dict__)
    for one, other in zip(before, all_values(model), strict=True):
        np.testing.assert_array_equal(one, other)


# --- in a run --------------------------------------------------------------------------------------------------------

FORGETFUL = """
import keras
import tensorflow as tf
from keras import layers


class Forgetful(keras.Model):
    def train_step(self, data):
        x, y = data
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self(x, training=True))
        self.optimizer.apply_gradients(zip(tape.gradient(loss, self.trainable_variables), self.trainable_variables))
        return {"loss": loss}


def model(input_shape, num_classes):
    inputs = keras.Input(input_shape)
    return Forgetful(inputs, layers.Dense(num_classes, dtype="float32")(layers.Dense(4)(layers.Flatten()(inputs))))
"""


@pytest.fixture(scope="module")
def stderr_kept() -> None:
    """Hydra closes all log handlers, and that of absl its stream, which would be pytest's if this is the first run here."""
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__


def test_run_with_a_forgetful_step_ends_before_training_in_one_line(
    tmp_path: Path, stderr_kept: None, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "forgetful_step.py").write_text(FORGETFUL, encoding="utf-8")
    small_images(tmp_path / "images.npz")
    words = ("model=custom", "model._target_=forgetful_step.model", "dataset=npz", "dataset.path=images.npz")
    assert type_command(*BRIEF, *words, "precision=mixed_float16", cwd=tmp_path) == 1
    said = capfd.readouterr()
    (line,) = [line for line in said.err.splitlines() if line.startswith("mp_hydra: ")]
    assert line.startswith("mp_hydra: Forgetful.train_step does not scale the loss: write ")
    assert "Traceback" not in said.err + said.out
    run = tracked()[-1]
    assert (run.status, run.outcome) == ("FAILED", "error")
    assert "loss_scale/applied_steps" not in run.metrics


def test_forgetful_step_may_train_where_nothing_is_scaled(tmp_path: Path) -> None:
    (tmp_path / "forgetful_step.py").write_text(FORGETFUL, encoding="utf-8")
    small_images(tmp_path / "images.npz")
    words = ("model=custom", "model._target_=forgetful_step.model", "dataset=npz", "dataset.path=images.npz")
    assert type_command(*BRIEF, *words, "precision=mixed_bfloat16", cwd=tmp_path) == 0
