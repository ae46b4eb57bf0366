"""What an attention is said to cost, against what PyTorch counts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers import MHLAConfig
from mhla_diffusers.attention import BlockLists, initial_mixing, mhla_attention
from mhla_diffusers.attention.costs import AttentionSizes
from mhla_diffusers.patching.costs import attention_sizes

GRID, COUNTS, BLOCKS, HEADS, DIM = (16, 16), (2, 2), (2, 2), 2, 16


def counted(extra, exact, **options):
    """FLOPs of a forward over 256 tokens of the grid, in tiles of 64, and some outside."""
    query, key, value = torch.randn(3, 1, 256 + extra, HEADS, DIM)
    given = {"exact": exact, "extra": (0, extra), **options}
    with FlopCounterMode(display=False) as counter:
        mhla_attention(query, key, value, initial_mixing(BLOCKS), GRID, BLOCKS, **given)
    return counter.get_total_flops()


@pytest.mark.parametrize("extra", [0, 64, 128])
def test_exact_tiles_and_whole_tiles_of_tokens_outside(extra):
    tiles = BlockLists.from_mask(COUNTS, torch.eye(4, dtype=torch.bool).expand(HEADS, -1, -1))
    sizes = AttentionSizes(256, HEADS, DIM, extra=extra).with_exact_tiles(4, 0.25, pooled=False)
    assert counted(extra, tiles) == sizes.listed_flops == 4 * DIM * sizes.exact_pairs
    assert sizes.exact_pairs == HEADS * (256 * 64 + 2 * 256 * extra + extra**2)


@pytest.mark.parametrize("extra", [64, 60])
def test_tokens_outside_alone(extra):
    """MHLA beside them is as without them; 60 tokens are padded to a tile of 64."""
    sizes = AttentionSizes(256, HEADS, DIM, 4, extra=extra)
    padded = AttentionSizes(256, HEADS, DIM, 4, extra=64)
    assert counted(extra, None) - counted(0, None) == padded.listed_flops
    assert sizes.flops == sizes.linear_flops + sizes.listed_flops
    assert sizes.linear_flops == AttentionSizes(256, HEADS, DIM, 4).flops


def test_all_exact_is_what_softmax_attention_costs():
    sizes = AttentionSizes(256, HEADS, DIM, extra=33).with_exact_tiles(4, 1.0, pooled=True)
    query = torch.empty(1, HEADS, 289, DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert sizes.flops == sizes.softmax_flops == counter.get_total_flops()
    assert sizes.exact_pairs == sizes.pairs


@pytest.mark.parametrize("exact", ["none", "own"])
@pytest.mark.parametrize("causal", ["token", "block"])
def test_causal_attention_counts_the_pairs_that_a_query_sees(causal, exact):
    """Of a sequence that ends inside its third block: by hand from which token sees which.

    Softmax attention in its place sees all of a video, and of a text what is earlier.
    """
    blocks, grid = ((4,), (20,)) if causal == "token" else ((4, 1), (20, 3))
    config = MHLAConfig(blocks=blocks, causal=causal, block_length=8, sparse=exact)
    frame = torch.arange(math.prod(grid)) // (8 * math.prod(grid[1:]))
    place = torch.arange(math.prod(grid)) if causal == "token" else frame
    seen, own = place[:, None] >= place, frame[:, None] == frame
    everything = HEADS * math.prod(grid) ** 2
    pairs = HEADS * int(seen.sum()) if causal == "token" else everything
    sizes = attention_sizes(config, grid, HEADS, DIM, in_order=causal == "token")
    in_own = HEADS * int((seen & own).sum())
    assert sizes.pairs == pairs
    assert sizes.weight_bytes == 4 * pairs
    assert sizes.exact_pairs == (in_own if exact == "own" else 0)
    assert sizes.softmax_flops == 4 * DIM * sizes.pairs
    one_by_one = in_own if causal == "token" or exact == "own" else 0
    assert sizes.flops == sizes.linear_flops + 4 * DIM * one_by_one
