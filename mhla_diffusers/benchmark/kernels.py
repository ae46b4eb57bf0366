"""What every kernel needs on a GPU that need not be there: compiled ahead of time, counted, nothing measured."""

import math
import re
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.jit import create_function_from_signature

from ..attention import Call
from ..attention.triton import (
    exact_backward,
    exact_forward,
    exact_key_gradients,
    launches,
    mixing_kernels,
    own_block_backward,
    own_block_forward,
    rotation,
)
from ..attention.triton.arguments import Angles, Rows, mixed_dtype, state_shape
from ..attention.triton.exact_lists import ExactCall, lists_of_keys
from ..attention.triton.launches import Launch
from ..attention.triton.tuning import PROCESSORS
from .shapes import Shape

_WARPS = {"sm_80": 64, "sm_90": 64, "sm_100": 64}
"""Per NVIDIA processor; 48 on the others."""
_REGISTERS = 65_536
"""Per NVIDIA processor."""
_SHARED_KIB = {"sm_80": 164, "sm_86": 100, "sm_89": 100, "sm_90": 228, "sm_100": 228, "sm_120": 100}
"""Per NVIDIA processor; a program takes one KiB besides its own."""


@dataclass(frozen=True)
class KernelReport:
    """One kernel of one call on one architecture. Counted or read from the compiled code."""

    kernel: str
    architecture: str
    tiles: dict[str, int]
    registers: int
    """Per thread."""
    stack_bytes: int
    """Per thread: what did not fit into registers."""
    shared_bytes: int
    """Per program."""
    programs: int
    bytes: int
    """Of all tensors that it takes, each once: about the least that must move."""
    flops: int
    """Of its matrix products; a multiplication and an addition count two, and one in three bfloat16 terms once."""
    waves: float | None
    """Programs over what the card's processors hold at once; None for AMD, whose limits are not counted here."""


_PRODUCTS = {
    "summary": 1,
    "output": 1,
    "query_gradient": 2,
    "summary_gradient": 1,
    "key_value_gradient": 2,
    "rotate": 0,
    "means": 0,
    "exact": 2,
    "exact_query_gradient": 3,
    "mean_gradient": 4,
    "exact_key_value_gradient": 4,
    "own_block": 2,
    "own_block_query_gradient": 3,
    "own_block_key_value_gradient": 4,
}
"""Matrix products: of each token with a D x D summary, or of D channels for each pair of a query and a key or mean."""


def launches_of(call: Call, architecture: str) -> list[Launch]:
    """One launch of each kernel of MHLA, forward and backward."""
    state, of_state = (torch.empty(state_shape(call), device="meta") for _ in range(2))
    mixed = state.to(mixed_dtype(call))
    numbers = torch.empty(*call.query.shape[:3], 1, device="meta")
    upstream, dtype = torch.empty_like(call.query), call.query.dtype
    query_gradient, gradients = launches.query_gradient_launch(call, state, upstream, numbers, architecture)
    return [
        launches.summary_launch(call, architecture)[0],
        mixing_kernels.mix_launch(call.mixing, state, dtype, mixed.dtype, architecture=architecture)[0],
        launches.output_launch(call, mixed, True, architecture)[0],
        query_gradient,
        launches.summary_gradient_launch(call, state, upstream, gradients.token_numbers, architecture)[0],
        mixing_kernels.mixing_gradient_launch(state, of_state, dtype, architecture)[0],
        launches.key_value_gradient_launch(call, of_state, architecture)[0],
    ]


def exact_launches_of(call: ExactCall, table: Angles | None, architecture: str) -> list[Launch]:
    """One launch of each kernel of the exact tiles, forward and backward; ``table`` is that of RoPE."""
    of_rope = []
    if table is not None:
        of_rope.append(rotation.rotate_launch(call.query, table, call.grid, False, architecture)[0])
    lists = lists_of_keys(call)
    of_means, means = exact_forward.means_launch(call, lists, architecture)
    of_output, output, log_sum = exact_forward.exact_launch(call, lists, means, architecture)
    upstream = torch.empty_like(output), torch.empty_like(log_sum)
    known = exact_key_gradients.OutputSide(output, log_sum, *upstream)
    of_query, side = exact_backward.query_gradient_launch(call, lists, means, known, architecture)
    mean_gradient, shares = exact_key_gradients.mean_gradient_launch(call, means, known, side, architecture)
    of_key, _ = exact_key_gradients.key_value_gradient_launch(call, lists, means, shares, known, side, architecture)
    return [*of_rope, of_means, of_output, of_query, mean_gradient, of_key]


