"""The mixing matrix that brings MHLA closest to softmax attention on given inputs, by least squares without gradients.

Row i of a head's matrix weighs summaries for the queries of block i, o = Σ_b m_b n_b / Σ_b m_b z_b with n_b = φ(q)ᵀ S_b
and z_b = φ(q)ᵀ z_b. Around weights that give the output o, a change d of them moves it by about Σ_b d_b (n_b − z_b o) /
Σ_b m_b z_b. So every step is a linear least squares problem of M unknowns for each row, solved under m ≥ 0, and as much
of the step is taken as lowers the error most. Errors are seen through the head's part of the output projection.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from .call import Call
from .feature_maps import get_feature_map
from .layout import mhla_block_table
from .rope import rotated
from .tile_errors import HeadInput, TiledInput, rows_of_head

_STEPS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Parts of a step that are tried."""
_ROUNDS = 6
_DAMPING = 0.03
"""What holds weights where they are, in units of the mean square of a weight's effect."""
_SWEEPS = 60


@dataclass(frozen=True)
class BlockInput:
    """What MHLA attends with in one call, block by block, and the softmax attention that it stands for. M blocks of at
    most L tokens.
    """

    softmax: TiledInput
    """With blocks as tiles."""
    samples: torch.Tensor
    """Places of the queries of every block that are looked at: (M, count)."""
    numerator: torch.Tensor
    denominator: torch.Tensor
    """φ(q) as numerator and normaliser have it: both (B, H, M, L, D)."""
    summaries: torch.Tensor
    """S: (B, H, M, D, D)."""
    key_sums: torch.Tensor
    """z: (B, H, M, D)."""

    @classmethod
    def of(cls, call: Call, queries: int, shift: int) -> "BlockInput":
        """Of a call in float32.

        Extra tokens stay out: what MHLA stands for beside them is softmax attention among the grid's tokens.
        How the two share a query is for λ, which :func:`mhla_diffusers.attention.tile_errors.candidate_errors` tries.

        Args:
            call: of MHLA alone, with RoPE's table for every token.
            queries: of every block that are looked at.
            shift: another one looks at others.
        """
        rotary = call.rotary_of_tokens
        turned = (rotated(call.query, rotary), rotated(call.key, rotary))
        table = mhla_block_table(call.grid, call.blocks, call.query.device)
        softmax = TiledInput.of(*turned, call.value, table, call.key_mask)
        numerator, denominator = (table.in_blocks(x) for x in _features(call, call.query))
        key, plain_key = (table.in_blocks(x) for x in _features(call, call.key))
        weight = softmax.weight[:, None, :, :, None]
        summaries, key_sums = (key * weight).mT @ softmax.value, (plain_key * weight).sum(dim=3)
        return cls(softmax, softmax.samples(queries, shift), numerator, denominator, summaries, key_sums)


