"""The linear branch in PyTorch operations, for any device: block states, mixing, reading (paper, Eq. 3-5).

Sums are kept in float32 (float64 for float64 inputs) whatever the input type, under autocast too. Tokens are taken into
the order of their blocks once; without gradients a few blocks are worked on at a time, so that on a CPU they stay in
the cache.
"""

import math
from collections.abc import Iterator

import torch

from .call import Call
from .feature_maps import get_feature_map
from .layout import block_rows, from_blocks, to_blocks
from .precision import OUTPUT_NORM_EPS, sum_dtype, without_autocast
from .rope import apply_rotary

_CACHED_BYTES = 2**19
"""Of query, key or value, as the sums are kept, that are worked on at once on a CPU, if that is a block or more."""
_MOST_BYTES = 2**23
"""The same of a part of one block, whose state is then the sum of several."""


def block_states(call: Call) -> torch.Tensor:
    """KV states and, to normalise, key sums of all blocks, of the tokens of the call (paper, Eq. 3).

    Returns:
        (B, H, M, D + normalize, D), the key sum after the rows of the state; float32 (float64 for float64 inputs).
    """
    with without_autocast(call.query.device):
        key, value, table, weight = (
            _in_blocks(call, call.key),
            _in_blocks(call, call.value),
            _table(call),
            _weights(call),
        )
        states: list[torch.Tensor] = []
        for blocks, tokens in _parts(key):
            turned, plain = _features(call, key, table, blocks, tokens)
            if weight is not None:
                turned, plain = (x * _part(weight, blocks, tokens) for x in (turned, plain))
            state = turned.mT @ _part(value, blocks, tokens)
            if call.normalize:
                state = torch.cat([state, plain.sum(dim=-2, keepdim=True)], dim=-2)
            if tokens.start:
                state = states.pop() + state
            states.append(state)
        joined = states[0] if len(states) == 1 else torch.cat(states, dim=2)
        own, count = call.own_blocks, math.prod(call.blocks)
        return torch.nn.functional.pad(joined, (0, 0, 0, 0, own.start, count - own.stop))


