"""Every finding on a model made for it: it is found, at its place, and its cure removes it; a clean model gives none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from mp_hydra.audit.findings import Finding, Severity, findings
from mp_hydra.audit.gathering import gather
from mp_hydra.layer_overrides import apply
from mp_hydra.precision import scoped_policy
from mp_hydra.probe import observe, observe_graph

if TYPE_CHECKING:
    from collections.abc import Callable

X = np.random.default_rng(0).normal(size=(8, 16)).astype("float32")
IDS = np.arange(8 * 16).reshape(8, 16).astype("int32")


def audited(build: Callable[..., Any], policy: str, x: Any = X, **settings: Any) -> list[Finding]:
    overrides, graph = settings.pop("overrides", {}), settings.pop("graph", False)
    settings = dict[str, Any](batch_size=8, device="CPU", peak_input=None) | settings
    settings["scaling"] = settings.get("scaling") or ("dynamic" if policy == "mixed_float16" else "none")
    early = build() if settings.pop("early", False) else None
    with scoped_policy(policy, tf32=False) as scope:
        model = early or build()
        if overrides:
            apply(model, overrides, scope)
        seen = observe_graph(model) if graph else observe(model, x)
        return findings(gather(model, x, seen, scope, **settings))


def net(
    *layers: Any, head: dict[str, Any] | None = None, shape: tuple[int, ...] = (16,), dtype: str | None = "float32"
) -> Any:
    import keras

    head = {"dtype": "float32"} if head is None else head
    x = y = keras.Input(shape, dtype=dtype)
    for layer in (*layers, keras.layers.Dense(8, name="head", **head)):
        y = layer(y)
    return keras.Model(x, y, name="net")


def clean() -> Any:
    import keras

    return net(keras.layers.Dense(16, activation="relu", name="body"), keras.layers.BatchNormalization(name="norm"))


def attentive() -> Any:
    import keras

    x = keras.Input((4, 16))
    y = keras.layers.MultiHeadAttention(2, 8, name="attention")(x, x)
    y = keras.layers.LayerNormalization(name="norm")(keras.layers.Add(name="add")([x, y]))
    y = keras.layers.GlobalAveragePooling1D(name="pool")(y)
    return keras.Model(x, keras.layers.Dense(8, dtype="float32", name="head")(y))


def wide(units: int = 12) -> Any:
    import keras

    return net(keras.layers.Dense(units, name="body"))


def embedded(dtype: str = "float32") -> Any:
    import keras

    first = keras.layers.Reshape((16,), name="first")  # casts floats to 16 bits; integers it leaves alone
    embedding = keras.layers.Embedding(256, 8, name="rows")
    return net(first, embedding, keras.layers.Flatten(name="flat"), shape=(16,), dtype=dtype)


def with_head(**settings: Any) -> Any:
    import keras

    return net(keras.layers.Dense(16, name="body"), head=settings)


def softmax_then_cast() -> Any:
    import keras

    x = keras.Input((16,))
    y = keras.layers.Dense(8, activation="softmax", name="head")(keras.layers.Dense(16, name="body")(x))
    return keras.Model(x, keras.layers.Activation("linear", dtype="float32", name="cast")(y))


def pretrained(dtype: str | None = "float32") -> Any:
    import keras

    part = keras.Sequential([keras.Input((16,)), keras.layers.Dense(16, dtype=dtype, name="old")], name="part")
    return net(part, keras.layers.Dense(64, name="body"))


def mostly_pinned(dtype: str | None = "float32") -> Any:
    import keras

    return net(keras.layers.Dense(256, dtype=dtype, name="large"), keras.layers.Dense(8, name="body"))


def other_policy(leave: bool = False) -> Any:
    import keras

    before = keras.config.dtype_policy()
    if not leave:
        keras.config.set_dtype_policy("float32")
    body = keras.layers.Dense(16, name="body")
    keras.config.set_dtype_policy(before)
    return net(body, keras.layers.Dense(64, name="more"))


def own(function: Callable[[Any], Any]) -> Callable[[], Any]:
    """A model with a layer of the user's own."""

    def build() -> Any:
        import keras

        class Own(keras.layers.Layer):
            def call(self, x: Any) -> Any:
                return function(x)

        return net(keras.layers.Dense(16, name="body"), Own(name="own"))

    return build


