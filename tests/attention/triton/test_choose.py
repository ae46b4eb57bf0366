"""Chosen blocks against the formula of their scores in float64, and a stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import choose
from mhla_diffusers.attention.triton.choose import TINY

from ...refusals import refused


def chosen(query, key, spread, weight, n, extra, scale):
    """Indices, counts and bits of the n best of all blocks, of 16 tokens, and of extra blocks."""
    blocks = key.shape[1]
    return choose.choose(query, key, spread, weight, n / blocks, scale, [16 * blocks], 16, 16 * extra)


def chosen_by(scores, n, extra):
    """The same by given scores (G, T): those of one query block in each group, -inf by weights of 0."""
    query = torch.zeros(len(scores), 1, 16)
    query[..., 0] = 1
    keys = torch.zeros(*scores.shape, 16)
    keys[..., 0] = scores.nan_to_num(torch.nan, neginf=0.0)
    return chosen(query, keys, torch.ones_like(keys), (scores != -torch.inf).float(), n, extra, 1.0)


def lists_of(scores, n, extra):
    """The same from scores (G, Tq, T) by a stable sort, list after list."""
    groups, query_blocks, key_blocks = scores.shape
    can = torch.isfinite(scores)
    indices = torch.full((groups * query_blocks, n + extra), 0, dtype=torch.int32)
    counts = can.sum(-1).clamp(max=n).flatten().to(torch.int32) + extra
    bits = torch.zeros(groups * query_blocks, -(-key_blocks // 32) * 32, dtype=torch.int64)
    best = torch.where(can, scores, -torch.inf).sort(dim=-1, descending=True, stable=True).indices.flatten(0, 1)
    for row, (order, count) in enumerate(zip(best, (counts - extra).tolist(), strict=True)):
        blocks = torch.cat([order[:count].sort().values, key_blocks + torch.arange(extra)])
        indices[row] = row // query_blocks * (key_blocks + extra)
        indices[row, : count + extra] += blocks.to(torch.int32)
        bits[row, order[:count]] = 1
    words = (bits.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return indices, counts, torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def formula(query, key, spread, weight, scale):
    query, key, spread = (x.double() for x in (query, key, spread))
    variance = scale**2 * torch.einsum("gad,gtd->gat", query.square(), spread)
    scores = scale * torch.einsum("gad,gtd->gat", query, key) + 0.5 * variance.clamp(min=TINY.value).log()
    weight = weight.repeat_interleave(len(query) // len(weight), 0)
    return torch.where(weight[:, None] > 0, scores, -torch.inf)


def assert_same(got, expected):
    for ours, right in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, right, rtol=0, atol=0)


@settings(max_examples=15, deadline=None)
@given(
    groups=st.integers(1, 3),
    blocks=st.integers(1, 70),
    part=st.floats(0, 1),
    extra=st.integers(0, 40),
    values=st.integers(1, 9),
    masked=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_best_of_a_row(groups, blocks, part, extra, values, masked, seed):
    """Few values, so most rows have ties; some blocks or all are masked."""
    generator, n = torch.Generator().manual_seed(seed), max(1, round(part * blocks))
    scores = torch.randint(-values, values, (groups, blocks), generator=generator).float() / 2
    scores[torch.rand(scores.shape, generator=generator) < masked] = -torch.inf
    assert_same(chosen_by(scores, n, extra), lists_of(scores[:, None], n, extra))


@pytest.mark.parametrize("spacing", [1e-38, 1e-7, 1.0, 1e30])
def test_close_and_distant_scores(spacing):
    torch.manual_seed(0)
    scores = (1.0 + torch.randperm(100)[None] - 50) * spacing
    assert_same(chosen_by(scores, 20, 1), lists_of(scores[:, None], 20, 1))


def test_nan_is_never_chosen():
    scores = torch.randn(3, 40)
    scores[0, 3:9], scores[1], scores[2, :4] = torch.nan, torch.nan, -torch.nan
    assert_same(chosen_by(scores, 38, 2), lists_of(scores[:, None], 38, 2))


def make_problem(groups, query_blocks, key_blocks, head_dim, dtype, samples=1, masked=0.2):
    torch.manual_seed(0)
    query, key = torch.randn(groups, query_blocks, head_dim), torch.randn(groups, key_blocks, head_dim)
    weight = torch.rand(samples, key_blocks) * (torch.rand(samples, key_blocks) >= masked)
    return query.to(dtype), key.to(dtype), torch.rand(groups, key_blocks, head_dim).to(dtype), weight


SIZES = {
    "float32": (1, 66, 37, 16, torch.float32, 1),
    "padded channels": (2, 5, 66, 72, torch.bfloat16, 1),
    "float16": (4, 3, 130, 32, torch.float16, 2),
    "many channels": (1, 3, 20, 136, torch.float32, 1),
}


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_formula(size):
    problem = make_problem(*size)
    scale = size[3] ** -0.5
    truth = formula(*problem, scale)
    indices, counts, bits = chosen(*problem, 9, 2, scale)
    if size[4] == torch.float32:
        assert_same((indices, counts, bits), lists_of(truth, 9, 2))
    # squares of queries are rounded to the input's type, and half of their relative error is in the logarithm
    rounding = torch.finfo(size[4]).eps / 4 if size[4] != torch.float32 else 0.0
    allowed = 2 * (1e-5 * truth[truth > -torch.inf].abs().max() + rounding)
    listed = (bits[:, :, None] >> torch.arange(32) & 1).flatten(1)[:, : size[2]].view(truth.shape) == 1
    worst, best = truth.where(listed, torch.inf).amin(-1), truth.where(~listed, -torch.inf).amax(-1)
    assert (counts == 11).all() and (worst >= best - allowed).all()


@pytest.mark.parametrize("rows", [1, 3, 14])
def test_parts_choose_the_same(rows, monkeypatch):
    problem = make_problem(5, 7, 33, 16, torch.float32)
    whole = chosen(*problem, 4, 1, 0.25)
    monkeypatch.setattr(choose, "SCORE_BYTES", rows * 48 * 4)
    assert_same(chosen(*problem, 4, 1, 0.25), whole)


def test_nothing_to_choose():
    query, key, spread, weight = make_problem(2, 2, 20, 16, torch.float32, samples=2)
    weight[1] = 0.0
    indices, counts, listed = chosen(query, key, spread, weight, 3, 2, 0.25)
    assert counts.tolist() == [5, 5, 2, 2] and not listed[2:].any()
    assert indices[2:].tolist() == [[42, 43, 22, 22, 22]] * 2


def test_keys_without_spread():
    """The logarithm of their variance is finite, so they are chosen where there is nothing better."""
    query, key, spread, weight = make_problem(1, 2, 8, 16, torch.float32, masked=0.0)
    spread[:, 3:] = 0.0
    _, counts, listed = chosen(query, key, spread, weight, 5, 0, 0.25)
    assert (counts == 5).all() and (listed & 7 == 7).all()


def test_too_many_blocks():
    key = torch.empty(1, 32769, 16)
    with refused("32769"):
        chosen(torch.empty(1, 1, 16), key, key, torch.empty(1, 32769), 3, 0, 1.0)
