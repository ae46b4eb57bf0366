"""The linear branch: KV states of the MHLA blocks, and reading their mixtures; backward in :mod:`.linear_backward`.

With f = φ(q), S and z the mixed KV state and normaliser state of the query's block, the output is fᵀS / fᵀz. Beside
block-sparse attention it is one of up to three branches under one denominator: with n = fᵀS and d = fᵀz,

    o = (exp(lse_listed) o_listed + exp(lse_pooled) o_pooled + λ n) / (exp(lse_listed) + exp(lse_pooled) + λ d)

Then come output norm and gate. Kernels find the tokens of a block through tables, so that the same kernels read raster
tokens, which they rotate themselves, and prepared rows (B * H, R, D), seen as (B, R, H, D).
"""

# mypy: disable-error-code="import-untyped, no-untyped-def, untyped-decorator"
# Triton ships no types, and annotations of a kernel mean something else to it.

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from .launch import Launch, allocate, architecture_of, power_of_two, precision_of, processors_of
from .linear_features import Features, load_features, load_tile, read_state, source_of, store_tile


@dataclass(frozen=True)
class Blocks:
    """Which tokens belong to which MHLA block: three tables, int32."""

    members: torch.Tensor
    """(N,) Where the tokens stand in query, key and value, MHLA block after MHLA block."""
    places: torch.Tensor
    """(N,) Where the same tokens stand in the sequence: in output, gate, key mask and angles. For raster tokens these
    are the members themselves."""
    starts: torch.Tensor
    """(M + 1,) Where each block begins in the two tables, and where the last one ends."""
    longest: int
    """Tokens in the longest block."""

    def __len__(self) -> int:
        """M."""
        return len(self.starts) - 1

    @property
    def arguments(self) -> dict[str, Any]:
        """Of the kernels."""
        tables = {"members": self.members, "places": self.places, "starts": self.starts}
        return {**tables, "tokens": len(self.members), "blocks": len(self)}


class Branches(NamedTuple):
    """What the linear branch is merged with: block-sparse attention's branches by row; outputs contiguous."""

    listed: torch.Tensor | None = None
    """(B * H, R, D) like the query; None where MHLA is alone."""
    listed_lse: torch.Tensor | None = None
    """float32 (B * H, R), natural logarithm."""
    pooled: torch.Tensor | None = None
    """Like ``listed``, or None."""
    pooled_lse: torch.Tensor | None = None
    """Like ``listed_lse``, with β in it."""
    linear_weight: torch.Tensor | None = None
    """λ: float32 (H,), not negative."""


@dataclass(frozen=True)
class Reading:
    """What queries read, and what becomes of it."""

    query: torch.Tensor
    """(B, N, H, D) of any strides but the last, which is 1."""
    states: torch.Tensor
    """Mixed, (B, H, M, D, D), contiguous."""
    sums: torch.Tensor | None
    """Mixed normaliser states, float32 (B, H, M, D), contiguous; None for no normaliser, which the merge needs."""
    blocks: Blocks
    features: Features
    """Of the query."""
    branches: Branches = Branches()
    output_norm: torch.Tensor | None = None
    """Weight of an RMSNorm over channels, (D,)."""
    norm_eps: float = 1e-6
    gate: torch.Tensor | None = None
    """(B, N, H, D), contiguous: the output is multiplied by its SiLU."""

    def arguments(self, kernel: str, architecture: str) -> tuple[dict[str, Any], "Tile", tuple[int, int, int]]:
        """What reading and its backward share: arguments, tile and programs."""
        tile = tile_of(kernel, self.query, self.blocks.longest, architecture)
        batch, rows, heads, _ = self.query.shape
        arguments = {
            **{"query": self.query, "states": self.states, "sums": self.sums, **self.branches._asdict()},
            **{"output_norm": self.output_norm, "norm_eps": self.norm_eps, "gate": self.gate},
            **{"heads": heads, "rows": rows, "BLOCK_T": tile.tokens, "BLOCK_C": tile.channels},
            **self.blocks.arguments,
            **self.features.arguments,
            **constants_of(self.query, architecture),
        }
        return arguments, tile, (batch * heads, triton.cdiv(self.blocks.longest, tile.tokens), len(self.blocks))


