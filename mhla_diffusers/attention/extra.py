"""MHLA beside extra tokens, such as the text of joint attention, which lie in no MHLA block.

Every query of the grid attends to the extra tokens E with softmax and to the grid through mixed states, under one
denominator, s_t = q · k_t / √D after RoPE::

    o = [ Σ_{t∈E} exp(s_t) v_t + λ φ(q)ᵀ Σ_b m_ib S_b ] / [ the same without v ]

Extra tokens attend to everything with softmax.
"""

from dataclasses import replace

import torch

from .blocks import in_order
from .call import Backend, BlockLists, MHLACall
from .layout import block_count
from .linear import finish
from .merge import least_mixing, under_common_sum
from .precision import LEAST_MASK, sum_dtype, without_autocast
from .sparse import attend_to_lists, extra_queries, uniform_rows

ROWS = 64
"""Rows of a block of queries, as many as fill one block of a matrix product."""


def beside_extra(call: MHLACall, backend: Backend) -> torch.Tensor:
    """MHLA merged with softmax over the extra tokens: (B, N, H, D); norm and gate leave extra tokens as they are.

    Softmax and the merge are PyTorch operations on all devices.
    """
    device, heads, blocks = call.query.device, call.query.shape[2], block_count(call.grid, ROWS)
    lists = BlockLists(ROWS, torch.empty(1, heads, blocks, 0, dtype=torch.int64, device=device), 0)
    with without_autocast(device):
        query, key, value, weights = uniform_rows(call, lists)
        scaled = query[:, :, :blocks] * query.shape[-1] ** -0.5
        near, lse = attend_to_lists(scaled, key, value, weights.log(), lists)
        near, lse = (in_order(x, call.grid, ROWS) for x in (near, lse[..., None]))
    mask = call.key_mask
    if mask is not None:  # keeps the normaliser positive, as does the mixing matrix
        mask = mask.to(sum_dtype(call.query.dtype)).clamp_min(LEAST_MASK)
    alone = replace(call, key_mask=mask, mixing=least_mixing(call.mixing), output_norm=None, output_gate=None)
    far, normaliser = backend.read(alone, backend.states(alone))
    weight = 1 if call.linear_weight is None else call.linear_weight.to(normaliser.dtype)[:, None]
    output = under_common_sum(near, lse, far.to(near.dtype), (weight * normaliser).log())
    output = finish(output, call.output_norm, call.output_gate).to(call.query.dtype)
    return call.in_sequence(torch.cat([output, extra_queries(call)], dim=1))
