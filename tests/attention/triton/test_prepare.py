"""Rows, pooled blocks and their gradients against the definition, written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.layout import Layout
from mhla_diffusers.attention.triton.prepare import _OUTPUTS, prepare_backward_launch, prepare_launch


def tokens_in_blocks(valid, block, grid_blocks):
    """A random order of as many tokens as the blocks hold, padded; the blocks behind those of the grid are of text."""
    order = torch.full((len(valid), block), -1, dtype=torch.int32)
    places = torch.randperm(sum(valid), dtype=torch.int32)
    for t, part in enumerate(places.split(list(valid))):
        order[t, : len(part)] = part
    return Layout(block, grid_blocks, order.flatten(), torch.tensor(valid, dtype=torch.int32), places)


def rotate(x, angles):
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angles[..., 0::2], angles[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def definition(query, key, value, angles, key_mask, layout, number):
    """In the tensors' own type, but that rows are rounded to ``number``; all seven tensors."""
    batch, tokens, heads, head_dim = query.shape
    order, valid, grid_blocks = layout.order, layout.valid, layout.grid_blocks
    if angles is not None:
        query, key = rotate(query, angles), rotate(key, angles)
    place, exists = order.long().clamp(min=0), (order >= 0).to(query.dtype)

    def rows(x):
        return (x.to(number).to(x.dtype)[:, place] * exists[:, None, None]).transpose(1, 2).flatten(0, 1)

    def blocks(x):
        return x.unflatten(1, (len(valid), -1))[:, :grid_blocks]

    mask = key_mask if key_mask is not None else query.new_ones(batch, tokens)
    weight = (mask.to(query.dtype)[:, place] * exists).repeat_interleave(heads, 0)
    weight = blocks(weight)[..., None]
    total = weight.sum(2, keepdim=True)
    share = weight / torch.where(total > 0, total, torch.ones_like(total))
    q, k, v = rows(query), rows(key), rows(value)
    pooled_query = blocks(q).sum(2) / valid[:grid_blocks, None].clamp(min=1)
    mean = (blocks(k) * share).sum(2)
    spread = ((blocks(k) - mean[:, :, None]).square() * share).sum(2)
    return q, k, v, pooled_query, mean, (blocks(v) * share).sum(2), spread


def make_problem(
    valid, block, batch, heads, head_dim, dtype, mask=False, angles="shared", strides="plain", grid_blocks=None
):
    torch.manual_seed(0)
    layout = tokens_in_blocks(valid, block, len(valid) if grid_blocks is None else grid_blocks)
    tokens = sum(valid)
    if strides == "plain":
        inputs = [torch.randn(batch, tokens, heads, head_dim).to(dtype) for _ in range(3)]
    elif strides == "fused":
        inputs = list(torch.randn(batch, tokens, 3, heads, head_dim).to(dtype).unbind(2))
    else:
        inputs = [torch.randn(batch, heads, tokens, head_dim).to(dtype).transpose(1, 2) for _ in range(3)]
    table = None
    if angles is not None:
        angle = torch.randn(1 if angles == "shared" else batch, tokens, 1, head_dim // 2)
        table = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)
    key_mask = torch.rand(batch, tokens) * (torch.rand(batch, tokens) < 0.8) if mask else None
    return [*inputs, table, key_mask, layout]


def in_type(problem, dtype):
    *floats, layout = problem
    return [x.to(dtype) if x is not None else None for x in floats] + [layout]


def assert_near(got, in_pytorch, truth, dtype):
    """float32 within 1e-5 of the largest; 16 bits within twice the error of the same steps in PyTorch."""
    for ours, theirs, right in zip(got, in_pytorch, truth, strict=True):
        assert ours.shape == right.shape and ours.dtype == dtype
        largest, error = right.abs().max(), (ours.double() - right).abs().max()
        allowed = 1e-5 * largest if dtype == torch.float32 else 2 * (theirs.to(dtype).double() - right).abs().max()
        assert error <= allowed, (float(error), float(allowed))


def written(launch, names):
    launch.run()
    return [launch.arguments[name] for name in names]


def check(problem):
    """Forward and backward; returns what the forward wrote."""
    dtype, layout = problem[0].dtype, problem[-1]
    prepared = written(prepare_launch(*problem), _OUTPUTS)
    truth = definition(*in_type(problem, torch.float64), torch.float64)
    assert_near(prepared, definition(*in_type(problem, torch.float32), dtype), truth, dtype)

    gradients = [torch.randn(prepared[i].shape).to(dtype) for i in (0, 1, 2, 4, 5)]
    expected = []
    for wide in (torch.float32, torch.float64):
        inputs = [x.to(wide, copy=True).requires_grad_() for x in problem[:3]]
        q, k, v, _, pooled_key, pooled_value, _ = definition(*inputs, *in_type(problem, wide)[3:], wide)
        upstream = [x.to(wide) for x in gradients]
        expected.append(torch.autograd.grad([q, k, v, pooled_key, pooled_value], inputs, upstream))
    launch = prepare_backward_launch(gradients, *problem[3:5], layout, problem[0].shape, dtype)
    assert_near(written(launch, ("query", "key", "value")), *expected, dtype)
    return prepared


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
    """The last block holds extra tokens."""
    block = case["block"]
    check(make_problem((block, 3, block - 1, 7), batch=2, grid_blocks=3, **case))


@settings(max_examples=10, deadline=None)
@given(
    valid=st.lists(st.integers(0, 16), min_size=1, max_size=3).filter(any),
    extra=st.integers(0, 1),
    heads=st.integers(1, 2),
    head_dim=st.sampled_from([2, 16, 18]),
    mask=st.booleans(),
)
def test_any_size(valid, extra, heads, head_dim, mask):
    grid_blocks = len(valid) - min(extra, len(valid) - 1)
    check(make_problem(valid, 16, 1, heads, head_dim, torch.float32, mask, grid_blocks=grid_blocks))


def test_blocks_without_weight_are_zero_and_pass_no_gradient_on():
    problem = make_problem((16, 9), 16, 1, 2, 16, torch.float32, mask=True)
    problem[4][0, problem[5].order[16:25].long()] = 0.0
    for pooled in check(problem)[4:]:
        assert (pooled[:, 1] == 0).all() and (pooled[:, 0] != 0).any()


def test_spread_of_keys_far_from_zero():
    problem = make_problem((16,), 16, 1, 1, 16, torch.float32, angles=None)
    problem[1] = problem[1] + 1000
    check(problem)


def test_without_pooled_gradients():
    problem = make_problem((16, 5), 16, 1, 2, 16, torch.float32, mask=True)
    rows = [torch.randn(2, 32, 16) for _ in range(3)]
    zeros = torch.zeros(2, 2, 16)
    about, names = (*problem[3:], problem[0].shape, torch.float32), ("query", "key", "value")
    with_zeros = written(prepare_backward_launch([*rows, zeros, zeros], *about), names)
    without = written(prepare_backward_launch([*rows, None, None], *about), names)
    assert all(map(torch.equal, with_zeros, without))


def test_the_same_bits_twice():
    problem = make_problem((16, 5), 16, 2, 2, 16, torch.bfloat16, mask=True)
    assert all(map(torch.equal, check(problem), check(problem)))
