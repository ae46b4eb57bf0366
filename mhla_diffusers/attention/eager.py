"""MHLA in plain PyTorch operations, for any device.

Sums are accumulated in float32 (float64 for float64 inputs) whatever the input type, under autocast too. The work
is done for a few heads and a few rows of blocks, or a part of one row, at a time: that bounds the working memory and,
on a CPU, keeps the working set in the cache.
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch

from .blocks import Region, Shape, from_blocks, join_blocks, join_tokens, regular_regions, to_blocks
from .feature_maps import FeatureMap, get_feature_map
from .reference import OUTPUT_NORM_EPS
from .rotary import Rotary, apply_rotary, pair_tables

_CPU_BYTES = 2**23
_DEVICE_BYTES = 2**30
"""Float32 bytes of query (or key, or value) that are processed at once."""


@dataclass(frozen=True)
class _Part:
    """A region of the grid with what its tokens carry besides query, key and value."""

    region: Region
    rotary: Rotary | None
    """(cos, sin), each (1 or B, 1, *block counts, tokens per block, D / 2)."""
    key_mask: torch.Tensor | None
    """(B, 1, *block counts, tokens per block, 1)."""


@dataclass(frozen=True)
class _Features:
    """Feature map of query or key, with RoPE before or after it."""

    feature_map: FeatureMap
    eps: float
    rope: str
    dtype: torch.dtype

    def __call__(self, x: torch.Tensor, part: _Part) -> tuple[torch.Tensor, torch.Tensor]:
        """Features of one region's tokens for the numerator and for the normaliser.

        Args:
            x: (B, *grid, H, D).
            part: the region.

        Returns:
            Twice (B, H, *block counts, tokens per block, D).
        """
        x = to_blocks(x, part.region, self.dtype)
        if part.rotary is not None and self.rope == "before":
            x = apply_rotary(x, *part.rotary)
        features = self.feature_map(x, self.eps)
        if part.rotary is not None and self.rope == "after":
            return apply_rotary(features, *part.rotary), features
        return features, features


def eager_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mixing: torch.Tensor,
    grid: Shape,
    blocks: Shape,
    *,
    feature_map: str,
    rotary: Rotary | None,
    rope: str,
    normalize: bool,
    eps: float,
    key_mask: torch.Tensor | None,
    output_norm: torch.Tensor | None,
    output_gate: torch.Tensor | None,
) -> torch.Tensor:
    """Torch backend of :func:`mhla_diffusers.attention.mhla_attention`, which has checked the arguments."""
    dtype = sum_dtype(query.dtype)
    features = _Features(get_feature_map(feature_map), eps, rope, dtype)
    heads_at_once, rows_at_once = working_set(query, blocks)
    regions = regular_regions(grid, blocks, rows_at_once, _length_at_once(query, grid))
    parts = [_make_part(region, grid, rotary, key_mask, dtype) for region in regions]

    def summarise(heads: slice) -> tuple[torch.Tensor, torch.Tensor | None]:
        coefficients = (mixing[heads] if mixing.ndim == 3 else mixing).to(dtype)
        k, v = (x[:, :, heads].unflatten(1, grid) for x in (key, value))
        return _mix(coefficients, *_summarise(k, v, parts, features, normalize))

    def read(heads: slice, mixed: tuple[torch.Tensor, torch.Tensor | None], part: _Part) -> torch.Tensor:
        output = _read(query[:, :, heads].unflatten(1, grid), *mixed, part, features)
        gate = output_gate[:, :, heads].unflatten(1, grid) if output_gate is not None else None
        return finish(output, output_norm, gate[(slice(None), *part.region.tokens)] if gate is not None else None)

    groups = groups_of_heads(query, heads_at_once)
    with without_autocast(query.device):
        if torch.is_grad_enabled():
            # writing into one tensor would make the backward pass copy the whole gradient once for every write
            outputs = []
            for heads in groups:
                mixed = summarise(heads)
                outputs.append(join_tokens([read(heads, mixed, part) for part in parts], regions, first_axis=1))
            return torch.cat(outputs, dim=-2).to(query.dtype).reshape(query.shape)
        output = torch.empty(query.shape, dtype=query.dtype, device=query.device)
        on_grid = output.unflatten(1, grid)
        for heads in groups:
            mixed = summarise(heads)
            for part in parts:
                on_grid[(slice(None), *part.region.tokens, heads)] = read(heads, mixed, part)
        return output


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


def _make_part(
    region: Region, grid: Shape, rotary: Rotary | None, key_mask: torch.Tensor | None, dtype: torch.dtype
) -> _Part:
    tables = mask = None
    if rotary is not None:
        cos, sin = (to_blocks(table.unflatten(1, grid), region, dtype) for table in pair_tables(rotary))
        tables = (cos, sin)
    if key_mask is not None:
        mask = to_blocks(key_mask[:, :, None, None].unflatten(1, grid), region, dtype)
    return _Part(region, tables, mask)


def _summarise(
    key: torch.Tensor, value: torch.Tensor, parts: list[_Part], features: _Features, normalize: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """KV summaries (B, H, *blocks, D, D) and key sums (B, H, *blocks, D) of all blocks (paper, Eq. 3)."""
    summaries, key_sums = [], []
    for part in parts:
        rotated, plain = features(key, part)
        if part.key_mask is not None:
            rotated, plain = rotated * part.key_mask, plain * part.key_mask
        summaries.append(rotated.mT @ to_blocks(value, part.region, features.dtype))
        key_sums.append(plain.sum(dim=-2))
    regions = [part.region for part in parts]
    key_sum = join_blocks(key_sums, regions, first_axis=2) if normalize else None
    return join_blocks(summaries, regions, first_axis=2), key_sum


def _mix(
    coefficients: torch.Tensor, summary: torch.Tensor, key_sum: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multi-Head Mixing: the mixture of summaries, and of key sums, that each query block sees."""

    def mix(x: torch.Tensor, channel_axes: int) -> torch.Tensor:
        rows = x.flatten(2, -1 - channel_axes).flatten(3)
        return (coefficients @ rows).view(x.shape)

    return mix(summary, 2), mix(key_sum, 1) if key_sum is not None else None


