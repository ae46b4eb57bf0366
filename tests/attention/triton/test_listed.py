"""Attention over lists of blocks against the same written out in float64, gradients by autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import listed
from mhla_diffusers.attention.triton.launch import EMPTY
from mhla_diffusers.attention.triton.listed import listed_backward, listed_forward, transpose_lists

from .interpreter import make_interpreter_fast
from .written_out import check_types, nearness

make_interpreter_fast()


@pytest.fixture(autouse=True)
def poisoned(monkeypatch):
    def allocate(shape, dtype, device):
        return torch.full(tuple(shape), float("nan"), dtype=dtype, device=device)

    monkeypatch.setattr(listed, "allocate", allocate)


def problem(query_blocks, key_blocks, width, *, rows=16, ratio=1, head_dim=16, short=(), masked=False, seed=0):
    """Random rows, lists of unlike blocks with random counts, and what they are multiplied with to get gradients."""
    torch.manual_seed(seed)
    q, k, v = (
        torch.randn(n * rows * r, head_dim) for n, r in ((query_blocks, ratio), (key_blocks, 1), (key_blocks, 1))
    )
    valid = torch.full((key_blocks,), rows, dtype=torch.int32)
    for block in short:
        valid[block] = rows // 2 - 1
        k[block * rows + valid[block] : (block + 1) * rows] = 0
        v[block * rows + valid[block] : (block + 1) * rows] = 0
    bias = None
    if masked:
        bias = torch.rand(key_blocks * rows).log()
        bias[torch.rand(key_blocks * rows) < 0.3] = -math.inf
        bias[:rows] = -math.inf
    indices = torch.rand(query_blocks, key_blocks).argsort(1)[:, :width].int()
    counts = torch.randint(0, width + 1, (query_blocks,), dtype=torch.int32)
    counts[0], counts[-1] = 0, width
    indices[torch.arange(width) >= counts[:, None]] = 2**31 - 1
    return {"query": q, "key": k, "value": v, "valid": valid, "bias": bias, "indices": indices, "counts": counts}


def written_out(query, key, value, valid, bias, indices, counts, scale, causal=False, dtype=torch.float64):
    """Of every row the softmax over the keys that it sees; in ``dtype`` products, sums in float64 or float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    query_rows, key_rows = query.shape[0] // len(indices), key.shape[0] // len(valid)
    sees = torch.zeros(len(indices), len(valid), dtype=torch.bool)
    for block, (entries, count) in enumerate(zip(indices.tolist(), counts.tolist(), strict=True)):
        sees[block, entries[:count]] = True
    sees = sees.repeat_interleave(query_rows, 0).repeat_interleave(key_rows, 1)
    places = torch.arange(key.shape[0])
    sees &= places % key_rows < valid.repeat_interleave(key_rows) if bias is None else bias > -math.inf
    if causal:
        sees &= places <= torch.arange(query.shape[0])[:, None]
    logits = (query.to(wide) @ key.to(wide).mT) * scale
    if bias is not None:
        logits = logits + bias.to(wide)  # -inf is seen by none
    something = sees.any(1)
    logits = torch.where(sees, logits, torch.where(something, -math.inf, 0.0)[:, None])
    lse = logits.logsumexp(1)
    weights = (logits - lse[:, None]).exp() * something[:, None]
    return weights.to(dtype).to(wide) @ value.to(wide), torch.where(something, lse, EMPTY)


def gradients_of(inputs, scale, causal, upstream, upstream_lse, dtype=torch.float64):
    leaves = [inputs[name].to(dtype).requires_grad_() for name in ("query", "key", "value")]
    rest = {name: inputs[name] for name in ("valid", "bias", "indices", "counts")}
    output, lse = written_out(*leaves, **rest, scale=scale, causal=causal, dtype=dtype)
    loss = (output * upstream.to(output.dtype)).sum()
    if upstream_lse is not None:
        loss = loss + (lse * upstream_lse.to(output.dtype))[lse > EMPTY].sum()
    return output.detach(), lse.detach(), torch.autograd.grad(loss, leaves)


