"""The audit of a lean model: what layers compute is Keras' own, what they keep is what the training will keep."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import keras
import numpy as np
import pytest

from mp_hydra.audit.facts import reach
from mp_hydra.audit.findings import findings
from mp_hydra.audit.gathering import gather
from mp_hydra.audit.report import Audit
from mp_hydra.memory_mode import apply
from mp_hydra.precision import scoped_policy
from mp_hydra.probe import observe

if TYPE_CHECKING:
    from collections.abc import Iterator

    from mp_hydra.audit.facts import Model
    from mp_hydra.precision import Scope

SIDE, CHANNELS, BATCH = 4, 8, 16
ELEMENTS = SIDE * SIDE * CHANNELS * BATCH


@pytest.fixture
def scope() -> Iterator[Scope]:
    with scoped_policy("mixed_bfloat16", tf32=True) as found:
        yield found


def gathered(model: Any, scope: Scope, mode: str, recompute: Any = None) -> Model:
    config = {"memory": {"mode": mode, "recompute": recompute}, "precision": {"policy": "mixed_bfloat16"}}
    x = np.ones((2, SIDE, SIDE, CHANNELS), "float32")
    seen = observe(model, x)
    memory = apply(model, config)
    return gather(model, x, seen, scope, batch_size=BATCH, device="CPU", scaling="none", peak_input=1.0, memory=memory)


def normalised(**settings: Any) -> Any:
    inputs = keras.Input((SIDE, SIDE, CHANNELS))
    x = keras.layers.Conv2D(CHANNELS, 1, name="conv")(inputs)
    x = keras.layers.BatchNormalization(name="norm", **settings)(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    return keras.Model(inputs, keras.layers.Dense(2, dtype="float32", name="head")(x))


def kept(model: Model, path: str) -> tuple[int, int | None, int]:
    (found,) = (layer.traced for layer in model.layers if layer.path == path and layer.traced)
    return found.kept_bytes, found.kept_bytes_stock, found.kept_bytes_float32


def test_lean_norm_keeps_nothing_but_its_16_bit_input_and_the_audit_says_what_stock_keras_would_keep(
    scope: Scope,
) -> None:
    stock, lean = (gathered(normalised(), scope, mode) for mode in ("stock", "lean"))
    statistics = 8 * CHANNELS * 4  # some vectors in float32
    inputs = 2 * 2 * ELEMENTS  # those of the convolution and of the normalisation, 16 bits each
    both = ("conv", "norm")
    kept_stock = sum(kept(stock, name)[0] for name in both)
    kept_lean = sum(kept(lean, name)[0] for name in both)
    assert kept_stock >= 2 * ELEMENTS + 4 * ELEMENTS  # a float32 copy
    assert inputs <= kept_lean <= inputs + statistics
    assert sum(kept(lean, name)[1] or 0 for name in both) == kept_stock
    assert kept(stock, "norm")[1] is None
    extent, plain = reach(lean), reach(stock)
    assert extent is not None
    assert plain is not None
    assert (extent.kept_bytes_stock, extent.kept_bytes_float32) == (plain.kept_bytes, plain.kept_bytes_float32)
    assert "; stock Keras would keep " in Audit.of(lean).summary()
    assert "stock Keras" not in Audit.of(stock).summary()


def test_what_a_lean_layer_computes_in_is_told_as_before(scope: Scope) -> None:
    stock, lean = (gathered(normalised(), scope, mode) for mode in ("stock", "lean"))
    assert [layer.computes_in for layer in lean.layers] == [layer.computes_in for layer in stock.layers]
    assert "norm" in [layer.path for layer in lean.layers if layer.inside == "float32"]


def test_recomputed_layers_keep_what_others_use_of_them_and_the_price_is_told(scope: Scope) -> None:
    inputs = keras.Input((SIDE, SIDE, CHANNELS))
    x = inputs
    for block in range(3):
        x = keras.layers.Conv2D(CHANNELS, 1, use_bias=False, name=f"conv_{block}")(x)
        x = keras.layers.BatchNormalization(name=f"norm_{block}")(x)
        x = keras.layers.Activation("relu", name=f"relu_{block}")(x)
    x = keras.layers.GlobalAveragePooling2D(name="pool")(x)
    deep = keras.Model(inputs, keras.layers.Dense(2, dtype="float32", name="head")(x))
    lean = gathered(deep, scope, "lean")
    again = gathered(keras.models.clone_model(deep), scope, "recompute", "block")
    assert again.recomputed is not None
    assert again.recomputed.segments >= 1
    assert again.recomputed.flops is not None
    # Each convolution has the same share: three of them are all but the head.
    convolutions = 3 * SIDE * SIDE * CHANNELS * CHANNELS
    share = convolutions / (convolutions + 2 * CHANNELS)
    assert any(again.recomputed.flops == pytest.approx(count * share / 3) for count in (1, 2, 3))
    assert again.recomputed.price == again.recomputed.flops / 3
    assert reach(again).kept_bytes < reach(lean).kept_bytes  # type: ignore[union-attr]
    (note,) = [found for found in findings(again) if found.code == "recomputes"]
    assert f"{again.recomputed.flops:.0%} of the forward pass" in note.reason
    assert "recomputes" not in [found.code for found in findings(lean)]


def test_layer_that_stays_stock_is_a_note_with_the_reason_and_a_clean_model_has_none(scope: Scope) -> None:
    codes = [found.code for found in findings(gathered(normalised(), scope, "lean"))]
    assert "stays_stock" not in codes
    odd = gathered(normalised(synchronized=True), scope, "lean")
    notes = [found for found in findings(odd) if found.code == "stays_stock"]
    assert [note.places for note in notes] == [("norm",)]
    assert "synchronized=True" in notes[0].reason
    assert notes[0].severity.value == "note"
