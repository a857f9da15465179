"""From config to a model that is ready to train: what is kept of the user's, what is ours, what is refused."""

from __future__ import annotations

import copy
import logging
from typing import Any

import numpy as np
import pytest

from mp_hydra.errors import ConfigError, DataError, ModelError, UserError

SCALING = {
    "mode": "auto",
    "value": None,
    "initial": 2.0**15,
    "growth_interval": 2000,
    "growth_factor": 2.0,
    "backoff_factor": 0.5,
    "minimum": 1.0,
    "maximum": 2.0**32,
    "force": False,
}
CONFIG: dict[str, Any] = {
    "precision": {"name": "fp32", "policy": "float32", "tf32": False, "pinned": []},
    "loss_scale": SCALING,
    "model": {"_target_": "mp_hydra.models.mlp", "widths": [8]},
    "dataset": {"_target_": f"{__name__}.classes", "name": "made up", "validation_fraction": 0.25},
    "optimizer": {"_target_": "keras.optimizers.Adam", "learning_rate": 0.01},
    "schedule": {"_target_": None},
    "callbacks": None,
    "compile": {"loss": None, "metrics": None, "jit_compile": "auto", "steps_per_execution": 1, "replace": False},
    "epochs": 2,
    "batch_size": 8,
    "seed": 0,
    "objective": "test/loss",
}


def classes(peak: float = 1.0) -> Any:
    """40 training samples (30 after the split), 3 classes."""
    x = np.random.default_rng(0).uniform(0, peak, (48, 4)).astype("float32")
    x[0, 0] = peak
    y = np.arange(48) % 3
    return (x[:40], y[:40]), (x[40:], y[40:])


def targets(outputs: int = 2) -> Any:
    """The same with float targets."""
    (x, _), (x_test, _) = classes()
    random = np.random.default_rng(1)
    return (x, random.normal(size=(40, outputs))), (x_test, random.normal(size=(8, outputs)))


def plain(input_shape: Any, width: int, *, pinned: bool = True) -> Any:
    """An uncompiled model with a float32 head."""
    import keras

    head = keras.layers.Dense(width, dtype="float32" if pinned else None)
    return keras.Sequential([keras.Input(input_shape), keras.layers.Dense(4), head])


MADE: list[Any] = []


def ready(input_shape: Any, optimizer: Any = None, *, trained: int = 0, **settings: Any) -> Any:
    """A model that comes compiled, and perhaps trained for some steps; it is remembered in MADE with its optimizer."""
    import keras

    model = plain(input_shape, 3)
    optimizer = optimizer or keras.optimizers.SGD(0.5, momentum=0.75, nesterov=True, global_clipnorm=2.0)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, name="mine")
    model.compile(optimizer, loss, metrics=["sparse_top_k_categorical_accuracy"], **settings)
    if trained:
        x, y = classes()[0]
        model.fit(x[: 8 * trained], y[: 8 * trained], batch_size=8, verbose=0)
    MADE[:] = [model, model.optimizer]
    return model


def ready_frozen_later(input_shape: Any) -> Any:
    """A trained model of which one layer was frozen after the training."""
    model = ready(input_shape, trained=1)
    model.layers[0].trainable = False
    return model


def with_scale_factor(input_shape: Any) -> Any:
    """A compiled model whose optimizer scales the loss by itself."""
    import keras

    return ready(input_shape, keras.optimizers.SGD(loss_scale_factor=128.0))


def changed(**changes: Any) -> dict[str, Any]:
    """The config with changes; `a__b=c` is a.b=c, and a mapping replaces the whole group."""
    config = copy.deepcopy(CONFIG)
    for key, value in changes.items():
        *groups, last = key.split("__")
        node = config
        for group in groups:
            node = node[group]
        node[last] = value
    return config


def prepared(**changes: Any) -> Any:
    from mp_hydra.precision import scoped_policy
    from mp_hydra.preparation import load_data, prepare

    config = changed(**changes)
    with scoped_policy(config["precision"]["policy"], tf32=False) as scope:
        return prepare(config, load_data(config), scope)


