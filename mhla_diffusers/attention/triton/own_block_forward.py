"""Kernel of what queries take from their own block up to themselves, with its launch, and what its backward shares.

A program holds some queries of one block and takes the keys of the block from its begin up to them. With SOFTMAX the
weights are exp(q · k / √D), kept as online softmax attention does, in base 2; queries and keys come after RoPE then.
Without it they are φ(q) · φ(k). Blocks are runs of the sequence.
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl

from ..blocks import Shape, frame_block_starts
from ..call import Call
from .arguments import Layout, Source, allocate, angles_of, layout, numbers, rows
from .features import load_features, softmax_scale
from .forward_kernels import token_weight
from .launches import Launch
from .tile import accurate_dot, block_box, load_rows, numbers_of, plain_layout, store_rows, this_program, tile_of
from .tilings import AnyTiling, PairTiling, Place, wished
from .tuning import architecture_of, name_of, pair_tiling, power_of_two, precision_of

_LN_2 = tl.constexpr(math.log(2))


@triton.jit
def all_features(source, tile, channels, HEAD_DIM: tl.constexpr, FEATURE_MAP: tl.constexpr, ROPE_BEFORE: tl.constexpr):
    """:func:`load_features` of all channels; those that are not there are 0, as one token meets another here."""
    scale = softmax_scale(source, tile, HEAD_DIM, channels.shape[0], FEATURE_MAP, ROPE_BEFORE)
    rotated, plain = load_features(source, scale, tile, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)
    if channels.shape[0] != HEAD_DIM:
        exists = (channels < HEAD_DIM)[None, :]
        rotated = tl.where(exists, rotated, 0.0)
        plain = tl.where(exists, plain, 0.0)
    return rotated, plain


@triton.jit
def places(index, BLOCK: tl.constexpr):
    """Places in the block of a tile's tokens, int32 (BLOCK,)."""
    return index * BLOCK + tl.arange(0, BLOCK)


