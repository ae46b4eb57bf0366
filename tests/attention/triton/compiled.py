"""What the compiler makes of a launch for a GPU that is not there. Needs a process without TRITON_INTERPRET."""

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

KIB = 1024
SHARED_MEMORY = {
    "sm_80": 163 * KIB,
    "sm_86": 99 * KIB,
    "sm_89": 99 * KIB,
    "sm_90": 227 * KIB,
    "sm_100": 227 * KIB,
    "sm_120": 99 * KIB,
    "gfx942": 64 * KIB,
}
"""What one block (workgroup) may have; from the vendors' tables of limits per architecture."""


@dataclass(frozen=True)
class Compiled:
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread: what did not fit into registers."""
    shared_bytes: int
    text: str
    """PTX, or AMD's assembly."""


def target_of(architecture):
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def variant_of(launch, architecture):
    """The kernel as Triton specialises it at this launch; of two that share compiled code ``hash()`` is the same."""
    backend = make_backend(target_of(architecture))
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    bound, specialization, _ = bind(**launch.arguments, **launch.options)
    _, signature, constants, attributes = kernel._pack_args(
        backend, launch.options, bound, specialization, launch.options
    )
    return ASTSource(kernel, signature, constants, attributes)


def compile_launch(launch, architecture):
    """A launch over tensors of the meta device, compiled for "sm_90" and the like."""
    assert not triton.knobs.runtime.interpret, "the interpreter compiles nothing; unset TRITON_INTERPRET"
    source, target = variant_of(launch, architecture), target_of(architecture)
    compiled = triton.compile(source, target=target, options=dict(launch.options))
    shared = int(compiled.metadata.shared)
    if "cubin" not in compiled.asm:
        text = compiled.asm["amdgcn"]
        return Compiled(
            _number(r"\.vgpr_count:\s*(\d+)", text),
            _number(r"\.private_segment_fixed_size:\s*(\d+)", text),
            shared,
            text,
        )
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    stack = sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", report))
    return Compiled(_number(r"REG:(\d+)", report), stack, shared, compiled.asm["ptx"])


def run_without_interpreter(arguments, folder=None):
    """What Python prints, run with these arguments in a process of its own; ``folder`` is for a cache of its own."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    if folder is not None:
        environment["TRITON_CACHE_DIR"] = str(folder / "cache")
    command, root = [sys.executable, *arguments], Path(__file__).parents[3]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment, cwd=root).stdout


def _number(pattern, text):
    return int(re.search(pattern, text)[1])