def ours(function: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": f"{__name__}.{function}", **arguments}


def policy(name: str) -> dict[str, Any]:
    return {"name": name, "policy": name, "tf32": False, "pinned": []}


# --- data ------------------------------------------------------------------------------------------------------------


def test_batch_size_above_the_training_samples_that_are_left_after_the_split_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"^batch_size=31: there are only 30 training samples"):
        prepared(batch_size=31)
    assert prepared(batch_size=30).data.train.size == 30


@pytest.mark.parametrize(("peak", "refused"), [(65519.0, False), (65520.0, True)])
def test_inputs_that_float16_rounds_to_inf_are_refused_under_float16_alone(peak: float, refused: bool) -> None:
    from mp_hydra.preparation import load_data

    dataset = ours("classes", name="loud", peak=peak)
    if refused:
        with pytest.raises(DataError, match=r"inputs reach 65520.*dataset.scale=1.5e-05"):
            load_data(changed(dataset=dataset, precision=policy("mixed_float16")))
    else:
        load_data(changed(dataset=dataset, precision=policy("mixed_float16")))
    load_data(changed(dataset=dataset, precision=policy("mixed_bfloat16")))


# --- loss, metrics, head ---------------------------------------------------------------------------------------------


def test_default_for_classes_is_cross_entropy_on_logits_and_accuracy() -> None:
    made = prepared(objective="test/accuracy")
    assert type(made.model.loss).__name__ == "SparseCategoricalCrossentropy"
    assert made.model.loss.from_logits
    logs = made.model.evaluate(made.data.test.batches(8), return_dict=True, verbose=0)
    assert set(logs) == {"loss", "accuracy"}


def test_default_for_float_targets_is_mean_squared_and_mean_absolute_error() -> None:
    made = prepared(dataset=ours("targets", name="made up"), objective="test/mae")
    outputs = made.model.predict(made.data.test.batches(8), verbose=0)
    logs = made.model.evaluate(made.data.test.batches(8), return_dict=True, verbose=0)
    assert logs["loss"] == pytest.approx(np.mean((outputs - made.data.test.labels()) ** 2), rel=1e-5)
    assert logs["mae"] == pytest.approx(np.mean(np.abs(outputs - made.data.test.labels())), rel=1e-5)


@pytest.mark.parametrize(
    ("dataset", "width", "line"),
    [
        (
            ours("classes", name="made up"),
            2,
            "the model gives 2 outputs for 3 classes; give it one logit for each class",
        ),
        (ours("classes", name="made up"), 1, "the model gives 1 outputs for 3 classes"),
        (ours("targets", name="made up"), 1, "the model gives 1 outputs for 2 targets; give it one output"),
        (ours("targets", name="made up"), 3, "the model gives 3 outputs for 2 targets"),
    ],
)
def test_head_of_the_wrong_width_for_the_default_loss_is_refused(dataset: Any, width: int, line: str) -> None:
    with pytest.raises(ModelError, match=line):
        prepared(dataset=dataset, model=ours("plain", width=width))


def test_head_of_another_width_is_the_users_affair_where_the_loss_is_theirs() -> None:
    loss = {"_target_": "keras.losses.SparseCategoricalCrossentropy", "from_logits": True}
    prepared(model=ours("plain", width=7), compile__loss=loss)


def test_model_that_does_not_take_the_samples_is_one_line_with_their_shape() -> None:
    with pytest.raises(ModelError, match=r"does not accept samples of shape \(4,\)"):
        prepared(model=ours("plain", width=3, input_shape=[5]))


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"compile__loss": "no_such_loss"}, "compile.loss"),
        ({"compile__metrics": ["acuracy"]}, "compile.metrics"),
        ({"compile__loss": {"_target_": "keras.losses.NoSuch"}}, "compile.loss._target_"),
        ({"optimizer": {"_target_": "keras.optimizers.Adam", "learning_rat": 1.0}}, "optimizer._target_"),
        ({"optimizer": {"_target_": "keras.layers.Dense", "units": 3}}, "optimizer._target_"),
        ({"optimizer": {"_target_": "keras.optimizers.SGD", "loss_scale_factor": 2.0}}, "optimizer"),
        ({"model": ours("with_scale_factor")}, "optimizer"),
        ({"schedule": {"_target_": "keras.layers.Flatten"}}, "schedule._target_"),
        ({"objective": "test/acuracy"}, "objective"),
    ],
)
def test_setting_that_keras_would_reject_is_one_line_with_its_key(changes: dict[str, Any], key: str) -> None:
    with pytest.raises(UserError) as caught:
        prepared(**changes)
    assert str(caught.value).startswith(f"{key}=")
    assert "\n" not in str(caught.value)


