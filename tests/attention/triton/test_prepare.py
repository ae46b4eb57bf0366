"""Rows, pooled blocks and their gradients against the definition, written out in float64."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import prepare
from mhla_diffusers.attention.triton.prepare import prepare_backward_launch, prepare_launch

from .compiled import SHARED_MEMORY, compile_launch, run_without_interpreter, variant_of


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    def allocate(shape, dtype, device):
        return torch.full(shape, float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(prepare, "allocate", allocate)


def tokens_in_blocks(valid, block):
    """A random order of as many tokens as the blocks hold, padded."""
    order = torch.full((len(valid), block), -1, dtype=torch.int32)
    places = torch.randperm(sum(valid), dtype=torch.int32)
    for t, part in enumerate(places.split(list(valid))):
        order[t, : len(part)] = part
    return order.flatten(), torch.tensor(valid, dtype=torch.int32)


def rotate(x, angles):
    even, odd, cos, sin = x[..., 0::2], x[..., 1::2], angles[..., 0::2], angles[..., 1::2]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def definition(query, key, value, angles, key_mask, order, valid, grid_blocks, number):
    """In the tensors' own type, but that rows are rounded to ``number``; all seven tensors."""
    batch, tokens, heads, head_dim = query.shape
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


def make_problem(valid, block, batch, heads, head_dim, dtype, mask=False, angles="shared", layout="plain"):
    torch.manual_seed(0)
    order, valid = tokens_in_blocks(valid, block)
    tokens = int(valid.sum())
    if layout == "plain":
        inputs = [torch.randn(batch, tokens, heads, head_dim).to(dtype) for _ in range(3)]
    elif layout == "fused":
        inputs = list(torch.randn(batch, tokens, 3, heads, head_dim).to(dtype).unbind(2))
    else:
        inputs = [torch.randn(batch, heads, tokens, head_dim).to(dtype).transpose(1, 2) for _ in range(3)]
    table = None
    if angles is not None:
        angle = torch.randn(1 if angles == "shared" else batch, tokens, 1, head_dim // 2)
        table = torch.stack([angle.cos(), angle.sin()], -1).flatten(-2)
    key_mask = torch.rand(batch, tokens) * (torch.rand(batch, tokens) < 0.8) if mask else None
    return [*inputs, table, key_mask, order, valid]


def in_type(problem, dtype):
    *floats, order, valid = problem
    return [x.to(dtype) if x is not None else None for x in floats] + [order, valid]


def check(got, in_pytorch, truth, dtype):
    """float32 within 1e-5 of the largest; 16 bits within twice the error of the same steps in PyTorch."""
    for ours, theirs, right in zip(got, in_pytorch, truth, strict=True):
        assert ours.shape == right.shape and ours.dtype == dtype
        largest, error = right.abs().max(), (ours.double() - right).abs().max()
        allowed = 1e-5 * largest if dtype == torch.float32 else 2 * (theirs.to(dtype).double() - right).abs().max()
        assert error <= allowed, (float(error), float(allowed))


def written(launch, outputs):
    launch.run()
    return outputs


def check_forward(problem, grid_blocks, dtype):
    got = written(*prepare_launch(*problem, len(problem[-1]), grid_blocks))
    truth = definition(*in_type(problem, torch.float64), grid_blocks, torch.float64)
    check(got, definition(*in_type(problem, torch.float32), grid_blocks, dtype), truth, dtype)
    return got


def check_backward(problem, grid_blocks, dtype):
    truth_problem = in_type(problem, torch.float64)
    inputs = [x.clone().requires_grad_() for x in truth_problem[:3]]
    q, k, v, _, pooled_key, pooled_value, _ = definition(*inputs, *truth_problem[3:], grid_blocks, torch.float64)
    outputs = [q, k, v, pooled_key, pooled_value]
    gradients = [torch.randn(x.shape).to(dtype) for x in outputs]
    truth = torch.autograd.grad(outputs, inputs, [x.double() for x in gradients])
    inputs = [x.float().requires_grad_() for x in problem[:3]]
    q, k, v, _, pooled_key, pooled_value, _ = definition(
        *inputs, *in_type(problem, torch.float32)[3:], grid_blocks, torch.float32
    )
    in_pytorch = torch.autograd.grad([q, k, v, pooled_key, pooled_value], inputs, [x.float() for x in gradients])
    got = written(*prepare_backward_launch(*gradients, *problem[3:], problem[0].shape, dtype))
    check(got, in_pytorch, truth, dtype)
    return got


CASES = {
    "bfloat16": {"block": 64, "heads": 5, "head_dim": 32, "dtype": torch.bfloat16},
    "float16, masked": {"block": 16, "heads": 2, "head_dim": 16, "dtype": torch.float16, "mask": True},
    "float32, angles by sample": {"block": 16, "heads": 2, "head_dim": 64, "dtype": torch.float32, "angles": "own"},
    "padded channels": {
        "block": 32,
        "heads": 3,
        "head_dim": 72,
        "dtype": torch.bfloat16,
        "mask": True,
        "layout": "fused",
    },
    "three chunks of channels": {"block": 16, "heads": 1, "head_dim": 136, "dtype": torch.float32, "mask": True},
    "head before token": {"block": 32, "heads": 2, "head_dim": 40, "dtype": torch.float32, "layout": "transposed"},
    "no angles": {"block": 16, "heads": 2, "head_dim": 24, "dtype": torch.float32, "mask": True, "angles": None},
}


@pytest.mark.parametrize("case", CASES)
def test_forward_and_backward(case):
    settings = dict(CASES[case])
    block = settings["block"]
    problem = make_problem((block, 3, block - 1, 7), batch=2, **settings)  # the last block holds extra tokens
    check_forward(problem, 3, settings["dtype"])
    check_backward(problem, 3, settings["dtype"])


@settings(max_examples=12, deadline=None)
@given(
    valid=st.lists(st.integers(0, 16), min_size=1, max_size=3).filter(any),
    extra=st.integers(0, 1),
    heads=st.integers(1, 2),
    head_dim=st.sampled_from([2, 16, 18]),
    mask=st.booleans(),
)
def test_any_size(valid, extra, heads, head_dim, mask):
    problem = make_problem(valid, 16, 1, heads, head_dim, torch.float32, mask)
    check_forward(problem, len(valid) - min(extra, len(valid) - 1), torch.float32)
    check_backward(problem, len(valid) - min(extra, len(valid) - 1), torch.float32)


def test_blocks_without_weight_are_zero_and_pass_no_gradient_on():
    problem = make_problem((16, 9), 16, 1, 2, 16, torch.float32, mask=True)
    problem[4][0, problem[5][16:25].long()] = 0.0
    prepared = check_forward(problem, 2, torch.float32)
    for pooled in (prepared.pooled_key, prepared.pooled_value, prepared.spread):
        assert (pooled[:, 1] == 0).all() and (pooled[:, 0] != 0).any()
    check_backward(problem, 2, torch.float32)


def test_spread_of_keys_far_from_zero():
    problem = make_problem((16,), 16, 1, 1, 16, torch.float32, angles=None)
    problem[1] = problem[1] + 1000
    check_forward(problem, 1, torch.float32)


def test_without_pooled_gradients():
    problem = make_problem((16, 5), 16, 1, 2, 16, torch.float32, mask=True)
    rows = [torch.randn(2, 32, 16) for _ in range(3)]
    zeros = torch.zeros(2, 2, 16)
    about = *problem[3:], problem[0].shape, torch.float32
    with_zeros = written(*prepare_backward_launch(*rows, zeros, zeros, *about))
    without = written(*prepare_backward_launch(*rows, None, None, *about))
    assert all(map(torch.equal, with_zeros, without))


def test_the_same_bits_twice():
    problem = make_problem((16, 5), 16, 2, 2, 16, torch.bfloat16, mask=True)
    assert all(map(torch.equal, check_forward(problem, 2, torch.bfloat16), check_forward(problem, 2, torch.bfloat16)))


def launches_of(tokens, heads, head_dim, dtype, architecture):
    """Forward and backward with RoPE and without a mask, as Wan calls them, on tensors that are not there."""

    def empty(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    blocks = -(-tokens // 64)
    query = empty(1, tokens, heads, head_dim)
    angles = empty(1, tokens, 1, head_dim, dtype=torch.float32)
    order, valid = empty(64 * blocks, dtype=torch.int32), empty(blocks, dtype=torch.int32)
    rows, pooled = empty(heads, 64 * blocks, head_dim), empty(heads, blocks - 8, head_dim)
    about = angles, None, order, valid
    yield prepare.prepare_launch(query, query, query, *about, blocks, blocks - 8, architecture)[0]
    yield prepare.prepare_backward_launch(
        rows, rows, rows, pooled, pooled, *about, query.shape, dtype, architecture=architecture
    )[0]


SHAPES = (12, 128, torch.bfloat16), (16, 72, torch.bfloat16), (70, 32, torch.float32), (12, 128, torch.float32)


def report():
    """Print what the compiler makes of every launch, a JSON object for each, and whether resolutions differ."""
    for architecture in SHARED_MEMORY:
        for shape in SHAPES:
            for launch in launches_of(31500, *shape, architecture):
                compiled = compile_launch(launch, architecture)
                wide = compiled.text.count("ld.global.v4"), compiled.text.count("ld.global")
                resources = [compiled.registers, compiled.stack_bytes, compiled.shared_bytes, *wide]
                print(json.dumps([architecture, launch.kernel.__name__, shape[1], *resources]))
    for shape in SHAPES:
        for one, other in zip(launches_of(31500, *shape, "sm_90"), launches_of(7777, *shape, "sm_90"), strict=True):
            assert variant_of(one, "sm_90").hash() == variant_of(other, "sm_90").hash(), shape


@pytest.mark.slow
def test_ahead_of_time(tmp_path):
    """On all cards: fits, nothing spilled, 16 bytes at a time; and another resolution compiles nothing anew."""
    text = run_without_interpreter(["-c", f"from {__name__} import report; report()"], tmp_path)
    print(text)
    for line in text.splitlines():
        architecture, kernel, head_dim, _, stack, shared, wide, loads = json.loads(line)
        assert stack == 0 and shared <= SHARED_MEMORY[architecture], line
        if architecture.startswith("sm_"):
            assert loads - wide <= 5, (kernel, head_dim, line)  # of order and valid
