"""What every kernel does with a tile of tokens: find them, load them, rotate them, multiply them."""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

import triton
import triton.language as tl

from .arguments import Box, Layout, Program, Tile

# The interpreter cuts bfloat16 values off instead of rounding them and multiplies their bits as if they were integers:
# there, tiles are rounded by hand and stay float32, which holds the same values.
_INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def plain(number):
    """An integer that was passed in disguise."""
    return (number >> 1) - 1


@triton.jit
def plain_layout(layout):
    """A :class:`Layout` that was passed in disguise."""
    return Layout(
        plain(layout.heads),
        plain(layout.grid_0),
        plain(layout.grid_1),
        plain(layout.grid_2),
        plain(layout.blocks_0),
        plain(layout.blocks_1),
        plain(layout.blocks_2),
        plain(layout.parts),
        plain(layout.first),
        plain(layout.tokens),
    )


@triton.jit
def this_program(layout, COLUMN_TILES: tl.constexpr):
    """The share of this program.

    Heads vary fastest: programs that run together then read neighbouring memory and the same RoPE rows.
    """
    rest = tl.program_id(0)
    head = rest % layout.heads
    rest = rest // layout.heads
    column = rest % COLUMN_TILES
    rest = rest // COLUMN_TILES
    part = rest % layout.parts
    rest = rest // layout.parts
    blocks = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
    return Program((rest // blocks).to(tl.int64), head.to(tl.int64), rest % blocks, part, column)


@triton.jit
def _start(index, tokens, blocks):
    """First token of block ``index`` of an axis: the longer blocks come first."""
    return index * (tokens // blocks) + tl.minimum(index, tokens % blocks)


@triton.jit
def block_box(block, layout):
    """The box of block ``block``; blocks are numbered in raster order."""
    index_0 = block // (layout.blocks_1 * layout.blocks_2)
    index_1 = block // layout.blocks_2 % layout.blocks_1
    index_2 = block % layout.blocks_2
    start_0 = _start(index_0, layout.grid_0, layout.blocks_0)
    start_1 = _start(index_1, layout.grid_1, layout.blocks_1)
    start_2 = _start(index_2, layout.grid_2, layout.blocks_2)
    starts = start_0, start_1, start_2
    length_0 = _start(index_0 + 1, layout.grid_0, layout.blocks_0) - start_0
    length_1 = _start(index_1 + 1, layout.grid_1, layout.blocks_1) - start_1
    length_2 = _start(index_2 + 1, layout.grid_2, layout.blocks_2) - start_2
    lengths = length_0, length_1, length_2
    begin = _tokens_before(layout.first, starts, lengths, layout)
    end = _tokens_before(layout.first + layout.tokens, starts, lengths, layout)
    return Box(start_0, start_1, start_2, length_0, length_1, length_2, begin, end)


@triton.jit
def _tokens_before(token, starts, lengths, layout):
    """How many tokens of a box come before a token of the grid, or one past its last, in raster order."""
    row = token // layout.grid_2
    count = _clipped(token % layout.grid_2 - starts[2], lengths[2])
    count = _in_row(row % layout.grid_1 - starts[1], lengths[1], lengths[2], count)
    return _in_row(row // layout.grid_1 - starts[0], lengths[0], lengths[1] * lengths[2], count)


@triton.jit
def _in_row(row, rows, size, count):
    """Tokens of the rows before ``row``, each of ``size``, and ``count`` of that row if the box has it."""
    return _clipped(row, rows) * size + tl.where((row >= 0) & (row < rows), count, 0)


@triton.jit
def _clipped(number, most):
    return tl.minimum(tl.maximum(number, 0), most)


@triton.jit
def tiles_in(box, BLOCK_T: tl.constexpr):
    """Tiles of the call's share of a block."""
    return tl.cdiv(box.end - box.begin, BLOCK_T)


@triton.jit
def _tiles_per_part(box, layout, BLOCK_T: tl.constexpr):
    return tl.cdiv(tiles_in(box, BLOCK_T), layout.parts)


@triton.jit
def first_tile(program, box, layout, BLOCK_T: tl.constexpr):
    """First tile of the program's part of its block."""
    return program.part * _tiles_per_part(box, layout, BLOCK_T)


@triton.jit
def end_tile(program, box, layout, BLOCK_T: tl.constexpr):
    """One past the last tile of the program's part of its block."""
    return tl.minimum((program.part + 1) * _tiles_per_part(box, layout, BLOCK_T), tiles_in(box, BLOCK_T))


@triton.jit
def tile_of(program, index, box, layout, BLOCK_T: tl.constexpr):
    """Tile ``index`` of the call's share of the block: BLOCK_T tokens in raster order of the box."""
    place = box.begin + index * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = place < box.end
    place = tl.where(exists, place, box.begin)
    row = place // box.length_2
    place_0 = (box.start_0 + row // box.length_1).to(tl.int64)
    place_1 = box.start_1 + row % box.length_1
    place_2 = box.start_2 + place % box.length_2
    tokens = (place_0 * layout.grid_1 + place_1) * layout.grid_2 + place_2 - layout.first
    return Tile(program.batch, program.head, tokens, exists)


@triton.jit
def tokens_in(layout):
    """N, int64."""
    return tl.cast(layout.tokens, tl.int64)


@triton.jit
def to_bfloat16(x):
    """Round a float32 tile to the nearest bfloat16, ties to even."""
    if _INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        odd = (bits >> 16) & 1
        rounded = ((bits.to(tl.uint64) + 0x7FFF + odd) & 0xFFFF0000).to(tl.uint32)
        # a NaN has no neighbour to round to, and its bits could carry into the sign
        return tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    else:
        return x.to(tl.bfloat16)


@triton.jit
def load_rows(rows, tile, channels, HEAD_DIM: tl.constexpr):
    """Channels of a tile as float32 (tokens, channels); what does not exist is 0."""
    start = rows.pointer + tile.batch * rows.batch_stride + tile.head * rows.head_stride
    addresses = start + tile.tokens[:, None] * rows.token_stride + channels[None, :]
    return tl.load(addresses, mask=tile.exists[:, None] & (channels < HEAD_DIM)[None, :], other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, values, tile, channels, layout, HEAD_DIM: tl.constexpr):
    """Write ``values`` (tokens, channels) into a contiguous (B, N, H, D)."""
    row = (tile.batch * tokens_in(layout) + tile.tokens) * layout.heads + tile.head
    addresses = pointer + row[:, None] * HEAD_DIM + channels[None, :]
    if pointer.dtype.element_ty == tl.bfloat16:
        values = to_bfloat16(values)
    tl.store(addresses, values, mask=tile.exists[:, None] & (channels < HEAD_DIM)[None, :])


@triton.jit
def numbers_of(numbers, tile):
    """Addresses of a tile's numbers, one per token, in a (B, N, H, 1)."""
    start = numbers.pointer + tile.batch * plain(numbers.batch_stride) + tile.head * plain(numbers.head_stride)
    return start + tile.tokens * plain(numbers.token_stride)


@triton.jit
def _block_number(program, layout):
    """Index of the program's block in (B, H, M)."""
    blocks = layout.blocks_0 * layout.blocks_1 * layout.blocks_2
    return (program.batch * layout.heads + program.head) * blocks + program.block


@triton.jit
def state_of(pointer, program, layout, HEAD_DIM: tl.constexpr, NORMALIZE: tl.constexpr):
    """Where the summary of the program's block begins in a contiguous (B, H, M, D + NORMALIZE, D)."""
    return pointer + _block_number(program, layout) * ((HEAD_DIM + NORMALIZE) * HEAD_DIM)


@triton.jit
def load_state(state, channels, columns, HEAD_DIM: tl.constexpr):
    """Part of a KV summary, float32 (channels of the key, columns of the value); what does not exist is 0."""
    exists = (channels < HEAD_DIM)[:, None] & (columns < HEAD_DIM)[None, :]
    return tl.load(state + channels[:, None] * HEAD_DIM + columns[None, :], mask=exists, other=0.0).to(tl.float32)


@triton.jit
def load_key_sum(state, channels, HEAD_DIM: tl.constexpr):
    """Part of the key sum, which follows the KV summary: float32 (channels,)."""
    return tl.load(state + HEAD_DIM * HEAD_DIM + channels, mask=channels < HEAD_DIM, other=0.0).to(tl.float32)


@triton.jit
def store_part(pointer, summary, key_sum, program, columns, layout, HEAD_DIM: tl.constexpr, NORMALIZE: tl.constexpr):
    """Write one part's share of a block's summary into a contiguous (B, H, M, parts, D + NORMALIZE, D)."""
    part = _block_number(program, layout) * layout.parts + program.part
    start = pointer + part * ((HEAD_DIM + NORMALIZE) * HEAD_DIM)
    channels = tl.arange(0, summary.shape[0])
    exists = (channels < HEAD_DIM)[:, None] & (columns < HEAD_DIM)[None, :]
    tl.store(start + channels[:, None] * HEAD_DIM + columns[None, :], summary, mask=exists)
    if NORMALIZE and program.column == 0:
        tl.store(start + HEAD_DIM * HEAD_DIM + channels, key_sum, mask=channels < HEAD_DIM)


@triton.jit
def rotate(x, table, BACKWARDS: tl.constexpr):
    """RoPE of channel pairs (2i, 2i + 1): ``table`` holds (cos, sin) at the places of each pair."""
    even, odd = tl.split(tl.reshape(x, (x.shape[0], x.shape[1] // 2, 2)))
    cos, sin = tl.split(tl.reshape(table, (x.shape[0], x.shape[1] // 2, 2)))
    if BACKWARDS:
        sin = -sin
    return tl.reshape(tl.join(even * cos - odd * sin, even * sin + odd * cos), x.shape)


@triton.jit
def load_operand(rows, tile, channels, HEAD_DIM: tl.constexpr):
    """Channels of a tile as they are in memory (tokens, channels), for :func:`product`; what does not exist is 0."""
    start = rows.pointer + tile.batch * rows.batch_stride + tile.head * rows.head_stride
    addresses = start + tile.tokens[:, None] * rows.token_stride + channels[None, :]
    if channels.shape[0] == HEAD_DIM:
        values = tl.load(addresses, mask=tile.exists[:, None], other=0.0)
    else:
        values = tl.load(addresses, mask=tile.exists[:, None] & (channels < HEAD_DIM)[None, :], other=0.0)
    if _INTERPRETED:
        return values.to(tl.float32)
    else:
        return values


@triton.jit
def operand(x, number: tl.constexpr):
    """A float32 tile rounded to the input's type, which is what softmax attention multiplies in."""
    if number == tl.float32:
        return x
    elif number == tl.bfloat16:
        return to_bfloat16(x)
    elif _INTERPRETED:
        return x.to(tl.float16).to(tl.float32)
    else:
        return x.to(tl.float16)


@triton.jit
def product(a, b, total, PRECISION: tl.constexpr):
    """``a @ b + total`` of two tiles of the same type: float32 ones as PRECISION says, others exactly."""
    if a.dtype == tl.float32 and PRECISION != "bf16x2":
        return tl.dot(a, b, total, input_precision=PRECISION)
    else:
        return tl.dot(a, b, total)


@triton.jit
def accurate_dot(a, b, total, PRECISION: tl.constexpr, EXACT_A: tl.constexpr, EXACT_B: tl.constexpr):
    """``a @ b + total`` of float32 tiles, see :func:`mhla_diffusers.attention.triton.tuning.precision_of`.

    With "bf16x2" a float32 tile is taken as the sum of two bfloat16 tiles (16 bits of the 24): rounding the operands
    to one would add an error as large as that of rounding the result to bfloat16. A tile that was loaded as bfloat16 is
    exact. float16 would overflow: a summary of 100 000 tokens passes 65 504.
    """
    if PRECISION != "bf16x2":
        return tl.dot(a, b, total, input_precision=PRECISION)
    else:
        high_a = to_bfloat16(a)
        high_b = to_bfloat16(b)
        if not EXACT_A:
            total = tl.dot(to_bfloat16(a - high_a.to(tl.float32)), high_b, total)
        if not EXACT_B:
            total = tl.dot(high_a, to_bfloat16(b - high_b.to(tl.float32)), total)
        return tl.dot(high_a, high_b, total)
