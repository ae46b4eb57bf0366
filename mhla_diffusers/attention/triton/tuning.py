"""Tile sizes and warps of every kernel, by rule where no card was measured: looked up, never searched at run time."""

from functools import cache
from typing import Any

import torch

from .tilings import MixTiling, PairTiling, Place, Tiling, tiles_at


def name_of(kernel: Any) -> str:
    """Of a kernel, as the tables of this file spell it."""
    return str(kernel.__name__.removesuffix("_kernel"))


def precision_of(dtype: torch.dtype, architecture: str) -> str:
    """How kernels multiply float32 tiles in a call whose query has this type.

    "bf16x2": as sums of two bfloat16 tiles, for half precision. "tf32x3": as sums of two TF32 tiles, which keeps 21
    bits of the 24 on NVIDIA's tensor cores; outside of them such products would also spill registers. "ieee": float32
    throughout, for cards that have no TF32.
    """
    if dtype != torch.float32:
        return "bf16x2"
    return "tf32x3" if architecture.startswith("sm_") else "ieee"


SUMMARY_KERNELS = ("summary", "summary_gradient")
"""Kernels that add tokens up to summaries, ``channels`` columns at a time; the others read summaries."""

_Table = dict[str, Tiling]

# Chosen so that no kernel spills registers and each fits into the card's shared memory, with Triton 3.9, and on sm_90
# with 3.6 too but for 8 bytes; not measured on any card yet. With two stages the next tile is on its way while one is
# multiplied.
_LARGE: _Table = {  # 227 KiB of shared memory per block: a whole summary of D = 128 is held
    "summary": Tiling(tokens=32, channels=128, warps=8, stages=3),
    "output": Tiling(tokens=32, channels=128, warps=8, stages=3),
    "query_gradient": Tiling(tokens=32, channels=128, warps=8, stages=1),
    "summary_gradient": Tiling(tokens=16, channels=64, warps=8, stages=2),
    "key_value_gradient": Tiling(tokens=32, channels=128, warps=8, stages=2),
    "rotate": Tiling(tokens=64, channels=128, warps=4, stages=1),
}
_SMALL: _Table = dict.fromkeys(_LARGE, Tiling(tokens=32, channels=64, warps=8, stages=1)) | {  # 99 KiB
    "summary_gradient": Tiling(tokens=16, channels=64, warps=8, stages=1)
}
_NARROW: _Table = _SMALL | {"output": Tiling(tokens=32, channels=32, warps=8, stages=1)}  # a padded D = 72 spilled
_AMD: _Table = dict.fromkeys(_LARGE, Tiling(tokens=32, channels=64, warps=4, stages=1))  # 64 KiB, 64 threads per warp
_INTERPRETER: _Table = dict.fromkeys(_LARGE, Tiling(tokens=64, channels=64, warps=4, stages=1))
_WHOLE_WHEN_PADDED = {("summary", "sm_100"), ("summary", "sm_103")}
"""Kernels that need all columns at once where channels are padded; others need fewer."""
_SPILL_WITH_FOUR = {("output", "sm_80"), ("summary", "sm_86"), ("summary", "sm_89")}
"""Kernels that need eight warps at small head dims too."""
_BY_ARCHITECTURE = {"sm_80": _NARROW, "sm_120": _NARROW, "interpreter": _INTERPRETER} | dict.fromkeys(
    ("sm_90", "sm_100", "sm_103"), _LARGE
)
"""Cards that are not named here take the small tiles."""