def exponential(x: Any) -> Any:
    import keras

    return keras.ops.exp(x)


def normalised(x: Any) -> Any:
    import keras

    return x / keras.ops.sqrt(keras.ops.sum(keras.ops.square(x), axis=-1, keepdims=True))


def masked(x: Any) -> Any:
    import keras

    return x + (1.0 - keras.ops.cast(x > 0, x.dtype)) * -1e9


def masked_well(x: Any) -> Any:
    import keras

    return keras.ops.where(x > 0, x, keras.ops.cast(-1e4, x.dtype))


def without_kernel() -> Any:
    import keras

    layers = [keras.layers.MaxPooling3D(2, name="own"), keras.layers.Flatten(name="flat")]
    return net(*layers, keras.layers.Dense(8, name="body"), shape=(4, 4, 4, 1))


def pooled(size: int = 16) -> Any:
    import keras

    layers = [keras.layers.AveragePooling2D(size, name="pool"), keras.layers.Flatten(name="flat")]
    return net(
        keras.layers.Reshape((16, 16, 1), name="shape"), *layers, keras.layers.Dense(8, name="body"), shape=(256,)
    )


def stock(name: str, **settings: Any) -> Callable[[], Any]:
    """A model with one layer of Keras' own."""

    def build() -> Any:
        import keras

        layer = getattr(keras.layers, name)(name="own", **settings)
        return net(keras.layers.Dense(16, name="body"), layer)

    return build


def untraceable() -> Any:
    import keras

    class Own(keras.layers.Layer):
        def call(self, x: Any) -> Any:
            return x * float(keras.ops.max(x))

    class Net(keras.Model):
        def __init__(self) -> None:
            super().__init__(name="net")
            self.own, self.head = Own(name="own"), keras.layers.Dense(8, dtype="float32", name="head")

        def call(self, x: Any) -> Any:
            return self.head(self.own(x))

    return Net()


@dataclass(frozen=True)
class Case:
    """A model with something wrong, and what removes it: another model, other settings, or overrides as the cure says."""

    code: str
    severity: str
    places: tuple[str, ...]
    build: Callable[..., Any]
    settings: dict[str, Any] = field(default_factory=dict)
    policy: str = "mixed_float16"
    x: Any = None
    cured: dict[str, Any] = field(default_factory=dict)
    words: str = ""


def pin(path: str) -> dict[str, Any]:
    return {"overrides": {path: "float32"}}