SIZES = [
    *("heads", "tokens", "rows", "blocks", "parts", "angle_tokens"),
    *(f"{name}_{axis}" for name in ("query", "key", "value", "gradient") for axis in ("batch", "token", "head")),
]
"""Arguments that change with the resolution, for any of which Triton would compile anew."""


class Tile(NamedTuple):
    """How a kernel is cut."""

    tokens: int
    channels: int
    """Columns of a state that a program adds up; rows of a state that it holds at a time where it reads one."""
    warps: int
    stages: int


_LARGE = {
    "states": Tile(32, 128, 4, 3),
    "read": Tile(64, 128, 8, 1),
    "query_gradient": Tile(32, 128, 8, 1),
    "key_gradient": Tile(64, 128, 8, 1),
    "wide_states": Tile(32, 64, 8, 2),
    "wide_read": Tile(32, 64, 8, 1),
    "wide_query_gradient": Tile(32, 32, 8, 1),
    "wide_key_gradient": Tile(32, 32, 8, 1),
}
"""227 KiB of shared memory. Wide: float32, or more than 128 channels."""
_AMPERE = _LARGE | {"states": Tile(32, 128, 8, 3)}
"""163 KiB, and fewer registers where 4 warps multiply."""
_SMALL = _AMPERE | {
    "states": Tile(32, 128, 8, 2),
    "read": Tile(32, 128, 8, 1),
    "query_gradient": Tile(32, 64, 8, 1),
    "key_gradient": Tile(32, 64, 4, 1),
}
"""99 KiB."""
_AMD = {name: Tile(32, 64, 4, 1) for name in _LARGE} | {"wide_states": Tile(32, 32, 4, 1)}
"""64 KiB."""
_TILES = {"sm_80": _AMPERE, "sm_90": _LARGE, "sm_100": _LARGE, "gfx942": _AMD, "interpreter": _SMALL}
"""By architecture; others take the small tiles."""


def tile_of(kernel: str, like: torch.Tensor, longest: int, architecture: str) -> Tile:
    """Of a kernel over tokens ``like`` these, with D channels last."""
    padded = power_of_two(like.shape[-1])
    wide = like.dtype == torch.float32 or padded > 128
    tile = _TILES.get(architecture, _SMALL)[f"wide_{kernel}" if wide else kernel]
    return tile._replace(tokens=min(tile.tokens, power_of_two(longest)), channels=min(tile.channels, padded))


