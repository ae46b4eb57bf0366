"""Compile every kernel for GPUs that are not there and print what each needs, one JSON object per line.

A program of its own, because a kernel is made either for the interpreter or for a GPU:

    python -m tests.attention.triton.compile_ahead sm_90:128 gfx942:72 --near-field
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mhla_diffusers.attention import Call
from mhla_diffusers.attention.triton import launches
from mhla_diffusers.attention.triton.arguments import state_shape
from mhla_diffusers.attention.triton.near_field import launches as near
from mhla_diffusers.attention.triton.near_field.call import near_field_call

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


def near_field_launches_of(call: Call, architecture: str) -> list[launches.Launch]:
    """One launch of each kernel of the near field."""
    heads = call.query.shape[2]
    near_call = near_field_call(replace(call, far_field_weight=torch.empty(heads, device="meta")))
    state = torch.empty(state_shape(near_call.far), device="meta")
    forward, output, log_sums = near.near_field_launch(near_call, state, architecture)
    known = near.OutputSide(output, output, log_sums)
    of_query, numbers = near.near_query_gradient_launch(near_call, known, output, architecture)
    return [
        forward,
        near.far_query_gradient_launch(near_call, state, known, architecture)[0],
        of_query,
        near.near_key_value_gradient_launch(near_call, known, numbers, output, output, architecture),
    ]


def launches_of(call: Call, architecture: str) -> list[launches.Launch]:
    """One launch of each kernel but the near field's."""
    state = torch.empty(state_shape(call), device="meta")
    query_gradient, gradients = launches.query_gradient_launch(call, state, call.query, architecture)
    return [
        launches.summary_launch(call, architecture)[0],
        launches.output_launch(call, state, architecture)[0],
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
            return "*" + {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}[value.dtype]
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


def stack_bytes(compiled: Any) -> int:
    """Bytes per thread that did not fit into registers."""
    if "cubin" in compiled.asm:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compiled.asm["cubin"])
            file.flush()
            report = subprocess.run(
                [CUOBJDUMP, "--dump-resource-usage", file.name], check=True, capture_output=True, text=True
            ).stdout
        return sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", report))
    return int(re.search(r"\.private_segment_fixed_size:\s*(\d+)", compiled.asm["amdgcn"])[1])


def main(architecture: str, head_dim: int, dtype: torch.dtype, near_field: bool) -> None:
    launches_here = near_field_launches_of if near_field else launches_of
    for launch in launches_here(call_of(head_dim, dtype), architecture):
        compiled = triton.compile(source_of(launch), target=target_of(architecture), options=launch.options)
        report = {
            "kernel": launch.kernel.__name__,
            "architecture": architecture,
            "head_dim": head_dim,
            "dtype": str(dtype),
            "shared_bytes": compiled.metadata.shared,
            "stack_bytes": stack_bytes(compiled),
            "tiles": launch.tiles._asdict(),
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET"):
        sys.exit("TRITON_INTERPRET is set: there is nothing to compile.")
    parser = argparse.ArgumentParser()
    parser.add_argument("targets", nargs="+", help="architecture:head_dim")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--near-field", action="store_true", help="the near field's kernels instead of the others")
    options = parser.parse_args()
    for target in options.targets:
        architecture, head_dim = target.split(":")
        main(architecture, int(head_dim), getattr(torch, options.dtype), options.near_field)
