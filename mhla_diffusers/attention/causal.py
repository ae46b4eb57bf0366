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
from typing import Literal, get_args

import torch

from .blocks import Shape, frame_block_starts
from .call import Call
from .linear import finish
from .merge import LinearAttention, least_mixing, under_common_sum, with_least_mask
from .mixing import causal_mixing
from .own_block import Own

Causal = Literal["token", "block"]


@dataclass(frozen=True)
class CausalAttention:
    """A backend's parts of which causal attention is made."""

    linear: LinearAttention
    """MHLA throughout."""
    own: Callable[[Call], Own]
    """What a query takes from its own frame block, up to itself or whole,
    :func:`mhla_diffusers.attention.own_block.own_block_attention`."""

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


def check_causal(causal: str, grid: Shape, blocks: Shape) -> None:
    """Raise unless a grid and its blocks have such an order.

    Raises:
        ValueError: another name, or "token" where a block is no run of the sequence.
    """
    if causal not in get_args(Causal):
        raise ValueError(f"Unknown causal={causal!r}; allowed: 'token', 'block' or None.")
    if causal == "token" and math.prod(grid[1:]) > 1:
        raise ValueError(
            f"causal='token' orders the tokens of a sequence, and the grid {grid} has several axes; give it as "
            f"({math.prod(grid)},), or causal='block' for frames of which each is seen whole."
        )


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
