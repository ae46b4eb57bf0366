"""Compile every kernel for GPUs that are not there and print what each needs, one JSON object per line.

A program of its own, because a kernel is made either for the interpreter or for a GPU:

    python -m tests.attention.triton.compile_ahead sm_90:128 gfx942:72 --exact 75
"""

import argparse
import json
import math
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhla_diffusers.attention import Call
from mhla_diffusers.attention.triton import exact_backward as backward
from mhla_diffusers.attention.triton import exact_forward as forward
from mhla_diffusers.attention.triton import exact_key_gradients as keys
from mhla_diffusers.attention.triton import launches
from mhla_diffusers.attention.triton.arguments import state_shape
from mhla_diffusers.attention.triton.exact_lists import ExactCall, lists_of_keys

POINTERS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.uint8: "u8",
}
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


def call_of(head_dim: int, dtype: torch.dtype) -> Call:
    """Everything at once: the variant of each kernel that needs the most of the card. Wan's video of 480 x 800."""
    grid, blocks, heads = (21, 30, 50), (7, 3, 5), 12
    rows = torch.empty(1, 31500, heads, head_dim, dtype=dtype, device="meta")
    return Call(
        query=rows,
        key=rows,
        value=rows,
        mixing=torch.empty(105, 105, device="meta"),
        grid=grid,
        blocks=blocks,
        rotary=torch.empty(1, 31500, 1, head_dim, device="meta"),
        key_mask=torch.empty(1, 31500, device="meta"),
        output_norm=torch.empty(head_dim, device="meta"),
        output_gate=rows,
    )


EXACT_LAYOUTS = {
    75: ((21, 30, 50), (7, 6, 10)),
    120: ((21, 45, 80), (7, 9, 10)),
    16: ((32, 32), (8, 8)),
}
"""Tokens per tile: grid and tile counts. Wan's videos of 480 x 800 and of 720 x 1280, and an image of DiT."""


def exact_launches_of(head_dim: int, dtype: torch.dtype, tokens_per_tile: int, architecture: str) -> list[Any]:
    """One launch of each kernel of the exact tiles, with means and a key mask."""
    (grid, counts), heads = EXACT_LAYOUTS[tokens_per_tile], 12
    tokens, tiles = math.prod(grid), math.prod(counts)
    rows = torch.empty(1, tokens, heads, head_dim, dtype=dtype, device="meta")
    call = ExactCall(
        query=rows,
        key=rows,
        value=rows,
        mean_bias=torch.empty(heads, device="meta"),
        key_mask=torch.empty(1, tokens, device="meta"),
        offsets=torch.empty(heads * tiles + 1, dtype=torch.int64, device="meta"),
        tiles=torch.empty(1000, dtype=torch.int64, device="meta"),
        grid=grid,
        counts=counts,
    )
    lists = lists_of_keys(call)
    of_means, means = forward.means_launch(call, lists, architecture)
    of_output, output, log_sum = forward.exact_launch(call, lists, means, architecture)
    known = keys.OutputSide(output, log_sum, output, log_sum)
    of_query, side = backward.query_gradient_launch(call, lists, means, known, architecture)
    mean_gradient, shares = keys.mean_gradient_launch(call, means, known, side, architecture)
    of_key = keys.key_value_gradient_launch(call, lists, means, shares, known, side, architecture)[0]
    return [of_means, of_output, of_query, mean_gradient, of_key]


def launches_of(call: Call, architecture: str) -> list[launches.Launch]:
    """One launch of each kernel of MHLA."""
    state = torch.empty(state_shape(call), device="meta")
    numbers = torch.empty(*call.query.shape[:3], 1, device="meta")
    query_gradient, gradients = launches.query_gradient_launch(call, state, call.query, numbers, architecture)
    return [
        launches.summary_launch(call, architecture)[0],
        launches.output_launch(call, state, True, architecture)[0],
        query_gradient,
        launches.summary_gradient_launch(call, state, call.query, gradients.token_numbers, architecture)[0],
        launches.key_value_gradient_launch(call, state, architecture)[0],
    ]


def source_of(launch: launches.Launch) -> ASTSource:
    """The kernel as Triton would specialise it at this launch; memory from PyTorch is aligned to 16 bytes."""
    signature: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: dict[tuple[int, ...], list[list[Any]]] = {}

    def type_of(value: Any, path: tuple[int, ...], specialise: bool) -> Any:
        if isinstance(value, tuple):
            return type(value)(*(type_of(x, (*path, i), specialise) for i, x in enumerate(value)))
        if isinstance(value, torch.Tensor):
            aligned[path] = [["tt.divisibility", 16]]
            return "*" + POINTERS[value.dtype]
        if value is None or (specialise and value == 1):
            constants[path] = value
            return "constexpr"
        if isinstance(value, float):
            return "fp32"
        if specialise and value % 16 == 0:
            aligned[path] = [["tt.divisibility", 16]]
        return "i32" if abs(value) < 2**31 else "i64"

    for index, name in enumerate(launch.kernel.arg_names):
        if name in launch.constants:
            signature[name], constants[index,] = "constexpr", launch.constants[name]
        else:
            signature[name] = type_of(launch.arguments[name], (index,), name != "layout")
    return ASTSource(launch.kernel, signature, constants, aligned)


def target_of(architecture: str) -> GPUTarget:
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def usage(compiled: Any) -> dict[str, int]:
    """Registers per thread, and bytes per thread that did not fit into them."""
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            report = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
            ).stdout
        stack = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", report))
        return {"registers": int(re.search(r"REG:(\d+)", report)[1]), "stack_bytes": stack}
    return {
        name: int(re.search(rf"\.{field}:\s*(\d+)", compiled.asm["amdgcn"])[1])
        for name, field in {"registers": "vgpr_count", "stack_bytes": "private_segment_fixed_size"}.items()
    }


def main(architecture: str, head_dim: int, dtype: torch.dtype, tokens_per_tile: int | None) -> None:
    if tokens_per_tile is None:
        launches_here = launches_of(call_of(head_dim, dtype), architecture)
    else:
        launches_here = exact_launches_of(head_dim, dtype, tokens_per_tile, architecture)
    for launch in launches_here:
        compiled = triton.compile(source_of(launch), target=target_of(architecture), options=launch.options)
        report = {
            "kernel": launch.kernel.__name__,
            "architecture": architecture,
            "head_dim": head_dim,
            "dtype": str(dtype),
            "shared_bytes": compiled.metadata.shared,
            **usage(compiled),
            "tiles": launch.tiles._asdict(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: there is nothing to compile.")
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+", help="architecture:head_dim")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--exact", type=int, choices=EXACT_LAYOUTS, help="exact tiles of so many tokens, not MHLA")
    options = parser.parse_args()
    for target in options.targets:
        architecture, head_dim = target.split(":")
        main(architecture, int(head_dim), getattr(torch, options.dtype), options.exact)
