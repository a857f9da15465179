"""Training with bad batches: epoch means and moving statistics must be those of a training without them."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

if TYPE_CHECKING:
    from pathlib import Path

WAYS: dict[str, dict[str, Any]] = {
    "graph": {"jit_compile": False},
    "eager": {"run_eagerly": True},
    "jit": {"jit_compile": True},
    "spe": {"jit_compile": False, "steps_per_execution": 4},
}
STEPS = 8


def layers_of(kind: str) -> list[Any]:
    import keras

    normal = [] if kind == "stateless" else [keras.layers.BatchNormalization()]
    return [keras.layers.Dense(4), *normal, keras.layers.Dense(1)]


def build(kind: str) -> Any:
    """A model of the kind; the same weights at every call."""
    import keras

    keras.utils.set_random_seed(1)
    layers = layers_of(kind)
    if kind == "subclassed":

        class Model(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.parts = layers

            def call(self, x: Any, training: bool = False) -> Any:
                for part in self.parts:
                    x = part(x, training=training) if "normalization" in part.name else part(x)
                return x

        model = Model()
        model(np.zeros((2, 3), "float32"))
        return model
    if kind == "own_step":

        class Trained(keras.Sequential):
            def train_step(self, data: Any) -> Any:
                import tensorflow as tf

                x, y = data
                with tf.GradientTape() as tape:
                    y_pred = self(x, training=True)
                    loss = self.compute_loss(x=x, y=y, y_pred=y_pred)
                    scaled = self.optimizer.scale_loss(loss)
                gradients = tape.gradient(scaled, self.trainable_variables)
                self.optimizer.apply(gradients, self.trainable_variables)
                for metric in self.metrics:
                    metric.update_state(*((loss,) if metric.name == "loss" else (y, y_pred)))
                return {metric.name: metric.result() for metric in self.metrics}

        return Trained([keras.Input((3,)), *layers])
    return keras.Sequential([keras.Input((3,)), *layers])


def data(*, bad: dict[int, float], left_out: bool) -> Any:
    """`STEPS` batches of 4; those in `bad` hold that value, or are left out."""
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(STEPS, 4, 3)).astype("float32")
    y = random.normal(size=(STEPS, 4, 1)).astype("float32")
    for position, value in bad.items():
        x[position, 1, 2] = value
    keep = [i for i in range(STEPS) if not (left_out and i in bad)]
    return tf.data.Dataset.from_tensor_slices((x[keep], y[keep]))


def trained(
    kind: str, batches: Any, *, mode: str = "dynamic", epochs: int = 1, **settings: Any
) -> tuple[Any, Any, Any]:
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    model = build(kind)
    metrics = ["mae", keras.metrics.RootMeanSquaredError(name="rmse")]
    model.compile(keras.optimizers.Adam(0.01), "mse", metrics=metrics, auto_scale_loss=False, **settings)
    model.optimizer = ScaledOptimizer(model.optimizer, mode=mode, scale=1.0 if mode == "none" else 1024.0)
    model.optimizer.build(model.trainable_variables)
    with finite_steps(model, model.optimizer) as counted:
        history = model.fit(batches, epochs=epochs, shuffle=False, verbose=0)
    return model, history.history, counted.read()


def assert_same(one: Any, other: Any) -> None:
    for mine, theirs in zip(one.variables, other.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy(), err_msg=mine.path)


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *itertools.product(["sequential", "subclassed", "own_step", "stateless"], ["graph", "eager"]),
        *itertools.product(["sequential", "own_step"], ["jit", "spe"]),
    ],
)
def test_state_and_means_equal_those_without_the_bad_batches_bit_for_bit(kind: str, way: str) -> None:
    bad = {2: np.nan, 3: np.inf, 6: -np.inf, 7: np.nan}  # four of eight, so that steps_per_execution=4 divides both
    mode = "fixed"  # a dynamic scale would differ afterwards
    model, history, counts = trained(kind, data(bad=bad, left_out=False), mode=mode, **WAYS[way])
    clean, clean_history, clean_counts = trained(kind, data(bad=bad, left_out=True), mode=mode, **WAYS[way])
    assert counts == (8, 4)
    assert clean_counts == (4, 0)
    assert_same(model, clean)
    assert history == clean_history
    assert set(history) == {"loss", "mae", "rmse"}
    assert all(np.isfinite(values).all() for values in history.values())


@pytest.mark.parametrize("mode", ["dynamic", "none"])
def test_counts_go_on_over_epochs(mode: str) -> None:
    _, _, counts = trained("sequential", data(bad={0: np.nan}, left_out=False), mode=mode, epochs=3)
    assert counts == (24, 3)


def test_backward_overflow_with_a_finite_loss_keeps_the_loss_in_the_mean_and_restores_the_state() -> None:
    import keras
    import tensorflow as tf

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    model = build("sequential")

    @tf.custom_gradient
    def overflowing(x: Any) -> Any:
        return x, lambda dy: dy * np.float32(np.inf)

    model.compile("sgd", lambda _, y: keras.ops.mean(overflowing(y)), auto_scale_loss=False, jit_compile=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="dynamic", scale=2.0)
    model.optimizer.build(model.trainable_variables)
    before = [v.numpy() for v in model.variables if "moving" in v.path]
    with finite_steps(model, model.optimizer) as counted:
        history = model.fit(data(bad={}, left_out=False), verbose=0, shuffle=False)
    assert counted.read() == (8, 0)
    assert model.optimizer.counters().skipped == 8
    assert np.isfinite(history.history["loss"][0])
    assert history.history["loss"][0] != 0
    for variable, value in zip([v for v in model.variables if "moving" in v.path], before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_all_batches_bad_are_counted_and_leave_the_model_as_it_was() -> None:
    bad = dict.fromkeys(range(STEPS), np.nan)
    model, _, counts = trained("sequential", data(bad=bad, left_out=False))
    assert counts == (STEPS, STEPS)
    untouched = build("sequential")
    for mine, theirs in zip(model.weights, untouched.weights, strict=True):
        np.testing.assert_array_equal(mine.numpy(), theirs.numpy())


def test_seeds_and_integer_state_move_on_after_a_bad_batch() -> None:
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    keras.utils.set_random_seed(1)
    model = keras.Sequential([keras.Input((3,)), keras.layers.Dropout(0.5), keras.layers.Dense(1)])
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="none")
    model.optimizer.build(model.trainable_variables)
    (seed,) = [v for v in model.non_trainable_variables if "seed" in v.path]
    before = seed.numpy().copy()
    with finite_steps(model, model.optimizer):
        model.fit(data(bad=dict.fromkeys(range(STEPS), np.nan), left_out=False), verbose=0, shuffle=False)
    assert (seed.numpy() != before).any()


def test_logs_of_a_step_with_names_of_its_own_are_passed_on() -> None:
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    class Named(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            return {"mine": super().train_step(data)["loss"]}

    model = Named([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="none")
    model.optimizer.build(model.trainable_variables)
    with finite_steps(model, model.optimizer):
        history = model.fit(data(bad={}, left_out=False), verbose=0, shuffle=False).history
    assert set(history) == {"mine"}


def test_override_is_gone_afterwards_and_after_an_exception_and_the_class_stays() -> None:
    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    model = build("sequential")
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="none")
    before, kind = set(vars(model)), type(model)
    with finite_steps(model, model.optimizer):
        assert "train_step" in vars(model)
        assert type(model) is kind
    assert set(vars(model)) == before
    with pytest.raises(KeyError), finite_steps(model, model.optimizer):
        raise KeyError
    assert set(vars(model)) == before
    assert model.train_function is None


def test_file_saved_while_it_is_in_force_holds_the_models_own_class(tmp_path: Path) -> None:
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    model = build("sequential")
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="none")
    model.optimizer.build(model.trainable_variables)
    with finite_steps(model, model.optimizer):
        model.fit(data(bad={}, left_out=False), verbose=0, shuffle=False)
        model.save(tmp_path / "m.keras")
    loaded = keras.saving.load_model(tmp_path / "m.keras")
    assert type(loaded) is keras.Sequential
    assert_same(loaded, model)


def test_batches_are_counted_where_the_users_step_applies_gradients_twice() -> None:
    import keras

    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.scaled_optimizer import ScaledOptimizer

    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            return super().train_step(data)

    model = Twice([keras.Input((3,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", auto_scale_loss=False)
    model.optimizer = ScaledOptimizer(model.optimizer, mode="none")
    model.optimizer.build(model.trainable_variables)
    with finite_steps(model, model.optimizer) as counted:
        model.fit(data(bad={}, left_out=False), verbose=0, shuffle=False)
    assert counted.read() == (8, 0)
    assert model.optimizer.counters().steps == 16
