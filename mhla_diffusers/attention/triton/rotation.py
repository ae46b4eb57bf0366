"""RoPE of queries or keys as a kernel of its own, for the exact tiles, which read every key many times."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import torch
import triton
import triton.language as tl

from ..blocks import Shape
from .arguments import Angles, Source, Tile, layout, like, rows
from .features import load_angles
from .launches import Launch
from .tile import load_rows, plain_layout, rotate, store_rows, tokens_in
from .tilings import Place
from .tuning import architecture_of, power_of_two, tiling

_ANY_LENGTH = 1024
"""Tokens stand in one row here, so no block bounds a tile."""


@triton.jit
def rotate_kernel(
    query,
    angles,
    rotated,
    layout,
    BACKWARDS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    """Some tokens of one head of queries or keys."""
    layout = plain_layout(layout)
    tiles = tl.cdiv(tokens_in(layout), BLOCK_T)
    rest = tl.program_id(0)
    head = (rest % layout.heads).to(tl.int64)
    rest = rest // layout.heads
    tokens = rest % tiles * BLOCK_T + tl.arange(0, BLOCK_T)
    tile = Tile(rest // tiles, head, tokens, tokens < tokens_in(layout))
    channels = tl.arange(0, BLOCK_D)
    table = load_angles(Source(query, angles, layout, 0.0), tile, channels, HEAD_DIM)
    values = rotate(load_rows(query, tile, channels, HEAD_DIM), table, BACKWARDS)
    store_rows(rotated, values, tile, channels, layout, HEAD_DIM)


def rotate_launch(
    x: torch.Tensor, angles: Angles | None, grid: Shape, backwards: bool, architecture: str | None = None
) -> tuple[Launch, torch.Tensor]:
    """``x`` (B, N, H, D) turned by its angles, or back by them, in float32, and rounded to its type."""
    batch, tokens, heads, head_dim = x.shape
    place = Place(architecture or architecture_of(x.device), "rotate", head_dim, x.dtype, _ANY_LENGTH)
    tiles = tiling(place)
    turned = like(x)
    arguments = {
        "query": rows(x),
        "angles": angles,
        "rotated": turned,
        "layout": layout(heads, grid, (1,) * len(grid), 1, tokens),
    }
    constants = {
        "BACKWARDS": backwards,
        "HEAD_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_T": tiles.tokens,
    }
    programs = batch * heads * -(-tokens // tiles.tokens)
    return Launch(rotate_kernel, programs, arguments, constants, place, tiles), turned
