"""Causal MHLA: queries that see no later token (paper, Appendix C), or no later block of frames.

A *frame block* is one block of the first axis of the grid with all tokens of the other axes; of a text, which has one
axis, it is a block. Frame blocks follow each other in the sequence. With ``causal="block"`` a query sees its own frame
block and earlier ones in full. With ``causal="token"`` it sees earlier frame blocks, and its own up to itself. The rows
of the mixing matrix then hold what is seen alone.

With λ (``linear_weight``) the own frame block is attended to with softmax instead, and earlier ones through mixed
states, under one denominator::

    o = [ Σ_{t own} exp(q · k_t / √D) v_t + λ φ(q)ᵀ Σ_{b earlier} m_ib S_b ] / [ the same without v ]

The sequence begins with the grid and may end before it does.
"""

import math
from dataclasses import replace
from itertools import pairwise
from types import ModuleType
from typing import Literal

import torch

from .call import MHLACall
from .feature_maps import get_feature_map
from .layout import frame_block_starts
from .mixing import causal_mixing
from .precision import LEAST, finish, sum_dtype, under_common_sum
from .rope import apply_rotary, rotary_table

Causal = Literal["token", "block"]
_BYTES = 2**23
"""Bytes of scores, or of query, key or value, that are formed at once."""
Own = tuple[torch.Tensor, torch.Tensor | None]
"""Output (B, N, H, D) and LSE (B, N, H, 1), None without normaliser; in float32 (float64 for float64 inputs)."""


def causal_attention(call: MHLACall, backend: ModuleType) -> torch.Tensor:
    """Attend in a sequence from its first token, with :mod:`.eager` or the kernels: (B, N, H, D)."""
    starts, count = frame_block_starts(call.grid, call.blocks), call.query.shape[1]
    call = replace(call, mixing=causal_mixing(least_mixing(call.mixing), call.blocks, own=True))
    last = max(start for start in starts if start < count)
    if not has_own_part(call):
        return backend.linear(call)
    if not last:
        return beside_earlier(call, backend.own_block(call), None)
    # the first frame block has none before it, and the last is before none
    mixing = causal_mixing(call.mixing, call.blocks, own=False)
    alone = replace(call, mixing=mixing, output_norm=None, output_gate=None, linear_weight=None)
    states = backend.states(part_of(alone, slice(0, last)))
    own = backend.own_block(call)
    return beside_earlier(call, own, backend.read(part_of(alone, slice(starts[1], count)), states))


def has_own_part(call: MHLACall) -> bool:
    """Whether attention within the own frame block is computed separately from the states."""
    return call.causal == "token" or call.linear_weight is not None


def least_mixing(mixing: torch.Tensor) -> torch.Tensor:
    """Return the mixing matrix in the sums' dtype, plus a tiny constant so that no entry is 0."""
    return mixing.to(sum_dtype(mixing.dtype)) + LEAST


def part_of(call: MHLACall, tokens: slice) -> MHLACall:
    """The call of some of its tokens."""
    query, key, value = (x[:, tokens] for x in (call.query, call.key, call.value))
    gate = None if call.output_gate is None else call.output_gate[:, tokens]
    rotary = None if call.rotary is None else (call.rotary[0][:, tokens], call.rotary[1][:, tokens])
    changed = {"rotary": rotary, "output_gate": gate, "first": call.first + tokens.start}
    return replace(call, query=query, key=key, value=value, **changed)


