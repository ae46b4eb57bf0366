"""MHLA in plain PyTorch operations, for any device.

Sums are accumulated in float32 (float64 for float64 inputs) whatever the input type, under autocast too. The work
is done for a few heads and a few rows of blocks, or a part of one row, at a time: that bounds the working memory and,
on a CPU, keeps the working set in the cache.
"""

import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .blocks import (
    Region,
    Shape,
    boxes_of_range,
    from_blocks,
    join_blocks,
    join_tokens,
    regular_regions,
    to_blocks,
)
from .call import Call
from .feature_maps import get_feature_map
from .reference import OUTPUT_NORM_EPS
from .rope import apply_rotary

_CPU_BYTES = 2**23
_DEVICE_BYTES = 2**30


@dataclass(frozen=True)
class _Part:
    """A region of a box of tokens with what its tokens carry besides query, key and value."""

    box: slice
    """The box's tokens in the call."""
    shape: Shape
    """Tokens of the box along each axis."""
    region: Region
    rotary: torch.Tensor | None
    """(1 or B, 1, *block counts, tokens per block, D)."""
    key_mask: torch.Tensor | None
    """(B, 1, *block counts, tokens per block, 1)."""


def eager_attention(call: Call) -> tuple[torch.Tensor, ...]:
    """MHLA throughout, without a near field, as :func:`eager_read` returns it."""
    return eager_read(call, eager_summaries(call))


def eager_summaries(call: Call) -> torch.Tensor:
    """KV summaries and, to normalise, key sums of all blocks, of the tokens of the call (paper, Eq. 3).

    Returns:
        (B, H, M, D + normalize, D), the key sum after the rows of the summary; float32 (float64 for float64 inputs).
    """
    boxes = _parts(call)
    with without_autocast(call.query.device):
        groups = [_summarise(call, heads, boxes) for heads in groups_of_heads(call.query, _at_once(call)[0])]
        return groups[0] if len(groups) == 1 else torch.cat(groups, dim=1)


