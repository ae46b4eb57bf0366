"""Every operator of the kernels by itself against what it computes, written out in float64: outputs and gradients."""

import math
from itertools import product

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import BlockLists, sparse
from mhla_diffusers.attention.blocks import in_order
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.merge import under_common_sum
from mhla_diffusers.attention.order import stretch_of
from mhla_diffusers.attention.precision import EMPTY
from mhla_diffusers.attention.triton import tiles
from mhla_diffusers.attention.triton.choose import choose
from mhla_diffusers.attention.triton.fit import fit
from mhla_diffusers.attention.triton.listed import listed, transpose_lists
from mhla_diffusers.attention.triton.merge import merge
from mhla_diffusers.attention.triton.pooled import pooled
from mhla_diffusers.attention.triton.tiles import states_dtype

from ...refusals import refused
from ..problems import relative_error
from .test_choose import words_of

DTYPES = torch.float32, torch.bfloat16, torch.float16
FLOAT32 = 2e-6
"""Relative error of float32 sums of some hundred terms; weights are off by the rounding of their logits."""
ROUNDED = {torch.float32: FLOAT32, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Half an eps, the most by which a number that is rounded once is off. The norm of an error adds up mean squares, each
a third of that square at most, so it bounds what is made of rounded factors or terms too."""

drawn = settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture
def tiles_of_a_card(monkeypatch):
    """Tiles of an H100, larger than the interpreter's, but for products in TF32."""
    monkeypatch.setattr(tiles, "architecture_of", lambda _: "sm_90")


def check(operator, definition, leaves, rounding=0.0):
    """Hold outputs and gradients to the definition; returns the outputs.

    ``rounding`` is that of float32 logits, by which a weight is off, or of inputs.
    """
    dtype = leaves[0].dtype
    own = [x.detach().requires_grad_() for x in leaves]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    found, expected = operator(*own), definition(*wide)
    make = torch.Generator().manual_seed(1)
    upstream = [torch.randn(x.shape, generator=make).to(x.dtype) for x in found]
    of_found = torch.autograd.grad(found, own, upstream)
    of_expected = torch.autograd.grad(expected, wide, [x.double() for x in upstream])
    bounds = *(ROUNDED[x.dtype] for x in found), *(ROUNDED[dtype] for _ in own)
    for ours, right, bound in zip((*found, *of_found), (*expected, *of_expected), bounds, strict=True):
        assert ours.shape == right.shape
        error = relative_error(ours.detach(), right.detach())
        assert error <= max(bound, rounding), f"relative error {error:.2e}, allowed {max(bound, rounding):.2e}"
    return [x.detach() for x in found]


def rounding_of(query, key):
    """float32 rounds a logit by eps of its size."""
    return (
        torch.finfo(torch.float32).eps * float((query.double() @ key.double().mT).abs().max()) * query.shape[-1] ** -0.5
    )


# Softmax over listed blocks, and over the means of all others


def softmax_over(sees, bias):
    """Output and LSE of queries that see some keys; both 0 where there is none, as :func:`hidden` makes them."""

    def definition(query, key, value, gain=None):
        logits = (query @ key.mT) * query.shape[-1] ** -0.5 + bias.double()
        if gain is not None:
            logits = logits + gain.repeat_interleave(query.shape[1] // gain.shape[1], 1)
        something = sees.any(-1)
        logits = torch.where(sees, logits, torch.where(something, -math.inf, 0.0)[..., None])
        lse = logits.logsumexp(-1)
        return ((logits - lse[..., None]).exp() * something[..., None]) @ value, lse * something

    return definition


def hidden(operator, *others):
    """The operator with the LSE of a query that sees nothing, which is EMPTY, as 0."""

    def attend(*rows):
        output, lse = operator(*rows, *others)
        return output, lse.masked_fill(lse == torch.tensor(EMPTY), 0)

    return attend


def listed_problem(tokens=75, *, extra=9, rows=16, groups=2, width=3, head_dim=16, masked=False, causal=False, seed=0):
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
    sees = sees.tril() if causal else sees
    flat = indices + torch.arange(groups, dtype=torch.int32).repeat_interleave(query_blocks)[:, None] * blocks
    bias = bias.expand(groups, -1)
    others = bias.contiguous() if masked else None, flat.where(counted, 2**31 - 1), counts
    operator = hidden(listed, *others, head_dim**-0.5, [tokens], rows, extra, causal)
    return operator, softmax_over(sees, bias[:, None]), [query, key, value]


def pooled_problem(
    blocks=40,
    *,
    query_blocks=2,
    groups=2,
    rows=16,
    head_dim=16,
    density=0.3,
    masked=False,
    spread=True,
    seed=0,
):
    """With gains of blocks, or for means alone without."""
    torch.manual_seed(seed)
    query = torch.randn(groups, query_blocks * rows, head_dim)
    key, value = (torch.randn(groups, blocks, head_dim) for _ in range(2))
    bias = torch.randint(1, 17, (groups, blocks)).float().log()
    if masked:
        bias[torch.rand(groups, blocks) < 0.3] = -math.inf
    is_listed = torch.rand(groups * query_blocks, blocks) < density
    is_listed[0] = True
    sees = ~is_listed.unflatten(0, (groups, -1)).repeat_interleave(rows, 1)
    by_group = bias[:, None]
    place = bias, words_of(is_listed), head_dim**-0.5
    leaves = [query, key, value, *([torch.rand(groups, query_blocks, blocks) * 3] if spread else [])]
    operator = hidden(pooled, *place) if spread else hidden(pooled, None, *place)
    return operator, softmax_over(sees & (by_group > -math.inf), by_group), leaves


def check_softmax(make, *, dtype=torch.float32, change=lambda rows: rows, **options):
    operator, definition, rows = make(**options)
    rows = [x.to(dtype if i < 3 else states_dtype(dtype)) for i, x in enumerate(change(rows))]
    output, lse = check(operator, definition, rows, rounding_of(*rows[:2]))
    assert not output[lse == 0].any() and (lse == 0).any()


SOFTMAX = {
    "key mask": (listed_problem, {"masked": True}),
    "blocks of 32": (listed_problem, {"rows": 32, "groups": 1}),
    "padded channels": (listed_problem, {"head_dim": 24, "extra": 0}),
    "padded channels, key mask": (listed_problem, {"head_dim": 40, "masked": True}),
    "causal": (listed_problem, {"causal": True, "extra": 0}),
    # float32 has tiles of 16 queries and 32 keys
    "blocks of 64 cut": (listed_problem, {"tokens": 110, "rows": 64, "groups": 1}),
    "cut, causal": (
        listed_problem, {"tokens": 110, "rows": 64, "extra": 0, "groups": 1, "causal": True, "masked": True}
    ),
    "pooled, key mask": (pooled_problem, {"groups": 4, "masked": True}),
    "pooled, blocks of 128": (pooled_problem, {"rows": 128, "groups": 1}),
    "pooled, wide rows": (pooled_problem, {"head_dim": 128, "rows": 64, "groups": 1}),
    "pooled, all listed": (pooled_problem, {"density": 1.1}),
    "pooled, means alone": (pooled_problem, {"spread": False, "masked": True}),
    "pooled, many queries in few splits": (pooled_problem, {"query_blocks": 11, "groups": 1, "head_dim": 24}),
    **{f"{count} pooled keys": (pooled_problem, {"blocks": count}) for count in (1, 31, 32, 33, 64, 97)},
    **{f"{make.__name__}, {dtype}": (make, {"head_dim": 32, "dtype": dtype})
       for make, dtype in product((listed_problem, pooled_problem), DTYPES[1:])},
}  # fmt: skip


@pytest.mark.parametrize(("make", "options"), SOFTMAX.values(), ids=SOFTMAX)
def test_softmax(make, options):
    check_softmax(make, **options)


either = pytest.mark.parametrize("make", [listed_problem, pooled_problem])


@either
def test_softmax_without_gradient_of_the_lse(make):
    operator, definition, rows = make()
    check(lambda *x: operator(*x)[:1], lambda *x: definition(*x)[:1], rows, rounding_of(*rows[:2]))


@either
def test_logits_far_below_zero(make):
    """Padded rows have logits of 0, beside which the real ones vanish: neither may they leak, nor overflow."""
    check_softmax(make, seed=1, change=lambda rows: [rows[0].abs() * 8, -rows[1].abs() * 8, *rows[2:]])


@either
def test_head_dims_beyond_the_table(make):
    with refused("512"):
        check_softmax(make, head_dim=512)


@drawn
@given(
    make=st.sampled_from((listed_problem, pooled_problem)),
    count=st.integers(1, 70),
    head_dim=st.sampled_from((16, 20, 32)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
    more=st.integers(0, 20),
    density=st.sampled_from((0.0, 0.5, 0.95)),
)
def test_drawn_softmax(make, count, head_dim, masked, seed, more, density):
    if make is listed_problem:
        check_softmax(make, tokens=count, extra=more, head_dim=head_dim, masked=masked, seed=seed)
    else:
        own = {"query_blocks": 1 + more % 3, "density": density}
        check_softmax(make, blocks=count, **own, head_dim=head_dim, masked=masked, seed=seed)


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


# Mixing by content


def mixing_problem(
    key_blocks, query_blocks=5, size=32, *, samples=1, groups=4, head_dim=16, density=0.3, masked=0.0, seed=0
):
    """Means of queries and keys, gains, weights of blocks, bits, their lists, and rows of a block of keys."""
    make = torch.Generator().manual_seed(seed)
    query = torch.randn(groups, query_blocks, head_dim, generator=make)
    key = torch.randn(groups, key_blocks, head_dim, generator=make)
    gain = 3 * torch.rand(groups, query_blocks, key_blocks, generator=make)
    weight = size * torch.rand(samples, key_blocks, generator=make)
    weight[torch.rand(weight.shape, generator=make) < masked] = 0
    mask = torch.rand(1, groups, query_blocks, key_blocks, generator=make) < density
    mask[0, 0, 0] = True  # a query block that lists all has no far field
    lists = BlockLists.from_mask(1, mask)
    return query, key, gain, weight, words_of(mask.flatten(0, 2)), lists.keys, size


def check_mixing(query, key, gain, weight, bits, lists, size, dtype=torch.float32):
    scale = query.shape[-1] ** -0.5

    def definition(query, key, gain):
        log_weight = weight.double().repeat_interleave(len(query) // len(weight), 0).log().clamp_min(EMPTY)
        logits = scale * query @ key.mT + gain + log_weight[:, None]
        return (sparse.content_mixing(logits[None], lists, stretch_of(size) // size)[0],)

    leaves = [query.to(dtype), key.to(dtype), gain.to(states_dtype(dtype))]
    others = gain, weight.repeat_interleave(len(query) // len(weight), 0), bits, lists.shape[-1]
    place = scale, [size * key.shape[1]], size, 0
    found = check(lambda *x: choose(*x, *others, *place)[3:], definition, leaves, rounding_of(*leaves[:2]))[0]
    # rows sum to 1, or to 0 where all is listed
    assert found.dtype == torch.float32
    assert ((found.sum(-1) - 1).abs() < 1e-6).logical_or(found.sum(-1) == 0).all()
    return found


MIXING = {
    "one block": {"key_blocks": 1},
    "a stretch and a block": {"key_blocks": 9},
    "two words": {"key_blocks": 33},
    "three tiles": {"key_blocks": 130},
    "blocks of 16": {"key_blocks": 40, "size": 16},
    "blocks of 64": {"key_blocks": 13, "query_blocks": 20, "size": 64},
    "blocks of 128": {"key_blocks": 5, "query_blocks": 3, "size": 128},
    "nothing listed": {"key_blocks": 40, "density": 0.0},
    "everything listed": {"key_blocks": 40, "density": 1.1},
    **{f"{d} channels": {"key_blocks": 40, "head_dim": d, "groups": 2} for d in (64, 72, 128)},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", MIXING.values(), ids=MIXING)
def test_mixing(options, dtype):
    check_mixing(*mixing_problem(**options), dtype)


def test_blocks_without_weight_have_no_part_in_mixing():
    problem = mixing_problem(70, samples=2, masked=0.4)
    problem[3][1] = 0  # nor has a whole sample
    assert not check_mixing(*problem)[2:].any()


def test_mixing_with_the_tiles_of_a_card(tiles_of_a_card):
    check_mixing(*mixing_problem(70, 66, groups=1, head_dim=64), torch.bfloat16)


def test_large_logits_of_mixing():
    query, *others = mixing_problem(70)
    check_mixing(100 * query, *others)


@drawn
@given(
    key_blocks=st.integers(1, 140),
    query_blocks=st.integers(1, 40),
    size=st.sampled_from([16, 32, 64, 128]),
    density=st.floats(0, 1),
    masked=st.floats(0, 1),
    seed=st.integers(0, 99),
)
def test_drawn_mixing(**options):
    check_mixing(*mixing_problem(groups=2, **options))


# Merging


def check_merge(grid=(5, 7), size=16, *, batch=1, heads=2, head_dim=16, dtype=torch.float32, with_states=True):
    """Some rows have no listed key, some no other, some neither."""
    make = torch.Generator().manual_seed(0)
    groups, blocks = batch * heads, -(-math.prod(grid) // size)

    def random(*shape):
        return torch.randn(groups, *shape, generator=make)

    near, far, query = (random(blocks * size, head_dim).to(dtype) for _ in range(3))
    near_lse, far_lse = (random(blocks * size) for _ in range(2))
    near_lse[:, ::5], far_lse[:, ::3] = EMPTY, EMPTY
    mixed, gamma = random(blocks, head_dim, head_dim).to(states_dtype(dtype)), torch.rand(groups, generator=make)
    scale, leaves = head_dim**-0.5, [near, near_lse, far, far_lse]
    leaves += [query, mixed] if with_states else []  # without states the query has no part

    def operator(*rows):
        of_states = (*rows[4:], gamma) if with_states else (None, None, None)
        return (merge(*rows[:4], *of_states, scale, list(grid), size, heads),)

    def definition(near, near_lse, far, far_lse, query=None, mixed=None):
        if with_states:
            far = far + gamma.double()[:, None, None] * scale * (query.unflatten(1, (-1, size)) @ mixed).flatten(1, 2)
        merged = under_common_sum(near, near_lse[..., None], far, far_lse[..., None])
        return (in_order(merged.unflatten(1, (-1, size)).unflatten(0, (-1, heads)), tuple(grid), size),)

    assert check(operator, definition, leaves)[0].dtype == dtype


MERGE = [
    *({"head_dim": d, "dtype": dtype} for d in (5, 72, 128) for dtype in DTYPES),
    *({"dtype": dtype, "with_states": False} for dtype in DTYPES),
    *({"grid": (3, 5, 11), "size": size, "batch": 2} for size in (16, 32, 64, 128)),
]


@pytest.mark.parametrize("options", MERGE, ids=str)
def test_merge(options):
    check_merge(**options)


@pytest.mark.parametrize("options", [*MERGE[-4:], {"grid": (70,), "size": 64, "heads": 1, "head_dim": 136}], ids=str)
def test_merge_with_the_tiles_of_a_card(options, tiles_of_a_card):
    check_merge(dtype=torch.bfloat16, **options)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("head_dim", [5, 72, 128])
def test_fit(dtype, head_dim):
    """With values of 0 nothing but the inputs is rounded to half precision."""
    make = torch.Generator().manual_seed(0)
    query, key, noise = torch.randn(3, 2, 96, head_dim, generator=make).to(dtype)
    near_lse, far_lse = torch.randn(2, 2, 96, generator=make)
    mixed = torch.randn(2, 3, head_dim, head_dim, generator=make).to(states_dtype(dtype))
    read = 0.3 * (query.double().unflatten(1, (3, 32)) @ mixed.double()).flatten(1, 2)
    near = far = (noise - read).to(dtype)  # so that γ is about 1 or more
    found = fit(query, key, 0 * key, None, near, near_lse, far, far_lse, mixed, 0.3, [96], 32, 0)
    some = sparse.fitting_rows(96, query.device)
    parts = (x[:, some].double() for x in (0 * near, near, near_lse, far, far_lse, read))
    for weights, expected in zip(found, sparse.best_weights(*parts), strict=True):
        assert relative_error(weights, expected) < FLOAT32
