"""MHLA in plain PyTorch operations, for any device.

Sums are accumulated in float32 (float64 for float64 inputs) whatever the input type, under autocast too. The work
is done for a few heads and a few rows of blocks, or a part of one row, at a time: that bounds the working memory and,
on a CPU, keeps the working set in the cache.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .blocks import Region, Shape, from_blocks, join_blocks, join_tokens, regular_regions, to_blocks
from .call import Call
from .feature_maps import get_feature_map
from .reference import OUTPUT_NORM_EPS
from .rotary import apply_rotary

_CPU_BYTES = 2**23
_DEVICE_BYTES = 2**30
"""Float32 bytes of query (or key, or value) that are processed at once."""


@dataclass(frozen=True)
class _Part:
    """A region of the grid with what its tokens carry besides query, key and value."""

    region: Region
    rotary: torch.Tensor | None
    """(1 or B, 1, *block counts, tokens per block, D)."""
    key_mask: torch.Tensor | None
    """(B, 1, *block counts, tokens per block, 1)."""


def eager_attention(call: Call) -> tuple[torch.Tensor, ...]:
    """MHLA throughout, without a near field.

    Returns:
        The output (B, N, H, D) in the type of the query, and with ``normalize`` the normaliser of Eq. 4,
        φ(q)ᵀ Σ_b m_ib z_b, as (B, N, H, 1) in float32 (float64 for float64 inputs).
    """
    query, grid = call.query, call.grid
    heads_at_once, rows_at_once = working_set(query, call.blocks)
    regions = regular_regions(grid, call.blocks, rows_at_once, _length_at_once(query, grid))
    rotary = call.rotary_of_tokens
    parts = [_make_part(call, rotary, region) for region in regions]
    groups = groups_of_heads(query, heads_at_once)
    with without_autocast(query.device):
        if torch.is_grad_enabled():
            # writing into one tensor would make the backward pass copy the whole gradient once for every write
            joined = []
            for heads in groups:
                summaries = _mix(call, heads, _summarise(call, heads, parts))
                pieces = zip(*[_read(call, heads, part, summaries) for part in parts], strict=True)
                joined.append([join_tokens(list(found), regions, first_axis=1) for found in pieces])
            output, *normaliser = (torch.cat(found, dim=-2).flatten(1, -3) for found in zip(*joined, strict=True))
            return output.to(query.dtype), *normaliser
        shapes = [(query.shape, query.dtype), ((*query.shape[:-1], 1), sum_dtype(query.dtype))][: 1 + call.normalize]
        whole = [torch.empty(shape, dtype=dtype, device=query.device) for shape, dtype in shapes]
        for heads in groups:
            summaries = _mix(call, heads, _summarise(call, heads, parts))
            for part in parts:
                here = (slice(None), *part.region.tokens, heads)
                for tensor, piece in zip(whole, _read(call, heads, part, summaries), strict=True):
                    tensor.unflatten(1, grid)[here] = piece
        return tuple(whole)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Autocast switched off; the meta device, for which shapes and costs are counted, has none."""
    return nullcontext() if device.type == "meta" else torch.autocast(device.type, enabled=False)


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type that sums are kept in: float64 for float64 inputs, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def groups_of_heads(query: torch.Tensor, heads_at_once: int) -> list[slice]:
    """Slices of the head axis of (B, N, H, D)."""
    return [slice(start, start + heads_at_once) for start in range(0, query.shape[2], heads_at_once)]


