"""A head in float32 on request: the right layers, the activation included, in every kind of model, and in what is saved."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import absl.logging
import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from mp_hydra.errors import PrecisionError
from mp_hydra.precision import scoped_policy
from mp_hydra.probe import float32_head, probe
from tests.e2e.app_driver import BRIEF, small_images, tracked, type_command

if TYPE_CHECKING:
    from pathlib import Path

MIXED = ("mixed_float16", "mixed_bfloat16")
KINDS = ("functional", "sequential", "subclassed", "nested")
X = np.ones((2, 4), "float32")

# The last layers of a model; those named head or after are to compute in float32 afterwards, nothing else.
HEADS: dict[str, Any] = {
    "softmax": lambda: [layers.Dense(3, activation="softmax", name="head")],
    "sigmoid": lambda: [layers.Dense(1, activation="sigmoid", name="head")],
    "logits": lambda: [layers.Dense(3, name="head")],
    "softmax layer": lambda: [layers.Dense(3), layers.Softmax(name="head")],
    "activation layer": lambda: [layers.Dense(3), layers.Activation("softmax", name="head")],
    "reshaped": lambda: [layers.Dense(3, activation="softmax", name="head"), layers.Reshape((3, 1), name="after")],
    "cast": lambda: [
        layers.Dense(3, activation="softmax", name="head"),
        layers.Activation("linear", dtype="float32", name="after"),
    ],
    "dropped out": lambda: [layers.Dense(3, activation="softmax", name="head"), layers.Dropout(0.5, name="after")],
    "regularized": lambda: [
        layers.Dense(3, activation="softmax", name="head"),
        layers.ActivityRegularization(1e-3, dtype="float32", name="after"),
    ],
}


@keras.saving.register_keras_serializable("test_probe")
class Chain(keras.Model):
    """A subclassed model: one layer after the other."""

    def __init__(self, parts: list[Any], **settings: Any) -> None:
        super().__init__(**settings)
        self.parts = parts

    def call(self, x: Any) -> Any:
        for part in self.parts:
            x = part(x)
        return x


def built(kind: str, head: str, policy: str) -> Any:
    with scoped_policy(policy, tf32=False):
        stack = [layers.Dense(4, name="body"), *HEADS[head]()]
        if kind == "sequential":
            return keras.Sequential(stack)
        if kind == "subclassed":
            return Chain(stack)
        x = keras.Input((4,))
        if kind == "nested":
            return keras.Model(x, keras.Sequential([keras.Input((4,)), *stack])(x))
        y = x
        for layer in stack:
            y = layer(y)
        return keras.Model(x, y)


def in_float32(model: Any) -> set[str]:
    return {
        layer.name
        for layer in model._flatten_layers(include_self=False)
        if layer.compute_dtype == "float32" and not layer._layers and not isinstance(layer, layers.InputLayer)
    }


@pytest.mark.parametrize(
    ("kind", "head", "policy"),
    [
        *((kind, head, "mixed_float16") for kind in ("functional", "subclassed") for head in HEADS),
        *((kind, head, "mixed_bfloat16") for kind in ("sequential", "nested") for head in ("softmax", "reshaped")),
    ],
)
def test_head_computes_in_float32_afterwards_and_passes_the_probe_that_it_failed(
    kind: str, head: str, policy: str
) -> None:
    model = built(kind, head, policy)
    with pytest.raises(PrecisionError, match="the head, "):
        probe(model, X)
    changed = float32_head(model, X)
    assert changed
    assert probe(model, X).dtype == "float32"
    assert model(X, training=True).dtype == "float32"
    names = in_float32(model)
    assert names == {layer.name for layer in model._flatten_layers() if layer.name in ("head", "after")}
    assert {layer.name for layer in changed} <= names


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("head", ["softmax", "reshaped"])
def test_nothing_is_changed_under_float32(kind: str, head: str) -> None:
    assert float32_head(built(kind, head, "float32"), X) == []


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_changed_the_second_time(kind: str) -> None:
    model = built(kind, "softmax", "mixed_float16")
    assert len(float32_head(model, X)) == 1
    assert float32_head(model, X) == []


@pytest.mark.parametrize("policy", MIXED)
def test_confident_mistake_has_a_gradient_as_the_activation_itself_is_in_float32(policy: str) -> None:
    # sigmoid(-20) = 2e-9 is zero in float16, and 1 - sigmoid(20) in both; the gradient of the cross-entropy is the error, 1.
    def gradient(cured: bool) -> float:
        with scoped_policy(policy, tf32=False):
            head = layers.Dense(1, activation="sigmoid", use_bias=False, kernel_initializer="ones")
            model = keras.Sequential([keras.Input((1,)), layers.Identity(), head])
        if cured:
            float32_head(model, np.ones((1, 1), "float32"))
        x = tf.constant([[-12.0]])
        with tf.GradientTape() as tape:
            likelihood = tf.cast(model(-x), "float32")  # of what is wrong
            loss = -tf.math.log(1.0 - likelihood)
        return float(tape.gradient(loss, head.kernel)[0, 0])

    assert not 11 < gradient(cured=False) < 13
    assert gradient(cured=True) == pytest.approx(12.0, rel=0.02)  # error * input


def test_all_heads_of_a_model_with_several_outputs_are_changed() -> None:
    with scoped_policy("mixed_bfloat16", tf32=False):
        x = keras.Input((4,))
        y = layers.Dense(4, name="body")(x)
        shared = layers.Dense(2, name="shared")
        ends = {"a": layers.Dense(3, activation="softmax", name="a")(y), "b": [shared(y), shared(x)]}
        model = keras.Model(x, ends)
    assert sorted(layer.name for layer in float32_head(model, X)) == ["a", "shared"]
    assert {tensor.dtype.name for tensor in keras.tree.flatten(probe(model, X))} == {"float32"}
    assert "body" not in in_float32(model)


def test_all_heads_of_a_subclassed_model_with_several_outputs_are_changed() -> None:
    class Two(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.a, self.b = (layers.Dense(n, name=name) for n, name in ((4, "body"), (3, "a"), (2, "b")))

        def call(self, x: Any) -> Any:
            x = self.body(x)
            return self.a(x), self.b(x)

    with scoped_policy("mixed_float16", tf32=False):
        model = Two()
    assert sorted(layer.name for layer in float32_head(model, X)) == ["a", "b"]


@pytest.mark.parametrize("kind", ["functional", "sequential", "nested"])
@pytest.mark.parametrize("head", ["softmax", "reshaped"])
def test_saved_file_keeps_it_in_plain_keras(kind: str, head: str, tmp_path: Path) -> None:
    model = built(kind, head, "mixed_float16")
    float32_head(model, X)
    expected = model(X)
    model.save(tmp_path / "model.keras")
    loaded = keras.saving.load_model(tmp_path / "model.keras")
    assert in_float32(loaded) == in_float32(model)
    assert loaded(X).dtype == "float32"
    np.testing.assert_array_equal(loaded(X), expected)


def test_training_goes_on_with_the_changed_head() -> None:
    model = built("functional", "softmax", "mixed_float16")
    float32_head(model, X)
    model.compile("sgd", "sparse_categorical_crossentropy", auto_scale_loss=False)
    before = model.get_weights()
    model.fit(X, np.array([0, 1]), verbose=0)
    assert any((one != other).any() for one, other in zip(before, model.get_weights(), strict=True))


# --- in a run --------------------------------------------------------------------------------------------------------

MODEL = """
import keras
from keras import layers


