"""What a calibration and an audit measure, against attention written out."""

import math
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.attention import BlockLists, Call, ContentRule, initial_mixing, mhla_attention
from mhla_diffusers.attention.calibrate import candidate_errors, tokens_along, weight_held
from mhla_diffusers.attention.layout import block_count, layout_of
from mhla_diffusers.attention.sparse import key_block_of_tokens, with_lists

GRIDS = [(8, 6), (7, 5), (3, 5, 4)]
BLOCK, HEADS, DIM = 4, 2, 8
RULES = {"content": ContentRule(BLOCK, 0.3, key_block_size=2), "curve": ContentRule(BLOCK, 0.3, order="curve")}


def call_of(grid, mask=False, extra=(0, 0)):
    """A call, and query, key, value and mask of its whole sequence."""
    make = torch.Generator().manual_seed(0)
    count = math.prod(grid) + sum(extra)
    whole = [torch.randn(2, count, HEADS, DIM, generator=make) for _ in range(3)]
    key_mask = torch.rand(2, count, generator=make) > 0.2 if mask else None
    blocks = (2,) * len(grid)
    return Call(*whole, initial_mixing(blocks), grid, blocks, key_mask=key_mask, extra=extra), whole, key_mask


def of_grid(x, extra):
    return x[:, extra[0] : x.shape[1] - extra[1]]


def softmax_of(whole, key_mask):
    """Weights (B, H, N, N) of all tokens."""
    query, key, _ = (x.transpose(1, 2) for x in whole)
    logits = query @ key.mT / DIM**0.5
    return (logits if key_mask is None else logits.masked_fill(~key_mask[:, None, None], -math.inf)).softmax(dim=-1)


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("extra", [(0, 0), (2, 3), (0, 40)], ids=str)
@pytest.mark.parametrize(("grid", "rule"), list(zip(GRIDS, [*RULES.values(), RULES["content"]], strict=True)), ids=str)
def test_the_error_of_a_candidate_is_that_of_the_attention(grid, rule, extra, mask):
    """Merged with this β and λ, against softmax attention, over some queries of the grid."""
    call, whole, key_mask = call_of(grid, mask, extra)
    shape = HEADS, block_count(grid, BLOCK), block_count(grid, rule.key_block_size)
    listed = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.3
    lists = BlockLists.from_mask(BLOCK, listed, key_block_size=rule.key_block_size, order=rule.order)
    biases, log_weights = torch.tensor([-0.5, 0.7]), torch.tensor([-2.0, 0.0, 1.0])
    unit = torch.eye(DIM).expand(HEADS, -1, -1)
    found = candidate_errors(replace(call, sparse=lists), rule, 20, 1, unit, biases, log_weights)
    tokens, _ = tokens_along(call, BLOCK, 20, 1)
    expected_output = (softmax_of(whole, key_mask) @ whole[2].transpose(1, 2)).transpose(1, 2)
    for row, beta in enumerate(biases):
        for column, log_weight in enumerate(log_weights):
            merged = mhla_attention(
                *whole,
                call.mixing,
                grid,
                call.blocks,
                key_mask=key_mask,
                sparse=lists,
                pooled_bias=beta.expand(HEADS),
                linear_weight=log_weight.exp().expand(HEADS),
                extra=extra,
            )
            squares = of_grid((merged - expected_output).square().sum(dim=-1), extra)
            torch.testing.assert_close(found[:, row, column], squares[:, tokens].mean(dim=(0, 1)), rtol=1e-3, atol=1e-6)


def test_candidates_of_a_linear_branch_beside_extra_tokens_alone():
    """Without a sparse branch the best λ is found as well, each channel seen through the output projection."""
    grid, extra = (8, 6), (2, 3)
    call, whole, _ = call_of(grid, extra=extra)
    projections = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(1))
    log_weights = torch.tensor([-1.0, 0.5])
    found = candidate_errors(call, RULES["curve"], 48, 0, projections, torch.tensor([-torch.inf]), log_weights)
    softmax = (softmax_of(whole, None) @ whole[2].transpose(1, 2)).transpose(1, 2)
    for column, log_weight in enumerate(log_weights):
        weight = log_weight.exp().expand(HEADS)
        merged = mhla_attention(*whole, call.mixing, grid, (2, 2), linear_weight=weight, extra=extra)
        error = torch.einsum("bnhd,hde->bnhe", of_grid(merged - softmax, extra), projections)
        expected = error.square().sum(dim=-1).mean(dim=(0, 1))
        torch.testing.assert_close(found[:, 0, column], expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("order", RULES)
@pytest.mark.parametrize("extra", [(0, 0), (2, 3)], ids=str)
def test_the_weight_held_is_that_of_the_listed_blocks_and_of_extra_tokens(extra, order):
    grid = (7, 5)
    call, whole, _ = call_of(grid, True, extra)
    weights = of_grid(softmax_of(whole, call.key_mask).transpose(1, 2), extra).transpose(1, 2)
    of_tokens = of_grid(weights.flatten(0, 1).mT, extra).mT.unflatten(0, (2, HEADS))
    of_extra = weights.sum(dim=-1) - of_tokens.sum(dim=-1)
    block = layout_of(grid, BLOCK).rows.long() // BLOCK
    for density in (0.2, 0.5, 1.0):
        rule = replace(RULES[order], density=density)
        mask = with_lists(replace(call, sparse=rule)).sparse.mask()[:, :, block].expand(2, HEADS, -1, -1)
        members = key_block_of_tokens(call, rule).expand(2, HEADS, -1)[:, :, None].expand(-1, -1, 35, -1)
        expected = ((of_tokens * mask.gather(-1, members)).sum(dim=-1) + of_extra).mean()
        held = weight_held(call, rule, 35, 0)
        assert float(held) == pytest.approx(float(expected), rel=1e-4)
    assert float(held) == pytest.approx(1, rel=1e-5)


def test_other_calls_look_at_other_queries():
    call, _, _ = call_of((7, 5))
    found = [tokens_along(call, BLOCK, 6, shift)[0] for shift in range(4)]
    assert all(len(set(tokens.tolist())) == 6 for tokens in found)
    assert len({tuple(tokens.tolist()) for tokens in found}) == 4
    tokens, blocks = tokens_along(call, BLOCK, 100, 0)
    assert sorted(tokens.tolist()) == list(range(35))
    assert torch.equal(blocks, layout_of((7, 5), BLOCK).rows.long()[tokens] // BLOCK)