LOUD = np.concatenate([X, X * 1e6])
SIDE = np.ones((8, 256), "float32")
CASES = [
    Case("policy_too_late", "error", ("body", "norm", "head"), clean, {"early": True}, cured={"early": False}),
    Case("other_policy", "error", ("body",), other_policy, cured={"build": lambda: other_policy(leave=True)}),
    Case("pinned_part", "warning", ("part",), pretrained, cured={"build": lambda: pretrained(None)}),
    Case("pinned_part", "warning", ("part",), pretrained, cured={"pinned": [".*old"]}),
    Case("out_of_reach", "warning", ("large", "head"), mostly_pinned, cured={"build": lambda: mostly_pinned(None)}),
    Case("out_of_reach", "error", ("body", "norm", "head"), clean, pin(".*"), cured={"overrides": {}}, words="100 %"),
    Case("sixteen_bit_head", "error", ("head",), with_head, cured={"build": lambda: with_head(dtype="float32")}),
    Case("sixteen_bit_head", "error", ("head",), with_head, policy="mixed_bfloat16", cured=pin("head")),
    Case("head_activation", "error", ("head",), softmax_then_cast, cured=pin("head")),
    Case("rounded_ids", "error", ("rows",), embedded, x=IDS, cured={"build": lambda: embedded("int32")}, words="2048"),
    Case("rounded_ids", "error", ("rows",), embedded, policy="mixed_bfloat16", x=IDS,
         cured={"build": lambda: embedded("int32")}, words="256"),
    Case("input_overflow", "error", (), clean, x=LOUD, cured={"x": X}, words="dataset.scale="),
    Case("input_overflow", "error", (), clean, {"peak_input": 65520.0}, cured={"peak_input": 65519.0}),
    Case("scaler_missing", "warning", (), clean, {"scaling": "none"}, cured={"scaling": "dynamic"}),
    Case("scaler_without_purpose", "warning", (), clean, {"scaling": "dynamic"}, "mixed_bfloat16",
         cured={"scaling": "none"}),
    Case("risky_in_float16", "warning", ("own",), own(exponential), cured=pin("own"), words="own: float32"),
    Case("risky_in_float16", "warning", ("own",), own(normalised), cured=pin("own"), words="sum of squares"),
    Case("risky_in_float16", "warning", ("own",), stock("UnitNormalization"), cured=pin("own"), words="squares"),
    Case("risky_in_float16", "warning", ("own",), stock("Dense", units=8, activation="exponential"), cured=pin("own"),
         words="exp"),
    Case("risky_in_float16", "warning", ("pool",), pooled, x=SIDE, cured=pin("pool"), words="averages 256 values"),
    Case("infinite_constant", "warning", ("own",), own(masked), cured=pin("own"), words="inf"),
    Case("infinite_constant", "warning", ("own",), own(masked), cured={"build": own(masked_well)}),
    Case("no_kernel", "error", ("own",), without_kernel, {"graph": True}, x=np.ones((8, 4, 4, 4, 1), "float32"), cured=pin("own"),
         words="no float16 kernel of MaxPool3D for the CPU: the step fails"),
    Case("width_not_multiple", "note", ("body",), wide, cured={"build": lambda: wide(16)}, words="(12)"),
    Case("batch_not_multiple", "note", (), clean, {"batch_size": 30}, cured={"batch_size": 32}, words="batch_size=32"),
    Case("not_traced", "note", (), untraceable, cured={"build": clean}),
]  # fmt: skip


@pytest.mark.parametrize(
    "case", CASES, ids=lambda case: f"{case.code}-{case.policy}-{getattr(case.build, '__name__', '')}"
)
def test_it_is_found_at_its_place_and_its_cure_removes_it(case: Case) -> None:
    x = X if case.x is None else case.x
    found = audited(case.build, case.policy, x, **case.settings)
    named = [f for f in found if f.code == case.code]
    assert [(f.severity, f.places) for f in named] == [(Severity(case.severity), case.places)]
    assert case.words in named[0].line()
    cured: dict[str, Any] = {"build": case.build, "x": x} | case.settings | case.cured
    after = audited(cured.pop("build"), case.policy, cured.pop("x"), **cured)
    assert case.code not in {f.code for f in after}


@pytest.mark.parametrize("policy", ["float32", "mixed_float16", "mixed_bfloat16"])
@pytest.mark.parametrize(
    ("build", "x"), [(clean, X), (attentive, np.ones((8, 4, 16), "float32"))], ids=["dense", "attention"]
)
def test_a_clean_model_gives_no_finding(build: Any, x: Any, policy: str) -> None:
    assert audited(build, policy, x) == []


def test_a_float32_model_is_not_asked_for_multiples_of_eight() -> None:
    assert audited(wide, "float32", batch_size=3) == []


def test_under_a_gpu_what_lacks_a_kernel_there_falls_back_to_the_cpu() -> None:
    import tensorflow as tf

    from mp_hydra.audit.kernels import FALLS_BACK, missing
    from mp_hydra.audit.operations import Kernel

    if not tf.sysconfig.get_build_info()["is_cuda_build"]:
        pytest.skip("this TensorFlow knows no GPU kernels")
    lrn = Kernel("LRN", (("T", "float16"),))
    assert missing(lrn, "GPU") == FALLS_BACK
    assert missing(lrn, "CPU") is None
    assert missing(Kernel("MatMul", (("T", "bfloat16"),)), "GPU") is None
    assert missing(Kernel("NoSuchOperation", ()), "GPU") is None