def own_block_launches_of(call: Call, has_softmax: bool, architecture: str) -> list[Launch]:
    """One launch of each kernel of the own block, forward and backward; see :func:`sequence_call_of`."""
    of_output, output, log_sum = own_block_forward.own_block_launch(call, has_softmax, architecture)
    log_sum = output[..., :1] if log_sum is None else log_sum
    side = exact_key_gradients.OutputSide(output, log_sum, torch.empty_like(output), torch.empty_like(log_sum))
    of_query, _, products = own_block_backward.query_gradient_launch(call, has_softmax, side, architecture)
    of_key, _ = own_block_backward.key_value_gradient_launch(call, has_softmax, side, products, architecture)
    return [of_output, of_query, of_key]


def call_of(shape: Shape, dtype: torch.dtype, batch: int, *, everything: bool) -> Call:
    """A call of a shape without memory behind it, with the RoPE of its model.

    Args:
        shape: the attention.
        dtype: of query, key and value.
        batch: samples.
        everything: RoPE for all, with a row for every token where the model has none, and key mask, output norm and
            gate: the variant that needs the most of a card.
    """
    tokens, head_dim, blocks = shape.tokens, shape.head_dim, math.prod(shape.blocks)
    query, key, value, gate = _rows(shape, dtype, batch)
    rotary = None
    if shape.rotary_axes is not None:
        rotary = torch.empty(1, sum(shape.grid), 1, head_dim, device="meta")
    elif everything:
        rotary = torch.empty(1, tokens, 1, head_dim, device="meta")
    return Call(
        query=query,
        key=key,
        value=value,
        mixing=torch.empty(shape.heads, blocks, blocks, device="meta"),
        grid=shape.grid,
        blocks=shape.blocks,
        rotary=rotary,
        rotary_axes=shape.rotary_axes,
        key_mask=torch.empty(batch, tokens, device="meta") if everything else None,
        output_norm=torch.empty(head_dim, device="meta") if everything else None,
        output_gate=gate if everything else None,
    )