def check(inputs, causal=False, with_lse=True):
    scale = inputs["query"].shape[1] ** -0.5
    upstream = torch.randn(inputs["query"].shape)
    upstream_lse = torch.randn(inputs["query"].shape[0]) if with_lse else None
    output, lse = listed_forward(**inputs, scale=scale, causal=causal)
    gradients = listed_backward(upstream, upstream_lse, **inputs, output=output, lse=lse, scale=scale, causal=causal)
    expected_output, expected_lse, expected = gradients_of(inputs, scale, causal, upstream, upstream_lse)
    assert nearness(output, expected_output) < 1e-5
    is_empty = expected_lse == EMPTY
    assert (lse[is_empty] == torch.tensor(EMPTY)).all()
    assert (output[is_empty] == 0).all()
    assert nearness(lse[~is_empty], expected_lse[~is_empty]) < 1e-5
    for got, wanted in zip(gradients, expected, strict=True):
        assert nearness(got, wanted) < 1e-5


CASES = {
    "plain": {},
    "short blocks": {"short": (0, 2, 4)},
    "key mask": {"masked": True},
    "blocks of queries of two": {"ratio": 2, "short": (1,)},
    "blocks of 32": {"rows": 32, "short": (3,)},
    "padded channels": {"head_dim": 24, "short": (1,)},
    "padded channels and key mask": {"head_dim": 40, "masked": True},
}


@pytest.mark.parametrize("case", CASES)
def test_output_and_gradients(case):
    check(problem(4, 5, 3, **CASES[case]))


def test_blocks_of_64_cut_by_a_tile():
    """The table's entry of float32 has 32 queries and 32 keys."""
    check(problem(2, 3, 2, rows=64, ratio=2, short=(1,)))


@pytest.mark.parametrize("rows", [16, 32])
def test_causal(rows):
    check(problem(5, 5, 4, rows=rows, short=(4,)), causal=True)


def test_causal_with_a_mask_cut_by_a_tile():
    check(problem(2, 2, 2, rows=64, masked=True), causal=True)


def test_without_gradient_of_the_log_sum_exp():
    check(problem(3, 4, 2), with_lse=False)


def test_logits_far_below_zero():
    """Padded rows have logits of 0, beside which the real ones vanish: neither may they leak, nor overflow."""
    inputs = problem(3, 4, 3, short=(0, 1, 2, 3))
    inputs["query"], inputs["key"] = inputs["query"].abs() * 8, -inputs["key"].abs() * 8
    check(inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype):
    """At most twice the error of the same formula in PyTorch with operands of the same type."""
    inputs = problem(4, 5, 3, head_dim=32, short=(2,), rows=32)
    inputs |= {name: inputs[name].to(dtype) for name in ("query", "key", "value")}
    scale, upstream = 32**-0.5, torch.randn(inputs["query"].shape).to(dtype)
    upstream_lse = torch.randn(inputs["query"].shape[0])
    output, lse = listed_forward(**inputs, scale=scale)
    gradients = listed_backward(upstream, upstream_lse, **inputs, output=output, lse=lse, scale=scale)
    truth = gradients_of(inputs, scale, False, upstream, upstream_lse)
    peer = gradients_of(inputs, scale, False, upstream, upstream_lse, dtype)
    check_types((output, *gradients), (truth[0], *truth[2]), (peer[0].to(dtype), *peer[2]), dtype)


def test_the_same_bits_twice():
    inputs = problem(4, 5, 3, short=(1,))
    upstream = torch.randn(inputs["query"].shape)

    def run():
        output, lse = listed_forward(**inputs, scale=0.3)
        return output, lse, *listed_backward(upstream, None, **inputs, output=output, lse=lse, scale=0.3)

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


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


def test_head_dims_beyond_the_table():
    with pytest.raises(ValueError, match="head_dim is 512"):
        check(problem(1, 1, 1, head_dim=512))


@settings(max_examples=12, deadline=None, database=None)
@given(
    blocks=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    head_dim=st.sampled_from((16, 20, 32)),
    ratio=st.sampled_from((1, 2)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_small_size(blocks, head_dim, ratio, masked, seed):
    width = min(2, blocks[1])
    check(problem(*blocks, width, head_dim=head_dim, ratio=ratio, masked=masked, short=(blocks[1] - 1,), seed=seed))
