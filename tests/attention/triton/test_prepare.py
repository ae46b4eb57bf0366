"""Rows, pooled blocks and their gradients against the definition, written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.layout import layout_of
from mhla_diffusers.attention.rope import apply_rotary
from mhla_diffusers.attention.triton.prepare import prepare


def definition(query, key, value, angles, key_mask, grid, block, extra, number):
    """In the tensors' own type, but that rows are rounded to ``number``; all seven tensors."""
    layout = layout_of(grid, block, extra)
    heads, order, valid = query.shape[2], layout.order, layout.valid
    if angles is not None:
        query, key = apply_rotary(query, angles), apply_rotary(key, angles)
    place, exists = order.long().clamp(min=0), (order >= 0).to(query.dtype)

    def rows(x):
        return (x.to(number).to(x.dtype)[:, place] * exists[:, None, None]).transpose(1, 2).flatten(0, 1)

    def blocks(x):
        return x.unflatten(1, (len(valid), -1))[:, : layout.grid_blocks]

    mask = key_mask if key_mask is not None else query.new_ones(query.shape[:2])
    weight = blocks((mask.to(query.dtype)[:, place] * exists).repeat_interleave(heads, 0))[..., None]
    total = weight.sum(2, keepdim=True)
    share = weight / torch.where(total > 0, total, torch.ones_like(total))
    q, k, v = rows(query), rows(key), rows(value)
    pooled_query = blocks(q).sum(2) / valid[: layout.grid_blocks, None]
    mean = (blocks(k) * share).sum(2)
    spread = ((blocks(k) - mean[:, :, None]).square() * share).sum(2)
    return q, k, v, pooled_query, mean, (blocks(v) * share).sum(2), spread


def make_problem(grid, block, extra, batch, heads, head_dim, dtype, mask=False, angles="shared", strides="plain"):
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
    return [*inputs, table, key_mask, grid, block, extra]


def assert_near(got, in_pytorch, truth, dtype):
    """float32 within 1e-5 of the largest; 16 bits within twice the error of the same steps in PyTorch."""
    for ours, theirs, right in zip(got, in_pytorch, truth, strict=True):
        assert ours.shape == right.shape and ours.dtype == dtype
        largest, error = right.abs().max(), (ours.double() - right).abs().max()
        allowed = 1e-5 * largest if dtype == torch.float32 else 2 * (theirs.to(dtype).double() - right).abs().max()
        assert error <= allowed, (float(error), float(allowed))


def check(problem):
    """Forward and backward; returns what the forward wrote."""
    dtype = problem[0].dtype
    inputs = [x.clone(memory_format=torch.preserve_format).requires_grad_() for x in problem[:3]]
    found = prepare(*inputs, *problem[3:5], list(problem[5]), *problem[6:])
    upstream = [torch.randn(found[i].shape).to(dtype) for i in (0, 1, 2, 4, 5)]
    outputs, gradients = [], []
    for wide, number in ((torch.float32, dtype), (torch.float64, torch.float64)):
        leaves = [x.detach().to(wide, copy=True).requires_grad_() for x in problem[:3]]
        others = [None if x is None else x.to(wide) for x in problem[3:5]]
        outputs.append(definition(*leaves, *others, *problem[5:], number))
        differentiable = [definition(*leaves, *others, *problem[5:], wide)[i] for i in (0, 1, 2, 4, 5)]
        gradients.append(torch.autograd.grad(differentiable, leaves, [x.to(wide) for x in upstream]))
    assert_near(found, *outputs, dtype)
    assert_near(torch.autograd.grad([found[i] for i in (0, 1, 2, 4, 5)], inputs, upstream), *gradients, dtype)
    return [x.detach() for x in found]


CASES = {
    "bfloat16": {"block": 64, "heads": 5, "head_dim": 32, "dtype": torch.bfloat16},
    "float16, masked": {"block": 16, "heads": 2, "head_dim": 16, "dtype": torch.float16, "mask": True},
    "float32, angles by sample": {"block": 16, "heads": 2, "head_dim": 64, "dtype": torch.float32, "angles": "own"},
    "padded channels": {"block": 32, "heads": 3, "head_dim": 72, "dtype": torch.bfloat16, "strides": "fused"},
    "three chunks of channels": {"block": 16, "heads": 1, "head_dim": 136, "dtype": torch.float32, "mask": True},
    "head before token": {"block": 32, "heads": 2, "head_dim": 40, "dtype": torch.float32, "strides": "transposed"},
    "no angles": {"block": 16, "heads": 2, "head_dim": 24, "dtype": torch.float32, "mask": True, "angles": None},
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_forward_and_backward(case):
    """The last block of the grid and that of the extra tokens have padding."""
    check(make_problem((3, case["block"] - 5), extra=7, batch=2, **case))


@settings(max_examples=10, deadline=None)
@given(
    grid=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    extra=st.integers(0, 17),
    heads=st.integers(1, 2),
    head_dim=st.sampled_from([2, 16, 18]),
    mask=st.booleans(),
)
def test_any_size(grid, extra, heads, head_dim, mask):
    check(make_problem(tuple(grid), 16, extra, 1, heads, head_dim, torch.float32, mask))


def test_blocks_without_weight_are_zero_and_pass_no_gradient_on():
    problem = make_problem((25,), 16, 0, 1, 2, 16, torch.float32, mask=True)
    problem[4][0, layout_of((25,), 16).order[16:25].long()] = 0.0
    for pooled in check(problem)[4:]:
        assert (pooled[:, 1] == 0).all() and (pooled[:, 0] != 0).any()


def test_spread_of_keys_far_from_zero():
    problem = make_problem((16,), 16, 0, 1, 1, 16, torch.float32, angles=None)
    problem[1] = problem[1] + 1000
    check(problem)
