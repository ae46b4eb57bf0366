"""What an attention is said to cost, against what PyTorch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers.attention import ExactTiles, initial_mixing, mhla_attention
from mhla_diffusers.attention.costs import AttentionSizes

GRID, COUNTS, BLOCKS, HEADS, DIM = (16, 16), (2, 2), (2, 2), 2, 16


def counted(outside, exact, **options):
    """FLOPs of a forward over 256 tokens of the grid, in tiles of 64, and some outside."""
    query, key, value = torch.randn(3, 1, 256 + outside, HEADS, DIM)
    given = {"exact": exact, "outside": (0, outside), **options}
    with FlopCounterMode(display=False) as counter:
        mhla_attention(query, key, value, initial_mixing(BLOCKS), GRID, BLOCKS, **given)
    return counter.get_total_flops()


@pytest.mark.parametrize("outside", [0, 64, 128])
def test_exact_tiles_and_whole_tiles_of_tokens_outside(outside):
    tiles = ExactTiles.from_mask(COUNTS, torch.eye(4, dtype=torch.bool).expand(HEADS, -1, -1))
    sizes = AttentionSizes(256, HEADS, DIM, outside=outside).with_exact_tiles(4, 0.25, tile_means=False)
    assert counted(outside, tiles) == sizes.listed_flops == 4 * DIM * sizes.exact_pairs
    assert sizes.exact_pairs == HEADS * (256 * 64 + 2 * 256 * outside + outside**2)


@pytest.mark.parametrize("outside", [64, 60])
def test_tokens_outside_alone(outside):
    """MHLA beside them is as without them; 60 tokens are padded to a tile of 64."""
    sizes = AttentionSizes(256, HEADS, DIM, 4, outside=outside)
    padded = AttentionSizes(256, HEADS, DIM, 4, outside=64)
    assert counted(outside, None) - counted(0, None) == padded.listed_flops
    assert sizes.flops == sizes.linear_flops + sizes.listed_flops
    assert sizes.linear_flops == AttentionSizes(256, HEADS, DIM, 4).flops


def test_all_exact_is_what_softmax_attention_costs():
    sizes = AttentionSizes(256, HEADS, DIM, outside=33).with_exact_tiles(4, 1.0, tile_means=True)
    query = torch.empty(1, HEADS, 289, DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert sizes.flops == sizes.softmax_flops == counter.get_total_flops()
    assert sizes.exact_pairs == sizes.pairs
