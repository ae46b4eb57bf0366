"""β and γ, which sparse attention is fitted with at every call."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch
import triton
import triton.language as tl

from ..sparse import best_weights, fitting_rows
from .operators import allocate, operator, padded
from .prepare import GRID, layout_for
from .softmax import load_rows
from .tiles import power_of_two


@triton.jit(do_not_specialize=["rows", "query_blocks", "count"])
def sampled_correction_kernel(
    query,
    mixed,
    sampled,
    correction,
    rows,
    query_blocks,
    count,
    scale,
    HEAD_DIM: tl.constexpr,
    QUERY_ROWS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """What one sampled query of one group reads from the mixed states of its block."""
    group = tl.program_id(1).to(tl.int64)
    row = tl.load(sampled + tl.program_id(0)).to(tl.int64)
    channel = tl.arange(0, padded(HEAD_DIM))
    mixed += (group * query_blocks + row // QUERY_ROWS) * HEAD_DIM * HEAD_DIM
    query += (group * rows + row) * HEAD_DIM
    total = tl.zeros((padded(HEAD_DIM),), tl.float32)
    for first in range(0, HEAD_DIM, ROWS):
        own = first + tl.arange(0, ROWS)
        q = tl.load(query + own, mask=own < HEAD_DIM, other=0.0).to(tl.float32)
        state = load_rows(mixed, own, own < HEAD_DIM, HEAD_DIM).to(tl.float32)
        total += tl.sum(q[:, None] * state, 0)
    at = (group * count + tl.program_id(0)) * HEAD_DIM + channel
    tl.store(correction + at, total * scale, mask=channel < HEAD_DIM)


@operator(
    "(Tensor query, Tensor key, Tensor value, Tensor? bias, Tensor near, Tensor near_lse, Tensor far, Tensor far_lse, "
    f"Tensor? mixed, float scale, {GRID}) -> (Tensor, Tensor)"
)
def fit(query, key, value, bias, near, near_lse, far, far_lse, mixed, scale, grid, block_size, extra):
    """β and γ with which sparse attention comes closest to softmax attention on some queries: float32 (G,) each.

    The queries are those of :func:`mhla_diffusers.attention.sparse.fitting_rows`; ``near`` is what
    :func:`.listed.listed` returns for the same query, key, value and bias, ``far`` what :func:`.pooled.pooled` does,
    and ``mixed`` (G, Tq, D, D) the mixed states of the query blocks, None without them, whose γ is 0 then.
    """
    layout, some = layout_for(grid, block_size, extra, query.device), fitting_rows(math.prod(grid), query.device)
    if bias is None and len(layout.order) != len(layout.rows):  # padding is left out
        bias = (layout.order >= 0).float().log()[None]
    mask = None if bias is None else bias[:, None, None].to(query.dtype)
    q, k, v = (x[:, None] for x in (query[:, some], key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    correction: torch.Tensor | None = None
    if mixed is not None:
        groups, rows, head_dim = query.shape
        correction = allocate((groups, len(some), head_dim), torch.float32, query.device)
        sampled_correction_kernel[len(some), groups](
            query=query,
            mixed=mixed,
            sampled=some,
            correction=correction,
            rows=rows,
            query_blocks=mixed.shape[1],
            count=len(some),
            scale=scale,
            HEAD_DIM=head_dim,
            QUERY_ROWS=rows // mixed.shape[1],
            ROWS=min(32, power_of_two(head_dim)),
            num_warps=4,
            num_stages=1,
        )
    near, far = near[:, some].float(), far[:, some].float()
    return best_weights(truth.flatten(0, 1).float(), near, near_lse[:, some], far, far_lse[:, some], correction)


@fit.register_fake
def _(query, *_: Any):
    return tuple(query.new_empty(query.shape[:1], dtype=torch.float32) for _ in range(2))
