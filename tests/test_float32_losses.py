"""Additional losses under a mixed policy: what they add up to, and that the model stays the user's own."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest
from keras import layers, ops

from mp_hydra.finite_steps import finite_steps
from mp_hydra.float32_losses import float32_losses
from mp_hydra.precision import scoped_policy

if TYPE_CHECKING:
    from pathlib import Path

MIXED = ("mixed_float16", "mixed_bfloat16")
WAYS: dict[str, dict[str, Any]] = {
    "graph": {},
    "eager": {"run_eagerly": True},
    "jit": {"jit_compile": True},
    "spe": {"steps_per_execution": 2},
}
KINDS = ("functional", "subclassed", "nested")
X, Y = np.full((4, 3), 2.0, "float32"), np.zeros((4, 1), "float32")
# Inputs of 2 through a kernel of ones and 3 inputs: each of 8 outputs is 6, so a sample's squares add up to 8 * 36 = 288; the
# regularizer takes half of it. The prediction is 8 * 6 / 48 = 1, its squared error 1.
ACTIVITY, ERROR = 144.0, 1.0


def constant(value: float) -> Any:
    return keras.initializers.Constant(value)


def body(factor: float = 0.5, **settings: Any) -> Any:
    settings = {"use_bias": False, "kernel_initializer": constant(1.0), **settings}
    return layers.Dense(8, activity_regularizer=keras.regularizers.L2(factor), name="body", **settings)


def head() -> Any:
    return layers.Dense(1, use_bias=False, kernel_initializer=constant(1 / 48), dtype="float32", name="head")


class Subclassed(keras.Model):
    """A model whose layers stand in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = body(), head()

    def call(self, x: Any) -> Any:
        return self.head(self.body(x))


class Added(layers.Layer):
    """Adds its mean input as a loss, in the dtype that it computes in."""

    def call(self, x: Any) -> Any:
        self.add_loss(ops.mean(x))
        return x


def built(kind: str, policy: str = "mixed_float16", **settings: Any) -> Any:
    with scoped_policy(policy, tf32=False):
        if kind == "functional":
            model = keras.Sequential([keras.Input((3,)), body(), head()])
        elif kind == "nested":
            x = keras.Input((3,))
            model = keras.Model(x, head()(keras.Sequential([keras.Input((3,)), body()], name="inner")(x)))
        elif kind == "add_loss":
            model = keras.Sequential([keras.Input((3,)), body(0.0), Added(), head()])
        else:
            model = Subclassed()
            model(X)
        model.compile(keras.optimizers.SGD(0.0), "mse", **{"jit_compile": False, "auto_scale_loss": False, **settings})
    return model


def regularizers(model: Any) -> list[Any]:
    return [r for layer in model._flatten_layers() if (r := layer.activity_regularizer) is not None]


def assert_untouched(model: Any) -> None:
    assert not {"train_step", "test_step", "_aggregate_additional_loss"} & set(model.__dict__)
    assert all(isinstance(r, keras.regularizers.L2) for r in regularizers(model))


# --- the sum ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", MIXED)
def test_stock_keras_raises_type_error_for_an_activity_regularizer_under_a_mixed_policy(policy: str) -> None:
    with pytest.raises(TypeError):
        built("functional", policy).fit(X, Y, batch_size=2, verbose=0)


@pytest.mark.parametrize("policy", MIXED)
@pytest.mark.parametrize("way", WAYS)
def test_fit_and_evaluate_give_the_sum_worked_out_by_hand_in_every_way_to_run(way: str, policy: str) -> None:
    model = built("functional", policy, **WAYS[way])
    with float32_losses(model):
        trained = model.fit(X, Y, batch_size=2, verbose=0).history["loss"][0]
        assert trained == pytest.approx(ACTIVITY + ERROR, rel=1e-3)
        assert model.evaluate(X, Y, batch_size=2, verbose=0) == pytest.approx(ACTIVITY + ERROR, rel=1e-3)
    assert_untouched(model)


@pytest.mark.parametrize("kind", KINDS)
def test_layers_are_reached_wherever_they_stand(kind: str) -> None:
    model = built(kind, run_eagerly=True)
    with float32_losses(model):
        assert model.evaluate(X, Y, verbose=0) == pytest.approx(ACTIVITY + ERROR, rel=1e-3)
        assert model.train_on_batch(X, Y) == pytest.approx(ACTIVITY + ERROR, rel=1e-3)
    assert_untouched(model)


