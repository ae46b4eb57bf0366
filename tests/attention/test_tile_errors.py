"""What calibration measures, against attention written out, and the estimate from some queries against all of them."""

import math

import pytest
import torch
from mhla_diffusers.attention.tile_errors import Candidates, TiledInput, candidate_errors, pair_errors
from mhla_diffusers.attention.tiles import tokens_of_tiles

from mhla_diffusers.attention import BlockLists, Call, initial_mixing, mhla_attention
from mhla_diffusers.attention.blocks import block_index
from mhla_diffusers.attention.extra import ExtraTokens, of_grid
from mhla_diffusers.attention.linear import linear_attention
from mhla_diffusers.attention.merge import linear_branch

GRIDS = [((8, 6), (4, 3)), ((7, 5), (3, 2)), ((3, 5, 4), (2, 2, 3))]
HEADS, DIM = 2, 8


def inputs(grid, seed=0, smooth=0.0):
    """Query, key and value; ``smooth`` lets neighbours look alike, as tokens of pictures do."""
    generator = torch.Generator().manual_seed(seed)
    shape = (2, math.prod(grid), HEADS, DIM)
    query, key, value = (torch.randn(shape, generator=generator) for _ in range(3))
    if smooth:
        waves = torch.stack([torch.arange(shape[1]) * (place + 1) / 40 for place in range(DIM)], dim=-1).sin()
        query, key = (smooth * waves[:, None] + (1 - smooth) * x for x in (query, key))
    return query, key, value


def all_queries(given):
    """Places of every query of every tile, for grids whose tiles are of one length."""
    length = given.query.shape[3]
    return torch.arange(length).expand(given.query.shape[2], -1)


def written_out(query, key, value, grid, counts):
    """Softmax weights (B, H, N, N), output (B, H, N, D), weight of every tile's mean (B, H, N, T), means of values."""
    query, key, value = (x.transpose(1, 2).double() for x in (query, key, value))
    logits = query @ key.mT / DIM**0.5
    member = torch.nn.functional.one_hot(block_index(grid, counts)).double()
    sizes = member.sum(dim=0)
    mean_key, mean_value = (torch.einsum("bhnd,nt->bhtd", x, member / sizes) for x in (key, value))
    of_means = (query @ mean_key.mT / DIM**0.5 + sizes.log() - logits.logsumexp(dim=-1, keepdim=True)).exp()
    weights = logits.softmax(dim=-1)
    return weights, weights @ value, of_means, mean_value, member


def with_extra(query, key, value, key_mask=None, count=5):
    """Query, key, value and mask of a sequence with tokens before and after those of the grid, and what they bring."""
    generator = torch.Generator().manual_seed(4)
    extra = count // 2, count - count // 2

    def around(x, others):
        return torch.cat([others[:, : extra[0]], x, others[:, extra[0] :]], dim=1)

    whole = [around(x, torch.randn(2, count, HEADS, DIM, generator=generator)) for x in (query, key, value)]
    if key_mask is not None:
        key_mask = around(key_mask, torch.rand(2, count, generator=generator) > 0.2)
    return whole, key_mask, extra, ExtraTokens.of(*whole, None, key_mask, extra) if count else None