def states_dtype(dtype: torch.dtype) -> torch.dtype:
    """Of KV states; sums over a block pass the largest number of half precision."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def constants_of(like: torch.Tensor, architecture: str) -> dict[str, Any]:
    """Compile-time constants that all kernels share."""
    precision = precision_of(like.dtype, architecture)
    if like.dtype == torch.float16 and architecture.startswith("sm_"):
        precision = "tf32"  # has as many bits; float32 states are multiplied in it
    return {"HEAD_DIM": like.shape[-1], "BLOCK_D": power_of_two(like.shape[-1]), "PRECISION": precision}


def strides_of(**tensors: torch.Tensor) -> dict[str, int]:
    """Strides of tensors (B, N, H, D) in units of ALIGNMENT channels.

    So the compiler sees that rows begin where a thread may load 8 channels at once, at any resolution.
    """
    strides = {
        f"{name}_{axis}": x.stride(i)
        for name, x in tensors.items()
        for i, axis in enumerate(("batch", "token", "head"))
    }
    head_dims = [x.shape[-1] for x in tensors.values()]
    alignment = 8 if all(stride % 8 == 0 for stride in (*strides.values(), *head_dims)) else 1
    return {name: stride // alignment for name, stride in strides.items()} | {"ALIGNMENT": alignment}


def states_launch(
    key: torch.Tensor,
    value: torch.Tensor,
    blocks: Blocks,
    features: Features,
    key_mask: torch.Tensor | None,
    normalize: bool,
    sum_weight: torch.Tensor | None = None,
    architecture: str | None = None,
) -> Launch:
    """KV state Σ w φ(k) vᵀ and normaliser state Σ w φ(k) of every block, in as many parts as fill the card.

    Args:
        key: (B, N, H, D) of any strides but the last, which is 1.
        value: likewise; or any rows to be added up by the features of the key.
        blocks: the tables.
        features: of the key.
        key_mask: w, float32 (B, N), contiguous, in the order of the sequence; or None.
        normalize: whether the normaliser is wanted.
        sum_weight: of a token and head in the normaliser state, float32 (B, H, N) in the order of ``blocks.members``.
        architecture: of a card that is not there.
    """
    architecture = architecture or architecture_of(key.device)
    batch, _, heads, head_dim = key.shape
    tile = tile_of("states", value if value.dtype == torch.float32 else key, blocks.longest, architecture)
    columns = triton.cdiv(head_dim, tile.channels)
    # four tiles at least, or writing parts would be most of the work
    wanted = triton.cdiv(2 * processors_of(key.device, architecture), batch * heads * len(blocks) * columns)
    parts = max(1, min(wanted, blocks.longest // (4 * tile.tokens)))
    dtype = states_dtype(key.dtype) if parts == 1 else torch.float32
    shape = (parts, batch, heads, len(blocks), head_dim)
    arguments = {
        **{"key": key, "value": value, "key_mask": key_mask, "sum_weight": sum_weight},
        "states": allocate((*shape, head_dim), dtype, key.device),
        "sums": allocate(shape, torch.float32, key.device) if normalize else None,
        **{"heads": heads, "parts": parts, "BLOCK_T": tile.tokens, "BLOCK_E": tile.channels},
        **blocks.arguments,
        **features.arguments,
        **strides_of(key=key, value=value),
        **constants_of(key, architecture),
    }
    return Launch(states_kernel, (batch * heads, columns, len(blocks) * parts), arguments, tile.warps, tile.stages)


def states_of(launch: Launch) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run a launch of :func:`states_launch` and add up its parts, always in the same order.

    Returns:
        States (B, H, M, D, D), bfloat16 for such keys, else float32; and normaliser states float32 (B, H, M, D), or
        None.
    """
    launch.run()
    states, sums = launch.arguments["states"], launch.arguments["sums"]
    if len(states) == 1:
        return states[0], None if sums is None else sums[0]
    return states.sum(0).to(states_dtype(launch.arguments["key"].dtype)), None if sums is None else sums.sum(0)


def read_launch(reading: Reading, with_normaliser: bool = False, architecture: str | None = None) -> Launch:
    """What the queries read from the mixed states of their blocks, merged with the sparse branches.

    Returns:
        The launch that writes ``output`` (B, N, H, D) like the query, in the order of the sequence, contiguous, and
        ``normalisers``, d of the linear branch alone, float32 (B, N, H, 1), or None.

    Raises:
        ValueError: branches without a normaliser.
    """
    if reading.branches.listed is not None and reading.sums is None:
        raise ValueError("The linear branch beside block-sparse attention needs its normaliser: pass sums.")
    query, device = reading.query, reading.query.device
    architecture = architecture or architecture_of(device)
    arguments, tile, programs = reading.arguments("read", architecture)
    shape = len(query), len(reading.blocks.members), query.shape[2]
    arguments["output"] = allocate((*shape, query.shape[3]), query.dtype, device)
    arguments["normalisers"] = allocate((*shape, 1), torch.float32, device) if with_normaliser else None
    return Launch(read_kernel, programs, arguments | strides_of(query=query), tile.warps, tile.stages)


