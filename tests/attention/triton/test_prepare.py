"""Rows, means and states of blocks and their gradients against the definition, written out in float64."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention import SparseCall
from mhla_diffusers.attention.call import ContentRule
from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.order import content_order, stretch_of
from mhla_diffusers.attention.rope import apply_rotary
from mhla_diffusers.attention.sparse import pool, stretch_states, uniform_rows
from mhla_diffusers.attention.triton import tiles
from mhla_diffusers.attention.triton.prepare import prepare
from mhla_diffusers.attention.triton.tiles import states_dtype

from ..problems import relative_error
from . import test_kernels as kernels

DIFFERENTIABLE = 0, 1, 2, 4, 5, 6, 7
"""Names of what :func:`definition` returns; without states the last two have no gradient."""


def definition(query, key, value, angles, key_mask, place, rows_of_keys):
    """All eight tensors that the operator writes, but for the positions."""
    grid, block, key_block, extra, _, with_states = place
    queries, keys = (layout_of(tuple(grid), size, extra) for size in (block, key_block))
    if angles is not None:
        query, key = apply_rotary(query, angles), apply_rotary(key, angles)

    def rows(x, positions):
        """(B H, R, D) of (B, N, H, D) at positions (B H, R), 0 at -1."""
        x = x.transpose(1, 2).flatten(0, 1)
        found = x.gather(1, positions.long().clamp(min=0)[..., None].expand(-1, -1, x.shape[-1]))
        return found * (positions >= 0)[..., None]

    def blocks(x, layout):
        return x.unflatten(1, (len(layout.valid), -1))[:, : layout.grid_blocks]

    mask = key_mask if key_mask is not None else query.new_ones(query.shape[:2])
    mask = mask.to(query.dtype)[:, :, None, None].expand(-1, -1, query.shape[2], 1)
    weight = blocks(rows(mask, rows_of_keys), keys)
    total = weight.sum(2, keepdim=True)
    share = weight / torch.where(total > 0, total, torch.ones_like(total))
    q = rows(query, queries.order.expand(len(rows_of_keys), -1))
    k, v = (rows(x, rows_of_keys) for x in (key, value))
    pooled_query = blocks(q, queries).sum(2) / queries.valid[: queries.grid_blocks, None]
    mean, mean_value = ((blocks(x, keys) * share).sum(2) for x in (k, v))
    spread = ((blocks(k, keys) - mean[:, :, None]).square() * share).sum(2)
    states = k.new_zeros(len(k), 0, k.shape[-1], k.shape[-1])
    if with_states:
        left, right = (blocks(k, keys) - mean[:, :, None]) * share, blocks(v, keys) - mean_value[:, :, None]
        per_stretch = stretch_of(key_block) // key_block
        has_weight = (total > 0).to(k.dtype)[..., None]
        parts = zip(*(x.split(per_stretch, 1) for x in (left.mT @ right, has_weight)), strict=True)
        states = torch.stack([x.sum(1) / n.sum(1).clamp(min=1).squeeze(1) for x, n in parts], 1)
    return q, k, v, pooled_query, mean, mean_value, spread, states


def expected_rows(key, angles, key_mask, place):
    """Positions of the rows of keys, (B H, R): the curve, sorted by content on the grid."""
    grid, _, block, extra, by_content, _ = place
    layout, heads = layout_of(tuple(grid), block, extra), key.shape[2]
    order = layout.order.long().expand(len(key), heads, -1)
    if by_content:
        key = key.float() if angles is None else apply_rotary(key.float(), angles)
        mask = torch.ones(len(key), key.shape[1]) if key_mask is None else key_mask
        on_grid = layout.order[: layout.grid_blocks * block].long()
        exists = (mask[:, on_grid.clamp(min=0)] > 0) & (on_grid >= 0)
        sorted_rows = content_order(key.transpose(1, 2)[:, :, on_grid.clamp(min=0)], exists, block)
        order = torch.cat([order.gather(2, sorted_rows), order[..., len(on_grid) :]], dim=2)
    return order.flatten(0, 1)


def make_problem(
    grid, block, extra=0, *, batch=1, heads=1, head_dim=16, dtype=torch.float32, key_block=None, content=True,
    mask=False, angles="shared", strides="plain", states=True,
):  # fmt: skip
    """Arguments of the operator."""
    torch.manual_seed(0)
    tokens = torch.Size(grid).numel() + extra
    if strides == "fused":
        inputs = list(torch.randn(batch, tokens, 3, heads, head_dim).to(dtype).unbind(2))
    elif strides == "transposed":
        inputs = [torch.randn(batch, heads, tokens, head_dim).to(dtype).transpose(1, 2) for _ in range(3)]
    else:
        inputs = [torch.randn(batch, tokens, heads, head_dim).to(dtype) for _ in range(3)]
    table = None
    if angles is not None:
        angle = torch.randn(1 if angles == "shared" else batch, tokens, 1, head_dim // 2)
        table = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)
    key_mask = torch.rand(batch, tokens) * (torch.rand(batch, tokens) < 0.8) if mask else None
    return [*inputs, table, key_mask, (list(grid), block, key_block or block, extra, content, states)]


def check(problem, rounding=0.0):
    """Forward and backward; returns what the forward wrote."""
    *inputs, table, key_mask, place = problem
    positions = expected_rows(inputs[1], table, key_mask, place)
    differentiable = DIFFERENTIABLE if place[-1] else DIFFERENTIABLE[:-2]
    written = []

    def operator(*rows):
        *found, where, states, bias, weight = prepare(*rows, table, key_mask, *place)
        check_weights(bias, weight, positions, key_mask, place)
        assert torch.equal(where.long(), positions)
        written[:] = [*found, states]
        return tuple(written[i] for i in differentiable)

    others = *(None if x is None else x.double() for x in (table, key_mask)), place, positions
    expected = definition(*(x.double() for x in inputs), *others)
    bound = max(rounding, kernels.ROUNDED[inputs[0].dtype])  # states are of rounded rows, also those in float32

    def wanted(*rows):
        return tuple(definition(*rows, *others)[i] for i in differentiable)

    kernels.check(operator, wanted, inputs, bound)
    assert relative_error(written[6], expected[6]) <= bound
    assert written[6].dtype == written[7].dtype == states_dtype(inputs[0].dtype)
    return [x.detach() for x in written]


def check_weights(bias, weight, positions, key_mask, place):
    """Logs of the weights of rows, with a mask, and sums of the weights of the grid's blocks."""
    grid, _, block, *_ = place
    weights = (positions >= 0).float()
    if key_mask is not None:
        by_group = key_mask.repeat_interleave(len(positions) // len(key_mask), 0)
        weights = weights * by_group.gather(1, positions.clamp(min=0))
        assert torch.allclose(bias.exp(), weights)
    of_blocks = weights.unflatten(1, (-1, block)).sum(2)[:, : -(-math.prod(grid) // block)]
    assert torch.allclose(weight, of_blocks)


CASES = {
    "bfloat16": {"block": 64, "heads": 5, "head_dim": 32, "dtype": torch.bfloat16},
    "keys in 32": {"block": 128, "key_block": 32, "head_dim": 24, "mask": True},
    "along the curve": {"block": 64, "key_block": 16, "heads": 2, "content": False},
    "without states": {"block": 32, "heads": 2, "mask": True, "states": False},
    "float16, masked": {"block": 16, "heads": 2, "dtype": torch.float16, "mask": True},
    "float32, angles by sample": {"block": 16, "heads": 2, "head_dim": 64, "angles": "own"},
    "padded channels": {"block": 32, "heads": 3, "head_dim": 72, "dtype": torch.bfloat16, "strides": "fused"},
    "three chunks of channels": {"block": 16, "head_dim": 136, "mask": True},
    "head before token": {"block": 32, "heads": 2, "head_dim": 40, "strides": "transposed"},
    "no angles": {"block": 16, "heads": 2, "head_dim": 24, "mask": True, "angles": None},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_backward(case):
    """The last block of the grid and that of the extra tokens have padding."""
    check(make_problem((3, case["block"] - 5), extra=7, batch=2, **case))


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grid=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    extra=st.integers(0, 17),
    heads=st.integers(1, 2),
    head_dim=st.sampled_from([2, 16, 18]),
    mask=st.booleans(),
    block=st.sampled_from([16, 32]),
)
def test_any_size(grid, block, **options):
    check(make_problem(grid, block, key_block=16, **options))


def test_several_stretches_and_equal_keys():
    problem = make_problem((600,), 64, batch=2, head_dim=8, mask=True)
    problem[1] = problem[1].round()
    check(problem)


def test_blocks_without_weight_are_zero_and_pass_no_gradient_on():
    problem = make_problem((25,), 16, heads=2, content=False, mask=True)
    problem[4][0, layout_of((25,), 16).order[16:25].long()] = 0.0
    *_, pooled_key, pooled_value, spread, states = check(problem)
    assert states.any()
    for pooled in (pooled_key, pooled_value, spread):
        assert (pooled[:, 1] == 0).all() and (pooled[:, 0] != 0).any()


def test_spread_of_keys_far_from_zero():
    problem = make_problem((16,), 16, angles=None)
    problem[1] = problem[1] + 1000
    check(problem, rounding=1e-5)  # of differences of numbers that float32 rounds by 6e-5


def test_nan_does_not_push_keys_out():
    """It is sorted before the padding, so that every token has its row."""
    problem = make_problem((37,), 16, heads=2, head_dim=8)
    problem[1][:, ::3] = float("nan")
    positions = prepare(*problem[:5], *problem[5])[7]
    for row in positions:
        assert torch.equal(row[:37].sort().values, torch.arange(37, dtype=torch.int32))


HALF_OF_STATES = {torch.float32: 3e-7, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
"""Relative error of states whose factors and, in bfloat16, sums are rounded: each by at most half an eps of its own,
so that a norm over many entries is off by less than one eps of all; float32 sums of some 250 terms of either sign."""


@pytest.mark.parametrize(
    ("head_dim", "dtype", "by_content"),
    [
        (16, torch.float16, True),
        (64, torch.float32, True),
        (72, torch.bfloat16, False),
        (72, torch.float32, True),
        (128, torch.bfloat16, True),
        (128, torch.float16, False),
    ],
    ids=str,
)
def test_states_are_those_of_the_eager_module(head_dim, dtype, by_content):
    """1,015 tokens: three whole stretches of 256 keys and one that the end cuts, in a block with padding."""
    query, key, value, _, mask, _ = make_problem((5, 7, 29), 32, head_dim=head_dim, dtype=dtype, mask=True, angles=None)
    rule = ContentRule(32, 0.1, key_block_size=16, order="content" if by_content else "curve")
    found = prepare(query, key, value, None, mask, [5, 7, 29], 32, 16, 0, by_content, True)[8]
    wide = (x.double() for x in (query, key, value))
    tensors = dict(zip(("query", "key", "value"), wide, strict=True))
    call = SparseCall(**tensors, grid=(5, 7, 29), sparse=rule, key_mask=mask)
    rows = uniform_rows(call, rule)
    expected = stretch_states(pool(call, rule, rows), rows.value, 16).flatten(0, 1)
    assert found.shape == (1, 4, head_dim, head_dim) and found.dtype == states_dtype(dtype)
    assert (found.double() - expected).norm() <= HALF_OF_STATES[dtype] * expected.norm()


def test_a_stretch_without_a_key_has_a_state_of_zero():
    query, key, value, *_ = make_problem((512,), 64)
    mask = torch.ones(1, 512)
    mask[0, layout_of((512,), 64).order[256:].long()] = 0
    states = prepare(query, key, value, None, mask, [512], 64, 64, 0, True, True)[8]
    assert states[:, 0].any() and not states[:, 1].any()


def test_parts_of_a_state_are_those_of_the_whole(monkeypatch):
    """Heads of more channels than are added up at once."""
    problem = make_problem((70,), 16, head_dim=40, mask=True)
    monkeypatch.setitem(tiles.TILES, "prepare_keys", {"": ((16, 16, 8, 1),) * 4})
    check(problem)