def test_squares_that_float16_cannot_hold_are_summed_in_float32() -> None:
    # Each output is 60, a sample's 8 squares are 28800, and a batch of 4 adds up to 115200, which float16 turns into inf.
    model = built("functional")
    with float32_losses(model):
        assert model.evaluate(X * 10, Y, verbose=0) == pytest.approx(0.5 * 28800 + 100, rel=1e-3)


@pytest.mark.parametrize("policy", MIXED)
def test_add_loss_of_a_layer_counts_once(policy: str) -> None:
    model = built("add_loss", policy)
    with float32_losses(model):
        assert model.fit(X, Y, verbose=0).history["loss"][0] == pytest.approx(6.0 + ERROR, rel=1e-2)


def test_float32_model_gives_what_stock_keras_gives_to_the_last_bit() -> None:
    stock, ours = built("functional", "float32"), built("functional", "float32")
    expected = stock.fit(X, Y, verbose=0).history
    with float32_losses(ours):
        assert ours.fit(X, Y, verbose=0).history == expected


# --- the model stays the user's --------------------------------------------------------------------------------------


def test_overrides_are_gone_after_an_exception_in_the_block() -> None:
    model = built("functional")
    with pytest.raises(ZeroDivisionError), float32_losses(model):
        _ = 1 / 0
    assert_untouched(model)


def test_regularizers_are_back_after_an_exception_in_a_step() -> None:
    model = built("functional", run_eagerly=True)
    with float32_losses(model), pytest.raises(ValueError, match="shape"):
        model.train_on_batch(np.ones((2, 5), "float32"), Y[:2])
    assert_untouched(model)


def test_steps_traced_before_and_within_are_not_used_afterwards() -> None:
    model = built("functional")
    with float32_losses(model):
        model.fit(X, Y, verbose=0)
    with pytest.raises(TypeError):  # stock Keras again
        model.fit(X, Y, verbose=0)


def test_own_train_step_of_the_instance_comes_back() -> None:
    model = built("functional", "float32")

    def mine(data: Any) -> dict[str, Any]:
        return {"loss": ops.zeros(())}

    model.__dict__["train_step"] = mine
    with float32_losses(model):
        assert model.train_step is not mine
    assert model.train_step is mine


@pytest.mark.parametrize("outer", ["float32_losses", "finite_steps"])
def test_blocks_nest_with_finite_steps_either_way_round(outer: str) -> None:
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    model = built("functional")
    model.optimizer = ScaledOptimizer(model.optimizer, mode="fixed", scale=4.0)
    model.optimizer.build(model.trainable_variables)
    bad = np.concatenate([X, np.full((1, 3), np.inf, "float32"), X])
    blocks = [lambda: float32_losses(model), lambda: finite_steps(model, model.optimizer)]
    first, second = blocks if outer == "float32_losses" else blocks[::-1]
    with first() as one, second() as two:
        batches = one or two
        assert batches is not None
        loss = model.fit(bad, np.zeros((9, 1)), batch_size=1, verbose=0, shuffle=False).history["loss"][0]
        assert loss == pytest.approx(ACTIVITY + ERROR, rel=1e-3)
        assert batches.read() == (9, 1)
    assert_untouched(model)


def test_overlapping_steps_as_of_two_replicas_leave_the_users_regularizers() -> None:
    model = built("functional", run_eagerly=True)
    entered = [threading.Event(), threading.Event()]
    original = type(model).train_step

    def train_step(self: Any, data: Any) -> Any:
        """The first replica waits in its step for the second one, which then outlasts it."""
        number = int(data)
        entered[number].set()
        if number == 0:
            assert entered[1].wait(30)
        else:
            first.join(30)
        return {}

    model.__dict__["train_step"] = train_step.__get__(model)
    with float32_losses(model):
        first = threading.Thread(target=model.train_step, args=(0,))
        first.start()
        assert entered[0].wait(30)
        model.train_step(1)
    del model.__dict__["train_step"]
    assert type(model).train_step is original
    assert_untouched(model)


@pytest.mark.parametrize("kind", ["functional", "nested"])
def test_file_saved_by_a_callback_inside_fit_holds_the_users_regularizer(kind: str, tmp_path: Path) -> None:
    model = built(kind)
    with float32_losses(model):
        callbacks = [keras.callbacks.ModelCheckpoint(tmp_path / "during.keras", save_freq=1)]
        model.fit(X, Y, verbose=0, callbacks=callbacks)
    loaded = keras.saving.load_model(tmp_path / "during.keras", compile=False)
    assert [type(r) for r in regularizers(loaded)] == [keras.regularizers.L2]
    assert float(regularizers(loaded)[0].l2) == 0.5