def beside_earlier(call: MHLACall, own: Own, earlier: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    """Merge what queries get from their own frame block and, for the last n, from earlier ones; apply norm and gate.

    ``earlier``: output (B, n, H, D) and, to normalise, normaliser (B, n, H, 1); None for nothing.

    Returns:
        (B, N, H, D) in the type of the query.
    """
    output, log_sum = own
    if earlier is not None:
        by_states, *normaliser = earlier
        alone = output.shape[1] - by_states.shape[1]
        beside = output[:, alone:] + by_states
        if call.normalize and log_sum is not None:
            log_states = normaliser[0].log()
            if call.linear_weight is not None:
                log_states = log_states + call.linear_weight.to(log_states.dtype).log()[:, None]
            beside = under_common_sum(output[:, alone:], log_sum[:, alone:], by_states, log_states)
        output = torch.cat([output[:, :alone], beside], dim=1)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


def own_block(call: MHLACall) -> Own:
    """Attention of every query within its frame block; with ``causal="token"`` only to keys up to itself.

    Weights are softmax's with ``linear_weight``, exp(q · k / √D), and MHLA's without it,
    m_ii φ(q) · φ(k). The tokens begin with the grid, and may end before it does.
    """
    parts: list[Own] = []
    batch, _, heads, head_dim = call.query.shape
    for blocks, tokens in block_runs(call):
        length = (tokens.stop - tokens.start) // (blocks.stop - blocks.start)
        at_once = max(1, _BYTES // (4 * batch * heads * length * max(length, head_dim)))
        for first in range(blocks.start, blocks.stop, at_once):
            some = slice(first, min(first + at_once, blocks.stop))
            start, stop = (tokens.start + (block - blocks.start) * length for block in (some.start, some.stop))
            parts.append(_attend_within(part_of(call, slice(start, stop)), some))
    return joined(parts)


def block_runs(call: MHLACall) -> list[tuple[slice, slice]]:
    """Runs of consecutive frame blocks of equal length, up to the end of the sequence, and their tokens."""
    count = call.query.shape[1]
    starts = [min(start, count) for start in frame_block_starts(call.grid, call.blocks)]
    runs: list[tuple[slice, slice]] = []
    for block, (start, end) in enumerate(pairwise(starts)):
        blocks, tokens = runs[-1] if runs else (slice(0, 0), slice(0, 0))
        if runs and tokens.stop - tokens.start == (end - start) * (blocks.stop - blocks.start):
            runs[-1] = slice(blocks.start, block + 1), slice(tokens.start, end)
        elif end > start:
            runs.append((slice(block, block + 1), slice(start, end)))
    return runs


def joined(parts: list[Own]) -> Own:
    """Parts of a sequence that follow each other."""
    sums = [lse for _, lse in parts if lse is not None]
    return torch.cat([output for output, _ in parts], dim=1), torch.cat(sums, dim=1) if sums else None


def _attend_within(call: MHLACall, blocks: slice) -> Own:
    """Attend within equally long frame blocks, which hold the tokens of the call."""
    dtype, table = sum_dtype(call.query.dtype), rotary_table(call.rotary)

    def by_block(x: torch.Tensor) -> torch.Tensor:
        """(B, N, H, D) to (B, H, blocks, tokens per block, D): a copy, since a feature map may overwrite its input."""
        return x.to(dtype, copy=True).unflatten(1, (blocks.stop - blocks.start, -1)).permute(0, 3, 1, 2, 4)

    def in_order(x: torch.Tensor) -> torch.Tensor:
        return x.permute(0, 2, 3, 1, 4).flatten(1, 2)

    query, key, value = (by_block(x) for x in (call.query, call.key, call.value))
    angles = None if table is None else by_block(table)
    if angles is not None and (call.linear_weight is not None or call.rope == "before"):
        query, key, angles = apply_rotary(query, angles), apply_rotary(key, angles), None
    if call.linear_weight is not None:
        output, lse = own_softmax(query, key, value, call.causal == "token")
        return in_order(output), in_order(lse)
    phi = get_feature_map(call.feature_map)
    query, key = phi(query, call.eps), phi(key, call.eps)
    own = call.mixing.diagonal(dim1=-2, dim2=-1)[..., blocks, None, None].to(dtype)
    normaliser = (query * key.cumsum(dim=-2)).sum(dim=-1, keepdim=True) if call.normalize else None
    if angles is not None:
        query, key = apply_rotary(query, angles), apply_rotary(key, angles)
    output = (query @ key.mT).tril() @ value
    if normaliser is None:
        return in_order(own * output), None
    return in_order(output / normaliser), in_order((own * normaliser).log())


def own_softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention, in which with ``is_causal`` the last query sees all keys, the one before it all but the last.

    Queries (..., n, D) and keys (..., m, D), m ≥ n, after RoPE.

    Returns:
        Output (..., n, D) and log of the sum of weights (..., n, 1).
    """
    scores = query * query.shape[-1] ** -0.5 @ key.mT
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~seen.tril(key.shape[-2] - query.shape[-2]), -math.inf)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - log_sum).exp() @ value, log_sum
