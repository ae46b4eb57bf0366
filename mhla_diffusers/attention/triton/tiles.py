"""The tiles of every kernel on every GPU, and other facts about GPUs."""

from functools import cache
from typing import Any, NamedTuple

import torch


class Tile(NamedTuple):
    """Tile sizes and launch settings of a kernel."""

    m: int
    """Rows of queries, or tokens, that it takes at once."""
    n: int
    """Rows of keys at once; in the linear branch columns of a state that it adds up, or rows of one that it reads."""
    warps: int
    stages: int

    @property
    def arguments(self) -> dict[str, int]:
        """Arguments of every launch."""
        return {"BLOCK_M": self.m, "BLOCK_N": self.n, "num_warps": self.warps, "num_stages": self.stages}


_SOFTMAX_FLOAT32 = (16, 32, 4, 1), (16, 16, 4, 1)
TILES: dict[str, dict[str, tuple[tuple[int, ...], ...]]] = {
    # channels of a part of a state, channels at once
    "prepare_queries": {"": (*[(16, 64, 4, 1)] * 2, *[(16, 32, 4, 1)] * 2)},
    "prepare_keys": {
        "sm_80": (*[(64, 8, 8, 1)] * 2, *[(32, 32, 8, 1)] * 2),
        "": (*[(64, 16, 8, 1)] * 2, *[(32, 32, 8, 1)] * 2),
    },
    "merge": {"": ((64, 64, 8, 1), *[(32, 32, 8, 1)] * 2, (16, 16, 4, 1))},
    "softmax_forward": {
        "sm_90 sm_100": ((64, 64, 4, 3), (64, 32, 4, 2), *_SOFTMAX_FLOAT32),
        "": ((64, 64, 4, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
    },
    "softmax_forward_128": {
        "sm_90": ((128, 64, 4, 2), (64, 32, 4, 2), *_SOFTMAX_FLOAT32),
        "": ((128, 64, 8, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
    },
    "softmax_dq": {
        "sm_90 sm_100": ((64, 64, 4, 2), (64, 32, 8, 2), *_SOFTMAX_FLOAT32),
        "gfx942": ((64, 32, 4, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
        "": ((64, 64, 4, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
    },
    "softmax_dkv": {
        "sm_90 sm_100": ((64, 64, 4, 2), (32, 64, 8, 2), *_SOFTMAX_FLOAT32),
        "gfx942": ((32, 64, 4, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
        "": ((64, 64, 8, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
    },
    "pooled_dkv": {  # which adds the gains of blocks, too
        "sm_90 sm_100": ((32, 64, 4, 2), (16, 64, 8, 2), (16, 32, 4, 1), (16, 16, 8, 1)),
        "gfx942": ((32, 64, 4, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
        "": ((64, 64, 8, 2), (32, 32, 4, 1), *_SOFTMAX_FLOAT32),
    },
    "states": {
        "sm_90 sm_100": ((32, 128, 4, 3), *[(32, 64, 8, 2)] * 3),
        "sm_80": ((32, 128, 8, 3), *[(32, 64, 8, 2)] * 2, (32, 32, 8, 1)),  # fewer registers where 4 warps multiply
        "gfx942": ((32, 64, 4, 1), *[(32, 32, 4, 1)] * 3),
        "": ((32, 128, 8, 2), *[(32, 64, 8, 2)] * 2, (32, 32, 8, 1)),
    },
    "key_gradient": {
        "sm_80 sm_90 sm_100": ((64, 128, 8, 1), *[(32, 32, 8, 1)] * 2, (16, 32, 8, 1)),
        "gfx942": ((32, 64, 4, 1),) * 4,
        "": ((32, 64, 4, 1), *[(32, 32, 8, 1)] * 2, (16, 32, 8, 1)),
    },
    "read": {
        "sm_80 sm_90 sm_100": ((64, 128, 8, 1), *[(32, 64, 8, 1)] * 3),
        "gfx942": ((32, 64, 4, 1),) * 4,
        "": ((32, 128, 8, 1), *[(32, 64, 8, 1)] * 3),
    },
    "query_gradient": {
        "sm_80 sm_90 sm_100": ((32, 128, 8, 1), *[(32, 32, 8, 1)] * 2, (16, 32, 8, 1)),
        "gfx942": ((32, 64, 4, 1),) * 4,
        "": ((32, 64, 8, 1), *[(32, 32, 8, 1)] * 2, (16, 32, 8, 1)),
    },
}
"""Kernel, architectures ("" stands for all others), and BLOCK_M, BLOCK_N, warps and stages of heads of 16 bits with at
most 128 and 256 channels, and of float32 heads with at most 128 and 256. "softmax" are listed and pooled keys, "128"
blocks of 128 queries. Shared memory is 227 KiB on sm_90 and sm_100, 163 on sm_80, 64 on gfx942, 99 on others."""
MAX_HEAD_DIM = 256

PROCESSORS = {"sm_80": 108, "sm_86": 84, "sm_89": 142, "sm_90": 132, "sm_100": 148, "sm_120": 170, "gfx942": 304}
"""Processors of the largest common card: A100, A40, L40S, H100 and H200, B200, RTX 5090, MI300X."""
_INTERPRETER_PROCESSORS = 4


def tile_of(kernel: str, x: torch.Tensor, most_m: int = MAX_HEAD_DIM, most_n: int = MAX_HEAD_DIM) -> Tile:
    """The tile of a kernel for tensors like ``x`` (..., D), cut down to ``most_m`` and ``most_n``, powers of two."""
    head_dim, architecture = x.shape[-1], architecture_of(x.device)
    entries = TILES[kernel]
    column = 2 * (x.dtype == torch.float32) + (head_dim > 128)
    m, n, warps, stages = next((v for k, v in entries.items() if architecture in k.split()), entries[""])[column]
    return Tile(min(m, most_m), min(n, most_n), warps, stages)


@cache
def architecture_of(device: torch.device) -> str:
    """Name of a device's architecture: "sm_90", "gfx942", and "interpreter" for a CPU."""
    if device.type != "cuda":
        return "interpreter"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip is not None:
        return str(properties.gcnArchName).split(":")[0]
    return f"sm_{properties.major}{properties.minor}"


def processors_of(device: torch.device) -> int:
    """Processors of a card; without it those of the largest common card of its architecture."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    return PROCESSORS.get(architecture_of(device), _INTERPRETER_PROCESSORS)


def power_of_two(size: int) -> int:
    """The next power of two, at least 16, the smallest side of a tile that the tensor cores multiply."""
    return max(16, 1 << (size - 1).bit_length())


def precision_of(x: torch.Tensor) -> str:
    """``input_precision`` of a kernel's products with tensors like ``x``.

    TF32 keeps 11 bits of a float32, which three products of it make 21, and all bits of float16, beside which float32
    states are multiplied in it. Cards without TF32 multiply float32 as it is.
    """
    if not architecture_of(x.device).startswith("sm_"):
        return "ieee"
    return {torch.float32: "tf32x3", torch.float16: "tf32"}.get(x.dtype, "ieee")


def constants_of(x: torch.Tensor) -> dict[str, Any]:
    """Compile-time constants of every kernel over heads like ``x`` (..., D)."""
    return {"HEAD_DIM": x.shape[-1], "PRECISION": precision_of(x)}


def states_dtype(dtype: torch.dtype) -> torch.dtype:
    """Type of KV states; sums over a block pass the largest number of float16."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32
