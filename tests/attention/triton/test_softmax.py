"""Attention over lists of blocks, and to pooled keys, against the same written out in float64 with autograd."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mhla_diffusers.attention.triton import listed, pooled
from mhla_diffusers.attention.triton.launch import EMPTY


def listed_problem(
    query_blocks,
    key_blocks,
    width,
    *,
    rows=16,
    ratio=1,
    head_dim=16,
    short=(),
    masked=False,
    causal=False,
    seed=0,
):
    """Random rows, and lists of unlike blocks with random counts: inputs, and which keys a row of queries sees."""
    torch.manual_seed(seed)
    query = torch.randn(query_blocks * rows * ratio, head_dim)
    key, value = (torch.randn(key_blocks * rows, head_dim) for _ in range(2))
    valid = torch.full((key_blocks,), rows, dtype=torch.int32)
    for block in short:
        valid[block] = rows // 2 - 1
        for x in (key, value):
            x[block * rows + valid[block] : (block + 1) * rows] = 0
    bias = None
    if masked:
        bias = torch.rand(key_blocks * rows).log()
        bias[torch.rand(key_blocks * rows) < 0.3] = -math.inf
        bias[:rows] = -math.inf
    indices = torch.rand(query_blocks, key_blocks).argsort(1)[:, :width].int()
    counts = torch.randint(0, width + 1, (query_blocks,), dtype=torch.int32)
    counts[0], counts[-1] = 0, width
    indices[torch.arange(width) >= counts[:, None]] = 2**31 - 1
    sees = torch.zeros(query_blocks, key_blocks, dtype=torch.bool)
    for block, (entries, count) in enumerate(zip(indices.tolist(), counts.tolist(), strict=True)):
        sees[block, entries[:count]] = True
    sees = sees.repeat_interleave(rows * ratio, 0).repeat_interleave(rows, 1)
    places = torch.arange(len(key))
    sees &= places % rows < valid.repeat_interleave(rows) if bias is None else bias > -math.inf
    if causal:
        sees &= places <= torch.arange(len(query))[:, None]
    return listed.Inputs(query, key, value, valid, bias, indices, counts, head_dim**-0.5, causal), sees


def pooled_problem(
    blocks, query_blocks=2, *, groups=2, samples=1, rows=16, head_dim=16, density=0.3, masked=False, seed=0
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
    sees = sees & (bias.repeat_interleave(groups // samples, 0)[:, None] > -math.inf)
    return pooled.Inputs(query, key, value, bias, words, head_dim**-0.5), sees


def run(inputs, upstream, upstream_lse):
    """Output, LSE and gradients of query, key and value by the kernels."""
    if isinstance(inputs, listed.Inputs):
        output, lse = listed.listed_forward(inputs)
        return output, lse, listed.listed_backward(inputs, upstream, upstream_lse, output, lse)
    output, lse = pooled.pooled(*inputs)
    return output, lse, pooled.pooled_gradients(upstream, upstream_lse, output, lse, *inputs)


def written_out(inputs, sees, upstream, upstream_lse, dtype=torch.float64):
    """The same by definition; in a 16-bit type products have operands of it, and sums are float32."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    leaves = [x.to(dtype).requires_grad_() for x in inputs[:3]]
    query, key, value = (x.to(wide) for x in leaves)
    logits = (query @ key.mT) * inputs.scale
    if inputs.bias is not None:  # of every group of heads its sample's, of rows that follow each other one
        bias = inputs.bias.to(wide)
        logits = logits + (bias if query.ndim == 2 else bias.repeat_interleave(len(query) // len(bias), 0)[:, None])
    something = sees.any(-1)
    logits = torch.where(sees, logits, torch.where(something, -math.inf, 0.0)[..., None])
    lse = logits.logsumexp(-1)
    weights = (logits - lse[..., None]).exp() * something[..., None]
    output = weights.to(dtype).to(wide) @ value
    loss = (output * upstream.to(wide)).sum()
    if upstream_lse is not None:
        loss = loss + (lse * upstream_lse.to(wide))[something].sum()
    return output.detach(), torch.where(something, lse, EMPTY).detach(), torch.autograd.grad(loss, leaves)


def nearness(got, wanted):
    """The largest difference beside the largest number."""
    if not wanted.numel():
        return 0.0
    assert got.shape == wanted.shape
    return float((got.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp_min(1e-30))


def check(inputs, sees, with_lse=True):
    upstream = torch.randn(inputs.query.shape)
    upstream_lse = torch.randn(inputs.query.shape[:-1]) if with_lse else None
    output, lse, gradients = run(inputs, upstream, upstream_lse)
    expected_output, expected_lse, expected = written_out(inputs, sees, upstream, upstream_lse)
    is_empty = expected_lse == EMPTY
    assert is_empty.any()
    assert (lse[is_empty] == torch.tensor(EMPTY)).all() and (output[is_empty] == 0).all()
    assert nearness(lse[~is_empty], expected_lse[~is_empty]) < 1e-5
    for got, wanted in zip((output, *gradients), (expected_output, *expected), strict=True):
        assert nearness(got, wanted) < 1e-5


LISTED = {
    "key mask": {"masked": True},
    "blocks of queries of two": {"ratio": 2, "short": (1,)},
    "blocks of 32": {"rows": 32, "short": (3,)},
    "padded channels": {"head_dim": 24, "short": (0, 2, 4)},
    "padded channels and key mask": {"head_dim": 40, "masked": True},
    "causal": {"causal": True, "short": (3,)},
}


@pytest.mark.parametrize("options", LISTED.values(), ids=LISTED)
def test_listed(options):
    check(*listed_problem(4, 4 if "causal" in options else 5, 3, **options))


@pytest.mark.parametrize("options", [{"ratio": 2, "short": (1,)}, {"causal": True, "masked": True}], ids=str)
def test_blocks_of_64_cut_by_a_tile(options):
    """The table's entry of float32 has 32 queries and 32 keys."""
    check(*listed_problem(2, 2, 2, rows=64, **options))


POOLED = {
    "key mask of each sample": {"groups": 4, "samples": 2, "masked": True},
    "blocks of 128": {"rows": 128, "groups": 1},
    "wide rows": {"head_dim": 128, "rows": 64, "groups": 1},
    "all listed": {"density": 1.1},
    "many queries in few shares": {"query_blocks": 11, "groups": 1, "head_dim": 24},
}


@pytest.mark.parametrize("options", POOLED.values(), ids=POOLED)
def test_pooled(options):
    check(*pooled_problem(40, **options))


@pytest.mark.parametrize("blocks", [1, 31, 32, 33, 64, 97])
def test_numbers_of_pooled_blocks(blocks):
    check(*pooled_problem(blocks))


EITHER = {
    "listed": lambda **given: listed_problem(4, 5, 3, **given),
    "pooled": lambda **given: pooled_problem(40, **given),
}
either = pytest.mark.parametrize("make", EITHER.values(), ids=EITHER)


@either
def test_without_gradient_of_the_log_sum_exp(make):
    check(*make(), with_lse=False)


@either
def test_logits_far_below_zero(make):
    """Padded rows have logits of 0, beside which the real ones vanish: neither may they leak, nor overflow."""
    inputs, sees = make(**({"short": (0, 1, 2, 3)} if make is EITHER["listed"] else {}))
    check(inputs._replace(query=inputs.query.abs() * 8, key=-inputs.key.abs() * 8), sees)


@either
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(make, dtype):
    """At most twice the error of the same formula in PyTorch with operands of the same type."""
    inputs, sees = make(head_dim=32)
    inputs = inputs._replace(**{name: getattr(inputs, name).to(dtype) for name in ("query", "key", "value")})
    upstream, upstream_lse = torch.randn(inputs.query.shape).to(dtype), torch.randn(inputs.query.shape[:-1])
    output, _, gradients = run(inputs, upstream, upstream_lse)
    exact_output, _, exact = written_out(inputs, sees, upstream, upstream_lse)
    peer_output, _, peer = written_out(inputs, sees, upstream, upstream_lse, dtype)
    truth, peers = (exact_output, *exact), (peer_output.to(dtype), *peer)
    for kernel, right, other in zip((output, *gradients), truth, peers, strict=True):
        assert kernel.dtype == dtype
        assert nearness(kernel, right) <= 2 * nearness(other, right)


@either
def test_the_same_bits_twice_in_memory_of_their_own(make):
    inputs, _ = make()
    upstream = torch.randn(inputs.query.shape)
    first, second = (run(inputs, upstream, None) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip((*first[:2], *first[2]), (*second[:2], *second[2]), strict=True))
    # custom operators return no views of each other
    assert len({x.untyped_storage().data_ptr() for x in first[2]}) == 3


def test_transposed_lists():
    """Ascending, without the entries that do not count; a block that all name comes first."""
    indices = torch.tensor([[0, 9, 2], [9, 1, 7], [9, 4, 3]] * 4, dtype=torch.int32)
    counts = torch.tensor([2, 2, 1] * 4, dtype=torch.int32)
    turns, starts, queries = listed.transpose_lists(indices, counts, 10)
    lists = [queries[a:b].tolist() for a, b in zip(starts[:-1], starts[1:], strict=True)]
    assert lists == [[0, 3, 6, 9], [1, 4, 7, 10], *[[]] * 7, list(range(12))]
    assert turns.tolist() == list(range(10))
    turns, _, _ = listed.transpose_lists(indices, counts, 40)
    assert turns.tolist() == [0, 1, 9, *range(2, 9), *range(10, 40)]
    assert all(x.dtype == torch.int32 for x in (turns, starts, queries))


def test_head_dims_beyond_the_table():
    with pytest.raises(ValueError, match="512"):
        check(*listed_problem(1, 1, 1, head_dim=512))


@settings(max_examples=10, deadline=None, database=None)
@given(
    blocks=st.tuples(st.integers(2, 4), st.integers(1, 4)),
    head_dim=st.sampled_from((16, 20, 32)),
    ratio=st.sampled_from((1, 2)),
    masked=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_small_lists(blocks, head_dim, ratio, masked, seed):
    options = {"head_dim": head_dim, "ratio": ratio, "masked": masked, "short": (blocks[1] - 1,), "seed": seed}
    check(*listed_problem(*blocks, min(2, blocks[1]), **options))


@settings(max_examples=8, deadline=None, database=None)
@given(
    blocks=st.integers(1, 70),
    query_blocks=st.integers(1, 3),
    head_dim=st.sampled_from((16, 20, 32)),
    density=st.sampled_from((0.0, 0.5, 0.95)),
    seed=st.integers(0, 99),
)
def test_any_small_number_of_pooled_keys(blocks, query_blocks, head_dim, density, seed):
    check(*pooled_problem(blocks, query_blocks, head_dim=head_dim, density=density, seed=seed))