def test_tokens_outside_take_their_share_and_have_no_error():
    """Errors and weights of the grid's tiles are those of a softmax over all tokens."""
    grid, counts = (8, 6), (4, 3)
    query, key, value = inputs(grid)
    whole, _, extra, others = with_extra(query, key, value)
    given = TiledInput.of(query, key, value, grid, counts, None, others)
    errors, masses, squares = pair_errors(given, all_queries(given), torch.eye(DIM).expand(HEADS, -1, -1), False)

    all_query, all_key, all_value = (x.transpose(1, 2).double() for x in whole)
    weights = (all_query @ all_key.mT / DIM**0.5).softmax(dim=-1)[:, :, 2:50]
    output, weights = weights @ all_value, weights[..., 2:50]
    member = torch.nn.functional.one_hot(block_index(grid, counts)).double()
    per_tile = member / member.sum(dim=0)
    mass = weights @ member
    moved = torch.einsum("bhqn,nt,bhnd->bhqtd", weights, member, value.transpose(1, 2).double())
    moved = moved - mass[..., None] * output[..., None, :]
    expected = torch.einsum("bhqt,qa->hat", moved.square().sum(dim=-1), per_tile) / 2
    torch.testing.assert_close(errors.double(), expected, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(masses.double(), torch.einsum("bhqt,qa->hat", mass, per_tile) / 2, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(squares.double(), output.square().sum(dim=-1).mean(dim=(0, 2)), rtol=1e-4, atol=1e-6)
    assert masses.sum(dim=-1).max() < 1


@pytest.mark.parametrize("means", [True, False])
@pytest.mark.parametrize(("grid", "counts"), [((8, 6), (4, 3)), ((4, 6, 4), (2, 3, 2))])
def test_errors_and_masses_of_all_queries(grid, counts, means):
    query, key, value = inputs(grid)
    given = TiledInput.of(query, key, value, grid, counts, None)
    projections = torch.randn(HEADS, DIM, DIM, generator=torch.Generator().manual_seed(1))
    errors, masses, squares = pair_errors(given, all_queries(given), projections, means)
    weights, output, of_means, mean_value, member = written_out(query, key, value, grid, counts)
    of_means = of_means * means
    # per tile: Σ p (v − o) − p̂ (v̄ − o)
    mass = weights @ member
    moved = torch.einsum("bhqn,nt,bhnd->bhqtd", weights, member, value.transpose(1, 2).double())
    moved = moved - of_means[..., None] * mean_value[:, :, None] - (mass - of_means)[..., None] * output[..., None, :]
    squared = (moved @ projections[None, :, None].double()).square().sum(dim=-1)
    per_tile = member / member.sum(dim=0)
    torch.testing.assert_close(
        errors.double(), torch.einsum("bhqt,qa->hat", squared, per_tile) / 2, rtol=1e-4, atol=1e-6
    )
    torch.testing.assert_close(masses.double(), torch.einsum("bhqt,qa->hat", mass, per_tile) / 2, rtol=1e-4, atol=1e-6)
    seen = (output @ projections[None].double()).square().sum(dim=-1).mean(dim=(0, 2))
    torch.testing.assert_close(squares.double(), seen, rtol=1e-4, atol=1e-6)


def test_some_queries_tell_what_all_tell():
    """Tiles of 24 tokens: of the pairs that 6 queries of a tile would choose, nearly all are those of all queries."""
    grid, counts = (24, 24), (6, 4)
    query, key, value = inputs(grid, smooth=0.9)
    given = TiledInput.of(query, key, value, grid, counts, None)
    projections = torch.eye(DIM).expand(HEADS, -1, -1)
    exactly = pair_errors(given, all_queries(given), projections, True)
    found = [pair_errors(given, given.samples(6, shift), projections, True) for shift in range(4)]
    for place in range(2):  # errors, masses
        estimate = sum(outcome[place] for outcome in found) / len(found)
        chosen, best = estimate.topk(3, dim=-1).indices, exactly[place].topk(3, dim=-1)
        kept = exactly[place].gather(-1, chosen).sum() / best.values.sum()
        assert kept > 0.95
    torch.testing.assert_close(sum(outcome[1] for outcome in found).sum(dim=-1) / 4, torch.ones(HEADS, 24))


def test_other_calls_look_at_other_queries():
    given = TiledInput.of(*inputs((7, 5)), (7, 5), (3, 2), None)
    places = [given.samples(2, shift) for shift in range(6)]
    assert all(given.exists.gather(1, place).all() for place in places)
    assert len({tuple(place[0].tolist()) for place in places}) > 2


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("count", [0, 5, 40])
@pytest.mark.parametrize(("grid", "counts"), GRIDS)
def test_the_error_of_a_candidate_is_that_of_the_attention(grid, counts, mask, count):
    """Merged with this β and λ, against softmax attention, over some queries of every tile of the grid."""
    query, key, value = inputs(grid)
    key_mask = torch.rand(2, math.prod(grid), generator=torch.Generator().manual_seed(2)) > 0.2 if mask else None
    tiles = math.prod(counts)
    exact = torch.rand(HEADS, tiles, tiles, generator=torch.Generator().manual_seed(3)) < 0.3
    mixing = initial_mixing((2,) * len(grid))
    call = Call(query, key, value, mixing, grid, (2,) * len(grid), key_mask=key_mask)
    output, normaliser = linear_attention(linear_branch(call))
    tokens, _ = tokens_of_tiles(grid, counts)
    in_tiles = output[:, tokens].permute(0, 3, 1, 2, 4), normaliser[:, tokens, :, 0].log().permute(0, 3, 1, 2)
    whole, whole_mask, extra, others = with_extra(query, key, value, key_mask, count)
    given = TiledInput.of(query, key, value, grid, counts, key_mask, others)
    places = given.samples(3, 0)
    candidates = Candidates(torch.tensor([-0.5, 0.7]), torch.tensor([-2.0, 0.0, 1.0]))
    projections = torch.eye(DIM).expand(HEADS, -1, -1)
    found = candidate_errors(given, places, projections, exact[None], in_tiles, candidates)

    expected_output = torch.nn.functional.scaled_dot_product_attention(
        *(x.transpose(1, 2) for x in whole),
        attn_mask=None if whole_mask is None else whole_mask[:, None, None],
    ).transpose(1, 2)
    for row, beta in enumerate(candidates.pooled_bias):
        for column, log_weight in enumerate(candidates.far_log_weight):
            merged = mhla_attention(
                *whole,
                mixing,
                grid,
                call.blocks,
                key_mask=whole_mask,
                sparse=BlockLists.from_mask(counts, exact),
                pooled_bias=beta.expand(HEADS),
                linear_weight=log_weight.exp().expand(HEADS),
                extra=extra,
            )
            squares = of_grid((merged - expected_output).square().sum(dim=-1), extra)
            expected = squares[:, tokens.gather(1, places)].mean(dim=(0, 1, 2))
            torch.testing.assert_close(found[:, row, column], expected, rtol=1e-3, atol=1e-6)


def test_candidates_of_a_linear_branch_beside_tokens_outside_alone():
    """Without exact tiles and means the best λ is found as well."""
    grid, counts = (8, 6), (2, 2)
    query, key, value = inputs(grid)
    whole, _, extra, others = with_extra(query, key, value)
    mixing = initial_mixing((2, 2))
    call = Call(query, key, value, mixing, grid, (2, 2))
    output, normaliser = linear_attention(linear_branch(call))
    tokens, _ = tokens_of_tiles(grid, counts)
    far = output[:, tokens].permute(0, 3, 1, 2, 4), normaliser[:, tokens, :, 0].log().permute(0, 3, 1, 2)
    given = TiledInput.of(query, key, value, grid, counts, None, others)
    candidates = Candidates(torch.tensor([-torch.inf]), torch.tensor([-1.0, 0.5]))
    none = torch.zeros(1, HEADS, 4, 4, dtype=torch.bool)
    found = candidate_errors(given, all_queries(given), torch.eye(DIM).expand(HEADS, -1, -1), none, far, candidates)
    softmax = torch.nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in whole)).transpose(1, 2)
    for column, log_weight in enumerate(candidates.far_log_weight):
        weight = log_weight.exp().expand(HEADS)
        merged = mhla_attention(*whole, mixing, grid, (2, 2), linear_weight=weight, extra=extra)
        expected = of_grid((merged - softmax).square().sum(dim=-1), extra).mean(dim=(0, 1))
        torch.testing.assert_close(found[:, 0, column], expected, rtol=1e-3, atol=1e-6)
