"""What an attention is said to cost, against what PyTorch counts."""

import math
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers import MHLAConfig
from mhla_diffusers.attention import BlockLists, initial_mixing, mhla_attention
from mhla_diffusers.attention.costs import AttentionSizes

GRID, SIZE, BLOCKS, HEADS, DIM = (16, 16), 64, (2, 2), 2, 16


def counted(extra, sparse, **options):
    """FLOPs of a forward over 256 tokens of the grid, in blocks of 64, and extra tokens."""
    query, key, value = torch.empty(3, 1, 256 + extra, HEADS, DIM, device="meta")
    mixing = initial_mixing(BLOCKS).to("meta")
    if sparse is not None:  # on the meta device, since PyTorch does not count its attention on a CPU
        sparse = replace(sparse, keys=sparse.keys.to("meta"))
    given = {"sparse": sparse, "extra": (0, extra), **options}
    with FlopCounterMode(display=False) as counter:
        mhla_attention(query, key, value, mixing, GRID, BLOCKS, **given)
    return counter.get_total_flops()


@pytest.mark.parametrize("extra", [0, 64, 128])
def test_lists_and_whole_blocks_of_extra_tokens(extra):
    lists = BlockLists.from_mask(SIZE, torch.eye(4, dtype=torch.bool).expand(HEADS, -1, -1))
    sizes = AttentionSizes(256, HEADS, DIM, extra=extra).with_sparse(4, 0.25, pooled=False)
    assert counted(extra, lists) == sizes.listed_flops == 4 * DIM * sizes.listed_pairs
    assert sizes.listed_pairs == HEADS * (256 * 64 + 2 * 256 * extra + extra**2)


def test_extra_tokens_alone():
    """MHLA beside them is as without them."""
    sizes = AttentionSizes(256, HEADS, DIM, 4, extra=64)
    assert counted(64, None) - counted(0, None) == sizes.listed_flops
    assert sizes.flops == sizes.linear_flops + sizes.listed_flops
    assert sizes.linear_flops == AttentionSizes(256, HEADS, DIM, 4).flops


def test_all_pairs_listed_is_what_softmax_attention_costs():
    sizes = AttentionSizes(256, HEADS, DIM, extra=33).with_sparse(4, 1.0, pooled=True)
    query = torch.empty(1, HEADS, 289, DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert sizes.flops == sizes.softmax_flops == counter.get_total_flops()
    assert sizes.listed_pairs == sizes.pairs


@pytest.mark.parametrize("sparse", ["none", "own"])
@pytest.mark.parametrize("causal", ["token", "block"])
def test_causal_attention_counts_the_pairs_that_a_query_sees(causal, sparse):
    """Of a sequence that ends inside its third block: by hand from which token sees which.

    Softmax attention in its place sees all of a video, and of a text what is earlier.
    """
    blocks, grid = ((4,), (20,)) if causal == "token" else ((4, 1), (20, 3))
    config = MHLAConfig(blocks=blocks, causal=causal, block_length=8, sparse=sparse)
    frame = torch.arange(math.prod(grid)) // (8 * math.prod(grid[1:]))
    place = torch.arange(math.prod(grid)) if causal == "token" else frame
    seen, own = place[:, None] >= place, frame[:, None] == frame
    everything = HEADS * math.prod(grid) ** 2
    pairs = HEADS * int(seen.sum()) if causal == "token" else everything
    sizes = config.sizes_on(grid, HEADS, DIM, in_order=causal == "token")
    in_own = HEADS * int((seen & own).sum())
    assert sizes.pairs == pairs
    assert sizes.weight_bytes == 4 * pairs
    assert sizes.listed_pairs == (in_own if sparse == "own" else 0)
    assert sizes.softmax_flops == 4 * DIM * sizes.pairs
    one_by_one = in_own if causal == "token" or sparse == "own" else 0
    assert sizes.flops == sizes.linear_flops + 4 * DIM * one_by_one