def tiling(place: Place) -> Tiling:
    """Tiles of a kernel of MHLA."""
    if isinstance(given := tiles_at(place), Tiling):
        return given
    architecture, kernel, head_dim, dtype, longest_block = place
    table = _BY_ARCHITECTURE.get(architecture, _AMD if architecture.startswith("gfx") else _SMALL)
    tokens, channels, warps, stages = table[kernel]
    padded = power_of_two(head_dim)
    wide = dtype == torch.float32 or padded > 128
    if wide:
        # operands of twice the size, in three terms; D = 256 doubles every row
        tokens, channels = min(tokens, 16), min(channels, 32)
        stages = 1 if dtype == torch.float32 else stages
    if head_dim != padded:  # the masks of padded channels take registers of their own
        stages = 1
        if kernel in SUMMARY_KERNELS:
            is_whole = wide or (kernel, architecture) in _WHOLE_WHEN_PADDED
            tokens, channels = 16, channels if is_whole else channels // 2
        elif kernel == "query_gradient":
            channels = min(channels, 64)
    if kernel in ("output", "key_value_gradient") and dtype == torch.float16:  # more of it is taken as two terms
        stages = 1
    is_small = kernel == "query_gradient" and padded <= 32
    if is_small:
        tokens = min(tokens, 16)
    # on sm_120 four warps have too few registers, but for the smallest tile, of which eight have too few each
    spills_with_four = (architecture == "sm_120" and not is_small) or (kernel, architecture) in _SPILL_WITH_FOUR
    if padded <= 64 and not spills_with_four:
        warps = 4
    return Tiling(min(tokens, power_of_two(longest_block)), min(channels, padded), warps, stages)


def power_of_two(size: int) -> int:
    """The next power of two, at least 16, the smallest side of a tile that the tensor cores multiply."""
    return max(16, 1 << (size - 1).bit_length())