@triton.jit(do_not_specialize=SIZES)
def states_kernel(
    key,
    value,
    angles,
    key_mask,
    sum_weight,
    members,
    places,
    starts,
    states,
    sums,
    heads,
    tokens,
    blocks,
    parts,
    key_batch,
    key_token,
    key_head,
    value_batch,
    value_token,
    value_head,
    angle_tokens,
    eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """BLOCK_E columns of the state of one part of one block."""
    TYPE: tl.constexpr = value.dtype.element_ty
    # batch row and head; heads run side by side, and share angles and cache lines
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block, part = tl.program_id(2) // parts, tl.program_id(2) % parts
    begin, end = tl.load(starts + block), tl.load(starts + block + 1)
    length = tl.cdiv(tl.cdiv(end - begin, parts), BLOCK_T) * BLOCK_T
    begin += part * length
    end = tl.minimum(begin + length, end)
    d = tl.arange(0, BLOCK_D)
    e = tl.program_id(1) * BLOCK_E + tl.arange(0, BLOCK_E)
    key += (batch * key_batch + head * key_head) * ALIGNMENT
    value += (batch * value_batch + head * value_head) * ALIGNMENT
    state = tl.zeros((BLOCK_D, BLOCK_E), tl.float32)
    normaliser = tl.zeros((BLOCK_D,), tl.float32)
    for first in tl.range(begin, end, BLOCK_T):
        index = first + tl.arange(0, BLOCK_T)
        there = index < end
        member = tl.load(members + index, mask=there, other=0).to(tl.int64)
        place = tl.load(places + index, mask=there, other=0).to(tl.int64)
        rows = key + member * key_token * ALIGNMENT
        turn = rows
        if angles is not None:
            turn = angles + (batch * angle_tokens + place) * HEAD_DIM
        source = source_of(rows, turn, there, eps, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE)
        features, plain = load_features(source, d, HEAD_DIM, FEATURE_MAP, ROPE, TYPE)
        weight = there.to(tl.float32)
        if key_mask is not None:
            weight = tl.load(key_mask + batch * tokens + place, mask=there, other=0.0)
            features = (features.to(tl.float32) * weight[:, None]).to(TYPE)
        values = load_tile(value + member * value_token * ALIGNMENT, there, e, HEAD_DIM)
        state = tl.dot(tl.trans(features), values, state, input_precision=PRECISION)
        if sums is not None:
            if sum_weight is not None:
                weight *= tl.load(sum_weight + whole * tokens + index, mask=there, other=0.0)
            normaliser += tl.sum(plain * weight[:, None], 0)
    base = (part * tl.num_programs(0) + whole) * blocks + block
    mask = (d < HEAD_DIM)[:, None] & (e < HEAD_DIM)[None, :]
    at = states + base * HEAD_DIM * HEAD_DIM + d[:, None] * HEAD_DIM + e[None, :]
    tl.store(at, state.to(states.dtype.element_ty), mask=mask)
    if sums is not None and tl.program_id(1) == 0:
        tl.store(sums + base * HEAD_DIM + d, normaliser, mask=d < HEAD_DIM)


@triton.jit
def merge(
    product,
    normaliser,
    listed,
    listed_lse,
    pooled,
    pooled_lse,
    linear_weight,
    row,
    head,
    there,
    NORMALIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """All branches under one denominator.

    Args:
        row: of the tokens in the branches' outputs, (tokens,).

    Returns:
        Output float32 (tokens, channels), and of each token: what ``product`` was multiplied by, the weights of the
        listed and the pooled branch, and the logarithm of the denominator.
    """
    slope = tl.full(normaliser.shape, 1.0, tl.float32)
    of_listed, of_pooled, lse = slope, slope, slope
    if listed is None:
        if NORMALIZE:
            slope = 1.0 / normaliser
        output = product * slope[:, None]
    else:
        d = tl.arange(0, BLOCK_D)
        log_weight = tl.log(tl.load(linear_weight + head))
        log_linear = log_weight + tl.log(tl.maximum(normaliser, 1e-37))
        near = tl.load(listed_lse + row, mask=there, other=0.0)
        largest = tl.maximum(log_linear, near)
        if pooled is not None:
            means = tl.load(pooled_lse + row, mask=there, other=0.0)
            largest = tl.maximum(largest, means)
        of_listed = tl.exp(near - largest)
        total = of_listed + tl.exp(log_linear - largest)
        if pooled is not None:
            of_pooled = tl.exp(means - largest)
            total += of_pooled
        of_listed /= total
        slope = tl.exp(log_weight - largest) / total
        output = product * slope[:, None]
        output += load_tile(listed + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32) * of_listed[:, None]
        if pooled is not None:
            of_pooled /= total
            output += load_tile(pooled + row * HEAD_DIM, there, d, HEAD_DIM).to(tl.float32) * of_pooled[:, None]
        lse = largest + tl.log(total)
    return output, slope, of_listed, of_pooled, lse


@triton.jit(do_not_specialize=SIZES)
def read_kernel(
    query,
    states,
    sums,
    listed,
    listed_lse,
    pooled,
    pooled_lse,
    linear_weight,
    output_norm,
    gate,
    output,
    normalisers,
    members,
    places,
    starts,
    angles,
    heads,
    tokens,
    rows,
    blocks,
    query_batch,
    query_token,
    query_head,
    angle_tokens,
    eps,
    norm_eps,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_T: tl.constexpr,
    FEATURE_MAP: tl.constexpr,
    ROPE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Output of one tile of the queries of one block."""
    NORMALIZE: tl.constexpr = sums is not None
    whole = tl.program_id(0).to(tl.int64)
    batch, head = whole // heads, whole % heads
    block = tl.program_id(2)
    begin, end = tl.load(starts + block) + tl.program_id(1) * BLOCK_T, tl.load(starts + block + 1)
    if begin < end:
        index = begin + tl.arange(0, BLOCK_T)
        there = index < end
        member = tl.load(members + index, mask=there, other=0).to(tl.int64)
        place = tl.load(places + index, mask=there, other=0).to(tl.int64)
        at = query + (batch * query_batch + head * query_head + member * query_token) * ALIGNMENT
        turn = at
        if angles is not None:
            turn = angles + (batch * angle_tokens + place) * HEAD_DIM
        source = source_of(at, turn, there, eps, HEAD_DIM, BLOCK_D, FEATURE_MAP, ROPE)
        base, row = whole * blocks + block, whole * rows + member
        product, normaliser = read_state(
            source, states, sums, base, HEAD_DIM, BLOCK_D, BLOCK_C, FEATURE_MAP, ROPE, PRECISION
        )
        branches = (listed, listed_lse, pooled, pooled_lse, linear_weight)
        values, _, _, _, _ = merge(product, normaliser, *branches, row, head, there, NORMALIZE, HEAD_DIM, BLOCK_D)
        d = tl.arange(0, BLOCK_D)
        here = (batch * tokens + place) * heads + head
        if normalisers is not None:
            tl.store(normalisers + here, normaliser, mask=there)
        here *= HEAD_DIM
        if output_norm is not None:
            weight = tl.load(output_norm + d, mask=d < HEAD_DIM, other=0.0).to(tl.float32)
            root = tl.rsqrt(tl.sum(values * values, 1) / HEAD_DIM + norm_eps)
            values = values * root[:, None] * weight[None, :]
        if gate is not None:
            gates = load_tile(gate + here, there, d, HEAD_DIM).to(tl.float32)
            values *= gates * tl.sigmoid(gates)
        store_tile(output + here, there, d, values, HEAD_DIM)
