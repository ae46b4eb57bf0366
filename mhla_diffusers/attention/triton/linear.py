"""The linear branch on kernels: KV states, mixing, reading, each of which takes gradients.

Mixing is a product of PyTorch between the operators of :mod:`.states` and :mod:`.read`; processes that hold a share of
the tokens each add up their states there.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..call import Call
from ..precision import without_autocast
from .read import read_states
from .states import block_states, states_dtype


def linear_attention(call: Call) -> torch.Tensor:
    """MHLA alone: (B, N, H, D)."""
    return _read(call, *_states(call), False)[0]


def linear_states(call: Call) -> torch.Tensor:
    """States of all blocks from the tokens of a call, to be added up: float32 (B, H, M, D + normalize, D).

    The normaliser state is the last row.
    """
    states, sums = _states(call)
    return states.float() if sums is None else torch.cat([states.float(), sums[..., None, :]], dim=-2)


def linear_read(call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the queries of a call read from the :func:`linear_states` of all tokens.

    Returns:
        Output (B, N, H, D) and, with ``normalize``, normaliser float32 (B, N, H, 1).
    """
    head_dim = call.query.shape[3]
    sums = states[..., head_dim, :].float() if call.normalize else None
    found = _read(call, states[..., :head_dim, :].to(states_dtype(call.query.dtype)), sums, call.normalize)
    return found if call.normalize else found[:1]


def linear_beside(
    call: Call, rows: Sequence[torch.Tensor], block_size: int, branches: tuple[torch.Tensor | None, ...]
) -> torch.Tensor:
    """MHLA beside block-sparse attention under one denominator, with norm and gate, in raster order: (B, N, H, D).

    Args:
        call: whose mixing, λ and key mask weigh the linear branch; with normaliser.
        rows: query, key and value (B, H, R, D), rows of blocks after RoPE.
        block_size: of the blocks.
        branches: outputs and LSEs of listed and pooled keys, of all rows of the query.
    """
    query, key, value = rows
    place = list(call.grid), list(call.blocks), 0, block_size, call.feature_map, call.eps, False
    states = block_states(key, value, call.key_mask, None, *place, True)
    weight = None if call.linear_weight is None else call.linear_weight.float()
    others = *branches, weight, call.output_norm, call.output_gate, None
    return read_states(query, *mixed(call.mixing, *states), *others, *place, False)[0]


def _place(call: Call) -> tuple[Any, ...]:
    return list(call.grid), list(call.blocks), call.first, 0, call.feature_map, call.eps, call.rope == "before"


def _states(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors = call.key, call.value, call.key_mask, call.rotary
    states, sums = block_states(*tensors, *_place(call), call.normalize)
    return states, sums if call.normalize else None


def _read(
    call: Call, states: torch.Tensor, sums: torch.Tensor | None, with_normaliser: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    mixture = mixed(call.mixing[..., call.own_blocks, :], states, sums)
    tensors = *(None,) * 5, call.output_norm, call.output_gate, call.rotary
    output, normaliser = read_states(call.query, *mixture, *tensors, *_place(call), with_normaliser)
    return output, normaliser


def mixed(
    mixing: torch.Tensor, states: torch.Tensor, sums: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multi-Head Mixing: Σ_j m_ij S_j in the type of the states, and Σ_j m_ij z_j in float32.

    Args:
        mixing: (m, M) or (H, m, M), the rows of the blocks that are wanted; its gradient is added up in float32.
        states: (B, H, M, D, D).
        sums: float32 (B, H, M, D), or None.
    """
    mixing = mixing.float().expand(*states.shape[:2], -1, -1)
    mixture = _product(mixing, states.flatten(3)).unflatten(3, states.shape[3:])
    return mixture, None if sums is None else _product(mixing, sums)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    function: type[torch.autograd.Function] = _Product
    found: torch.Tensor = function.apply(left, right)
    return found


class _Product(torch.autograd.Function):
    """A float32 matrix times one of any type, in that type whatever autocast says, forward and backward."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(..., m, M) and (..., M, n) to (..., m, n)."""
        ctx.save_for_backward(left, right)
        with without_autocast(right.device):
            return torch.matmul(left.to(right.dtype), right)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both."""
        (upstream,), (left, right) = gradients, ctx.saved_tensors
        with without_autocast(right.device):
            of_left = torch.matmul(upstream, right.mT)
            return of_left.to(left.dtype), torch.matmul(left.to(right.dtype).mT, upstream)