@triton.jit
def own_block_kernel(
    query,
    key,
    value,
    angles,
    key_mask,
    output,
    log_sums,
    layout,
    scale,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OWN: tl.constexpr,
    OTHERS: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE_BEFORE: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SOFTMAX: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of some queries of one block, and the log of each one's sum of weights."""
    number: tl.constexpr = query.pointer.dtype.element_ty
    layout = plain_layout(layout)
    program = this_program(layout, 1)
    box = block_box(program.block, layout)
    channels = tl.arange(0, BLOCK_D)
    own = tile_of(program, program.part, box, layout, OWN)
    own_places = places(program.part, OWN)
    source = Source(key, angles, layout, eps)
    queries, plain_queries = all_features(
        Source(query, angles, layout, eps), own, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE
    )
    square = tl.zeros((OWN, OTHERS), tl.float32)
    total = tl.zeros((OWN,), tl.float32)
    end = tl.cdiv(tl.minimum((program.part + 1) * OWN, box.end), OTHERS)
    two_features: tl.constexpr = NORMALIZE and angles is not None and not ROPE_BEFORE
    if two_features:  # in a loop of its own, since both kinds of queries at once spill registers
        for index in range(0, end):
            others = tile_of(program, index, box, layout, OTHERS)
            seen = (places(index, OTHERS)[None, :] <= own_places[:, None]) & others.exists[None, :]
            plain_keys = all_features(source, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[1]
            plain = accurate_dot(plain_queries, tl.trans(plain_keys), square, PRECISION, False, False)
            total += tl.sum(tl.where(seen, plain * token_weight(key_mask, others, layout)[None, :], 0.0), axis=1)
    maximum = tl.full((OWN,), float("-inf"), tl.float32)
    values_sum = tl.zeros((OWN, BLOCK_D), tl.float32)
    for index in range(0, end):
        others = tile_of(program, index, box, layout, OTHERS)
        seen = (places(index, OTHERS)[None, :] <= own_places[:, None]) & others.exists[None, :]
        keys = all_features(source, others, channels, HEAD_DIM, FEATURE_MAP, ROPE_BEFORE)[0]
        values = load_rows(value, others, channels, HEAD_DIM)
        weight = token_weight(key_mask, others, layout)
        exact: tl.constexpr = SOFTMAX and number == tl.bfloat16
        weights = accurate_dot(queries, tl.trans(keys), square, PRECISION, exact, exact)
        if SOFTMAX:
            # every query sees the first key of its block, so a maximum is finite from the first tile on
            logits = tl.where(seen, weights * scale + tl.log2(weight)[None, :], float("-inf"))
            largest = tl.maximum(maximum, tl.max(logits, axis=1))
            weights = tl.exp2(logits - largest[:, None])
            shrink = tl.exp2(maximum - largest)
            total = total * shrink + tl.sum(weights, axis=1)
            values_sum *= shrink[:, None]
            maximum = largest
        else:
            weights = tl.where(seen, weights * weight[None, :], 0.0)
            if not two_features:
                total += tl.sum(weights, axis=1)
        values_sum = accurate_dot(weights, values, values_sum, PRECISION, False, number == tl.bfloat16)
    if NORMALIZE:
        values_sum /= total[:, None]
        log_sum = (maximum + tl.log2(total)) * _LN_2 if SOFTMAX else tl.log(total)
        tl.store(numbers_of(log_sums, own), log_sum, mask=own.exists)
    store_rows(output, values_sum, own, channels, layout, HEAD_DIM)


@dataclass(frozen=True)
class OwnBlockPlan:
    """How one kernel runs: the same for all calls of one size, so it is made once for each."""

    kernel: Any
    place: Place
    tiles: PairTiling
    programs: int
    layout: Layout
    constants: dict[str, Any]

    def launch(self, arguments: dict[str, Any]) -> Launch:
        """With the arguments of the kernel besides the layout."""
        arguments = arguments | {"layout": self.layout}
        return Launch(self.kernel, self.programs, arguments, self.constants, self.place, self.tiles)


def own_block_plan(kernel: Any, call: Call, has_softmax: bool, architecture: str | None) -> OwnBlockPlan:
    """Looked up by what tiles and constants depend on."""
    settings = call.feature_map, call.rope, call.normalize, has_softmax
    query, card = call.query, architecture or architecture_of(call.query.device)
    return _plan(kernel, query.shape, query.dtype, (call.grid, call.blocks), settings, card, wished(name_of(kernel)))


@lru_cache(maxsize=1024)
def _plan(
    kernel: Any,
    size: Shape,
    dtype: torch.dtype,
    cut: tuple[Shape, Shape],
    settings: tuple[str, str, bool, bool],
    card: str,
    _wish: AnyTiling | None,  # read by the tables themselves; here it tells calls apart
) -> OwnBlockPlan:
    batch, tokens, heads, head_dim = size
    feature_map, rope, normalize, has_softmax = settings
    # the blocks that the tokens lie in alone; the longer ones come first, so these are cut as before
    starts = frame_block_starts(*cut)
    blocks = sum(start < tokens for start in starts[:-1])
    longest = min(starts[1], tokens)
    place = Place(card, name_of(kernel), head_dim, dtype, longest)
    tiles = pair_tiling(place)
    parts = -(-longest // tiles.own)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
        "OWN": tiles.own,
        "OTHERS": tiles.others,
        "FEATURE_MAP": feature_map,
        "ROPE_BEFORE": rope == "before",
        "NORMALIZE": normalize,
        "SOFTMAX": has_softmax,
        "PRECISION": precision_of(dtype, card),
    }
    runs = layout(heads, (starts[blocks],), (blocks,), parts, tokens)
    return OwnBlockPlan(kernel, place, tiles, batch * heads * blocks * parts, runs, constants)


def own_block_inputs(call: Call) -> dict[str, Any]:
    """What every kernel of the own block takes."""
    return {
        "query": rows(call.query),
        "key": rows(call.key),
        "value": rows(call.value),
        "angles": angles_of(call),
        "key_mask": call.key_mask,
        "scale": math.log2(math.e) * call.query.shape[3] ** -0.5,
        "eps": call.eps,
    }


def number_per_token(call: Call) -> torch.Tensor:
    """float32 (B, N, H, 1), not filled, in which the tokens of a head lie side by side."""
    batch, tokens, heads, _ = call.query.shape
    return allocate((batch, heads, tokens), torch.float32, call.query.device).transpose(1, 2)[..., None]


def own_block_launch(
    call: Call, has_softmax: bool, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor | None]:
    """Output (B, N, H, D) and, to normalise, log of the sum of weights (B, N, H, 1), both float32."""
    plan = own_block_plan(own_block_kernel, call, has_softmax, architecture)
    output = allocate(tuple(call.query.shape), torch.float32, call.query.device)
    log_sum = number_per_token(call) if call.normalize else None
    of_sums = numbers(log_sum) if log_sum is not None else None
    return plan.launch(own_block_inputs(call) | {"output": output, "log_sums": of_sums}), output, log_sum
