"""The first-order term's kernels against the eager module's functions and the formula in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, sparse
from mhla_diffusers.attention.blocks import in_order
from mhla_diffusers.attention.merge import under_common_sum
from mhla_diffusers.attention.order import stretch_of
from mhla_diffusers.attention.precision import EMPTY
from mhla_diffusers.attention.triton import tiles
from mhla_diffusers.attention.triton.branches import given_blocks
from mhla_diffusers.attention.triton.first_order import content_mixing, sampled_correction
from mhla_diffusers.attention.triton.merge import merge
from mhla_diffusers.attention.triton.tiles import states_dtype

from ..problems import relative_error

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
FLOAT32 = 2e-6
"""Relative error of float32 sums of some hundred terms; weights are off by the rounding of their logits."""
ROUNDED = {torch.float32: FLOAT32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of what is summed in float32 and rounded once: half an eps of each number at most."""
SEVERAL = {dtype: error * (1 if dtype == torch.float32 else 2) for dtype, error in ROUNDED.items()}
"""The same where factors or terms are rounded too, each by at most half an eps."""


def is_card(monkeypatch):
    """Tiles of an H100, larger than the interpreter's, but for products in TF32."""
    monkeypatch.setattr(tiles, "architecture_of", lambda _: "sm_90")


# Mixing


def mixing_problem(
    key_blocks,
    query_blocks=5,
    size=32,
    *,
    samples=1,
    groups=4,
    head_dim=16,
    density=0.3,
    masked=0.0,
    seed=0,
    dtype=None,
):
    """Means of queries and keys, weights of blocks, bits, their lists, and rows of a block of keys."""
    make = torch.Generator().manual_seed(seed)
    query = torch.randn(groups, query_blocks, head_dim, generator=make)
    key = torch.randn(groups, key_blocks, head_dim, generator=make)
    weight = size * torch.rand(samples, key_blocks, generator=make)
    weight[torch.rand(weight.shape, generator=make) < masked] = 0
    mask = torch.rand(1, groups, query_blocks, key_blocks, generator=make) < density
    mask[0, 0, 0] = True  # a query block that lists all has no far field
    lists = BlockLists.from_mask(1, mask)
    query, key = (x if dtype is None else x.to(dtype) for x in (query, key))
    return query, key, weight, given_blocks(lists, 1, key_blocks)[2], lists.keys, size


def mixing_in_eager(query, key, weight, lists, size, scale):
    """:func:`sparse.content_mixing` of float64 tensors, samples and heads in one axis."""
    weight = weight.double().repeat_interleave(len(query) // len(weight), 0)
    logits = scale * (query @ key.mT)[None]
    pooled = sparse.Pooled(*(None,) * 5, weight.log().clamp_min(EMPTY)[None], logits)
    return sparse.content_mixing(pooled, lists, stretch_of(size) // size)[0]


def check_mixing(problem):
    query, key, weight, bits, lists, size = problem
    scale, dtype = query.shape[-1] ** -0.5, query.dtype
    leaves = [x.detach().requires_grad_() for x in (query, key)]
    found = content_mixing(*leaves, weight, bits, scale, size)
    wide = [x.detach().double().requires_grad_() for x in (query, key)]
    expected = mixing_in_eager(*wide, weight, lists, size, scale)
    assert found.shape == expected.shape and found.dtype == torch.float32
    # rows sum to 1, or to 0 where all is listed
    assert (found.sum(-1) - expected.sum(-1)).abs().max() < 1e-6
    # float32 rounds a logit by eps of its size, and a weight is off by that much of itself
    rounding = torch.finfo(torch.float32).eps * scale * float((query.double() @ key.double().mT).abs().max())
    assert relative_error(found.detach(), expected.detach()) < max(FLOAT32, rounding)
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1))
    gradients = torch.autograd.grad(found, leaves, upstream)
    for ours, right in zip(gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=True):
        assert ours.dtype == dtype
        assert relative_error(ours, right) < max(ROUNDED[dtype], rounding)