@cache
def architecture_of(device: torch.device) -> str:
    """Name of the device's architecture, as the table of this file spells it: "sm_90", "gfx942", "interpreter"."""
    if device.type == "cpu":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def parts_per_block(whole_blocks: int, longest_block: int, tile_tokens: int, processors: int) -> int:
    """Programs that share one block, so that a call with few blocks fills the card too.

    Args:
        whole_blocks: programs that there would be with one per block.
        longest_block: tokens in the longest block, or whatever else parts share out.
        tile_tokens: of them per tile.
        processors: of the card, see :func:`processors_of`.
    """
    wanted = _PROGRAMS_PER_PROCESSOR * processors
    most = max(1, longest_block // (tile_tokens * _TILES_PER_PART))
    return min(most, -(-wanted // whole_blocks))


_PROGRAMS_PER_PROCESSOR = 4
"""So that the last programs to finish leave little of the card idle."""
_TILES_PER_PART = 4
"""A part begins by reading, or ends by writing, a whole summary: with fewer tiles that would be most of its traffic."""


PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
"""Of the largest common card of an architecture: A100, A40, L40S, H100 and H200, B200, RTX 5090, MI300X."""
_OF_THE_INTERPRETER = 4
"""So that it shares blocks out as a GPU does."""


def processors_of(device: torch.device, architecture: str) -> int:
    """Processors of a card; of one that is not there, those of the largest common card of its architecture."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return PROCESSORS.get(architecture, _OF_THE_INTERPRETER)


OWN_BLOCK_KERNELS = ("own_block", "own_block_query_gradient", "own_block_key_value_gradient")
"""Whose queries and keys are features, in two terms each, and take more registers than those of the exact tiles."""

_PairTable = dict[str, PairTiling]

_PAIRS_LARGE: _PairTable = {
    "means": PairTiling(own=16, others=32, warps=4, stages=1),
    "exact": PairTiling(own=128, others=64, warps=8, stages=2),
    "exact_query_gradient": PairTiling(own=128, others=32, warps=8, stages=3),
    "mean_gradient": PairTiling(own=128, others=32, warps=8, stages=2),
    "exact_key_value_gradient": PairTiling(own=128, others=32, warps=8, stages=3),
}
_PAIRS_SMALL: _PairTable = _PAIRS_LARGE | {
    "exact_query_gradient": PairTiling(own=64, others=64, warps=8, stages=2),
    "mean_gradient": PairTiling(own=64, others=32, warps=8, stages=2),
    "exact_key_value_gradient": PairTiling(own=64, others=64, warps=8, stages=2),
}
_PAIRS_AMD: _PairTable = dict.fromkeys(_PAIRS_LARGE, PairTiling(own=64, others=32, warps=4, stages=1))
_PAIRS_INTERPRETER: _PairTable = dict.fromkeys(_PAIRS_LARGE, PairTiling(own=64, others=64, warps=4, stages=1))
_PAIRS_BY_ARCHITECTURE = dict.fromkeys(("sm_90", "sm_100", "sm_103"), _PAIRS_LARGE)
_PAIRS_BY_ARCHITECTURE["interpreter"] = _PAIRS_INTERPRETER


def pair_tiling(place: Place) -> PairTiling:
    """Tiles of a kernel of the exact tiles."""
    if isinstance(given := tiles_at(place), PairTiling):
        return given
    architecture, kernel, head_dim, dtype, longest_tile = place
    if kernel in OWN_BLOCK_KERNELS:
        return _own_block_tiling(place)
    table = _PAIRS_BY_ARCHITECTURE.get(architecture, _PAIRS_AMD if architecture.startswith("gfx") else _PAIRS_SMALL)
    own, others, warps, stages = table[kernel]
    padded = power_of_two(head_dim)
    wide = dtype == torch.float32 or padded > 128
    if architecture == "interpreter":
        return PairTiling(min(own, power_of_two(longest_tile)), others, warps, stages)
    if wide:  # as in tiling()
        own, others, stages = (16, 16, 1) if dtype == torch.float32 else (32, 32, 1)
    elif head_dim != padded:  # the masks of padded channels take registers of their own
        of_keys = kernel in ("mean_gradient", "exact_key_value_gradient")
        own, others = min(own, 32 if of_keys else 64), min(others, 16 if kernel == "means" else 32)
    if kernel != "mean_gradient":  # whose means are of many tiles
        own = min(own, power_of_two(longest_tile))
    if own <= 32 and not wide:
        warps = 4
    return PairTiling(own, others, warps, stages)


def _own_block_tiling(place: Place) -> PairTiling:
    """Tiles of a kernel of the own block, which is short: small ones fill the card too."""
    padded = power_of_two(place.head_dim)
    if place.architecture == "interpreter":
        return PairTiling(min(64, power_of_two(place.length)), 64, 4, 1)
    side = 16 if place.dtype == torch.float32 or padded > 128 else min(32, power_of_two(place.length))
    warps = 8 if padded > 64 and not place.architecture.startswith("gfx") else 4
    return PairTiling(side, side, warps, 1)


_MIXING: dict[str, MixTiling] = {
    "mix": MixTiling(rows=64, columns=128, depth=32, warps=8, stages=2),
    "mixing_gradient": MixTiling(rows=64, columns=64, depth=32, warps=8, stages=2),
}

_MIXING_INTERPRETER: dict[str, MixTiling] = {  # whose time is that of its programs and steps, whatever their size
    "mix": MixTiling(rows=64, columns=512, depth=32, warps=4, stages=1),
    "mixing_gradient": MixTiling(rows=64, columns=64, depth=512, warps=4, stages=1),
}


def mix_tiling(place: Place) -> MixTiling:
    """Tiles of a kernel of the mixing."""
    if isinstance(given := tiles_at(place), MixTiling):
        return given
    architecture, kernel, _, dtype, blocks = place
    rows, columns, depth, warps, stages = (_MIXING_INTERPRETER if architecture == "interpreter" else _MIXING)[kernel]
    if architecture != "interpreter" and (dtype == torch.float32 or architecture.startswith("gfx")):  # as in tiling()
        rows, columns, stages = min(rows, 32), min(columns, 64), 1
    most = power_of_two(blocks)
    if most <= 32:
        warps = 4
    if kernel == "mix":
        return MixTiling(min(rows, most), columns, min(depth, most), warps, stages)
    return MixTiling(min(rows, most), min(columns, most), depth, warps, stages)