# --- objective -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["test/loss", "val/accuracy", "train/loss", "time/step_ms", "memory/training_mib"])
def test_objective_may_be_any_metric_of_the_run(name: str) -> None:
    prepared(objective=name)


def test_misspelt_objective_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError, match=r"objective=test/acuracy: .*did you mean test/accuracy"):
        prepared(objective="test/acuracy")


def test_objective_on_validation_is_refused_without_validation_samples() -> None:
    with pytest.raises(ConfigError, match="objective=val/loss"):
        prepared(objective="val/loss", dataset=ours("classes", name="made up", validation_fraction=0.0))


# --- precision and scaling -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "mode", "effective", "scale"),
    [
        ("float32", "auto", "none", 1.0),
        ("mixed_bfloat16", "auto", "none", 1.0),
        ("mixed_float16", "auto", "dynamic", 2.0**15),
        ("mixed_float16", "dynamic", "dynamic", 2.0**15),
        ("mixed_float16", "fixed", "fixed", 1000.0),
        ("mixed_float16", "none", "none", 1.0),
        ("float32", "fixed", "fixed", 1000.0),
    ],
)
def test_optimizer_gets_the_scaling_of_config_and_census(name: str, mode: str, effective: str, scale: float) -> None:
    value = 1000.0 if mode == "fixed" else None
    made = prepared(precision=policy(name), loss_scale={**SCALING, "mode": mode, "value": value, "growth_interval": 7})
    assert (made.optimizer.mode, made.optimizer.initial_scale) == (effective, scale)
    assert made.optimizer.rule.growth_interval == 7
    assert made.model.optimizer is made.optimizer


def test_everything_that_training_needs_exists_before_it() -> None:
    made = prepared()
    assert made.optimizer.built
    assert made.model.built
    assert {metric.name for metric in made.model.metrics} == {"loss", "compile_metrics"}
    before = len(made.model.variables), len(made.optimizer.variables)
    made.model.fit(made.data.train.batches(8), verbose=0, shuffle=False)
    assert (len(made.model.variables), len(made.optimizer.variables)) == before
    assert made.optimizer.counters().steps == 4  # none of them was taken while preparing


def test_pinned_layers_come_from_the_config() -> None:
    made = prepared(precision={**policy("mixed_bfloat16"), "pinned": [".*dense.*"]}, model=ours("plain", width=3))
    assert [layer.compute_dtype for layer in made.layers] == ["bfloat16", "float32"]


# --- a model that comes compiled -------------------------------------------------------------------------------------


