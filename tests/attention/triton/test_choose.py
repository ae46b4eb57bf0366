"""Chosen blocks against the formula of their scores in float64, and a stable sort."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import choose
from mhla_diffusers.attention.triton.tiles import states_dtype

from ...refusals import refused


def words_of(is_listed):
    """Bits of blocks in int32 words, the first block the lowest bit."""
    bits = torch.nn.functional.pad(is_listed.long(), (0, -is_listed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (bits << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def chosen(query, key, variance, gain, weight, n, extra, scale):
    """Indices, counts and bits of the n best of all blocks, of 16 tokens, and of extra blocks."""
    weight = weight.repeat_interleave(len(query) // len(weight), 0)
    place = [16 * key.shape[1]], 16, 16 * extra
    return choose.choose(query, key, gain, variance, weight, None, n, scale, *place)[:3]


def lists_of(scores, n, extra):
    """The same from scores (G, Tq, T) by a stable sort, list after list."""
    groups, query_blocks, key_blocks = scores.shape
    can = torch.isfinite(scores)
    indices = torch.full((groups * query_blocks, n + extra), 0, dtype=torch.int32)
    counts = can.sum(-1).clamp(max=n).flatten().to(torch.int32) + extra
    is_listed = torch.zeros(groups * query_blocks, key_blocks, dtype=torch.bool)
    best = torch.where(can, scores, -torch.inf).sort(dim=-1, descending=True, stable=True).indices.flatten(0, 1)
    for row, (order, count) in enumerate(zip(best, (counts - extra).tolist(), strict=True)):
        blocks = torch.cat([order[:count].sort().values, key_blocks + torch.arange(extra)])
        indices[row] = row // query_blocks * (key_blocks + extra)
        indices[row, : count + extra] += blocks.to(torch.int32)
        is_listed[row, order[:count]] = True
    return indices, counts, words_of(is_listed)


def check_chosen(scores, n, extra):
    """Choose by given scores (G, T): those of one query block in each group, -inf by weights of 0."""
    query = torch.zeros(len(scores), 1, 16)
    query[..., 0] = 1
    keys = torch.zeros(*scores.shape, 16)
    keys[..., 0] = scores.nan_to_num(torch.nan, neginf=0.0)
    weight = (scores != -torch.inf).float()
    found = chosen(query, keys, torch.ones_like(scores)[:, None], None, weight, n, extra, 1.0)
    assert all(map(torch.equal, found, lists_of(scores[:, None], n, extra)))


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
    make = torch.Generator().manual_seed(seed)
    scores = torch.randint(-values, values, (groups, blocks), generator=make).float() / 2
    scores[torch.rand(scores.shape, generator=make) < masked] = -torch.inf
    check_chosen(scores, max(1, round(part * blocks)), extra)


def test_nan_is_never_chosen():
    scores = torch.randn(3, 40)
    scores[0, 3:9], scores[1], scores[2, :4] = torch.nan, torch.nan, -torch.nan
    check_chosen(scores, 38, 2)


def scored(groups, query_blocks, key_blocks, head_dim=16, dtype=torch.float32, samples=1, masked=0.2):
    torch.manual_seed(0)
    query, key = torch.randn(groups, query_blocks, head_dim), torch.randn(groups, key_blocks, head_dim)
    weight = torch.rand(samples, key_blocks) * (torch.rand(samples, key_blocks) >= masked)
    variance, gain = torch.rand(2, groups, query_blocks, key_blocks).to(states_dtype(dtype))
    return query.to(dtype), key.to(dtype), variance, gain, weight


SIZES = {
    "float32": (1, 66, 37),
    "padded channels": (2, 5, 66, 72, torch.bfloat16),
    "float16": (4, 3, 130, 32, torch.float16, 2),
    "many channels": (1, 3, 20, 136),
}


@pytest.mark.parametrize("means_alone", [False, True])
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_scores_are_those_of_the_formula(size, means_alone):
    problem = list(scored(*size))
    query, key, variance, gain, weight = (x.double() for x in problem)
    dtype, scale = problem[0].dtype, query.shape[-1] ** -0.5
    truth = scale * torch.einsum("gad,gtd->gat", query, key)
    if means_alone:
        problem[3] = None
        truth += 0.5 * variance.log()
    else:
        truth += gain + 1.5 * variance.log()
    truth = torch.where(weight.repeat_interleave(len(query) // len(weight), 0)[:, None] > 0, truth, -torch.inf)
    indices, counts, bits = chosen(*problem, 9, 2, scale)
    if dtype == torch.float32:
        assert all(map(torch.equal, (indices, counts, bits), lists_of(truth, 9, 2)))
    allowed = 2e-5 * truth[truth > -torch.inf].abs().max()
    is_listed = (bits[:, :, None] >> torch.arange(32) & 1).flatten(1)[:, : size[2]].view(truth.shape) == 1
    worst, best = truth.where(is_listed, torch.inf).amin(-1), truth.where(~is_listed, -torch.inf).amax(-1)
    assert (counts == 11).all() and (worst >= best - allowed).all()


@pytest.mark.parametrize("rows", [1, 3, 14])
def test_parts_choose_the_same(rows, monkeypatch):
    problem = scored(5, 7, 33)
    whole = chosen(*problem, 4, 1, 0.25)
    monkeypatch.setattr(choose, "SCORE_BYTES", rows * 48 * 4)
    assert all(map(torch.equal, chosen(*problem, 4, 1, 0.25), whole))


def test_nothing_to_choose():
    *problem, weight = scored(2, 2, 20, samples=2)
    weight[1] = 0.0
    indices, counts, bits = chosen(*problem, weight, 3, 2, 0.25)
    assert counts.tolist() == [5, 5, 2, 2] and not bits[2:].any()
    assert indices[2:].tolist() == [[42, 43, 22, 22, 22]] * 2


def test_keys_without_spread():
    """The logarithm of their variance is finite, so they are chosen where there is nothing better."""
    problem = scored(1, 2, 8, masked=0.0)
    problem[2][..., 3:] = 0.0
    _, counts, bits = chosen(*problem, 5, 0, 0.25)
    assert (counts == 5).all() and (bits & 7 == 7).all()


def test_too_many_blocks():
    key = torch.empty(1, 32769, 16)
    with refused("32769"):
        chosen(torch.empty(1, 1, 16), key, key, None, torch.empty(1, 32769), 3, 0, 1.0)