def working_set(query: torch.Tensor, blocks: Shape) -> tuple[int, int]:
    """How many heads, and how many blocks along the first axis, to process together."""
    batch, tokens, heads, head_dim = query.shape
    budget = _budget(query)
    row_bytes = max(1, 4 * batch * tokens * head_dim // blocks[0])
    heads_at_once = max(1, min(heads, budget // row_bytes))
    return heads_at_once, max(1, budget // (row_bytes * heads_at_once))


def _length_at_once(query: torch.Tensor, grid: Shape) -> int:
    """How many tokens along the grid's first axis to process together, of one head."""
    batch, tokens, _, head_dim = query.shape
    return max(1, _budget(query) // (4 * batch * head_dim * (tokens // grid[0])))


def _budget(query: torch.Tensor) -> int:
    return _CPU_BYTES if query.device.type == "cpu" else _DEVICE_BYTES


def _make_part(call: Call, rotary: torch.Tensor | None, region: Region) -> _Part:
    dtype = sum_dtype(call.query.dtype)
    table = mask = None
    if rotary is not None:
        table = to_blocks(rotary.unflatten(1, call.grid), region, dtype)
    if call.key_mask is not None:
        mask = to_blocks(call.key_mask[:, :, None, None].unflatten(1, call.grid), region, dtype)
    return _Part(region, table, mask)


def _in_blocks(call: Call, x: torch.Tensor, heads: slice, part: _Part) -> torch.Tensor:
    """Tokens of one region and some heads of (B, N, H, D): (B, heads, *block counts, tokens per block, D)."""
    return to_blocks(x[:, :, heads].unflatten(1, call.grid), part.region, sum_dtype(call.query.dtype))


def _features(call: Call, x: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of tokens from :func:`_in_blocks` for the numerator and for the normaliser, in the same shape."""
    if part.rotary is not None and call.rope == "before":
        x = apply_rotary(x, part.rotary)
    features = get_feature_map(call.feature_map)(x, call.eps)
    if part.rotary is not None and call.rope == "after":
        return apply_rotary(features, part.rotary), features
    return features, features


def _summarise(call: Call, heads: slice, parts: list[_Part]) -> list[torch.Tensor]:
    """KV summaries (B, H, *blocks, D, D) and, to normalise, key sums (B, H, *blocks, D, 1) of all blocks (Eq. 3)."""
    summaries, key_sums = [], []
    for part in parts:
        rotated, plain = _features(call, _in_blocks(call, call.key, heads, part), part)
        if part.key_mask is not None:
            rotated, plain = rotated * part.key_mask, plain * part.key_mask
        summaries.append(rotated.mT @ _in_blocks(call, call.value, heads, part))
        key_sums.append(plain.sum(dim=-2).unsqueeze(-1))
    regions = [part.region for part in parts]
    return [join_blocks(sums, regions, first_axis=2) for sums in (summaries, key_sums)[: 1 + call.normalize]]


def _mix(call: Call, heads: slice, summaries: list[torch.Tensor]) -> list[torch.Tensor]:
    """Multi-Head Mixing: the mixture of summaries, and of key sums, that each query block sees."""
    coefficients = (call.mixing[heads] if call.mixing.ndim == 3 else call.mixing).to(summaries[0].dtype)
    # expanded, since torch.matmul folds a single matrix that takes gradients into a product of transposing copies
    coefficients = coefficients.expand(*summaries[0].shape[:2], -1, -1)
    return [(coefficients @ x.flatten(2, -3).flatten(3)).view(x.shape) for x in summaries]


def _read(call: Call, heads: slice, part: _Part, summaries: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Output (B, *tokens, H, D) and normaliser (B, *tokens, H, 1) of one region's queries (paper, Eq. 4)."""
    rotated, plain = _features(call, _in_blocks(call, call.query, heads, part), part)
    here = (slice(None), slice(None), *part.region.blocks)
    output = rotated @ summaries[0][here]
    normaliser = [plain @ key_sum[here] for key_sum in summaries[1:]]
    for divisor in normaliser:
        output = output.div_(divisor)
    gate = None
    if call.output_gate is not None:
        gate = call.output_gate[:, :, heads].unflatten(1, call.grid)[(slice(None), *part.region.tokens)]
    output = finish(from_blocks(output, part.region), call.output_norm, gate)
    return output, *(from_blocks(x, part.region) for x in normaliser)


def finish(output: torch.Tensor, output_norm: torch.Tensor | None, output_gate: torch.Tensor | None) -> torch.Tensor:
    """Output RMSNorm per head, with (D,) weight, then × SiLU(gate) of the output's shape, where they are given."""
    if output_norm is not None:
        output = torch.nn.functional.rms_norm(output, output.shape[-1:], output_norm.to(output.dtype), OUTPUT_NORM_EPS)
    if output_gate is not None:
        output = output * torch.nn.functional.silu(output_gate.to(output.dtype))
    return output
