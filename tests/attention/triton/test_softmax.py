"""Attention over lists of blocks, and to pooled keys, against the same written out in float64 with autograd."""

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.triton.listed import listed, transpose_lists
from mhla_diffusers.attention.triton.pooled import pooled
from mhla_diffusers.attention.triton.softmax import EMPTY

from ...refusals import refused


@dataclass
class Problem:
    operator: Any
    rows: list[torch.Tensor]
    """Query, key and value (G, rows, D)."""
    others: tuple
    """Further arguments of the operator."""
    sees: torch.Tensor
    """Which keys a query sees, (G, Q, R)."""
    bias: torch.Tensor
    """(G, 1, R)."""

    def run(self, upstream, upstream_lse):
        """Output, LSE and gradients of query, key and value by the kernels."""
        leaves = [x.detach().requires_grad_() for x in self.rows]
        outputs, upstreams = self.operator(*leaves, *self.others), [upstream, upstream_lse]
        count = 1 if upstream_lse is None else 2
        gradients = torch.autograd.grad(outputs[:count], leaves, upstreams[:count])
        return [x.detach() for x in (*outputs, *gradients)]

    def written_out(self, upstream, upstream_lse, dtype=torch.float64):
        """The same by definition; in a 16-bit type products have operands of it, and sums are float32."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        leaves = [x.to(dtype).requires_grad_() for x in self.rows]
        query, key, value = (x.to(wide) for x in leaves)
        logits = (query @ key.mT) * query.shape[-1] ** -0.5 + self.bias.to(wide)
        something = self.sees.any(-1)
        logits = torch.where(self.sees, logits, torch.where(something, -math.inf, 0.0)[..., None])
        lse = logits.logsumexp(-1)
        weights = (logits - lse[..., None]).exp() * something[..., None]
        output = weights.to(dtype).to(wide) @ value
        loss = (output * upstream.to(wide)).sum()
        if upstream_lse is not None:
            loss = loss + (lse * upstream_lse.to(wide))[something].sum()
        gradients = torch.autograd.grad(loss, leaves)
        return [output.detach(), torch.where(something, lse, EMPTY.value).detach(), *gradients]


def listed_problem(
    tokens=75, extra=9, *, rows=16, groups=2, width=3, head_dim=16, masked=False, causal=False, dtype=None, seed=0
):
    """Lists of unlike blocks with random counts; the last block of the grid and of extra tokens have padding."""
    torch.manual_seed(seed)
    layout = layout_of((tokens,), rows, extra)
    exists, blocks = layout.order >= 0, layout.blocks
    query_blocks = blocks if causal else layout.grid_blocks
    query = torch.randn(groups, query_blocks * rows, head_dim)
    key, value = (torch.randn(groups, blocks * rows, head_dim) * exists[:, None] for _ in range(2))
    bias = torch.zeros(1, blocks * rows)
    if masked:
        bias = torch.rand(1, blocks * rows).log().where(torch.rand(1, blocks * rows) < 0.7, -math.inf)
        bias[:, :rows] = -math.inf
    bias[:, ~exists] = -math.inf
    indices = torch.rand(groups * query_blocks, blocks).argsort(1)[:, :width].sort(1).values.int()
    width = indices.shape[1]
    counts = torch.randint(0, width + 1, (len(indices),), dtype=torch.int32)
    counts[0], counts[-1] = 0, width
    counted = torch.arange(width) < counts[:, None]
    lists = torch.zeros(len(indices), blocks + 1, dtype=torch.bool)
    lists.scatter_(1, indices.where(counted, blocks).long(), value=True)
    sees = lists[:, :blocks].view(groups, query_blocks, blocks).repeat_interleave(rows, 1).repeat_interleave(rows, 2)
    sees &= (bias > -math.inf)[:, None]
    if causal:
        sees = sees.tril()
    flat = indices + torch.arange(groups, dtype=torch.int32).repeat_interleave(query_blocks)[:, None] * blocks
    lists = bias if masked else None, flat.where(counted, 2**31 - 1), counts
    others = *lists, head_dim**-0.5, [tokens], rows, extra, causal
    tensors = [x if dtype is None else x.to(dtype) for x in (query, key, value)]
    return Problem(listed, tensors, others, sees, bias.expand(groups, -1)[:, None])


def pooled_problem(
    blocks=40,
    query_blocks=2,
    *,
    groups=2,
    samples=1,
    rows=16,
    head_dim=16,
    density=0.3,
    masked=False,
    dtype=None,
    seed=0,
):
    torch.manual_seed(seed)
    query = torch.randn(groups, query_blocks * rows, head_dim)
    key, value = (torch.randn(groups, blocks, head_dim) for _ in range(2))
    bias = torch.randint(1, 17, (samples, blocks)).float().log()
    if masked:
        bias[torch.rand(samples, blocks) < 0.3] = -math.inf
    is_listed = torch.rand(groups * query_blocks, blocks) < density
    is_listed[0] = True
    # the first block is the lowest bit of a word
    bits = torch.nn.functional.pad(is_listed.long(), (0, -blocks % 32)).unflatten(1, (-1, 32))
    words = (bits << torch.arange(32)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).int()
    sees = ~is_listed.unflatten(0, (groups, -1)).repeat_interleave(rows, 1)
    by_group = bias.repeat_interleave(groups // samples, 0)[:, None]
    tensors = [x if dtype is None else x.to(dtype) for x in (query, key, value)]
    return Problem(pooled, tensors, (bias, words, head_dim**-0.5), sees & (by_group > -math.inf), by_group)


def nearness(got, wanted):
    """The largest difference beside the largest number."""
    if not wanted.numel():
        return 0.0
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))


def check(problem, with_lse=True):
    upstream = torch.randn(problem.rows[0].shape)
    upstream_lse = torch.randn(upstream.shape[:-1]) if with_lse else None
    output, lse, *gradients = problem.run(upstream, upstream_lse)
    expected_output, expected_lse, *expected = problem.written_out(upstream, upstream_lse)
    is_empty = expected_lse == EMPTY.value
    assert is_empty.any()
    # float32 rounds a logit by eps of its size, and a weight is off by that much of itself
    query, key, _ = problem.rows
    largest = float((query @ key.mT).abs().max()) * query.shape[-1] ** -0.5
    bound = max(1e-5, torch.finfo(torch.float32).eps * largest)
    assert (lse[is_empty] == torch.tensor(EMPTY.value)).all() and (output[is_empty] == 0).all()
    assert nearness(lse[~is_empty], expected_lse[~is_empty]) < 1e-5
    for got, wanted in zip((output, *gradients), (expected_output, *expected), strict=True):
        assert nearness(got, wanted) < bound


CASES = {
    "key mask": (listed_problem, {"masked": True}),
    "blocks of 32": (listed_problem, {"rows": 32, "groups": 1}),
    "padded channels": (listed_problem, {"head_dim": 24, "extra": 0}),
    "padded channels, key mask": (listed_problem, {"head_dim": 40, "masked": True}),
    "causal": (listed_problem, {"causal": True, "extra": 0}),
    # float32 has tiles of 16 queries and 32 keys
    "blocks of 64 cut": (listed_problem, {"tokens": 110, "rows": 64, "groups": 1}),
    "blocks of 64 cut, causal": (
        listed_problem,
        {"tokens": 110, "extra": 0, "rows": 64, "groups": 1, "causal": True, "masked": True},
    ),
    "pooled, key mask of each sample": (pooled_problem, {"groups": 4, "samples": 2, "masked": True}),
    "pooled, blocks of 128": (pooled_problem, {"rows": 128, "groups": 1}),
    "pooled, wide rows": (pooled_problem, {"head_dim": 128, "rows": 64, "groups": 1}),
    "pooled, all listed": (pooled_problem, {"density": 1.1}),
    "pooled, many queries in few splits": (pooled_problem, {"query_blocks": 11, "groups": 1, "head_dim": 24}),
    **{f"{count} pooled keys": (pooled_problem, {"blocks": count}) for count in (1, 31, 32, 33, 64, 97)},
}


@pytest.mark.parametrize(("make", "options"), CASES.values(), ids=CASES)
def test_against_the_formula(make, options):
    check(make(**options))


either = pytest.mark.parametrize("make", [listed_problem, pooled_problem])


@either
def test_without_gradient_of_the_lse(make):
    check(make(), with_lse=False)


@either
def test_logits_far_below_zero(make):
    """Padded rows have logits of 0, beside which the real ones vanish: neither may they leak, nor overflow."""
    problem = make(seed=1)
    query, key, value = problem.rows
    problem.rows = [query.abs() * 8, -key.abs() * 8, value]
    check(problem)


@either
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(make, dtype):
    """At most twice the error of the same formula in PyTorch with operands of the same type."""
    problem = make(head_dim=32, dtype=dtype)
    upstream = torch.randn(problem.rows[0].shape).to(dtype)
    upstreams = upstream, torch.randn(upstream.shape[:-1])
    found, exact = problem.run(*upstreams), problem.written_out(*upstreams)
    peer = problem.written_out(*upstreams, dtype)
    for i in (0, 2, 3, 4):
        assert found[i].dtype == dtype
        assert nearness(found[i], exact[i]) <= 2 * nearness(peer[i].to(dtype), exact[i])


def test_transposed_lists():
    """Ascending, without the entries that do not count; a block that all name comes first."""
    indices = torch.tensor([[0, 9, 2], [9, 1, 7], [9, 4, 3]] * 4, dtype=torch.int32)
    counts = torch.tensor([2, 2, 1] * 4, dtype=torch.int32)
    turns, starts, queries = transpose_lists(indices, counts, 10)
    lists = [queries[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert lists == [[0, 3, 6, 9], [1, 4, 7, 10], *[[]] * 7, list(range(12))]
    assert turns.tolist() == list(range(10))
    turns, _, _ = transpose_lists(indices, counts, 40)
    assert turns.tolist() == [0, 1, 9, *range(2, 9), *range(10, 40)]
    assert all(x.dtype == torch.int32 for x in (turns, starts, queries))


@either
def test_head_dims_beyond_the_table(make):
    with refused("512"):
        check(make(head_dim=512))


@settings(max_examples=18, deadline=None)
@given(
    make=st.sampled_from((listed_problem, pooled_problem)),
    count=st.integers(1, 70),
    head_dim=st.sampled_from((16, 20, 32)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
    more=st.integers(0, 20),
    density=st.sampled_from((0.0, 0.5, 0.95)),
)
def test_drawn_problems(make, count, head_dim, masked, seed, more, density):
    own = {"extra": more} if make is listed_problem else {"query_blocks": 1 + more % 3, "density": density}
    check(make(count, **own, head_dim=head_dim, masked=masked, seed=seed))