def softmax(input_shape, num_classes):
    inputs = keras.Input(input_shape)
    x = layers.Dense(4)(layers.Flatten()(inputs))
    return keras.Model(inputs, layers.Dense(num_classes, activation="softmax", name="head")(x))
"""


def test_run_refuses_a_16_bit_head_and_cures_it_where_it_is_asked_to(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    absl.logging.get_absl_handler().python_handler.stream = sys.__stderr__  # Hydra closes it, and pytest's with it
    (tmp_path / "softmax_head.py").write_text(MODEL, encoding="utf-8")
    small_images(tmp_path / "images.npz")
    words = ("model=custom", "model._target_=softmax_head.softmax", "dataset=npz", "dataset.path=images.npz")
    settings = ("compile.loss=sparse_categorical_crossentropy", "precision=mixed_float16")
    assert type_command(*BRIEF, *words, *settings, cwd=tmp_path) == 1
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mp_hydra: ")]
    assert "the head, layer head (Dense), gives float16 outputs" in line
    assert line.endswith(
        'construct it with dtype="float32", its activation included, or set precision.float32_head=true'
    )

    assert type_command(*BRIEF, *words, *settings, "precision.float32_head=true", cwd=tmp_path) == 0
    run = tracked()[-1]
    assert (run.status, run.outcome) == ("FINISHED", "ok")
    computed = {layer["path"]: layer["compute_dtype"] for layer in run.json("audit.json")["layers"]}
    assert computed["head"] == "float32"
    assert (
        "layer head computes in float32 (precision.float32_head=true)" in (tmp_path / "out" / "train.log").read_text()
    )
