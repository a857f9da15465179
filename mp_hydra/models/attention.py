"""Transformer encoders: `vit` on images, `transformer` on token ids."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from mp_hydra.errors import ConfigError, ModelError
from mp_hydra.models._parts import check_above_zero, check_dropout, check_positive, dropped, image_shape, logits

if TYPE_CHECKING:
    from collections.abc import Sequence

    import keras

_GRID = 8  # patches a side that `patch=null` aims at
_GRID_LIMITS = (4, 32)
_EPSILON = 1e-6
_POSITION_STDDEV = 0.02


def vit(
    input_shape: Sequence[int],
    outputs: int,
    *,
    patch: int | None = None,
    width: int = 64,
    depth: int = 4,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
) -> keras.Model:
    """The vision transformer of Dosovitskiy et al. 2021 (arXiv:2010.11929), mean pooling in place of a class token.

    Args:
        input_shape: (height, width, channels).
        outputs: classes, or regression targets.
        patch: side of the square patches in pixels, a divisor of height and width; None: see `default_patch`.
        width: features of each patch, a multiple of `heads`.
        depth: encoder blocks.
        heads: attention heads.
        mlp_ratio: hidden units of a block's perceptron, as a multiple of `width`.
        dropout: share dropped from the embedding and from what each block adds.

    Returns:
        float32 (batch, height, width, channels) -> float32 logits (batch, outputs).

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the inputs are not images, or the patches do not tile them.
    """
    import keras

    height, across, channels = image_shape(input_shape, "vit")
    if patch is None:
        patch = default_patch(height, across)
    check_positive(patch=patch)
    if height % patch or across % patch:
        raise ModelError(
            f"model.patch={patch}: patches of {patch}x{patch} do not tile images of {height}x{across}; "
            f"give a divisor of {math.gcd(height, across)}, or model.patch=null to have one chosen"
        )
    rows, columns = height // patch, across // patch
    inputs = keras.Input((height, across, channels), dtype="float32", name="images")
    x = keras.layers.Reshape((rows, patch, columns, patch, channels), name="patches")(inputs)
    # One layer is the paper's patch projection (its kernel) and learned position embedding (its bias, per position).
    embedding = keras.layers.EinsumDense(
        "bhpwqc,pqcd->bhwd",
        output_shape=(rows, columns, width),
        bias_axes="hwd",
        bias_initializer=keras.initializers.RandomNormal(stddev=_POSITION_STDDEV),
        name="patch_embedding",
    )
    _check_encoder(width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, dropout=dropout)
    x = keras.layers.Reshape((rows * columns, width), name="sequence")(embedding(x))
    x = _encoder(x, width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, dropout=dropout)
    return keras.Model(inputs, logits(x, outputs), name="vit")


def transformer(
    input_shape: Sequence[int],
    outputs: int,
    vocabulary: int,
    *,
    width: int = 64,
    depth: int = 2,
    heads: int = 4,
    mlp_ratio: float = 4.0,
    dropout: float = 0.0,
) -> keras.Model:
    """A transformer encoder on token ids (Vaswani et al. 2017, arXiv:1706.03762).

    Pre-norm blocks, learned positions, the mean over all positions.

    Args:
        input_shape: (length,) of the sequences; every position counts, there is no padding id.
        outputs: classes, or regression targets.
        vocabulary: number of token ids, which run from 0 to `vocabulary` - 1.
        width: features of each token, a multiple of `heads`.
        depth: encoder blocks.
        heads: attention heads.
        mlp_ratio: hidden units of a block's perceptron, as a multiple of `width`.
        dropout: share dropped from the embedding and from what each block adds.

    Returns:
        int32 (batch, length) -> float32 logits (batch, outputs).

    Raises:
        ConfigError: an argument is out of range.
        ModelError: the inputs are not sequences of one known length.
    """
    import keras

    shape = tuple(input_shape)
    if len(shape) != 1 or shape[0] is None:
        raise ModelError(
            f"model=transformer needs token sequences of shape (length,), but the inputs have shape {shape}: "
            "choose a dataset of token sequences, or another model"
        )
    check_positive(vocabulary=vocabulary)
    _check_encoder(width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, dropout=dropout)
    # int32 all the way: a float Input rounds ids above 256 (bfloat16) or 2048 (float16) to their neighbours.
    inputs = keras.Input(shape, dtype="int32", name="tokens")
    positions = keras.ops.cumsum(keras.ops.ones_like(inputs), axis=1) - 1
    x = keras.layers.Add(name="embedding")(
        [
            keras.layers.Embedding(vocabulary, width, name="token_embedding")(inputs),
            keras.layers.Embedding(shape[0], width, name="position_embedding")(positions),
        ]
    )
    x = _encoder(x, width=width, depth=depth, heads=heads, mlp_ratio=mlp_ratio, dropout=dropout)
    return keras.Model(inputs, logits(x, outputs), name="transformer")


def default_patch(height: int, width: int) -> int:
    """The patch side that tiles an image with a grid whose shorter side is as near to 8 patches as it gets, by ratio.

    Raises:
        ModelError: no divisor gives from 4 to 32 patches a side.

    >>> [default_patch(side, side) for side in (8, 28, 32, 96, 224)]
    [1, 4, 4, 12, 28]
    """
    shorter, longer = sorted((height, width))
    least, most = min(_GRID_LIMITS[0], shorter), _GRID_LIMITS[1]
    common = math.gcd(height, width)
    divisors = [side for side in range(1, common + 1) if common % side == 0]
    fitting = [side for side in divisors if shorter // side >= least and longer // side <= most]
    if not fitting:
        raise ModelError(
            f"model.patch=null: no patch tiles images of {height}x{width} with {_GRID_LIMITS[0]} to {most} patches "
            "a side; give model.patch, or images of another size"
        )
    return min(fitting, key=lambda side: (abs(math.log(shorter / side / _GRID)), -side))


def _check_encoder(*, width: int, depth: int, heads: int, mlp_ratio: float, dropout: float) -> None:
    check_positive(width=width, depth=depth, heads=heads)
    check_above_zero(mlp_ratio=mlp_ratio)
    check_dropout(dropout)
    if width % heads:
        raise ConfigError("model.heads", heads, f"give a divisor of model.width={width}")


def _encoder(x: Any, *, width: int, depth: int, heads: int, mlp_ratio: float, dropout: float) -> Any:
    """(batch, tokens, width) to (batch, width): pre-norm blocks, a last normalisation, the mean over the tokens."""
    import keras

    x = dropped(x, dropout, "embedding_dropout")
    for number in range(1, depth + 1):
        x = _block(x, width=width, heads=heads, mlp_ratio=mlp_ratio, dropout=dropout, name=f"block_{number}")
    x = keras.layers.LayerNormalization(epsilon=_EPSILON, name="norm")(x)
    return keras.layers.GlobalAveragePooling1D(name="pool")(x)


def _block(x: Any, *, width: int, heads: int, mlp_ratio: float, dropout: float, name: str) -> Any:
    import keras

    y = keras.layers.LayerNormalization(epsilon=_EPSILON, name=f"{name}_attention_norm")(x)
    y = keras.layers.MultiHeadAttention(heads, width // heads, name=f"{name}_attention")(y, y)
    y = dropped(y, dropout, f"{name}_attention_dropout")
    x = keras.layers.Add(name=f"{name}_attention_add")([x, y])
    y = keras.layers.LayerNormalization(epsilon=_EPSILON, name=f"{name}_mlp_norm")(x)
    y = keras.layers.Dense(max(1, round(width * mlp_ratio)), activation="gelu", name=f"{name}_mlp_1")(y)
    y = keras.layers.Dense(width, name=f"{name}_mlp_2")(y)
    y = dropped(y, dropout, f"{name}_mlp_dropout")
    return keras.layers.Add(name=f"{name}_mlp_add")([x, y])
