"""What the kernels of the exact tiles share: their tile, its list, the tokens of both, what is added to logits.

The layout of these kernels knows how many tokens and tiles there are, and not how they lie on the grid.
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

from .arguments import Lists, Means, Rows, Tile, allocate, layout, rows
from .exact_lists import ExactCall
from .forward_kernels import token_weight
from .launches import Launch
from .tile import load_operand, numbers_of, plain
from .tilings import AnyTiling, PairTiling, Place, wished
from .tuning import architecture_of, name_of, pair_tiling, power_of_two, precision_of, processors_of

LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def tiles_in_grid(layout):
    """T."""
    return layout.blocks_0 * layout.blocks_1 * layout.blocks_2


@triton.jit
def this_pair_program(layout, TILES_ONLY: tl.constexpr):
    """Batch, head, tile (of T) and part of this program.

    Parts and tiles vary fastest: programs that run together then read the keys of one head, which the cache holds.
    """
    tiles = tiles_in_grid(layout)
    rest = tl.program_id(0)
    part = 0
    if not TILES_ONLY:  # two divisions less keep the kernel of the means off the stack on sm_120
        part = rest % layout.parts
        rest = rest // layout.parts
    tile = rest % tiles
    rest = rest // tiles
    return (rest // layout.heads).to(tl.int64), (rest % layout.heads).to(tl.int64), tile, part


@triton.jit
def tokens_of_tile(lists, batch, head, tile, first, BLOCK: tl.constexpr):
    """BLOCK tokens of a tile from place ``first`` on."""
    longest = plain(lists.longest)
    place = first + tl.arange(0, BLOCK)
    tokens = tl.load(lists.tokens + tile * longest + place, mask=place < longest, other=-1)
    return Tile(batch, head, tl.maximum(tokens, 0).to(tl.int64), tokens >= 0)


@triton.jit
def list_of(lists, batch, head, tile, layout):
    """Row of a tile's list, where it begins and how many tiles it holds."""
    tiles = tiles_in_grid(layout)
    row = batch * plain(lists.sample_stride) + head * tiles + tile
    begin = tl.load(lists.offsets + row)
    return row, begin, (tl.load(lists.offsets + row + 1) - begin).to(tl.int32)


@triton.jit
def listed_tokens(lists, batch, head, begin, length, first, BLOCK: tl.constexpr):
    """BLOCK tokens of a list from place ``first`` on, its tiles laid end to end, so that short ones fill a block."""
    longest = plain(lists.longest)
    place = first + tl.arange(0, BLOCK)
    listed = place < length * longest
    tile = tl.load(lists.tiles + begin + place // longest, mask=listed, other=0).to(tl.int32)
    tokens = tl.load(lists.tokens + tile * longest + place % longest, mask=listed, other=-1)
    return Tile(batch, head, tl.maximum(tokens, 0).to(tl.int64), tokens >= 0)


@triton.jit
def key_bias(key_mask, tile, layout):
    """What is added to the logits of a tile of keys, (tokens,): minus infinity for a key that takes no part."""
    if key_mask is None:
        return tl.where(tile.exists, 0.0, float("-inf"))
    else:
        return tl.log2(token_weight(key_mask, tile, layout))


@triton.jit
def means_at(batch, head, first, layout, BLOCK: tl.constexpr):
    """BLOCK means from tile ``first`` on, as a tile of tokens."""
    tile = first + tl.arange(0, BLOCK)
    return Tile(batch, head, tile.to(tl.int64), tile < tiles_in_grid(layout))


@triton.jit
def load_mean(pointer, means, tile, channels, HEAD_DIM: tl.constexpr):
    """:func:`load_operand` of the keys or values of means."""
    rows = Rows(pointer, means.batch_stride, means.token_stride, means.head_stride)
    return load_operand(rows, tile, channels, HEAD_DIM)


@triton.jit
def pooled_bias(means, tile, layout):
    """What is added to the logits of means, (means,): β and the log of the number of tokens."""
    tiles = tiles_in_grid(layout)
    counts = means.counts + (tile.batch * layout.heads + tile.head) * tiles + tile.tokens
    beta = tl.load(means.bias + tile.head) * LOG2_E
    return tl.log2(tl.load(counts, mask=tile.exists, other=0.0)) + beta


@triton.jit
def unlisted_bias(means, tile, row, layout):
    """:func:`pooled_bias`, minus infinity for the tiles that the queries of list ``row`` meet exactly."""
    tiles = tiles_in_grid(layout)
    is_exact = tl.load(means.is_exact + row * tiles + tile.tokens, mask=tile.exists, other=1)
    return tl.where(is_exact != 0, float("-inf"), pooled_bias(means, tile, layout))


@triton.jit
def load_log_sums(log_sums, tile):
    """L in base 2; 0 for a query that attends to nothing, whose weights are 0 whatever they are divided by."""
    log_sum = tl.load(numbers_of(log_sums, tile), mask=tile.exists, other=float("inf"))
    return tl.where(log_sum < -1e38, 0.0, log_sum * LOG2_E)


@dataclass(frozen=True)
class PairPlan:
    """How one kernel runs: the same for all calls of one size, so it is made once for each."""

    kernel: Any
    place: Place
    tiles: PairTiling
    processors: int
    constants: dict[str, Any]
    """Those of the shared ones that the kernel takes."""

    def launch(self, call: ExactCall, arguments: dict[str, Any], parts: int, whole: int) -> Launch:
        """With the arguments of the kernel besides the layout, in ``parts`` programs for each of ``whole``."""
        batch, tokens, heads, _ = call.query.shape
        shared = {"layout": layout(heads, (tokens,), (call.number_of_tiles,), parts, tokens)}
        return Launch(
            self.kernel, batch * heads * whole * parts, arguments | shared, self.constants, self.place, self.tiles
        )

    def parts(self, call: ExactCall) -> int:
        """Programs that share the tokens of a tile."""
        return -(-call.longest_tile // self.tiles.own)


def pair_plan_of(kernel: Any, call: ExactCall, architecture: str | None) -> PairPlan:
    """Looked up by what tiles and constants depend on."""
    query = call.query
    card = architecture or architecture_of(query.device)
    return _plan(kernel, query.shape[3], query.dtype, query.device, call.longest_tile, card, wished(name_of(kernel)))


@lru_cache(maxsize=1024)
def _plan(
    kernel: Any,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    longest_tile: int,
    card: str,
    _wish: AnyTiling | None,  # read by the tables themselves; here it tells calls apart
) -> PairPlan:
    place = Place(card, name_of(kernel), head_dim, dtype, longest_tile)
    tiles = pair_tiling(place)
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
        "OWN": tiles.own,
        "OTHERS": tiles.others,
        "PRECISION": precision_of(dtype, card),
    }
    taken = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return PairPlan(kernel, place, tiles, processors_of(device, card), taken)


def inputs(call: ExactCall, lists: Lists, means: Means | None) -> dict[str, Any]:
    """What every kernel that walks lists of keys takes."""
    return {
        "query": rows(call.query),
        "key": rows(call.key),
        "value": rows(call.value),
        "key_mask": call.key_mask,
        "lists": lists,
        "means": means,
        "scale": math.log2(math.e) * call.query.shape[3] ** -0.5,
    }


def one_per_token(call: ExactCall) -> torch.Tensor:
    """float32 (B, N, H, 1), not filled, in which the tokens of a head lie side by side."""
    batch, tokens, heads, _ = call.query.shape
    return allocate((batch, heads, tokens), torch.float32, call.query.device).transpose(1, 2)[..., None]
