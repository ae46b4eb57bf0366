"""The linear branch on kernels: KV states, mixing, reading, each of which takes gradients.

Mixing is a product of PyTorch between the operators of :mod:`.states` and :mod:`.read`; processes that hold a share of
the tokens each add up their states there.
"""

import logging
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ..call import Call
from ..layout import Shape
from ..parallel.collectives import summed
from ..precision import product
from ..rope import rotary_table
from ..sparse import linear_branch
from .read import read_states
from .states import block_states, states_dtype

logger = logging.getLogger(__name__)


def linear_attention(call: Call) -> torch.Tensor:
    """MHLA alone: (B, N, H, D); over a ring of processes the states are summed."""
    if call.group is not None:
        return linear_read(call, summed(linear_states(call), call.group))[0]
    return _read(call, *_states(call), False)[0]


def linear_states(call: Call) -> torch.Tensor:
    """States of all blocks from the tokens of a call, to be added up: float32 (B, H, M, D + normalize, D).

    The normaliser state is the last row.
    """
    states, sums = _states(call)
    return states.float() if sums is None else torch.cat([states.float(), sums[..., None, :]], dim=-2)


def linear_read(call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mix the :func:`linear_states` of all tokens and read them by the queries of a call.

    Returns:
        Output (B, N, H, D) and, with ``normalize``, normaliser float32 (B, N, H, 1). N tokens of the grid.
    """
    head_dim = call.query.shape[3]
    sums = states[..., head_dim, :].float() if call.normalize else None
    found = _read(call, states[..., :head_dim, :].to(states_dtype(call.query.dtype)), sums, call.normalize)
    return found if call.normalize else found[:1]


def grid_mask(call: Call) -> torch.Tensor | None:
    """Key mask of the grid's tokens as kernels read it."""
    return None if call.key_mask is None else call.on_grid(call.key_mask).float().contiguous()


def finishing(call: Call) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Output norm and gate as kernels read them."""
    norm = None if call.output_norm is None else call.output_norm.contiguous()
    return norm, None if call.output_gate is None else usable(call.output_gate, "output_gate")


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
    (query, key, value), alone = rows, linear_branch(call)
    place = list(call.grid), list(call.blocks), 0, block_size, call.feature_map, call.eps, False
    states = block_states(key, value, grid_mask(alone), None, *place, True)
    weight = None if call.linear_weight is None else call.linear_weight.float()
    others = *branches, weight, *finishing(call), None
    return read_states(query, *mixed(alone.mixing, *states), *others, *place, False)[0]


def _place(call: Call) -> tuple[Any, ...]:
    return list(call.grid), list(call.blocks), call.first, 0, call.feature_map, call.eps, call.rope == "before"


def _angles(call: Call) -> torch.Tensor | None:
    table = rotary_table(call.rotary)
    return None if table is None else call.on_grid(table).float().contiguous().detach()


def _states(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    key, value = usable(call.on_grid(call.key), "key"), usable(call.on_grid(call.value), "value")
    states, sums = block_states(key, value, grid_mask(call), _angles(call), *_place(call), call.normalize)
    return states, sums if call.normalize else None


def _read(
    call: Call, states: torch.Tensor, sums: torch.Tensor | None, with_normaliser: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    mixture = mixed(call.mixing[..., call.own_blocks, :], states, sums)
    tensors = *mixture, *(None,) * 5, *finishing(call), _angles(call)
    output, normaliser = read_states(
        usable(call.on_grid(call.query), "query"), *tensors, *_place(call), with_normaliser
    )
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
    mixture = product(mixing, states.flatten(3)).unflatten(3, states.shape[3:])
    return mixture, None if sums is None else product(mixing, sums)


def usable(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """``tensor`` itself if its channels lie side by side, as the kernels read them; else a copy."""
    if tensor.stride(-1) == 1 or tensor.shape[-1] == 1:
        return tensor
    if not torch.compiler.is_compiling():  # a call of the logger would break the graph
        _say_copied(name, tensor.stride())
    return tensor.contiguous()


@cache
def _say_copied(name: str, strides: Shape) -> None:
    """Say, once per name and strides, that a tensor is copied."""
    logger.debug("%s has strides %s: its last dimension is not contiguous, so every call copies it.", name, strides)