MIXING = {
    "one block": (1,),
    "a stretch and a block": (9,),
    "two words": (33,),
    "three tiles": (130,),
    "blocks of 16": (40, 5, 16),
    "blocks of 64": (13, 20, 64),
    "blocks of 128": (5, 3, 128),
}


@pytest.mark.parametrize("sizes", MIXING.values(), ids=MIXING)
def test_mixing_by_content(sizes):
    check_mixing(mixing_problem(*sizes))


@DTYPES
@pytest.mark.parametrize("head_dim", [16, 64, 72, 128])
def test_types_and_head_dims_of_mixing(head_dim, dtype):
    check_mixing(mixing_problem(40, head_dim=head_dim, groups=2, dtype=dtype))


@pytest.mark.parametrize("density", [0.0, 1.1])
def test_mixing_where_nothing_or_everything_is_listed(density):
    check_mixing(mixing_problem(40, density=density))


def test_blocks_without_weight_have_no_part_in_mixing():
    problem = mixing_problem(70, samples=2, masked=0.4)
    problem[2][1] = 0  # nor has a whole sample
    check_mixing(problem)
    assert not content_mixing(*problem[:4], 0.25, 32)[2:].any()


def test_mixing_with_the_tiles_of_a_card(monkeypatch):
    is_card(monkeypatch)
    check_mixing(mixing_problem(70, 66, groups=1, head_dim=64, dtype=torch.bfloat16))


def test_mixing_of_32_blocks_at_once(monkeypatch):
    """One word of the lists, not two."""
    monkeypatch.setitem(tiles.TILES, "content_mixing", {"": ((16, 32, 4, 1),) * 4})
    for size in (16, 128):
        check_mixing(mixing_problem(70, size=size))


def test_large_logits_of_mixing():
    query, *others = mixing_problem(70)
    check_mixing((100 * query, *others))


def test_nan_stays_in_its_row_and_group():
    query, key, weight, bits, lists, size = mixing_problem(40)
    expected = content_mixing(query, key, weight, bits, 0.25, size)
    query[1, 2, 3], key[3, :, 0] = math.nan, math.nan
    found = content_mixing(query, key, weight, bits, 0.25, size)
    is_spoilt = torch.zeros(found.shape[:2], dtype=torch.bool)
    is_spoilt[1, 2] = is_spoilt[3] = True
    assert torch.equal(found[~is_spoilt], expected[~is_spoilt])
    assert found[is_spoilt].isnan().any(-1).all()


