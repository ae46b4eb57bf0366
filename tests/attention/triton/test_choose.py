"""Scores of blocks against the formula in float64, and lists against a stable sort of the scores."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import choose
from mhla_diffusers.attention.triton.choose import ALIGNMENT, TINY, Part, choose_launches, select_launch


def choose_blocks(*given):
    launches, chosen = choose_launches(*given)
    for launch in launches:
        launch.run()
    return chosen


def lists_of(scores, n, extra, total):
    """Indices, counts and bits from scores (G, Tq, T) by a stable sort, list after list."""
    groups, query_blocks, key_blocks = scores.shape
    can = torch.isfinite(scores)
    indices = torch.full((groups * query_blocks, n + extra), 0, dtype=torch.int32)
    counts = can.sum(-1).clamp(max=n).flatten().to(torch.int32) + extra
    bits = torch.zeros(groups * query_blocks, -(-key_blocks // 32) * 32, dtype=torch.int64)
    best = torch.where(can, scores, float("-inf")).sort(dim=-1, descending=True, stable=True).indices.flatten(0, 1)
    for row, (order, count) in enumerate(zip(best, (counts - extra).tolist(), strict=True)):
        group = row // query_blocks
        chosen = order[:count].sort().values
        blocks = torch.cat([chosen, key_blocks + torch.arange(extra)])
        indices[row] = group * total
        indices[row, : count + extra] += blocks.to(torch.int32)
        bits[row, chosen] = 1
    words = (bits.unflatten(1, (-1, 32)) << torch.arange(32)).sum(-1)
    return indices, counts, torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def formula(query, key, spread, weight, scale):
    query, key, spread = (x.double() for x in (query, key, spread))
    variance = scale**2 * torch.einsum("gad,gtd->gat", query.square(), spread)
    scores = scale * torch.einsum("gad,gtd->gat", query, key) + 0.5 * variance.clamp(min=TINY.value).log()
    weight = weight.repeat_interleave(len(query) // len(weight), 0)
    return torch.where(weight[:, None] > 0, scores, float("-inf"))


def select(scores, n, extra, total):
    groups, query_blocks, key_blocks = scores.shape
    aligned = -(-key_blocks // ALIGNMENT.value) * ALIGNMENT.value
    padded = torch.nn.functional.pad(scores, (0, aligned - key_blocks), value=float("-inf")).contiguous()
    rows = groups * query_blocks
    sizes = (rows, n + extra), (rows,), (rows, -(-key_blocks // 32))
    got = tuple(choose.allocate(size, torch.int32, scores.device) for size in sizes)
    part = Part(0, groups, 0, query_blocks)
    select_launch(padded.flatten(0, 1), part, got, (query_blocks, key_blocks), (n, extra, total), "interpreter").run()
    return got


def assert_same(got, expected):
    for ours, right in zip(got, expected, strict=True):
        assert ours.dtype == torch.int32
        torch.testing.assert_close(ours, right, rtol=0, atol=0)


@settings(max_examples=15, deadline=None)
@given(
    size=st.tuples(st.integers(1, 2), st.integers(1, 2), st.integers(1, 70)),
    n=st.integers(0, 72),
    extra=st.integers(0, 40),
    values=st.integers(1, 9),
    masked=st.floats(0, 1),
    seed=st.integers(0, 1000),
)
def test_best_of_a_row(size, n, extra, values, masked, seed):
    """Few values, so most rows have ties; some blocks or all are masked."""
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randint(-values, values, size, generator=generator).float() / 2
    scores[torch.rand(size, generator=generator) < masked] = float("-inf")
    total = size[2] + extra + 3
    assert_same(select(scores, n, extra, total), lists_of(scores, n, extra, total))


@pytest.mark.parametrize("spacing", [1e-38, 1e-7, 1.0, 1e30])
def test_close_and_distant_scores(spacing):
    torch.manual_seed(0)
    scores = (1.0 + torch.randperm(100).view(1, 1, -1) - 50) * spacing
    assert_same(select(scores, 20, 1, 101), lists_of(scores, 20, 1, 101))


def test_nan_is_never_chosen():
    scores = torch.randn(1, 3, 40)
    scores[0, 0, 3:9], scores[0, 1] = float("nan"), float("nan")
    scores[0, 2, :4] = -float("nan")
    assert_same(select(scores, 38, 2, 42), lists_of(scores, 38, 2, 42))


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
def test_scores_and_chosen_blocks(size):
    problem = make_problem(*size)
    query, key, spread, weight = problem
    key_blocks, scale = key.shape[1], query.shape[2] ** -0.5
    (launch, _), _ = choose_launches(*problem, 9, 2, scale, key_blocks + 4)
    launch.run()
    scores = launch.arguments["scores"].view(*query.shape[:2], -1)
    truth = formula(query, key, spread, weight, scale)
    assert (scores[:, :, key_blocks:] == float("-inf")).all()
    scores = scores[:, :, :key_blocks]
    assert torch.equal(scores == float("-inf"), truth == float("-inf"))
    finite = truth > float("-inf")
    # squares of queries are rounded to the input's type, and half of their relative error is in the logarithm
    rounding = torch.finfo(query.dtype).eps / 4 if query.dtype != torch.float32 else 0.0
    assert (scores - truth)[finite].abs().max() <= 1e-5 * truth[finite].abs().max() + rounding
    got = choose_blocks(*problem, 9, 2, scale, key_blocks + 4)
    assert_same(got, lists_of(scores, 9, 2, key_blocks + 4))
    if query.dtype == torch.float32:
        assert_same(got, lists_of(truth, 9, 2, key_blocks + 4))


@pytest.mark.parametrize("rows", [1, 3, 14])
def test_parts_choose_the_same(rows, monkeypatch):
    problem = make_problem(5, 7, 33, 16, torch.float32)
    whole = choose_blocks(*problem, 4, 1, 0.25, 34)
    monkeypatch.setattr(choose, "SCORE_BYTES", rows * 48 * 4)
    launches, _ = choose_launches(*problem, 4, 1, 0.25, 34)
    assert len(launches) > 2
    assert launches[0].arguments["scores"].shape[0] <= rows
    assert_same(choose_blocks(*problem, 4, 1, 0.25, 34), whole)


def test_nothing_to_choose():
    query, key, spread, weight = make_problem(2, 2, 20, 16, torch.float32, samples=2)
    weight[1] = 0.0
    indices, counts, listed = choose_blocks(query, key, spread, weight, 3, 2, 0.25, 22)
    assert counts.tolist() == [5, 5, 2, 2] and not listed[2:].any()
    assert indices[2:].tolist() == [[42, 43, 22, 22, 22]] * 2


def test_keys_without_spread():
    """The logarithm of their variance is finite, so they are chosen where there is nothing better."""
    query, key, spread, weight = make_problem(1, 2, 8, 16, torch.float32, masked=0.0)
    spread[:, 3:] = 0.0
    _, counts, listed = choose_blocks(query, key, spread, weight, 5, 0, 0.25, 8)
    assert (counts == 5).all() and (listed & 7 == 7).all()


def test_too_many_blocks():
    key = torch.empty(1, 32769, 16)
    with pytest.raises(ValueError, match="32769"):
        choose_blocks(torch.empty(1, 1, 16), key, key, torch.empty(1, 32769), 3, 0, 1.0, 32769)
