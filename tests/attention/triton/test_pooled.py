"""Attention to pooled keys against the same written out in float64, gradients by autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import pooled
from mhla_diffusers.attention.triton.launch import EMPTY
from mhla_diffusers.attention.triton.pooled import pooled_backward, pooled_forward

from .interpreter import make_interpreter_fast
from .written_out import check_types, nearness

make_interpreter_fast()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    def allocate(shape, dtype, device):
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(pooled, "allocate", allocate)


def words_of(is_listed):
    """bool (rows, T) → int32 (rows, ceil(T / 32)), the first block the lowest bit."""
    bits = torch.nn.functional.pad(is_listed.long(), (0, -is_listed.shape[1] % 32)).unflatten(1, (-1, 32))
    words = (bits << torch.arange(32)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def problem(blocks, query_blocks=2, *, groups=2, samples=1, rows=16, head_dim=16, listed=0.3, masked=False, seed=0):
    torch.manual_seed(seed)
    q = torch.randn(groups, query_blocks * rows, head_dim)
    k, v = (torch.randn(groups, blocks, head_dim) for _ in range(2))
    bias = torch.randint(1, 17, (samples, blocks)).float().log()
    if masked:
        bias[torch.rand(samples, blocks) < 0.3] = -math.inf
    is_listed = torch.rand(groups * query_blocks, blocks) < listed
    is_listed[0] = True
    return {"query": q, "key": k, "value": v, "bias": bias}, is_listed


def written_out(query, key, value, bias, is_listed, scale, dtype=torch.float64):
    """Of every row the softmax over pooled keys that are not listed; sums in float64 or float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    groups, rows, _ = query.shape
    sees = ~is_listed.unflatten(0, (groups, -1)).repeat_interleave(rows * groups // len(is_listed), 1)
    bias = bias.repeat_interleave(groups // len(bias), 0)[:, None].to(wide)
    sees = sees & (bias > -math.inf)
    logits = (query.to(wide) @ key.to(wide).mT) * scale + bias
    something = sees.any(-1)
    logits = torch.where(sees, logits, torch.where(something, -math.inf, 0.0)[..., None])
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp() * something[..., None]
    return weights.to(dtype).to(wide) @ value.to(wide), torch.where(something, lse, EMPTY)


def gradients_of(inputs, is_listed, scale, upstream, upstream_lse, dtype=torch.float64):
    leaves = [inputs[name].to(dtype).requires_grad_() for name in ("query", "key", "value")]
    output, lse = written_out(*leaves, inputs["bias"], is_listed, scale, dtype)
    loss = (output * upstream.to(output.dtype)).sum()
    if upstream_lse is not None:
        loss = loss + (lse * upstream_lse.to(output.dtype))[lse > EMPTY].sum()
    return output.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


def run(inputs, is_listed, scale, upstream, upstream_lse):
    inputs = inputs | {"listed": words_of(is_listed)}
    output, lse = pooled_forward(**inputs, scale=scale)
    return output, lse, pooled_backward(upstream, upstream_lse, **inputs, output=output, lse=lse, scale=scale)


def check(inputs, is_listed, with_lse=True):
    scale = inputs["query"].shape[2] ** -0.5
    upstream = torch.randn(inputs["query"].shape)
    upstream_lse = torch.randn(inputs["query"].shape[:2]) if with_lse else None
    output, lse, gradients = run(inputs, is_listed, scale, upstream, upstream_lse)
    expected_output, expected_lse, expected = gradients_of(inputs, is_listed, scale, upstream, upstream_lse)
    is_empty = expected_lse == EMPTY
    assert is_empty.any()
    assert (lse[is_empty] == torch.tensor(EMPTY)).all()
    assert (output[is_empty] == 0).all()
    assert nearness(output, expected_output) < 1e-5
    assert nearness(lse[~is_empty], expected_lse[~is_empty]) < 1e-5
    for got, wanted in zip(gradients, expected, strict=True):
        assert nearness(got, wanted) < 1e-5


@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 64, 70, 97])
def test_numbers_of_blocks(blocks):
    check(*problem(blocks))


CASES = {
    "key mask of each sample": {"groups": 4, "samples": 2, "masked": True},
    "blocks of 32": {"rows": 32},
    "blocks of 128": {"rows": 128, "groups": 1},
    "padded channels": {"head_dim": 24},
    "wide rows": {"head_dim": 128, "rows": 64, "groups": 1},
    "all listed": {"listed": 1.1},
    "many queries in few shares": {"query_blocks": 11, "groups": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case):
    check(*problem(40, **CASES[case]))


def test_without_gradient_of_the_log_sum_exp():
    check(*problem(10), with_lse=False)


def test_logits_far_below_zero():
    inputs, is_listed = problem(5)
    inputs["query"], inputs["key"] = inputs["query"].abs() * 8, -inputs["key"].abs() * 8
    check(inputs, is_listed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """At most twice the error of the same formula in PyTorch with operands of the same type."""
    inputs, is_listed = problem(40, head_dim=32)
    inputs |= {name: inputs[name].to(dtype) for name in ("query", "key", "value")}
    scale, upstream = 32**-0.5, torch.randn(inputs["query"].shape).to(dtype)
    upstream_lse = torch.randn(inputs["query"].shape[:2])
    output, _, gradients = run(inputs, is_listed, scale, upstream, upstream_lse)
    truth = gradients_of(inputs, is_listed, scale, upstream, upstream_lse)
    peer = gradients_of(inputs, is_listed, scale, upstream, upstream_lse, dtype)
    check_types((output, *gradients), (truth[0], *truth[2]), (peer[0].to(dtype), *peer[2]), dtype)


def test_the_same_bits_twice():
    inputs, is_listed = problem(40, 9, groups=1)
    upstream = torch.randn(inputs["query"].shape)
    first, second = (run(inputs, is_listed, 0.3, upstream, None) for _ in range(2))
    for a, b in zip((*first[:2], *first[2]), (*second[:2], *second[2]), strict=True):
        assert torch.equal(a, b)
    assert (
        len({x.untyped_storage().data_ptr() for x in first[2]}) == 3
    )  # custom operators return no views of each other


@settings(max_examples=10, deadline=None, database=None)
@given(
    blocks=st.integers(1, 70),
    query_blocks=st.integers(1, 3),
    head_dim=st.sampled_from((16, 20, 32)),
    listed=st.sampled_from((0.0, 0.5, 0.95)),
    seed=st.integers(0, 99),
)
def test_any_small_size(blocks, query_blocks, head_dim, listed, seed):
    check(*problem(blocks, query_blocks, head_dim=head_dim, listed=listed, seed=seed))
