"""The telemetry callback in real fits: what it reports, when, and what each number covers."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

STEPS = 8
BATCH = 4


class Fit:
    """One model, its scaled optimizer, and the reports of the fits that it went through."""

    def __init__(self, model: Any = None, *, mode: str = "dynamic", scale: float = 1024.0, **compiled: Any) -> None:
        import keras

        from mp_hydra.loss_scale import Rule
        from mp_hydra.scaled_optimizer import ScaledOptimizer

        keras.utils.set_random_seed(0)
        self.model = model or keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        settings = {"optimizer": keras.optimizers.SGD(0.01), "loss": "mse", "jit_compile": False, **compiled}
        self.model.compile(**settings, auto_scale_loss=False)
        rule = Rule(growth_interval=4)
        self.model.optimizer = ScaledOptimizer(self.model.optimizer, mode=mode, scale=scale, rule=rule)
        self.model.optimizer.build(self.model.trainable_variables)
        self.reports: list[tuple[dict[str, float], int]] = []
        self.telemetry: Any = None

    def run(self, data: Any = None, *, every: int = 0, epochs: int = 1, callbacks: Any = (), **fit: Any) -> Fit:
        from mp_hydra.finite_steps import finite_steps
        from mp_hydra.telemetry.callback import Telemetry

        self.reports = []
        data = batches() if data is None else data
        with finite_steps(self.model, self.model.optimizer) as counted:
            self.telemetry = Telemetry(
                lambda metrics, step: self.reports.append((dict(metrics), step)),
                optimizer=self.model.optimizer,
                batches=counted,
                batch_size=BATCH,
                samples=STEPS * BATCH,
                device="CPU:0",
                pci_bus_id=None,
                every=every,
            )
            self.model.fit(data, epochs=epochs, shuffle=False, verbose=0, callbacks=[self.telemetry, *callbacks], **fit)
        return self

    def series(self, name: str) -> list[tuple[int, Any]]:
        return [(step, metrics[name]) for metrics, step in self.reports if name in metrics]


def batches(*bad: int, steps: int = STEPS, x: Any = None) -> Any:
    import tensorflow as tf

    random = np.random.default_rng(0)
    x = random.normal(size=(steps, BATCH, 3)).astype("float32") if x is None else x
    x[list(bad)] = np.inf
    return tf.data.Dataset.from_tensor_slices((x, np.ones((steps, BATCH, 1), "float32")))


# --- loss scale and counters -----------------------------------------------------------------------------------------


def test_scale_reported_is_the_one_used_by_the_last_step_and_not_the_next_ones() -> None:
    # 1024 for steps 0-3, then 2048 for 4-7; after step 7 the next would be 4096.
    fit = Fit().run(every=4)
    assert fit.series("loss_scale/value") == [(4, 1024.0), (8, 2048.0)]
    assert float(fit.model.optimizer.dynamic_scale) == 4096.0


def test_scale_is_one_where_there_is_none() -> None:
    fit = Fit(mode="none", scale=1.0).run()
    assert fit.series("loss_scale/value") == [(STEPS, 1.0)]


@pytest.mark.parametrize("spe", [1, 4])
def test_skipped_and_applied_are_cumulative_and_the_step_axis_counts_both(spe: int) -> None:
    fit = Fit(steps_per_execution=spe).run(batches(1, 6), epochs=2)
    assert fit.series("loss_scale/skipped_steps") == [(8, 2.0), (16, 4.0)]
    assert fit.series("loss_scale/applied_steps") == [(8, 6.0), (16, 12.0)]
    assert fit.series("train/nonfinite_batches") == [(8, 2.0), (16, 4.0)]
    assert (fit.telemetry.seen, fit.telemetry.applied) == (16, 12)


@pytest.mark.parametrize(("spe", "steps"), [(1, [3, 6, 8, 9, 12, 15, 16]), (4, [4, 8, 12, 16])])
def test_reports_within_an_epoch_come_every_so_many_batches(spe: int, steps: list[int]) -> None:
    fit = Fit(steps_per_execution=spe).run(every=3, epochs=2)
    seen = [step for step, _ in fit.series("loss_scale/value")]
    assert sorted(set(seen)) == steps
    assert seen == sorted(seen)


def test_no_reports_within_an_epoch_where_none_are_asked_for() -> None:
    assert [step for step, _ in Fit().run(every=0, epochs=2).series("loss_scale/value")] == [8, 16]


def test_second_fit_of_the_same_model_counts_from_zero_again() -> None:
    fit = Fit()
    fit.run(batches(0, 1))
    fit.run(batches(2))
    assert fit.series("loss_scale/skipped_steps") == [(8, 1.0)]
    assert fit.series("loss_scale/applied_steps") == [(8, 7.0)]
    assert fit.series("train/nonfinite_batches") == [(8, 1.0)]
    assert (fit.telemetry.seen, fit.telemetry.applied) == (8, 7)


def test_early_stop_within_an_epoch_reports_the_batches_that_were_seen() -> None:
    import keras

    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
            self.model.stop_training = batch == 4

    fit = Fit().run(callbacks=[Stop()], epochs=3)
    assert [step for _, step in fit.reports] == [5, 5]
    assert fit.telemetry.seen == 5
    # two steady steps of four samples: warm-up is three steps
    total = fit.telemetry.clock.total()
    assert total.steps == 2
    assert total.samples_per_second == pytest.approx(8 / total.seconds)


def test_samples_of_a_smaller_last_batch_are_not_counted_as_a_full_one() -> None:
    import tensorflow as tf

    x, y = np.ones((STEPS * BATCH - 3, 3), "float32"), np.ones((STEPS * BATCH - 3, 1), "float32")
    fit = Fit()
    from mp_hydra.finite_steps import finite_steps
    from mp_hydra.telemetry.callback import Telemetry

    with finite_steps(fit.model, fit.model.optimizer) as counted:
        telemetry = Telemetry(
            lambda _metrics, _step: None,
            optimizer=fit.model.optimizer,
            batches=counted,
            batch_size=BATCH,
            samples=len(x),
            device="CPU:0",
            pci_bus_id=None,
        )
        data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH)
        fit.model.fit(data, verbose=0, shuffle=False, callbacks=[telemetry])
    total: Any = telemetry.clock.total()
    assert total.steps == STEPS - 3
    assert total.samples_per_second == pytest.approx((4 * 4 + 1) / total.seconds)


def test_step_axis_counts_batches_where_the_users_step_applies_gradients_twice() -> None:
    import keras

    class Twice(keras.Sequential):
        def train_step(self, data: Any) -> Any:
            super().train_step(data)
            return super().train_step(data)

    fit = Fit(Twice([keras.Input((3,)), keras.layers.Dense(1)])).run()
    assert [step for _, step in fit.reports] == [8, 8]
    assert fit.series("loss_scale/applied_steps") == [(8, 16.0)]
    assert math.isfinite(fit.series("train/loss")[0][1])


# --- gradients -------------------------------------------------------------------------------------------------------


def known_norms(*norms: float) -> Any:
    """Batches whose gradients have these L2 norms: the loss is the mean of w . x, so that the gradient is the mean of x."""
    x = np.zeros((len(norms), BATCH, 3), "float32")
    x[:, :, 1] = np.array(norms, "float32")[:, np.newaxis]
    return batches(steps=len(norms), x=x)


def linear_fit(**settings: Any) -> Fit:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1, use_bias=False)])
    return Fit(model, loss=lambda _, y: keras.ops.mean(y, axis=-1), **settings)


@pytest.mark.parametrize("mode", ["dynamic", "none"])
def test_gradient_norms_are_mean_and_maximum_of_the_finite_steps_since_the_last_report(mode: str) -> None:
    scale = 1.0 if mode == "none" else 1024.0
    fit = linear_fit(mode=mode, scale=scale).run(known_norms(1, 2, np.inf, 6, 5, np.nan, 7, 0), every=4)
    assert fit.series("gradients/global_norm") == [(4, pytest.approx(3.0)), (8, pytest.approx(4.0))]
    assert fit.series("gradients/global_norm_max") == [(4, pytest.approx(6.0)), (8, pytest.approx(7.0))]


def test_huge_norm_does_not_swallow_those_that_come_after_it() -> None:
    fit = linear_fit(mode="none", scale=1.0).run(known_norms(1e12, 1, 1, 1, 2, 2, 2, 2), every=4)
    assert fit.series("gradients/global_norm")[1] == (8, pytest.approx(2.0))


def test_norms_of_an_earlier_training_do_not_leak_into_the_next() -> None:
    fit = linear_fit(mode="none", scale=1.0)
    fit.model.fit(known_norms(100, 100), verbose=0, shuffle=False)  # without telemetry: nothing has reset the maximum
    fit.run(known_norms(*[2.0] * STEPS))
    assert fit.series("gradients/global_norm") == [(8, pytest.approx(2.0))]
    assert fit.series("gradients/global_norm_max") == [(8, pytest.approx(2.0))]


def test_norms_are_absent_with_the_reason_where_no_step_was_finite() -> None:
    fit = linear_fit().run(known_norms(*[np.inf] * STEPS), every=4, epochs=2)
    assert fit.series("gradients/global_norm") == []
    assert fit.telemetry.absent["gradients/global_norm"] == "no step had a finite gradient"
    assert fit.telemetry.applied == 0


def test_norms_are_not_called_absent_where_only_the_first_reports_lacked_them() -> None:
    fit = linear_fit().run(known_norms(*[np.inf] * 4, *[2.0] * 4), every=4)
    assert fit.series("gradients/global_norm") == [(8, pytest.approx(2.0))]
    assert "gradients/global_norm" not in fit.telemetry.absent


# --- Keras' metrics --------------------------------------------------------------------------------------------------


def test_metrics_of_keras_come_under_train_and_val() -> None:
    fit = Fit(metrics=["mae"]).run(validation_data=batches())
    metrics = fit.reports[0][0]
    assert {"train/loss", "train/mae", "val/loss", "val/mae"} <= set(metrics)


def test_learning_rate_that_a_callback_puts_into_the_logs_is_not_taken_for_a_metric() -> None:
    import keras

    class Rate(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            logs["learning_rate"] = 0.5

    fit = Fit()
    logs = {"loss": 1.0, "learning_rate": 0.5}
    fit.run()
    assert fit.telemetry._keras_logs(logs) == {"train/loss": 1.0}


def test_epoch_without_a_finite_batch_has_no_mean_and_other_callbacks_do_not_take_zero_for_one() -> None:
    import keras
    import tensorflow as tf

    epoch = tf.Variable(0)

    def spoiled(x: Any, y: Any) -> Any:
        return tf.where(epoch == 1, np.float32(np.nan), x), y

    class Epoch(keras.callbacks.Callback):
        def on_epoch_begin(self, number: int, logs: Any = None) -> None:
            epoch.assign(number)

    stopped = keras.callbacks.EarlyStopping(monitor="loss", patience=100)
    fit = Fit().run(batches().map(spoiled), epochs=3, callbacks=[Epoch(), stopped])
    losses = fit.series("train/loss")
    assert [step for step, _ in losses] == [8, 24]
    assert math.isnan(fit.model.history.history["loss"][1])
    assert stopped.best == min(loss for _, loss in losses) > 0
    assert fit.series("train/nonfinite_batches") == [(8, 0.0), (16, 8.0), (24, 8.0)]
    assert "train/loss" not in fit.telemetry.absent


def test_last_epoch_without_a_finite_batch_says_why_its_loss_is_absent() -> None:
    fit = Fit(metrics=["mae"]).run(batches(*range(STEPS)))
    assert fit.series("train/loss") == []
    assert fit.telemetry.absent["train/loss"] == "the last epoch had no batch with a finite loss"
    assert "train/mae" in fit.telemetry.absent


# --- memory and time -------------------------------------------------------------------------------------------------


def test_training_memory_is_peak_minus_baseline() -> None:
    fit = Fit().run(epochs=2)
    for metrics, _ in fit.reports:
        assert 0 < metrics["memory/baseline_mib"] < metrics["memory/peak_mib"]
        assert metrics["memory/training_mib"] == metrics["memory/peak_mib"] - metrics["memory/baseline_mib"]


def test_state_memory_is_variables_and_optimizer_state_counted_exactly() -> None:
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1000, use_bias=False), keras.layers.Dense(1)])
    fit = Fit(model, optimizer=keras.optimizers.Adam()).run()
    weights = 3 * 1000 + 1000 + 1
    # two slots a weight; the loss metric's two numbers are no state of the model
    small = fit.reports[0][0]["memory/state_mib"] * 2**20 - 3 * 4 * weights
    assert 0 < small < 200  # scale, counters, iterations, learning rate


def test_validation_memory_does_not_count_however_large_its_batch() -> None:
    import tensorflow as tf

    n = 1_000_000  # 12 MB of inputs, as much again inside the model
    huge = tf.data.Dataset.from_tensors((np.ones((n, 3), "float32"), np.ones((n, 1), "float32")))
    import keras

    def model() -> Any:
        return keras.Sequential([keras.Input((3,)), keras.layers.Dense(16), keras.layers.Dense(1)])

    alone = Fit(model()).run(epochs=2).reports[-1][0]
    validated = Fit(model()).run(epochs=2, validation_data=huge).reports[-1][0]
    assert validated["memory/training_mib"] < 8
    assert alone["memory/training_mib"] < 8


def test_times_leave_out_the_warm_up_and_are_reported_whole_at_the_end() -> None:
    fit = Fit().run(epochs=2)
    first, second, last = (metrics for metrics, _ in fit.reports)
    assert first["time/first_step_seconds"] == last["time/first_step_seconds"] > 0
    assert fit.telemetry.clock.total().steps == 16 - 3
    assert last["time/train_seconds"] == pytest.approx(first["time/epoch_seconds"] + second["time/epoch_seconds"])
    assert 0 < last["time/step_ms"] <= last["time/step_ms_p95"]


def test_times_are_absent_with_the_reason_where_every_step_is_warm_up() -> None:
    fit = Fit().run(batches(steps=2))
    assert "time/step_ms" not in fit.reports[-1][0]
    assert "warm-up" in fit.telemetry.absent["time/step_ms"]


def test_what_needs_a_gpu_is_absent_with_the_reason_on_a_cpu() -> None:
    fit = Fit().run()
    for name in ("memory/device_used_peak_mib", "energy/joules"):
        assert fit.series(name) == []
        assert fit.telemetry.absent[name]


def test_no_report_holds_anything_but_finite_numbers() -> None:
    fit = Fit(metrics=["mae"]).run(batches(3), every=2, epochs=2, validation_data=batches())
    assert all(math.isfinite(value) for metrics, _ in fit.reports for value in metrics.values())


def test_callback_makes_keras_convert_no_batch_logs() -> None:
    import keras

    from mp_hydra.console import ProgressBar
    from mp_hydra.telemetry.callback import Telemetry

    for kind in (Telemetry, ProgressBar):
        for name in ("on_train_batch_end", "on_batch_end"):
            assert getattr(kind, name) is getattr(keras.callbacks.Callback, name), (kind, name)


def test_close_can_be_called_after_a_fit_that_raised() -> None:
    import keras

    class Fail(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
            raise KeyError

    fit = Fit()
    with pytest.raises(KeyError):
        fit.run(callbacks=[Fail()])
    fit.telemetry.close()
    fit.telemetry.close()
