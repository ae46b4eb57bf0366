"""The mixing matrix that brings MHLA closest to softmax attention on given inputs, by least squares without gradients.

Row i of a head's matrix weighs KV states for the queries of block i, o = Σ_b m_b n_b / Σ_b m_b z_b with n_b = φ(q)ᵀ S_b
and z_b = φ(q)ᵀ z_b. Around weights that give the output o, a change d of them moves it by about Σ_b d_b (n_b − z_b o) /
Σ_b m_b z_b. So every step is a linear least squares problem of M unknowns for each row, solved under m ≥ 0, and as much
of the step is taken as lowers the error most. Errors are seen through the head's part of the output projection.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from .blocks import block_index
from .calibrate import SampledQueries
from .call import Call
from .feature_maps import get_feature_map
from .rope import rotated

_STEPS = (0.0, 0.1, 0.25, 0.5, 1.0)
"""Parts of a step that are tried."""
_ROUNDS = 6
_DAMPING = 0.03
"""What holds weights where they are, in units of the mean square of a weight's effect."""
_SWEEPS = 60


@dataclass(frozen=True)
class BlockInput:
    """What MHLA attends with in one call, and the softmax attention that it stands for. S queries, as many of every
    block.
    """

    softmax: SampledQueries
    queries: int
    """Of every block."""
    numerator: torch.Tensor
    denominator: torch.Tensor
    """φ(q) as numerator and normaliser have it: both (B, S, H, D)."""
    states: torch.Tensor
    """S: (B, H, M, D, D)."""
    key_sums: torch.Tensor
    """z: (B, H, M, D)."""

    @classmethod
    def of(cls, call: Call, queries: int, shift: int) -> "BlockInput":
        """Of a call in float32.

        Extra tokens stay out: what MHLA stands for beside them is softmax attention among the grid's tokens.
        How the two share a query is for λ, which :func:`mhla_diffusers.attention.calibrate.candidate_errors` tries.

        Args:
            call: of MHLA alone, with RoPE's table for every token.
            queries: of every block that are looked at.
            shift: another one looks at others.
        """
        call = replace(call, extra=None)
        block = block_index(call.grid, call.blocks)
        lengths = block.bincount()[:, None]
        places = lengths.cumsum(dim=0) - lengths + (torch.arange(queries) * lengths // queries + shift) % lengths
        tokens = block.argsort(stable=True)[places.flatten()].to(call.query.device)
        numerator, denominator = (x[:, tokens] for x in _features(call, call.query))
        key, plain_key = _features(call, call.key)
        if call.key_mask is not None:
            key, plain_key = (x * call.key_mask.to(x.dtype)[..., None, None] for x in (key, plain_key))
        states, key_sums = [], []
        for number in range(len(lengths)):
            here = (block == number).nonzero().flatten().to(call.query.device)
            states.append(torch.einsum("bnhd,bnhe->bhde", key[:, here], call.value[:, here]))
            key_sums.append(plain_key[:, here].sum(dim=1))
        softmax = SampledQueries.of(call, tokens)
        return cls(softmax, queries, numerator, denominator, torch.stack(states, dim=2), torch.stack(key_sums, dim=2))


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
    states, by_block = given.states[:, head] @ projection, (-1, given.queries)
    for rows in given.softmax.rows(head, projection, given.queries):
        numerator, denominator = (
            x[:, rows.queries, head].unflatten(1, by_block) for x in (given.numerator, given.denominator)
        )
        yield _Parts(
            slice(rows.queries.start // given.queries, rows.queries.stop // given.queries),
            torch.einsum("bqsd,bmde->bqsme", numerator, states),
            torch.einsum("bqsd,bmd->bqsm", denominator, given.key_sums[:, head]),
            rows.outputs.unflatten(1, by_block),
        )


def fit_mixing(given: list[BlockInput], projections: torch.Tensor, mixing: torch.Tensor) -> torch.Tensor:
    """Weights that lower the squared error of every head's output, summed over heads where they share one matrix.

    Args:
        given: calls.
        projections: (H, D, D), see :meth:`mhla_diffusers.attention.calibrate.SampledQueries.rows`.
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