def read_states(call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the queries read from the mixed states of all tokens.

    Args:
        call: the call.
        states: what :func:`block_states` returns, of all tokens of the grid.

    Returns:
        The output (B, N, H, D) in the type of the query, and with ``normalize`` the normaliser of Eq. 4,
        φ(q)ᵀ Σ_b m_ib z_b, as (B, N, H, 1) in float32 (float64 for float64 inputs).
    """
    head_dim = call.query.shape[3]
    with without_autocast(call.query.device):
        query, table, mixed = _in_blocks(call, call.query), _table(call), _mix(call, states)
        found: list[list[torch.Tensor]] = []
        for blocks, tokens in _parts(query):
            turned, plain = _features(call, query, table, blocks, tokens)
            here = mixed[:, :, blocks]
            output = turned @ here[..., :head_dim, :]
            normaliser = [plain @ here[..., head_dim:, :].mT] if call.normalize else []
            for divisor in normaliser:
                output = output.div_(divisor)
            found.append([x.permute(0, 2, 3, 1, 4) for x in (output, *normaliser)])
        output, *normaliser = (_in_raster(call, list(pieces), query.shape) for pieces in zip(*found, strict=True))
        return finish(output, call.output_norm, call.output_gate).to(call.query.dtype), *normaliser


def linear_attention(call: Call) -> tuple[torch.Tensor, ...]:
    """The linear branch alone, as :func:`read_states` returns it."""
    return read_states(call, block_states(call))


def _in_blocks(call: Call, x: torch.Tensor) -> torch.Tensor:
    """(B, N, H, D) block by block: (B, b, L, H, D), shorter blocks filled up with one of their tokens."""
    return to_blocks(x, call.grid, call.blocks, 0, call.first, False)


def _table(call: Call) -> torch.Tensor | None:
    """RoPE's table block by block, if there is one."""
    table = call.rotary_of_tokens
    return None if table is None else _in_blocks(call, table)


def _weights(call: Call) -> torch.Tensor | None:
    """What every row of :func:`_in_blocks` counts: (1 or B, b, L, 1, 1), 0 of filling; None where all count 1."""
    mask = call.key_mask
    if mask is None:
        count = call.query.shape[1]
        if math.prod(block_rows(call.grid, call.blocks, 0, call.first, count)) == count:
            return None
        mask = torch.ones(1, count, device=call.query.device)
    weights = to_blocks(mask.to(sum_dtype(call.query.dtype)), call.grid, call.blocks, 0, call.first, True)
    return weights[..., None, None]


def _parts(x: torch.Tensor) -> Iterator[tuple[slice, slice]]:
    """Blocks, and tokens within them, of (B, b, L, H, D) that are worked on at once; all where gradients are kept."""
    batch, blocks, length, heads, head_dim = x.shape
    if torch.is_grad_enabled() or x.device.type != "cpu":
        yield slice(0, blocks), slice(0, length)
        return
    token_bytes = max(1, sum_dtype(x.dtype).itemsize * batch * heads * head_dim)
    step, within = max(1, _CACHED_BYTES // (token_bytes * length)), max(1, min(length, _MOST_BYTES // token_bytes))
    for block in range(0, blocks, step):
        for token in range(0, length, within):
            yield slice(block, min(block + step, blocks)), slice(token, min(token + within, length))


def _part(x: torch.Tensor, blocks: slice, tokens: slice) -> torch.Tensor:
    """(B, H, blocks, tokens, D) of (B, b, L, H, D), in the type of sums."""
    return x[:, blocks, tokens].permute(0, 3, 1, 2, 4).to(sum_dtype(x.dtype))


def _in_raster(call: Call, pieces: list[torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """(B, N, H, D) of the pieces of all parts, each (B, blocks, tokens, H, D), for (B, b, L, H, D) queries."""
    rows = pieces[0] if len(pieces) == 1 else torch.cat([x.flatten(1, 2) for x in pieces], dim=1)
    rows = rows.reshape(*shape[:4], -1)
    return from_blocks(rows, call.grid, call.blocks, 0, call.first, call.query.shape[1])


def _features(
    call: Call, rows: torch.Tensor, table: torch.Tensor | None, blocks: slice, tokens: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a part of the rows for the numerator and for the normaliser, each (B, H, blocks, tokens, D)."""
    phi = get_feature_map(call.feature_map)
    # a copy, which a feature map may overwrite, and which the product needs anyway
    x = _part(rows, blocks, tokens).clone(memory_format=torch.contiguous_format)
    if table is None:
        return (features := phi(x, call.eps)), features
    angles = _part(table, blocks, tokens)
    if call.rope == "before":
        return (features := phi(apply_rotary(x, angles), call.eps)), features
    features = phi(x, call.eps)
    return apply_rotary(features, angles), features


def _mix(call: Call, states: torch.Tensor) -> torch.Tensor:
    """Multi-Head Mixing: the mixture of states that each own block sees, (B, H, b, D + normalize, D)."""
    coefficients = call.mixing[..., call.own_blocks, :]
    # expanded, since torch.matmul folds a single matrix that takes gradients into a product of transposing copies
    coefficients = coefficients.to(states.dtype).expand(*states.shape[:2], -1, -1)
    return (coefficients @ states.flatten(3)).unflatten(3, states.shape[3:])


def finish(output: torch.Tensor, output_norm: torch.Tensor | None, output_gate: torch.Tensor | None) -> torch.Tensor:
    """Output RMSNorm per head, with (D,) weight, then × SiLU(gate) of the output's shape, where they are given."""
    if output_norm is not None:
        output = torch.nn.functional.rms_norm(output, output.shape[-1:], output_norm.to(output.dtype), OUTPUT_NORM_EPS)
    if output_gate is not None:
        output = output * torch.nn.functional.silu(output_gate.to(output.dtype))
    return output