def eager_read(call: Call, summary: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the queries read from the summaries of all tokens.

    Args:
        call: the call.
        summary: what :func:`eager_summaries` returns, of all tokens of the grid.

    Returns:
        The output (B, N, H, D) in the type of the query, and with ``normalize`` the normaliser of Eq. 4,
        φ(q)ᵀ Σ_b m_ib z_b, as (B, N, H, 1) in float32 (float64 for float64 inputs).
    """
    query, boxes = call.query, _parts(call)
    groups = groups_of_heads(query, _at_once(call)[0])
    with without_autocast(query.device):
        if torch.is_grad_enabled():
            # writing into one tensor would make the backward pass copy the whole gradient once for every write
            joined = [_join_boxes(call, heads, boxes, _mix(call, heads, summary)) for heads in groups]
            output, *normaliser = (torch.cat(found, dim=-2) for found in zip(*joined, strict=True))
            return output.to(query.dtype), *normaliser
        shapes = [(query.shape, query.dtype), ((*query.shape[:-1], 1), sum_dtype(query.dtype))][: 1 + call.normalize]
        whole = [torch.empty(shape, dtype=dtype, device=query.device) for shape, dtype in shapes]
        for heads in groups:
            mixed = _mix(call, heads, summary)
            for part in (part for box in boxes for part in box):
                here = (slice(None), *part.region.tokens, heads)
                for tensor, piece in zip(whole, _read(call, heads, part, mixed), strict=True):
                    tensor[:, part.box].unflatten(1, part.shape)[here] = piece
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


def _at_once(call: Call) -> tuple[int, int, int]:
    """How many heads, blocks along the grid's first axis, and tokens along it of one head, to process together."""
    batch, tokens, heads, head_dim = call.query.shape
    most, token_bytes = budget(call.query), 4 * batch * head_dim
    # a sequence may end before its grid, even within the first row of blocks
    across = max(1, min(tokens, math.prod(call.grid[1:])))
    row_bytes = max(1, token_bytes * min(tokens, math.prod(call.grid) // call.blocks[0]))
    heads_at_once = max(1, min(heads, most // row_bytes))
    rows = max(1, most // (row_bytes * heads_at_once))
    return heads_at_once, rows, max(1, most // max(1, token_bytes * across))


def budget(query: torch.Tensor) -> int:
    """Bytes of query (or key, or value), as the sums are kept, that are processed at once."""
    return _CPU_BYTES if query.device.type == "cpu" else _DEVICE_BYTES


def _parts(call: Call) -> list[list[_Part]]:
    """Of every box that the tokens of the call fill on the grid."""
    _, rows, length = _at_once(call)
    rotary, boxes, start = call.rotary_of_tokens, [], 0
    for box in boxes_of_range(call.grid, call.first, call.query.shape[1]):
        shape = tuple(axis.stop - axis.start for axis in box)
        tokens = slice(start, start + math.prod(shape))
        regions = regular_regions(call.grid, call.blocks, rows, length, box)
        boxes.append([_make_part(call, rotary, tokens, shape, region) for region in regions])
        start = tokens.stop
    return boxes


def _make_part(call: Call, rotary: torch.Tensor | None, box: slice, shape: Shape, region: Region) -> _Part:
    dtype = sum_dtype(call.query.dtype)
    table = mask = None
    if rotary is not None:
        table = to_blocks(rotary[:, box].unflatten(1, shape), region, dtype)
    if call.key_mask is not None:
        mask = to_blocks(call.key_mask[:, box, None, None].unflatten(1, shape), region, dtype)
    return _Part(box, shape, region, table, mask)


def _in_blocks(call: Call, x: torch.Tensor, heads: slice, part: _Part) -> torch.Tensor:
    """Tokens of one region and some heads of (B, N, H, D): (B, heads, *block counts, tokens per block, D)."""
    return to_blocks(x[:, part.box, heads].unflatten(1, part.shape), part.region, sum_dtype(call.query.dtype))


def _features(call: Call, x: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of tokens from :func:`_in_blocks` for the numerator and for the normaliser, in the same shape."""
    if part.rotary is not None and call.rope == "before":
        x = apply_rotary(x, part.rotary)
    features = get_feature_map(call.feature_map)(x, call.eps)
    if part.rotary is not None and call.rope == "after":
        return apply_rotary(features, part.rotary), features
    return features, features


def _summarise(call: Call, heads: slice, boxes: list[list[_Part]]) -> torch.Tensor:
    """What :func:`eager_summaries` returns, of some heads."""
    whole: torch.Tensor | None = None
    for box in boxes:
        sums = [_sums(call, heads, part) for part in box]
        of_box = join_blocks(sums, [part.region for part in box], call.blocks, first_axis=2)
        whole = of_box if whole is None else whole + of_box
    if whole is None:
        head_dim = call.query.shape[3]
        shape = (len(call.query), call.query.shape[2], *call.blocks, head_dim + call.normalize, head_dim)
        whole = call.query.new_zeros(shape, dtype=sum_dtype(call.query.dtype))[:, heads]
    return whole.flatten(2, -3)


def _sums(call: Call, heads: slice, part: _Part) -> torch.Tensor:
    """Of the blocks of one region, (B, heads, *block counts, D + normalize, D)."""
    rotated, plain = _features(call, _in_blocks(call, call.key, heads, part), part)
    if part.key_mask is not None:
        rotated, plain = rotated * part.key_mask, plain * part.key_mask
    summary = rotated.mT @ _in_blocks(call, call.value, heads, part)
    return torch.cat([summary, plain.sum(dim=-2, keepdim=True)], dim=-2) if call.normalize else summary


def _mix(call: Call, heads: slice, summary: torch.Tensor) -> torch.Tensor:
    """Multi-Head Mixing: the mixture of summaries that each query block sees, (B, heads, *blocks, D + normalize, D).

    Of a share of the tokens, for the rows of blocks that it may lie in; the first axis has those alone then.
    """
    coefficients = (call.mixing[heads] if call.mixing.ndim == 3 else call.mixing)[..., call.own_blocks, :]
    some = summary[:, heads]
    # expanded, since torch.matmul folds a single matrix that takes gradients into a product of transposing copies
    coefficients = coefficients.to(summary.dtype).expand(*some.shape[:2], -1, -1)
    return (coefficients @ some.flatten(3)).unflatten(3, some.shape[3:]).unflatten(2, (-1, *call.blocks[1:]))


def _join_boxes(call: Call, heads: slice, boxes: list[list[_Part]], mixed: torch.Tensor) -> list[torch.Tensor]:
    """Output and normaliser of some heads, all tokens of the call."""
    found = []
    for box in boxes:
        regions = [part.region for part in box]
        pieces = zip(*[_read(call, heads, part, mixed) for part in box], strict=True)
        found.append([join_tokens(list(piece), regions, first_axis=1).flatten(1, -3) for piece in pieces])
    return [torch.cat(piece, dim=1) for piece in zip(*found, strict=True)]


def _read(call: Call, heads: slice, part: _Part, mixed: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Output (B, *tokens, H, D) and normaliser (B, *tokens, H, 1) of one region's queries (paper, Eq. 4)."""
    rotated, plain = _features(call, _in_blocks(call, call.query, heads, part), part)
    rows, *others = part.region.blocks
    first = call.own_blocks.start // math.prod(call.blocks[1:])
    here = mixed[(slice(None), slice(None), slice(rows.start - first, rows.stop - first), *others)]
    head_dim = call.query.shape[3]
    output = rotated @ here[..., :head_dim, :]
    normaliser = [plain @ here[..., head_dim:, :].mT] if call.normalize else []
    for divisor in normaliser:
        output = output.div_(divisor)
    gate = None
    if call.output_gate is not None:
        gate = call.output_gate[:, part.box, heads].unflatten(1, part.shape)[(slice(None), *part.region.tokens)]
    output = finish(from_blocks(output, part.region), call.output_norm, gate)
    return output, *(from_blocks(x, part.region) for x in normaliser)


def finish(output: torch.Tensor, output_norm: torch.Tensor | None, output_gate: torch.Tensor | None) -> torch.Tensor:
    """Output RMSNorm per head, with (D,) weight, then × SiLU(gate) of the output's shape, where they are given."""
    if output_norm is not None:
        output = torch.nn.functional.rms_norm(output, output.shape[-1:], output_norm.to(output.dtype), OUTPUT_NORM_EPS)
    if output_gate is not None:
        output = output * torch.nn.functional.silu(output_gate.to(output.dtype))
    return output