@settings(max_examples=10, deadline=None)
@given(
    key_blocks=st.integers(1, 140),
    query_blocks=st.integers(1, 40),
    size=st.sampled_from([16, 32, 64, 128]),
    density=st.floats(0, 1),
    masked=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_drawn_mixing(key_blocks, query_blocks, size, density, masked, seed):
    check_mixing(mixing_problem(key_blocks, query_blocks, size, groups=2, density=density, masked=masked, seed=seed))


# Merging


def merge_problem(
    grid=(5, 7), size=16, *, batch=1, heads=2, head_dim=16, dtype=torch.float32, with_states=True, seed=0
):
    """Arguments of the operator; some rows have no listed key, some no other, some neither."""
    make = torch.Generator().manual_seed(seed)
    groups, blocks = batch * heads, -(-math.prod(grid) // size)

    def random(*shape):
        return torch.randn(groups, *shape, generator=make)

    near, far, query = (random(blocks * size, head_dim).to(dtype) for _ in range(3))
    near_lse, far_lse = (random(blocks * size) for _ in range(2))
    near_lse[:, ::5], far_lse[:, ::3] = EMPTY, EMPTY
    states = None, None
    if with_states:
        mixed = random(blocks, head_dim, head_dim).to(states_dtype(dtype))
        states = mixed, torch.rand(groups, generator=make)
    return [near, near_lse, far, far_lse, query, *states, head_dim**-0.5, list(grid), size, heads]


def written_out(near, near_lse, far, far_lse, query, mixed, gamma, scale, grid, size, heads):
    if mixed is not None:
        read = query.unflatten(1, (-1, size)) @ mixed.to(query.dtype)
        far = far + gamma.to(far.dtype)[:, None, None] * scale * read.flatten(1, 2)
    merged = under_common_sum(near, near_lse[..., None], far, far_lse[..., None])
    return in_order(merged.unflatten(1, (-1, size)).unflatten(0, (-1, heads)), tuple(grid), size)


def check_merge(problem):
    dtype, count = problem[0].dtype, 5 if problem[5] is None else 6
    leaves = [x.detach().requires_grad_() for x in problem[:count]]
    found = merge(*leaves, *problem[count:])
    wide = [x.detach().double().requires_grad_() for x in problem[:count]]
    expected = written_out(*wide, *problem[count:])
    assert found.dtype == dtype and found.shape == expected.shape
    assert relative_error(found.detach(), expected.detach()) < ROUNDED[dtype]
    upstream = torch.randn(found.shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    # without states the query has no part
    leaves, wide = (x if problem[5] is not None else x[:4] for x in (leaves, wide))
    gradients = torch.autograd.grad(found, leaves, upstream)
    names = "near", "near_lse", "far", "far_lse", "query", "mixed"
    for name, ours, right in zip(
        names, gradients, torch.autograd.grad(expected, wide, upstream.double()), strict=False
    ):
        assert ours.shape == right.shape
        assert relative_error(ours, right) < SEVERAL[dtype], (name, relative_error(ours, right), SEVERAL[dtype])


@DTYPES
@pytest.mark.parametrize("head_dim", [5, 16, 72, 128])
@pytest.mark.parametrize("with_states", [True, False])
def test_merge(dtype, head_dim, with_states):
    check_merge(merge_problem(head_dim=head_dim, dtype=dtype, with_states=with_states))


@pytest.mark.parametrize("size", [16, 32, 64, 128])
@pytest.mark.parametrize("card", [False, True])
def test_block_sizes_of_merge(size, card, monkeypatch):
    if card:
        is_card(monkeypatch)
    check_merge(merge_problem((3, 5, 11), size, batch=2))


def test_merge_of_wide_heads_with_the_tiles_of_a_card(monkeypatch):
    is_card(monkeypatch)
    check_merge(merge_problem((70,), 64, heads=1, head_dim=136, dtype=torch.bfloat16))


def test_states_of_no_weight_are_none():
    """Output, and the gradients of near and far."""
    results = []
    for with_states in (False, True):
        problem = merge_problem(with_states=with_states)
        if with_states:
            problem[6] = torch.zeros_like(problem[6])
        leaves = [x.requires_grad_() for x in problem[:4]]
        output = merge(*problem)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), leaves)])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_nan_of_a_state_stays_in_its_block():
    problem = merge_problem((40,), 16, heads=1)
    expected = merge(*problem)
    problem[5][0, 1, 3, 2] = math.nan
    found = merge(*problem)
    is_spoilt = found.isnan()
    assert is_spoilt[0, :, 0, 2].sum() == 16 and is_spoilt.sum() == 16
    assert torch.equal(found[~is_spoilt], expected[~is_spoilt])


@DTYPES
@pytest.mark.parametrize("head_dim", [5, 64, 72, 128])
def test_what_sampled_queries_read(dtype, head_dim):
    make = torch.Generator().manual_seed(0)
    query = torch.randn(2, 96, head_dim, generator=make).to(dtype)
    mixed = torch.randn(2, 3, head_dim, head_dim, generator=make).to(states_dtype(dtype))
    some = torch.tensor([0, 31, 32, 70, 95])
    found = sampled_correction(query, mixed, some, 0.3)
    expected = 0.3 * (query.double().unflatten(1, (3, 32)) @ mixed.double()).flatten(1, 2)[:, some]
    # nothing is rounded to half precision
    assert found.dtype == torch.float32 and relative_error(found, expected) < FLOAT32
