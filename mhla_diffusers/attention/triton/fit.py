"""β and γ of every head, fitted within the call on some sampled queries.

The objective is that of :func:`mhla_diffusers.attention.sparse.best_weights`. What is left of a query there are six
inner products of its outputs: one kernel takes them where they lie, and another tries every β in one program per head,
so that no small operation of PyTorch stands in the way of the next large kernel.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..sparse import BIASES, FITTING_QUERIES, MOST_STATE_WEIGHT, fitting_rows
from .operators import allocate, operator
from .prepare import GRID, layout_for
from .softmax import load_rows
from .tiles import constants_of, power_of_two

FIRST = tl.constexpr(BIASES[0])
STEP = tl.constexpr((BIASES[1] - BIASES[0]) / (BIASES[2] - 1))
CANDIDATES = tl.constexpr(BIASES[2])
MOST = tl.constexpr(MOST_STATE_WEIGHT)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)
_SAMPLES = power_of_two(FITTING_QUERIES)


@triton.jit(do_not_specialize=["rows", "query_blocks", "count"])
def fit_products_kernel(
    query,
    mixed,
    truth,
    near,
    far,
    sampled,
    products,
    rows,
    query_blocks,
    count,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Inner products of one sampled query of one group, a column of ``products`` (G, 6, samples) or (G, 3, samples).

    Of n = near - truth and f = far - truth: n·n, n·f and f·f, and with the first-order term c, which the query reads
    from the mixed states of its block, c·n, c·f and c·c.
    """
    group, sample = tl.program_id(1).to(tl.int64), tl.program_id(0)
    row = tl.load(sampled + sample).to(tl.int64)
    channel = tl.arange(0, BLOCK_D)
    inside = channel < HEAD_DIM
    at = (group * rows + row) * HEAD_DIM + channel
    right = tl.load(truth + (group * count + sample) * HEAD_DIM + channel, mask=inside, other=0.0).to(tl.float32)
    n = tl.load(near + at, mask=inside, other=0.0).to(tl.float32) - right
    f = tl.load(far + at, mask=inside, other=0.0).to(tl.float32) - right
    NUMBER: tl.constexpr = 3 if mixed is None else 6
    products += group * NUMBER * count + sample
    tl.store(products, tl.sum(n * n))
    tl.store(products + count, tl.sum(n * f))
    tl.store(products + 2 * count, tl.sum(f * f))
    if mixed is not None:
        c = tl.zeros((BLOCK_D,), tl.float32)
        mixed += (group * query_blocks + row // QUERY_ROWS) * HEAD_DIM * HEAD_DIM
        query += (group * rows + row) * HEAD_DIM
        for first in range(0, HEAD_DIM, ROWS):
            own = first + tl.arange(0, ROWS)
            q = tl.load(query + own, mask=own < HEAD_DIM, other=0.0).to(tl.float32)
            state = load_rows(mixed, own, own < HEAD_DIM, HEAD_DIM, BLOCK_D).to(tl.float32)
            c += tl.sum(q[:, None] * state, 0)
        c *= scale
        tl.store(products + 3 * count, tl.sum(c * n))
        tl.store(products + 4 * count, tl.sum(c * f))
        tl.store(products + 5 * count, tl.sum(c * c))


@triton.jit(do_not_specialize=["rows", "count"])
def fit_kernel(
    products, near_lse, far_lse, sampled, beta, gamma, rows, count, NUMBER: tl.constexpr, SAMPLES: tl.constexpr
):
    """The β with the least squared error of one group and its γ, 0 without a first-order term (NUMBER 3).

    Of equal ones the first; NaN counts as least, as it does to torch.argmin, so that it shows.
    """
    group = tl.program_id(0).to(tl.int64)
    sample = tl.arange(0, SAMPLES)
    there = sample < count
    at = group * rows + tl.load(sampled + sample, mask=there, other=0)
    apart = tl.load(far_lse + at, mask=there, other=0.0) - tl.load(near_lse + at, mask=there, other=0.0)
    products += group * NUMBER * count + sample
    nn = tl.load(products, mask=there, other=0.0)
    nf = tl.load(products + count, mask=there, other=0.0)
    ff = tl.load(products + 2 * count, mask=there, other=0.0)
    if NUMBER == 6:
        cn = tl.load(products + 3 * count, mask=there, other=0.0)
        cf = tl.load(products + 4 * count, mask=there, other=0.0)
        cc = tl.load(products + 5 * count, mask=there, other=0.0)
    least, best_beta, best_gamma = float("inf"), FIRST + 0.0, 0.0
    for i in range(CANDIDATES):
        candidate = FIRST + i * STEP
        share = tl.sigmoid(apart + candidate)
        rest = 1 - share
        error = tl.sum(rest * rest * nn + 2 * share * rest * nf + share * share * ff)
        weight = 0.0
        if NUMBER == 6:
            pull = tl.sum(share * (rest * cn + share * cf))
            size = tl.sum(share * share * cc)
            weight = -pull / tl.where(size < TINY, TINY, size)
            weight = tl.where(weight < 0, 0.0, tl.where(weight > MOST, MOST, weight))  # NaN stays
            error += weight * (2 * pull + weight * size)
        is_better = (error < least) | ((error != error) & (least == least))
        least = tl.where(is_better, error, least)
        best_beta = tl.where(is_better, candidate, best_beta)
        best_gamma = tl.where(is_better, weight, best_gamma)
    tl.store(beta + group, best_beta)
    tl.store(gamma + group, best_gamma)


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor near, Tensor near_lse, Tensor far, Tensor far_lse, "
    f"Tensor? mixed, float scale, {GRID}) -> (Tensor, Tensor)"
)
def fit(query, key, value, bias, near, near_lse, far, far_lse, mixed, scale, grid, block_size, extra):
    """β and γ with which sparse attention comes closest to softmax attention on some queries: float32 (G,) each.

    The queries are those of :func:`mhla_diffusers.attention.sparse.fitting_rows`; ``near`` is what
    :func:`.listed.listed` returns for the same query, key, value and bias, ``far`` what :func:`.pooled.pooled` does,
    and ``mixed`` (G, Tq, D, D) the mixed states of the query blocks, None without the first-order term, whose γ is 0
    then.
    """
    layout, some = layout_for(grid, block_size, extra, query.device), fitting_rows(math.prod(grid), query.device)
    if bias is None and len(layout.order) != len(layout.rows):  # padding is left out
        bias = (layout.order >= 0).float().log()[None]
    samples, mask = (1, None) if bias is None else (len(bias), bias[:, None, None].to(query.dtype))
    q, k, v = (x.unflatten(0, (samples, -1)) for x in (query[:, some], key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    groups, rows, head_dim = query.shape
    number = 3 if mixed is None else 6
    products = allocate((groups, number, len(some)), torch.float32, query.device)
    beta, gamma = (allocate((groups,), torch.float32, query.device) for _ in range(2))
    constants, query_blocks = constants_of(query), 1 if mixed is None else mixed.shape[1]
    fit_products_kernel[len(some), groups](
        query=query,
        mixed=mixed,
        truth=truth.flatten(0, 1).contiguous(),
        near=near,
        far=far,
        sampled=some,
        products=products,
        rows=rows,
        query_blocks=query_blocks,
        count=len(some),
        scale=scale,
        HEAD_DIM=head_dim,
        BLOCK_D=constants["BLOCK_D"],
        QUERY_ROWS=rows // query_blocks,
        ROWS=min(32, constants["BLOCK_D"]),
        num_warps=4,
        num_stages=1,
    )
    fit_kernel[(groups,)](
        products=products,
        near_lse=near_lse,
        far_lse=far_lse,
        sampled=some,
        beta=beta,
        gamma=gamma,
        rows=rows,
        count=len(some),
        NUMBER=number,
        SAMPLES=_SAMPLES,
        num_warps=1,  # sums over samples stay within the warp
        num_stages=1,
    )
    return beta, gamma


@fit.register_fake
def _(query, *_: Any):
    return tuple(query.new_empty(query.shape[:1], dtype=torch.float32) for _ in range(2))
