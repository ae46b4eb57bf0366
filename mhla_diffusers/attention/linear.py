"""The linear branch in PyTorch operations, for any device: block states, mixing, reading (paper, Eq. 3-5).

Sums are kept in float32 (float64 for float64 inputs) for any input type. Tokens are taken into the order of their
blocks once; without gradients a few blocks are worked on at a time, so that on a CPU they stay in the cache.
"""

import math
from collections.abc import Iterator

import torch

from .blocks import from_blocks, to_blocks
from .call import MHLACall
from .feature_maps import get_feature_map
from .precision import finish, sum_dtype
from .rope import apply_rotary, rotary_table

_CACHED_BYTES = 2**19
"""Bytes of query, key or value, in the type of sums, that a CPU works on at once, if that is a block or more."""
_MOST_BYTES = 2**23
"""The same of a part of one block, whose state is then the sum of several."""
_Part = tuple[slice, slice]
"""Blocks, and tokens within them, that are worked on at once."""


def linear(call: MHLACall) -> torch.Tensor:
    """MHLA alone: (B, N, H, D)."""
    return read(call, states(call))[0]


def states(call: MHLACall) -> torch.Tensor:
    """KV states and, to normalise, key sums of all blocks, of the tokens of the call (paper, Eq. 3).

    Returns:
        (B, H, M, D + normalize, D), the key sum after the rows of the state; float32 (float64 for float64 inputs).
    """
    key, value, table = _in_blocks(call, call.key), _in_blocks(call, call.value), _angles(call)
    # what every row counts, 0 of filling; None where all count 1
    weight, mask, count = None, call.key_mask, call.query.shape[1]
    is_even = all(size % count == 0 for size, count in zip(call.grid, call.blocks, strict=True))
    if mask is not None or not is_even or count != math.prod(call.grid):
        mask = torch.ones(1, count, device=key.device) if mask is None else mask
        weight = _in_blocks(call, mask.to(sum_dtype(call.query.dtype))[..., None, None])
    found: list[torch.Tensor] = []
    for blocks, tokens in _parts(key):
        turned, plain = _features(call, key, table, (blocks, tokens))
        if weight is not None:
            turned, plain = (x * _take(weight, (blocks, tokens)) for x in (turned, plain))
        state = turned.mT @ _take(value, (blocks, tokens))
        if call.normalize:
            state = torch.cat([state, plain.sum(dim=-2, keepdim=True)], dim=-2)
        if tokens.start:
            state = found.pop() + state
        found.append(state)
    own, whole = call.own_blocks, math.prod(call.blocks)
    return torch.nn.functional.pad(torch.cat(found, dim=2), (0, 0, 0, 0, own.start, whole - own.stop))


def read(call: MHLACall, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Mix the :func:`states` of all tokens of the grid and read them by the queries.

    Returns:
        The output (B, N, H, D) in the type of the query, and with ``normalize`` the normaliser of Eq. 4,
        φ(q)ᵀ Σ_b m_ib z_b, as (B, N, H, 1) in float32 (float64 for float64 inputs).
    """
    query, table, head_dim = _in_blocks(call, call.query), _angles(call), call.query.shape[3]
    # expanded, since torch.matmul folds a single matrix that takes gradients into a product of transposing copies
    mixing = call.mixing[..., call.own_blocks, :].to(states.dtype).expand(*states.shape[:2], -1, -1)
    mixed = (mixing @ states.flatten(3)).unflatten(3, states.shape[3:])
    found: list[list[torch.Tensor]] = []
    for blocks, tokens in _parts(query):
        turned, plain = _features(call, query, table, (blocks, tokens))
        here = mixed[:, :, blocks]
        output = turned @ here[..., :head_dim, :]
        normaliser = [plain @ here[..., head_dim:, :].mT] if call.normalize else []
        for divisor in normaliser:
            # a query that gives weight to masked keys alone gets 0, and gives no gradient
            output = output.div_(divisor.masked_fill(divisor == 0, math.inf))
        found.append([x.permute(0, 2, 3, 1, 4).flatten(1, 2) for x in (output, *normaliser)])
    rows = (x[0] if len(x) == 1 else torch.cat(x, dim=1) for x in map(list, zip(*found, strict=True)))
    place = call.grid, call.blocks, 0, call.first, call.query.shape[1]
    output, *normaliser = (from_blocks(x.reshape(*query.shape[:4], -1), *place) for x in rows)
    return finish(output, call.output_norm, call.output_gate).to(call.query.dtype), *normaliser


def _in_blocks(call: MHLACall, x: torch.Tensor) -> torch.Tensor:
    """Order (B, N, H, D) by blocks: (B, b, L, H, D), shorter ones filled up with 0."""
    return to_blocks(x, call.grid, call.blocks, 0, call.first)


def _angles(call: MHLACall) -> torch.Tensor | None:
    """RoPE's table block by block, if there is one."""
    table = rotary_table(call.rotary)
    return None if table is None else _in_blocks(call, table)


def _parts(x: torch.Tensor) -> Iterator[_Part]:
    """Cut (B, b, L, H, D) into parts that are processed in turn; a single part if gradients are needed."""
    batch, blocks, length, heads, head_dim = x.shape
    if torch.is_grad_enabled() or x.device.type != "cpu":
        yield slice(0, blocks), slice(0, length)
        return
    token_bytes = max(1, sum_dtype(x.dtype).itemsize * batch * heads * head_dim)
    step, within = max(1, _CACHED_BYTES // (token_bytes * length)), max(1, min(length, _MOST_BYTES // token_bytes))
    for block in range(0, blocks, step):
        for token in range(0, length, within):
            yield slice(block, min(block + step, blocks)), slice(token, min(token + within, length))


def _take(x: torch.Tensor, part: _Part) -> torch.Tensor:
    """(B, H, blocks, tokens, D) of (B, b, L, H, D), in the type of sums."""
    return x[:, part[0], part[1]].permute(0, 3, 1, 2, 4).to(sum_dtype(x.dtype))


def _features(
    call: MHLACall, rows: torch.Tensor, table: torch.Tensor | None, part: _Part
) -> tuple[torch.Tensor, torch.Tensor]:
    """Features of a part of the rows for the numerator and for the normaliser, each (B, H, blocks, tokens, D)."""
    phi = get_feature_map(call.feature_map)
    # a copy, which a feature map may overwrite, and which the product needs anyway
    x = _take(rows, part).clone(memory_format=torch.contiguous_format)
    angles = None if table is None else _take(table, part)
    if angles is not None and call.rope == "before":
        x, angles = apply_rotary(x, angles), None
    features = phi(x, call.eps)
    return (features if angles is None else apply_rotary(features, angles)), features