def _features(call: Call, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Features (B, N, H, D) for the numerator and for the normaliser."""
    table = call.rotary_of_tokens
    if call.rope == "before":
        x = rotated(x, table)
    features = get_feature_map(call.feature_map)(x.clone(), call.eps)
    return (rotated(features, table) if call.rope == "after" else features), features


@dataclass(frozen=True)
class _Parts:
    """Some queries of one head, of some blocks."""

    blocks: slice
    numerators: torch.Tensor
    """W n_b: (B, blocks, samples, M, D)."""
    denominators: torch.Tensor
    """z_b: (B, blocks, samples, M)."""
    wanted: torch.Tensor
    """W softmax attention's output: (B, blocks, samples, D)."""

    def output(self, mixing: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Output (B, blocks, samples, D) and normaliser (B, blocks, samples, 1) with a head's matrix (M, M)."""
        rows = mixing[self.blocks, None, None, :]
        total = (self.denominators * rows[..., 0, :]).sum(dim=-1, keepdim=True)
        total = total.clamp_min(torch.finfo(total.dtype).tiny)
        return (rows @ self.numerators)[..., 0, :] / total, total


def _parts(given: BlockInput, head: int, projection: torch.Tensor) -> Iterator[_Parts]:
    seen = HeadInput.of(given.softmax, head, projection)
    summaries = given.summaries[:, head] @ projection
    for rows in rows_of_head(seen, given.samples):
        places = given.samples[rows.tiles][None, :, :, None].expand_as(rows.outputs)
        numerator, denominator = (
            x[:, head, rows.tiles].gather(2, places) for x in (given.numerator, given.denominator)
        )
        yield _Parts(
            rows.tiles,
            torch.einsum("bqsd,bmde->bqsme", numerator, summaries),
            torch.einsum("bqsd,bmd->bqsm", denominator, given.key_sums[:, head]),
            rows.outputs,
        )


def fit_mixing(given: list[BlockInput], projections: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Weights that lower the squared error of every head's output, summed over heads where they share one matrix.

    Args:
        given: calls.
        projections: (H, D, D), see :class:`mhla_diffusers.attention.tile_errors.HeadInput`.
        mixing: (M, M) or (H, M, M) to begin with, positive somewhere in every row.

    Returns:
        Of the same shape; the largest weight of every row is 1.
    """
    weights = mixing.float().view(-1, *mixing.shape[-2:])
    for _ in range(_ROUNDS):
        gram, slope = _equations(given, projections, weights)
        change = nonnegative_step(gram, slope, weights, _DAMPING) - weights
        errors = torch.stack([_errors(given, projections, weights + part * change) for part in _STEPS])
        parts = torch.tensor(_STEPS, device=weights.device)[errors.argmin(dim=0)]
        weights = weights + parts[..., None] * change
        weights = weights / weights.amax(dim=-1, keepdim=True)  # the output does not depend on the scale of a row
    return weights.view(mixing.shape)


def _equations(
    given: list[BlockInput], projections: torch.Tensor, weights: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Products of the effects of weights with each other, and minus those with the error.

    Returns:
        (H, M, M, M) and (H, M, M), row by row; with 1 for H where heads share one matrix.
    """
    gram, slope = weights.new_zeros(*weights.shape, weights.shape[-1]), torch.zeros_like(weights)
    for call in given:
        for head, projection in enumerate(projections):
            place = head % len(weights)
            for parts in _parts(call, head, projection):
                output, total = parts.output(weights[place])
                effects = parts.numerators - parts.denominators[..., None] * output[..., None, :]
                effects = (effects / total[..., None]).permute(1, 3, 0, 2, 4).flatten(2)
                error = (output - parts.wanted).transpose(0, 1).flatten(1)
                gram[place, parts.blocks] += effects @ effects.mT
                slope[place, parts.blocks] -= (effects @ error[..., None])[..., 0]
    return gram, slope


def _errors(given: list[BlockInput], projections: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Squared error of every row: (H, M), with 1 for H where heads share one matrix."""
    errors = torch.zeros_like(weights[..., 0])
    for call in given:
        for head, projection in enumerate(projections):
            place = head % len(weights)
            for parts in _parts(call, head, projection):
                output, _ = parts.output(weights[place])
                errors[place, parts.blocks] += (output - parts.wanted).square().sum(dim=(0, 2, 3))
    return errors


def nonnegative_step(gram: torch.Tensor, slope: torch.Tensor, start: torch.Tensor, damping: float) -> torch.Tensor:
    """The x ≥ 0 that minimises (x − start)ᵀ (G + λ) (x − start) / 2 − slopeᵀ (x − start), by coordinate descent.

    Args:
        gram: G, (..., M, M), positive semidefinite.
        slope: (..., M).
        start: (..., M).
        damping: λ in units of the mean of G's diagonal.
    """
    diagonal = gram.diagonal(dim1=-2, dim2=-1)
    held = damping * diagonal.mean(dim=-1, keepdim=True) + torch.finfo(gram.dtype).tiny
    x = start.clone()
    for _ in range(_SWEEPS):
        for place in range(x.shape[-1]):
            moved = x - start
            pull = slope[..., place] - (gram[..., place, :] * moved).sum(dim=-1) - held[..., 0] * moved[..., place]
            x[..., place] = (x[..., place] + pull / (diagonal[..., place] + held[..., 0])).clamp_min(0)
    return x