def _read(
    query: torch.Tensor,
    summary: torch.Tensor,
    key_sum: torch.Tensor | None,
    part: _Part,
    features: _Features,
) -> torch.Tensor:
    """Output (B, *tokens, H, D) of one region's queries from their blocks' mixed summaries (paper, Eq. 4)."""
    rotated, plain = features(query, part)
    here = (slice(None), slice(None), *part.region.blocks)
    output = rotated @ summary[here]
    if key_sum is not None:
        output = output.div_(plain @ key_sum[here].unsqueeze(-1))
    return from_blocks(output, part.region)


def finish(output: torch.Tensor, output_norm: torch.Tensor | None, output_gate: torch.Tensor | None) -> torch.Tensor:
    """Output RMSNorm per head, with (D,) weight, then × SiLU(gate) of the output's shape, where they are given."""
    if output_norm is not None:
        output = torch.nn.functional.rms_norm(output, output.shape[-1:], output_norm.to(output.dtype), OUTPUT_NORM_EPS)
    if output_gate is not None:
        output = output * torch.nn.functional.silu(output_gate.to(output.dtype))
    return output


def eager_normaliser(
    query: torch.Tensor,
    key: torch.Tensor,
    mixing: torch.Tensor,
    grid: Shape,
    blocks: Shape,
    *,
    feature_map: str,
    rotary: Rotary | None,
    rope: str,
    eps: float,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    """The normaliser of Eq. 4 by itself, φ(q)ᵀ Σ_b m_ib z_b: (B, N, H, 1) in float32 (float64 for float64 inputs)."""
    dtype = sum_dtype(query.dtype)
    features = _Features(get_feature_map(feature_map), eps, rope, dtype)
    heads_at_once, rows_at_once = working_set(query, blocks)
    regions = regular_regions(grid, blocks, rows_at_once, _length_at_once(query, grid))
    parts = [_make_part(region, grid, rotary if rope == "before" else None, key_mask, dtype) for region in regions]
    outputs = []
    with without_autocast(query.device):
        for heads in groups_of_heads(query, heads_at_once):
            q, k = (x[:, :, heads].unflatten(1, grid) for x in (query, key))
            coefficients = (mixing[heads] if mixing.ndim == 3 else mixing).to(dtype)
            sums = join_blocks([_key_sum(features(k, part)[1], part) for part in parts], regions, first_axis=2)
            mixed = (coefficients @ sums.flatten(2, -2)).view(sums.shape)
            pieces = []
            for part in parts:
                here = (slice(None), slice(None), *part.region.blocks)
                pieces.append(from_blocks(features(q, part)[1] @ mixed[here].unsqueeze(-1), part.region))
            outputs.append(join_tokens(pieces, regions, first_axis=1))
    return torch.cat(outputs, dim=-2).reshape(*query.shape[:-1], 1)


def _key_sum(features: torch.Tensor, part: _Part) -> torch.Tensor:
    """Sum of a block's masked keys: (B, H, *block counts, D)."""
    return (features if part.key_mask is None else features * part.key_mask).sum(dim=-2)
