"""What an attention is said to cost, against what PyTorch counts."""

import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers import CausalConfig, SparseConfig
from mhla_diffusers.attention import SparseCall, attend
from mhla_diffusers.attention.costs import AttentionSizes

from ..refusals import refused

GRID, HEADS, DIM = (16, 16), 2, 16


def test_what_is_read_from_states_costs_states_mixing_and_reading():
    """Against attention through means alone, on a grid that blocks and stretches divide."""
    flops, sizes = {}, {}
    for far in ("second-order", "means"):
        config = SparseConfig(density=0.3, block_size=16, key_block_size=4, order="curve", far=far)
        query, key, value = torch.empty(3, 1, 256, HEADS, DIM, device="meta")
        weights = {"pooled_bias": torch.empty(HEADS, device="meta")}
        weights |= {"state_weight": torch.empty(HEADS, device="meta")} if far == "second-order" else {}
        call = SparseCall(query=query, key=key, value=value, grid=GRID, sparse=config.rule_on(GRID), far=far, **weights)
        with FlopCounterMode(display=False) as counter:
            attend(call)
        flops[far], sizes[far] = counter.get_total_flops(), config.sizes_on(GRID, HEADS, DIM)
    own = sizes["second-order"]
    assert (own.blocks, own.mixtures, own.pooled_keys) == (64, 16, 64)
    assert flops["second-order"] - flops["means"] == own.linear_flops == own.flops - sizes["means"].flops


def test_all_pairs_listed_is_what_softmax_attention_costs():
    sizes = AttentionSizes.of_sparse(256, HEADS, DIM, 4, 4, 1, 1.0, extra=33)
    query = torch.empty(1, HEADS, 289, DIM, device="meta")
    with FlopCounterMode(display=False) as counter:
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
    assert sizes.flops == sizes.softmax_flops == counter.get_total_flops()
    assert sizes.listed_pairs == sizes.pairs


@pytest.mark.parametrize("own", ["softmax", "linear"])
@pytest.mark.parametrize("causal", ["token", "block"])
def test_causal_attention_counts_the_pairs_that_a_query_sees(causal, own):
    """Count three blocks by hand, from which token sees which; a text ends inside its third, a video cannot."""
    blocks, grid = ((4,), (20,)) if causal == "token" else ((4, 1), (24, 3))
    config = CausalConfig(blocks=blocks, causal=causal, block_length=8, own=own)
    frame = torch.arange(math.prod(grid)) // (8 * math.prod(grid[1:]))
    place = torch.arange(math.prod(grid)) if causal == "token" else frame
    seen, in_block = place[:, None] >= place, frame[:, None] == frame
    pairs = HEADS * math.prod(grid) ** 2
    sizes = config.sizes_on(grid, HEADS, DIM)
    if causal == "block":
        with refused("blocks of 8", 20):
            config.sizes_on((20, 3), HEADS, DIM)
    in_own = HEADS * int((seen & in_block).sum())
    assert sizes.pairs == pairs
    assert sizes.listed_pairs == (in_own if own == "softmax" else 0)
    assert sizes.softmax_flops == 4 * DIM * sizes.pairs
    one_by_one = in_own if causal == "token" or own == "softmax" else 0
    assert sizes.flops == sizes.linear_flops + 4 * DIM * one_by_one
