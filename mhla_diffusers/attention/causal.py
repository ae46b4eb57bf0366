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
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch

from .call import Call
from .feature_maps import get_feature_map
from .layout import frame_block_starts
from .linear import finish
from .merge import LinearAttention, least_mixing, under_common_sum, with_least_mask
from .mixing import causal_mixing
from .precision import sum_dtype, without_autocast
from .rope import apply_rotary

Causal = Literal["token", "block"]
_BYTES = 2**23
"""Of scores, or of query, key or value, that are formed at once."""
Own = tuple[torch.Tensor, torch.Tensor | None]
"""Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), None without normaliser; in float32 (float64 for
float64 inputs)."""


@dataclass(frozen=True)
class CausalAttention:
    """A backend's parts of which causal attention is made."""

    linear: LinearAttention
    """MHLA throughout."""
    own: Callable[[Call], Own]
    """What a query takes from its own frame block, up to itself or whole,
    :func:`own_block_attention`."""

    def __call__(self, call: Call) -> torch.Tensor:
        """The output (B, N, H, D) of a sequence from its begin."""
        call = with_causal_mixing(call)
        if not has_own_part(call):
            return self.linear.read(call, self.linear.states(call))[0]
        starts, count = frame_block_starts(call.grid, call.blocks), call.query.shape[1]
        last = max(start for start in starts if start < count)
        if not last:
            return beside_earlier(call, self.own(call), None)
        # the first frame block has none before it, and the last is before none
        later = linear_branch(part_of(call, slice(starts[1], count)))
        earlier = self.linear.states(linear_branch(part_of(call, slice(0, last))))
        return beside_earlier(call, self.own(call), self.linear.read(later, earlier))


def has_own_part(call: Call) -> bool:
    """Whether the own frame block is attended to otherwise than through its states."""
    return call.causal == "token" or call.linear_weight is not None


def with_causal_mixing(call: Call) -> Call:
    """A call whose mixing matrix holds what is seen alone, and whose masked keys still weigh something."""
    return replace(with_least_mask(call), mixing=causal_mixing(least_mixing(call.mixing), call.blocks, own=True))


def linear_branch(call: Call) -> Call:
    """MHLA over the earlier frame blocks alone, without norm, gate and λ."""
    mixing = causal_mixing(call.mixing, call.blocks, own=False)
    return replace(call, mixing=mixing, output_norm=None, output_gate=None, linear_weight=None)


def part_of(call: Call, tokens: slice) -> Call:
    """The call of some of its tokens."""

    def some(x: torch.Tensor | None) -> torch.Tensor | None:
        return None if x is None else x[:, tokens]

    return replace(
        call,
        query=call.query[:, tokens],
        key=call.key[:, tokens],
        value=call.value[:, tokens],
        rotary=some(call.rotary),
        key_mask=some(call.key_mask),
        output_gate=some(call.output_gate),
        first=call.first + tokens.start,
    )


def beside_earlier(call: Call, own: Own, earlier: tuple[torch.Tensor, ...] | None) -> torch.Tensor:
    """The two under one denominator, with norm and gate.

    Args:
        call: the call.
        own: what all its queries take from their own frame blocks.
        earlier: output (B, n, H, D) and, to normalise, normaliser (B, n, H, 1) of what its last n queries take from
            earlier frame blocks; None for nothing.

    Returns:
        (B, N, H, D) in the type of the query.
    """
    output, log_sum = own
    if earlier is not None:
        far, *normaliser = earlier
        alone = output.shape[1] - far.shape[1]
        beside = output[:, alone:] + far
        if call.normalize and log_sum is not None:
            log_far = normaliser[0].log()
            if call.linear_weight is not None:
                log_far = log_far + call.linear_weight.to(log_far.dtype).log()[:, None]
            beside = under_common_sum(output[:, alone:], log_sum[:, alone:], far, log_far)
        output = torch.cat([output[:, :alone], beside], dim=1)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype)


def own_block_attention(call: Call) -> Own:
    """What every query takes from the keys of its block; with ``causal="token"`` from those that do not come after it.

    Args:
        call: whose tokens begin with the grid, and may end before it does. With ``linear_weight`` the weights are
            those of softmax, exp(q · k / √D), and without it those of MHLA, m_ii φ(q) · φ(k).
    """
    with without_autocast(call.query.device):
        return joined([_of_blocks(call, blocks, tokens) for blocks, tokens in block_runs(call)])


