"""Order and weights of the rows of keys; whole attentions show that means, states and gradients are right."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.order import content_order
from mhla_diffusers.attention.rope import apply_rotary
from mhla_diffusers.attention.triton.prepare import prepare


def rows_of_keys(key, angles, key_mask, grid, block, extra, by_content):
    """Tokens of the rows of keys, (B H, R): the curve, sorted by content on the grid."""
    layout, heads = layout_of(grid, block, extra), key.shape[2]
    order = layout.order.long().expand(len(key), heads, -1)
    if by_content:
        key = key.float() if angles is None else apply_rotary(key.float(), angles)
        mask = torch.ones(len(key), key.shape[1]) if key_mask is None else key_mask
        on_grid = layout.order[: layout.grid_blocks * block].long()
        exists = (mask[:, on_grid.clamp(min=0)] > 0) & (on_grid >= 0)
        sorted_rows = content_order(key.transpose(1, 2)[:, :, on_grid.clamp(min=0)], exists, block)
        order = torch.cat([order.gather(2, sorted_rows), order[..., len(on_grid) :]], dim=2)
    return order.flatten(0, 1)


def check(
    grid, block, extra=0, *, batch=1, heads=1, head_dim=16, dtype=torch.float32, key_block=None, content=True,
    mask=False, angles=True, change=lambda key: key,
):  # fmt: skip
    """Which token every row of keys is, its weight, and those of blocks."""
    torch.manual_seed(0)
    tokens, key_block = math.prod(grid) + extra, key_block or block
    query, key, value = torch.randn(batch, tokens, 3, heads, head_dim).to(dtype).unbind(2)
    key, table = change(key), None
    if angles:
        angle = torch.randn(batch, tokens, 1, head_dim // 2)
        table = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)
    key_mask = torch.rand(batch, tokens) * (torch.rand(batch, tokens) < 0.8) if mask else None
    found = prepare(query, key, value, table, key_mask, list(grid), block, key_block, extra, content, True)
    positions = rows_of_keys(key, table, key_mask, grid, key_block, extra, content)
    assert torch.equal(found[7].long(), positions)
    weights = torch.ones(batch, tokens) if key_mask is None else key_mask
    weights = weights.repeat_interleave(heads, 0).gather(1, positions.clamp(min=0)) * (positions >= 0)
    of_blocks = weights.unflatten(1, (-1, key_block)).sum(2)[:, : -(-math.prod(grid) // key_block)]
    assert torch.allclose(found[10], of_blocks)
    if mask:
        assert torch.allclose(found[9].exp(), weights)


CASES = {
    "bfloat16": {"block": 64, "heads": 5, "head_dim": 32, "dtype": torch.bfloat16},
    "keys in 32": {"block": 128, "key_block": 32, "head_dim": 24, "mask": True},
    "along the curve": {"block": 64, "key_block": 16, "heads": 2, "content": False},
    "float16, masked": {"block": 16, "heads": 2, "dtype": torch.float16, "mask": True},
    "padded channels": {"block": 32, "heads": 3, "head_dim": 72, "dtype": torch.bfloat16},
    "three chunks of channels": {"block": 16, "head_dim": 136, "mask": True},
    "no angles": {"block": 16, "heads": 2, "head_dim": 24, "mask": True, "angles": False},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_rows_and_weights(case):
    """The last block of the grid and that of the extra tokens have padding."""
    check((3, case["block"] - 5), extra=7, batch=2, **case)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    grid=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    extra=st.integers(0, 17),
    head_dim=st.sampled_from([2, 16, 18]),
    mask=st.booleans(),
    block=st.sampled_from([16, 32]),
)
def test_any_size(grid, block, **options):
    check(grid, block, key_block=16, **options)


def test_several_stretches_and_equal_keys():
    check((600,), 64, batch=2, head_dim=8, mask=True, angles=False, change=torch.round)


def test_nan_does_not_push_keys_out():
    """It is sorted before the padding, so that every token has its row."""
    query, key, value = torch.randn(3, 1, 37, 2, 8)
    key[:, ::3] = float("nan")
    for row in prepare(query, key, value, None, None, [37], 16, 16, 0, True, True)[7]:
        assert torch.equal(row[:37].sort().values, torch.arange(37, dtype=torch.int32))


def test_blocks_and_stretches_without_a_key_are_zero():
    query, key, value = torch.randn(3, 1, 512, 1, 16)
    mask = torch.ones(1, 512)
    mask[0, layout_of((512,), 64).order[256:].long()] = 0
    found = prepare(query, key, value, None, mask, [512], 64, 64, 0, True, True)
    for of_blocks in (*found[4:7], found[10]):
        assert of_blocks[:, :4].all() and not of_blocks[:, 4:].any()
    assert found[8][:, 0].any() and not found[8][:, 1].any()
