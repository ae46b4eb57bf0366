"""β and γ, which sparse attention is fitted with at every call."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from typing import Any

import torch

from ..layout import layout_of
from ..sparse import best_weights, fitting_rows
from .operators import operator
from .prepare import GRID

_AT_ONCE = 64
"""Queries whose mixed states are multiplied at once."""


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
    layout, some = layout_of(tuple(grid), block_size, extra, query.device), fitting_rows(math.prod(grid), query.device)
    if bias is None and len(layout.order) != len(layout.rows):  # padding is left out
        bias = (layout.order >= 0).float().log()[None]
    mask = None if bias is None else bias[:, None, None].to(query.dtype)
    q, k, v = (x[:, None] for x in (query[:, some], key, value))
    truth = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale)
    of_states: torch.Tensor | None = None
    if mixed is not None:
        block_size = query.shape[1] // mixed.shape[1]
        parts = (  # some at a time, as each has a state of its own
            query[:, rows, None].float() @ mixed[:, rows // block_size].float() for rows in some.split(_AT_ONCE)
        )
        of_states = scale * torch.cat(list(parts), dim=1)[:, :, 0]
    near, far = near[:, some].float(), far[:, some].float()
    return best_weights(truth.flatten(0, 1).float(), near, near_lse[:, some], far, far_lse[:, some], of_states)


@fit.register_fake
def _(query, *_: Any):
    return tuple(query.new_empty(query.shape[:1], dtype=torch.float32) for _ in range(2))
