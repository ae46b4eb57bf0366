"""Softmax attention inside a block, MHLA across blocks, under one denominator, in PyTorch operations.

For a query q in block i, s_t = q · k_t / √D (RoPE on q and k where the model has it) and λ the far field's weight::

    o = [ Σ_{t∈i} exp(s_t) v_t + λ φ(q)ᵀ Σ_{b≠i} m_ib S_b ] / [ Σ_{t∈i} exp(s_t) + λ φ(q)ᵀ Σ_{b≠i} m_ib z_b ]

The far field enters the softmax of the block as one more key, whose logit is log(λ φ(q)ᵀ Σ m_ib z_b) and whose value is
MHLA's output over the other blocks. So a fused softmax attention does the near field, its maximum is common to both
parts, and no N x N matrix is formed. The split is known from FMMformer (Nguyen et al. 2021) and, for language models,
from LoLCATs (Zhang et al. 2024).
"""

import math
from dataclasses import replace

import torch

from .blocks import Region, from_blocks, join_tokens, regular_regions, to_blocks
from .call import Call
from .eager import eager_attention, finish, groups_of_heads, sum_dtype, without_autocast, working_set
from .merge import LEAST_MIXING, far_field_mask
from .rotary import rotated

_ALIGNMENT = 8
"""Channels that fused attention kernels want the head dim to be a multiple of."""


def near_field_attention(call: Call) -> torch.Tensor:
    """The near field and the far field in PyTorch operations: (B, N, H, D) in the type of the query."""
    far = logit = None
    if math.prod(call.blocks) > 1 and call.far_field_weight is not None:
        far, normaliser = eager_attention(far_field(call))
        logit = (call.far_field_weight.to(normaliser.dtype)[:, None] * normaliser).log()
    output = _near_field(call, far, logit)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


def far_field(call: Call) -> Call:
    """MHLA over the other blocks: what a call with a near field leaves to the summaries, without λ, norm and gate."""
    return replace(
        call,
        mixing=without_own_block(call.mixing),
        key_mask=far_field_mask(call.key_mask) if call.key_mask is not None else None,
        output_norm=None,
        output_gate=None,
        far_field_weight=None,
    )


def without_own_block(mixing: torch.Tensor) -> torch.Tensor:
    """The mixing matrix (M, M) or (H, M, M) with a diagonal of zeros, so that a query block reads the others alone.

    Above it is nowhere exactly zero, at least float32.
    """
    matrix = mixing.to(sum_dtype(mixing.dtype)) + LEAST_MIXING
    return matrix * (1 - torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device))


def _near_field(call: Call, far: torch.Tensor | None, logit: torch.Tensor | None) -> torch.Tensor:
    """Softmax attention over the block and the far field: (B, N, H, D) in float32 (float64 for float64)."""
    query, key = rotated(call.query, call.rotary), rotated(call.key, call.rotary)
    bias = call.key_mask.to(query.dtype).log()[:, :, None, None] if call.key_mask is not None else None
    heads_at_once, rows_at_once = working_set(query, call.blocks)
    regions = regular_regions(call.grid, call.blocks, rows_at_once)
    outputs = []
    with without_autocast(query.device):
        for heads in groups_of_heads(query, heads_at_once):
            pieces = []
            for region in regions:

                def here(x: torch.Tensor, heads: slice = heads, region: Region = region) -> torch.Tensor:
                    return to_blocks(x[:, :, heads].unflatten(1, call.grid), region, x.dtype)

                far_here = (here(far), here(logit)) if far is not None and logit is not None else None
                mask = to_blocks(bias.unflatten(1, call.grid), region, bias.dtype).mT if bias is not None else None
                pieces.append(from_blocks(_attend(here(query), here(key), here(call.value), far_here, mask), region))
            outputs.append(join_tokens(pieces, regions, first_axis=1))
    return torch.cat(outputs, dim=-2).reshape(query.shape)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    far: tuple[torch.Tensor, torch.Tensor] | None,
    mask: torch.Tensor | None,
) -> torch.Tensor:
    """Blocks of tokens, each with its far field as one more key.

    The logit of that key differs from query to query, which a key cannot, so it travels in two more channels of the
    query, where the key holds ones: the logit rounded to the input's type, and what the rounding lost. One more channel
    of the value, 1 for the far field alone, brings back its share.

    Args:
        query: (B, H, *block counts, tokens per block, D).
        key: like ``query``.
        value: like ``query``.
        far: the far field's output, like ``query``, and the log of its sum of weights, (..., 1); None for one block.
        mask: (B, 1, *block counts, 1, tokens per block), added to the logits.
    """
    dtype, head_dim = query.dtype, query.shape[-1]
    if far is None:
        return _softmax_attention(query, key, value, mask, head_dim).to(sum_dtype(dtype))
    far_output, logit = far
    spare = -(head_dim + 2) % _ALIGNMENT
    wanted = logit * math.sqrt(head_dim)
    coarse = wanted.to(dtype)
    fine = (wanted - coarse).detach().to(dtype)
    query = torch.cat([query, coarse, fine, query.new_zeros(*query.shape[:-1], spare)], dim=-1)
    key, value = (torch.nn.functional.pad(x, (0, 2 + spare, 0, 1)) for x in (key, value))
    key[..., -1, head_dim : head_dim + 2] = 1
    value[..., -1, head_dim] = 1
    if mask is not None:
        mask = torch.nn.functional.pad(mask, (0, 1))
    output = _softmax_attention(query, key, value, mask, head_dim).to(sum_dtype(dtype))
    return output[..., :head_dim] + output[..., head_dim : head_dim + 1] * far_output


def _softmax_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, head_dim: int
) -> torch.Tensor:
    """Scaled dot-product attention within every block, all blocks of all heads as one batch."""
    if mask is not None:
        mask = mask.expand(*query.shape[:-2], query.shape[-2], -1).flatten(0, -3)[:, None]
    batch = query.shape[:-2]
    query, key, value = (x.flatten(0, -3)[:, None] for x in (query, key, value))
    output = torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=head_dim**-0.5)
    return output.squeeze(1).unflatten(0, batch)