def test_compiled_model_keeps_loss_metrics_and_a_copy_of_its_optimizer() -> None:
    made = prepared(model=ours("ready"), objective="test/sparse_top_k_categorical_accuracy")
    model, theirs = MADE
    inner = made.optimizer.inner_optimizer
    assert made.model is model
    assert made.model.loss.name == "mine"
    assert type(inner) is type(theirs)
    assert inner is not theirs
    assert inner.get_config() == theirs.get_config()
    before = [v.numpy() for v in theirs.variables]
    made.model.fit(made.data.train.batches(8), verbose=0, shuffle=False)
    for variable, value in zip(theirs.variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_loss_scaling_that_keras_put_around_the_optimizer_is_taken_off() -> None:
    import keras

    made = prepared(model=ours("ready"), precision=policy("mixed_float16"))
    assert isinstance(MADE[1], keras.optimizers.LossScaleOptimizer)
    assert type(made.optimizer.inner_optimizer) is keras.optimizers.SGD
    assert made.optimizer.mode == "dynamic"


def test_state_of_a_trained_models_optimizer_goes_on() -> None:
    made = prepared(model=ours("ready", trained=3))
    theirs, inner = MADE[1], made.optimizer.inner_optimizer
    assert int(inner.iterations) == 3
    for mine, other in zip(inner.variables, theirs.variables, strict=True):
        np.testing.assert_array_equal(mine.numpy(), other.numpy())


def test_state_that_does_not_fit_what_trains_now_starts_anew_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        made = prepared(model=ours("ready_frozen_later"))
    assert "starts anew" in caplog.text
    assert int(made.optimizer.inner_optimizer.iterations) == 0


def test_compile_replace_puts_the_configs_optimizer_loss_and_metrics_in_place() -> None:
    made = prepared(model=ours("ready"), compile__replace=True, objective="test/accuracy")
    assert type(made.optimizer.inner_optimizer).__name__ == "Adam"
    assert made.model.loss.name != "mine"


def test_execution_settings_reach_a_compiled_model_where_they_are_given() -> None:
    kept = prepared(model=ours("ready", steps_per_execution=3, jit_compile=False)).model
    assert (kept.steps_per_execution, kept.jit_compile) == (3, False)
    given = prepared(model=ours("ready"), compile__steps_per_execution=5, compile__jit_compile=True).model
    assert (given.steps_per_execution, given.jit_compile) == (5, True)


# --- schedules -------------------------------------------------------------------------------------------------------

COSINE = {
    "_target_": "keras.optimizers.schedules.CosineDecay",
    "initial_learning_rate": 0.0,
    "warmup_target": 0.1,
    "warmup_steps": 2,
    "decay_steps": None,
    "alpha": 0.0,
}
EXPONENTIAL = {
    "_target_": "keras.optimizers.schedules.ExponentialDecay",
    "initial_learning_rate": 0.1,
    "decay_steps": None,
    "decay_rate": 0.25,
    "staircase": False,
}


def test_cosine_fills_the_run_after_the_warm_up() -> None:
    # 30 samples, 8 a batch: 4 batches, 2 epochs: 8 steps; 2 of warm-up, 6 along the cosine.
    made = prepared(schedule=COSINE)
    schedule = made.optimizer.inner_optimizer._learning_rate
    rates = [float(schedule(step)) for step in range(9)]
    expected = [0.0, 0.05, *(0.05 * (1 + np.cos(np.pi * k / 6)) for k in range(7))]
    assert rates == pytest.approx(expected, abs=1e-7)


def test_exponential_falls_to_its_rate_over_the_run() -> None:
    schedule = prepared(schedule=EXPONENTIAL, epochs=5).optimizer.inner_optimizer._learning_rate
    assert float(schedule(10)) == pytest.approx(0.05)
    assert float(schedule(20)) == pytest.approx(0.025)


def test_schedule_ends_with_the_run_under_gradient_accumulation_too() -> None:
    optimizer = {**CONFIG["optimizer"], "gradient_accumulation_steps": 2}
    made = prepared(schedule=EXPONENTIAL, epochs=5, optimizer=optimizer)
    made.model.fit(made.data.train.batches(8), epochs=5, verbose=0, shuffle=False)
    assert int(made.optimizer.iterations) == 10
    assert float(made.optimizer.learning_rate) == pytest.approx(0.025)


def test_decay_steps_that_are_given_are_kept() -> None:
    schedule = prepared(schedule={**EXPONENTIAL, "decay_steps": 3}).optimizer.inner_optimizer._learning_rate
    assert float(schedule(3)) == pytest.approx(0.025)


def test_warm_up_as_long_as_the_run_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(schedule={**COSINE, "warmup_steps": 8})
    assert str(caught.value) == "schedule.warmup_steps=8: the run has only 8 batches"


# --- callbacks -------------------------------------------------------------------------------------------------------


def test_callbacks_come_in_the_order_of_the_config_without_those_set_to_null() -> None:
    from mp_hydra.compiling import callbacks

    nodes = {
        "stop": {"_target_": "keras.callbacks.EarlyStopping", "patience": 7},
        "gone": None,
        "nan": {"_target_": "keras.callbacks.TerminateOnNaN"},
    }
    stop, nan = callbacks(changed(callbacks=nodes))
    assert stop.patience == 7
    assert type(nan).__name__ == "TerminateOnNaN"
    assert callbacks(changed(callbacks=None)) == []


def test_callback_that_is_none_is_refused_with_its_key() -> None:
    from mp_hydra.compiling import callbacks

    with pytest.raises(ConfigError, match=r"^callbacks.mine"):
        callbacks(changed(callbacks={"mine": {"_target_": "keras.layers.Flatten"}}))
