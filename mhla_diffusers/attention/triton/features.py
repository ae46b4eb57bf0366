"""Feature maps and RoPE of a tile of query or key tokens, and their gradients."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from .tile import load_rows, plain, rotate


@triton.jit
def load_angles(source, tile, channels, HEAD_DIM: tl.constexpr):
    """The RoPE table of a tile, float32 (tokens, channels)."""
    angles, layout = source.angles, source.layout
    token = tile.tokens.to(tl.int32)[:, None]
    of_first = token // (layout.grid_1 * layout.grid_2) * HEAD_DIM
    of_second = (layout.grid_0 + token // layout.grid_2 % layout.grid_1) * HEAD_DIM
    of_third = (plain(angles.third_start) + token % plain(angles.third_size)) * HEAD_DIM
    row = tl.where(channels[None, :] < angles.second_end, of_second, of_third)
    row = tl.where(channels[None, :] < angles.first_end, of_first, row)
    start = angles.rows.pointer + tile.batch * angles.rows.batch_stride
    exists = tile.exists[:, None] & (channels < HEAD_DIM)[None, :]
    return tl.load(start + row + channels[None, :], mask=exists, other=0.0)


@triton.jit
def load_input(source, tile, channels, HEAD_DIM: tl.constexpr, FEATURE_MAP: tl.constexpr, ROPE_BEFORE: tl.constexpr):
    """Query or key, after RoPE if ROPE_BEFORE: what the feature map is applied to. float32 (tokens, channels)."""
    values = load_rows(source.rows, tile, channels, HEAD_DIM)
    if source.angles is not None and ROPE_BEFORE:
        values = rotate(values, load_angles(source, tile, channels, HEAD_DIM), False)
    if FEATURE_MAP == "softmax":  # a channel that is not there has no exponential: 0 may lie far above the maximum
        values = tl.where((channels < HEAD_DIM)[None, :], values, float("-inf"))
    return values


@triton.jit
def softmax_scale(
    source, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, FEATURE_MAP: tl.constexpr, ROPE_BEFORE: tl.constexpr
):
    """Maximum and sum of exponentials of each token's channels; other maps than softmax do not use them."""
    if FEATURE_MAP == "softmax":
        channels = tl.arange(0, BLOCK_D)
        values = load_input(source, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
        maximum = tl.max(values, axis=1)
        return maximum, tl.sum(tl.exp(values - maximum[:, None]), axis=1)
    else:
        unused = tl.zeros(tile.tokens.shape, tl.float32)
        return unused, unused


@triton.jit
def _map(values, scale, eps, FEATURE_MAP: tl.constexpr):
    if FEATURE_MAP == "relu":
        return tl.where(values < 0, 0.0, values) + eps
    elif FEATURE_MAP == "elu+1":
        return tl.where(values > 0, values + 1, tl.exp(values)) + eps
    elif FEATURE_MAP == "softmax":
        return tl.exp(values - scale[0][:, None]) / scale[1][:, None]
    else:
        return values


@triton.jit
def _map_gradient(values, scale, gradient, row_product, FEATURE_MAP: tl.constexpr):
    if FEATURE_MAP == "relu":
        return tl.where(values < 0, 0.0, gradient)
    elif FEATURE_MAP == "elu+1":
        return tl.where(values > 0, gradient, gradient * tl.exp(values))
    elif FEATURE_MAP == "softmax":
        return _map(values, scale, 0.0, FEATURE_MAP) * (gradient - row_product[:, None])
    else:
        return gradient


@triton.jit
def load_features(
    source,
    scale,
    tile,
    channels,
    HEAD_DIM: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
):
    """Features of a tile for the numerator and for the normaliser: twice float32 (tokens, channels)."""
    unrotated = _map(
        load_input(source, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE), scale, source.eps, FEATURE_MAP
    )
    rotated = unrotated
    if source.angles is not None and not ROPE_BEFORE:
        rotated = rotate(unrotated, load_angles(source, tile, channels, HEAD_DIM), False)
    return rotated, unrotated


@triton.jit
def input_gradient(
    source,
    scale,
    rotated_gradient,
    plain_gradient,
    row_product,
    tile,
    channels,
    HEAD_DIM: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
):
    """Gradient of a tile of query or key: float32 (tokens, channels).

    Args:
        rotated_gradient: gradient of the numerator's features, (tokens, channels).
        plain_gradient: gradient of the normaliser's features, (tokens, channels).
        row_product: Σ features × gradient over all D channels, (tokens,); the softmax map needs it.
    """
    values = load_input(source, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
    if source.angles is None:
        gradient = rotated_gradient + plain_gradient
        return _map_gradient(values, scale, gradient, row_product, FEATURE_MAP)
    else:
        table = load_angles(source, tile, channels, HEAD_DIM)
        if ROPE_BEFORE:
            gradient = rotated_gradient + plain_gradient
            return rotate(_map_gradient(values, scale, gradient, row_product, FEATURE_MAP), table, True)
        else:
            gradient = rotate(rotated_gradient, table, True) + plain_gradient
            return _map_gradient(values, scale, gradient, row_product, FEATURE_MAP)