def sequence_call_of(call: Call, block_length: int, has_softmax: bool) -> Call:
    """The tokens of a call as a sequence in blocks, as the kernels of the own block read it: after RoPE for softmax.

    Args:
        call: that :func:`call_of` gave.
        block_length: tokens per block; the last one may be shorter.
        has_softmax: whether the own block is attended to with softmax.
    """
    tokens, head_dim = call.query.shape[1], call.query.shape[3]
    count = -(-tokens // block_length)
    rotary = None if has_softmax or call.rotary is None else torch.empty(1, tokens, 1, head_dim, device="meta")
    return replace(
        call,
        mixing=torch.empty(call.query.shape[2], count, count, device="meta"),
        grid=(count * block_length,),
        blocks=(count,),
        rotary=rotary,
        rotary_axes=None,
        output_norm=None,
        output_gate=None,
        feature_map="identity" if has_softmax else call.feature_map,
        causal="token",
    )


def _rows(shape: Shape, dtype: torch.dtype, batch: int) -> list[torch.Tensor]:
    """Four tensors (B, N, H, D)."""
    size = (batch, shape.tokens, shape.heads, shape.head_dim)
    return [torch.empty(size, dtype=dtype, device="meta") for _ in range(4)]


def exact_call_of(
    shape: Shape, tiles: tuple[int, ...], dtype: torch.dtype, batch: int, *, everything: bool
) -> ExactCall:
    """The exact tiles of a shape, with means: as :func:`call_of`, with as many pairs as the shape's share says."""
    query, key, value, _ = _rows(shape, dtype, batch)
    lists = shape.heads * math.prod(tiles)
    pairs = round(lists * math.prod(tiles) * shape.share)
    return ExactCall(
        query=query,
        key=key,
        value=value,
        pooled_bias=torch.empty(shape.heads, device="meta"),
        key_mask=torch.empty(batch, shape.tokens, device="meta") if everything else None,
        offsets=torch.empty(lists + 1, dtype=torch.int64, device="meta"),
        tiles=torch.empty(pairs, dtype=torch.int64, device="meta"),
        grid=shape.grid,
        counts=tiles,
    )


def variant_of(launch: Launch, architecture: str) -> ASTSource:
    """The kernel as Triton specialises it at this launch, by Triton's own binder.

    Of two launches that take the same compiled code, ``hash()`` of the two is the same.
    """
    backend = make_backend(target_of(architecture))
    kernel = launch.kernel
    bind = create_function_from_signature(kernel.signature, kernel.params, backend)
    options = launch.options
    bound, specialization, _ = bind(**launch.arguments, **launch.constants, **options)
    _, signature, constants, attributes = kernel._pack_args(backend, options, bound, specialization, options)
    return ASTSource(kernel, signature, constants, attributes)


def report_kernel(launch: Launch, architecture: str) -> KernelReport:
    """Compile one kernel for an architecture.

    Raises:
        ValueError: Triton runs as an interpreter, which compiles nothing.
    """
    if triton.knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set, and the interpreter compiles nothing; unset it.")
    compiled = triton.compile(
        variant_of(launch, architecture), target=target_of(architecture), options=dict(launch.options)
    )
    registers, stack = _registers_and_stack(compiled)
    shared = int(compiled.metadata.shared)
    return KernelReport(
        launch.name,
        architecture,
        launch.tiles._asdict(),
        registers,
        stack,
        shared,
        launch.programs,
        launch.moved_bytes,
        _flops(launch),
        _waves(launch, architecture, registers, shared),
    )


def target_of(architecture: str) -> GPUTarget:
    """Triton's target of "sm_90", "gfx942"."""
    if architecture.startswith("sm_"):
        return GPUTarget("cuda", int(architecture.removeprefix("sm_")), 32)
    return GPUTarget("hip", architecture, 64)


def _flops(launch: Launch) -> int:
    given = launch.arguments
    if launch.name in ("mix", "mixing_gradient"):
        return 2 * given["summaries"].numel() * given["summaries"].shape[2]
    rows: Rows = given["query" if "query" in given else "key"]
    batch, tokens, heads, head_dim = torch.as_tensor(rows.pointer).shape
    means, lists = given.get("means"), given.get("lists")
    if launch.name.startswith("own_block"):  # about half of the pairs within a block
        return _PRODUCTS[launch.name] * batch * heads * tokens * launch.place.length * head_dim
    if means is None and lists is None:
        pairs = batch * tokens * heads * head_dim
    else:
        pairs = 0
        if lists is not None:  # of a pair of tiles, those of the longest; without lists of their own, samples share
            shared = batch if len(lists.offsets) - 1 == heads * len(lists.tokens) else 1
            pairs += shared * len(lists.tiles) * lists.tokens.shape[1] ** 2
        if means is not None and launch.name != "exact_key_value_gradient":
            pairs += batch * heads * tokens * means.key.shape[1]
    products = _PRODUCTS[launch.name] + (launch.name == "summary_gradient" and given["output_norm"] is not None)
    return 2 * products * pairs * head_dim


def _waves(launch: Launch, architecture: str, registers: int, shared: int) -> float | None:
    if not architecture.startswith("sm_"):
        return None
    by_registers = _REGISTERS // (32 * launch.tiles.warps * -(-registers // 8) * 8)
    by_memory = _SHARED_KIB[architecture] * 1024 // (shared + 1024)
    by_warps = _WARPS.get(architecture, 48) // launch.tiles.warps
    return launch.programs / (PROCESSORS[architecture] * max(1, min(by_registers, by_memory, by_warps)))


def _registers_and_stack(compiled: Any) -> tuple[int, int]:
    """Per thread."""
    if "cubin" not in compiled.asm:
        report = compiled.asm["amdgcn"]
        registers, stack = (
            int(_only(rf"\.{name}:\s*(\d+)", report)) for name in ("vgpr_count", "private_segment_fixed_size")
        )
        return registers, stack
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), "--dump-resource-usage", file.name]
        report = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return int(_only(r"REG:(\d+)", report)), sum(int(n) for n in re.findall(r"(?:STACK|LOCAL):(\d+)", report))


def _only(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    if found is None:
        raise ValueError(f"{pattern} is not in Triton's report of a compiled kernel; its form has changed.")
    return found[1]
