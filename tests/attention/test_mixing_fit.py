"""The least squares that mixing matrices are fitted with."""

import math

import pytest
import torch

from mhla_diffusers.attention import Call, initial_mixing, mhla_attention
from mhla_diffusers.attention.calibrate import BlockInput, fit_mixing, nonnegative_step

HEADS, DIM = 2, 8
GRIDS = [((8, 6), (2, 3)), ((7, 5), (3, 2)), ((3, 5, 4), (2, 2, 2))]


def call_of(grid, blocks, seed=0, **settings):
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, math.prod(grid), HEADS, DIM, generator=generator) for _ in range(3))
    return Call(query, key, value, initial_mixing(blocks), grid, blocks, **settings)


def errors(call, mixing):
    """Squared error of every head against softmax attention."""
    query, key, value = call.query, call.key, call.value
    settings = {"feature_map": call.feature_map, "key_mask": call.key_mask}
    mhla = mhla_attention(query, key, value, mixing, call.grid, call.blocks, **settings)
    mask = None if call.key_mask is None else call.key_mask[:, None, None]
    softmax = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in (query, key, value)), attn_mask=mask
    )
    return (mhla - softmax.transpose(1, 2)).square().sum(dim=(0, 1, 3))


def test_a_known_optimum_is_found():
    """Where the best weights are positive, and a bound holds others at 0."""
    generator = torch.Generator().manual_seed(0)
    effects = torch.randn(3, 40, 5, generator=generator, dtype=torch.float64)
    known = torch.rand(3, 5, generator=generator, dtype=torch.float64)
    known[:, 2] = 0
    gram, start = effects.mT @ effects, torch.ones(3, 5, dtype=torch.float64)
    # what pushes against the bound, which does not change where the optimum is
    push = torch.zeros(3, 5, dtype=torch.float64)
    push[:, 2] = -3.0
    slope = (gram @ (known - start)[..., None])[..., 0] + push
    torch.testing.assert_close(nonnegative_step(gram, slope, start, 0.0), known, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("per_head", [True, False])
@pytest.mark.parametrize(("grid", "blocks"), GRIDS)
def test_fitting_lowers_the_error(grid, blocks, per_head):
    """Over all queries, keys masked or not; to no more than with the matrices that are known without fitting."""
    masked = torch.rand(2, math.prod(grid), generator=torch.Generator().manual_seed(1)) > 0.2
    for settings in ({}, {"key_mask": masked}, {"feature_map": "elu+1"}):
        call = call_of(grid, blocks, **settings)
        given = BlockInput.of(call, math.prod(grid), 0)
        begin = call.mixing.repeat(HEADS, 1, 1) if per_head else call.mixing
        fitted = fit_mixing([given], torch.eye(DIM).repeat(HEADS, 1, 1), begin)
        assert fitted.shape == begin.shape
        assert (fitted >= 0).all()
        torch.testing.assert_close(fitted.amax(dim=-1), torch.ones_like(fitted[..., 0]))
        found = errors(call, fitted)
        assert found.sum() < 0.98 * errors(call, begin).sum()
        assert found.sum() < errors(call, initial_mixing(blocks, "uniform")).sum()


@pytest.mark.parametrize("per_head", [True, False])
def test_where_every_key_looks_alike_every_block_weighs_the_same(per_head):
    """Softmax attention is the mean of all values then, which uniform mixing is too."""
    call = call_of((8, 6), (2, 3))
    call.key.fill_(0.5)
    given = BlockInput.of(call, 8, 0)
    begin = call.mixing.repeat(HEADS, 1, 1) if per_head else call.mixing
    fitted = fit_mixing([given], torch.eye(DIM).repeat(HEADS, 1, 1), begin)
    # what holds weights where they are leaves a thirtieth of the way in each of six rounds
    torch.testing.assert_close(fitted, torch.ones_like(fitted), rtol=0, atol=1e-3)


def test_other_calls_look_at_other_queries():
    first, second = (BlockInput.of(call_of((8, 6), (2, 3)), 3, shift).numerator for shift in (0, 1))
    assert not torch.equal(first, second)
