"""The record of the test set: metrics, and what the model said of every sample."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.evaluation import FILE, Evaluation, evaluate, per_sample

if TYPE_CHECKING:
    from pathlib import Path

LOGITS = np.array([[2.0, -1.0, 0.0], [0.0, 0.5, 0.4], [1.0, 1.0, 3.0]], "float32")


class FakeSplit:
    """Three samples whose input is what the model shall answer."""

    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = np.asarray(x, "float32"), np.asarray(y)

    def batches(self, batch_size: int) -> Any:
        import tensorflow as tf

        return tf.data.Dataset.from_tensor_slices((self.x, self.y)).batch(batch_size)

    def labels(self) -> Any:
        return self.y


class FakeData:
    def __init__(self, x: Any, y: Any, classes: int | None) -> None:
        self.test, self.classes = FakeSplit(x, y), classes


def echo(loss: Any, metrics: Any = (), *, dtype: str = "float32") -> Any:
    """A model that answers with its input."""
    import keras

    model = keras.Sequential([keras.Input((3,)), keras.layers.Activation("linear", dtype=dtype)])
    model.compile("sgd", loss, metrics=list(metrics))
    return model


def test_classes_are_recorded_with_their_prediction_in_the_order_of_the_test_set() -> None:
    samples = per_sample(LOGITS, np.array([0, 2, 2]), 3)
    assert {name: values.tolist() for name, values in samples.items()} == {
        "label": [0, 2, 2],
        "predicted": [0, 1, 2],
        "correct": [True, False, True],
    }
    assert samples["correct"].dtype == bool


def test_targets_are_recorded_with_float32_predictions() -> None:
    samples = per_sample(LOGITS.astype("float16"), np.ones((3, 3), "float32"), None)
    assert set(samples) == {"target", "prediction"}
    assert samples["prediction"].dtype == np.float32


def test_bfloat16_predictions_become_float32() -> None:
    import ml_dtypes

    samples = per_sample(LOGITS.astype(ml_dtypes.bfloat16), np.array([0, 1, 2]), None)
    assert samples["prediction"].dtype == np.float32


def test_single_output_for_classes_is_kept_as_it_is_since_its_threshold_is_not_known() -> None:
    samples = per_sample(np.array([[0.2], [0.9]]), np.array([0, 1]), 2)
    assert set(samples) == {"label", "output"}
    np.testing.assert_array_equal(samples["output"], np.array([[0.2], [0.9]], "float32"))


def test_nothing_is_recorded_for_several_outputs() -> None:
    assert per_sample({"a": LOGITS, "b": LOGITS}, np.array([0, 1, 2]), 3) == {}


def test_metrics_and_samples_of_a_whole_test_set_with_a_smaller_last_batch() -> None:
    import keras

    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    evaluation = evaluate(echo(loss, ["accuracy"]), FakeData(LOGITS, [0, 2, 2], 3), 2)  # type: ignore[arg-type]
    losses = np.log(np.exp(LOGITS).sum(1)) - LOGITS[np.arange(3), [0, 2, 2]]
    assert evaluation.metrics == {
        "test/loss": pytest.approx(losses.mean(), rel=1e-5),
        "test/accuracy": pytest.approx(2 / 3),
    }
    assert evaluation.absent == {}
    assert evaluation.samples["correct"].tolist() == [True, False, True]


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_metric_that_is_not_finite_is_absent_with_the_value_as_reason(value: float) -> None:
    x = LOGITS.copy()
    x[1, 1] = value
    evaluation = evaluate(echo("mse"), FakeData(x, np.zeros((3, 3), "float32"), None), 3)  # type: ignore[arg-type]
    assert evaluation.metrics == {}
    assert evaluation.absent == {"test/loss": f"the value is {value}"}


def test_record_is_saved_and_read_without_pickle(tmp_path: Path) -> None:
    path = Evaluation({}, {}, per_sample(LOGITS, np.array([0, 2, 2]), 3)).save(tmp_path)
    assert path == tmp_path / FILE
    with np.load(path, allow_pickle=False) as stored:
        assert stored["correct"].tolist() == [True, False, True]
        assert set(stored) == {"label", "predicted", "correct"}