def block_runs(call: Call) -> list[tuple[slice, slice]]:
    """Frame blocks that follow each other and are equally long as far as the sequence goes, and their tokens."""
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


def _of_blocks(call: Call, blocks: slice, tokens: slice) -> Own:
    """Of blocks that are equally long, a few of them at a time."""
    count = blocks.stop - blocks.start
    length, (batch, _, heads, head_dim) = (tokens.stop - tokens.start) // count, call.query.shape
    at_once = max(1, _BYTES // (4 * batch * heads * length * max(length, head_dim)))
    parts = []
    for first in range(0, count, at_once):
        last = min(first + at_once, count)
        here = slice(tokens.start + first * length, tokens.start + last * length)
        parts.append(_attend(call, slice(blocks.start + first, blocks.start + last), here))
    return joined(parts)


def joined(parts: list[Own]) -> Own:
    """Parts of a sequence that follow each other."""
    sums = [log_sum for _, log_sum in parts if log_sum is not None]
    return torch.cat([output for output, _ in parts], dim=1), torch.cat(sums, dim=1) if sums else None


def _attend(call: Call, blocks: slice, tokens: slice) -> Own:
    count, dtype = blocks.stop - blocks.start, sum_dtype(call.query.dtype)
    # copies, since a feature map may overwrite its input
    query, key, value = (_blocked(x[:, tokens].to(dtype, copy=True), count) for x in (call.query, call.key, call.value))
    table = None if call.rotary is None else _blocked(call.rotary[:, tokens].to(dtype), count)
    mask = None if call.key_mask is None else _blocked(call.key_mask[:, tokens, None, None].to(dtype), count)
    if call.linear_weight is not None:
        if table is not None:
            query, key = apply_rotary(query, table), apply_rotary(key, table)
        output, log_sum = own_softmax(query, key, value, mask, call.causal == "token")
        return _tokens(output), _tokens(log_sum)
    output, normaliser = _linear_up_to_itself(call, query, key, value, table, mask)
    own = call.mixing.diagonal(dim1=-2, dim2=-1)[..., blocks, None, None].to(dtype)
    if normaliser is None:
        return _tokens(own * output), None
    return _tokens(output / normaliser), _tokens((own * normaliser).log())


def own_softmax(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: torch.Tensor | None, is_causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax attention, in which with ``is_causal`` the last query sees all keys, the one before it all but the last.

    Args:
        query: (..., n, D) after RoPE.
        key: (..., m, D), m ≥ n, likewise.
        value: (..., m, D).
        mask: (..., m, 1), the positive weight of every key.
        is_causal: whether later keys are hidden.

    Returns:
        Output (..., n, D) and log of the sum of weights (..., n, 1).
    """
    scores = query * query.shape[-1] ** -0.5 @ key.mT
    if mask is not None:
        scores = scores + mask.log().mT
    if is_causal:
        seen = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(~seen.tril(key.shape[-2] - query.shape[-2]), -math.inf)
    log_sum = scores.logsumexp(dim=-1, keepdim=True)
    return (scores - log_sum).exp() @ value, log_sum


def _linear_up_to_itself(
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    table: torch.Tensor | None,
    mask: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Numerator (B, H, blocks, L, D) and normaliser (B, H, blocks, L, 1) without m_ii."""
    phi = get_feature_map(call.feature_map)
    if table is not None and call.rope == "before":
        query, key, table = apply_rotary(query, table), apply_rotary(key, table), None
    query, key = phi(query, call.eps), phi(key, call.eps)
    if mask is not None:
        key = key * mask
    normaliser = (query * key.cumsum(dim=-2)).sum(dim=-1, keepdim=True) if call.normalize else None
    if table is not None:
        query, key = apply_rotary(query, table), apply_rotary(key, table)
    return (query @ key.mT).tril() @ value, normaliser


def _blocked(x: torch.Tensor, count: int) -> torch.Tensor:
    """(B, tokens, H, D) to (B, H, blocks, tokens per block, D)."""
    return x.unflatten(1, (count, -1)).permute(0, 3, 1, 2, 4)


def _tokens(x: torch.Tensor) -> torch.Tensor:
    """The inverse."""
    return x.permute(0, 2, 3, 1, 4).flatten(1, 2)
