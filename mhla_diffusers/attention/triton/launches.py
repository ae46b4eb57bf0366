"""What each kernel is launched with, and what it writes."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton

from ..call import Call
from ..reference import OUTPUT_NORM_EPS
from .arguments import Layout, Numbers, Rows, allocate, layout, like, numbers, rotary_rows, rows, state_shape
from .backward_kernels import key_value_gradient_kernel, query_gradient_kernel, summary_gradient_kernel
from .forward_kernels import output_kernel, summary_kernel
from .tuning import SUMMARY_KERNELS, AnyTiling, architecture_of, parts_per_block, precision_of, processors_of, tiling


@dataclass(frozen=True)
class Launch:
    """One kernel with everything it takes."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tiles: AnyTiling

    @property
    def name(self) -> str:
        """Of the kernel, as :mod:`.tuning` spells it."""
        return str(self.kernel.__name__.removesuffix("_kernel"))

    @property
    def moved_bytes(self) -> int:
        """Of all tensors that the kernel reads or writes, each once: about the least that must move."""
        return sum(tensor.nbytes for tensor in {id(x): x for x in _tensors_of(self.arguments.values())}.values())

    @property
    def options(self) -> dict[str, Any]:
        """What Triton compiles the kernel with besides its constants."""
        return {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch the kernel on the device of its tensors."""
        device = next(_tensors_of(self.arguments.values())).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[(self.programs,)](**self.arguments, **self.constants, **self.options)


def summary_launch(call: Call, architecture: str | None = None) -> tuple[Launch, torch.Tensor]:
    """KV summaries and key sums of all blocks: float32 (B, H, M, parts, D + normalize, D)."""
    shape = KernelShape(call, "summary", architecture)
    summaries = shape.new_partial_states()
    arguments = {
        "key": rows(call.key),
        "value": rows(call.value),
        "rotary": rotary_rows(call),
        "key_mask": call.key_mask,
        "summaries": summaries,
        "layout": shape.layout,
        "eps": call.eps,
    }
    return shape.launch(summary_kernel, arguments, "BLOCK_E"), summaries


def output_launch(
    call: Call, mixed: torch.Tensor, with_normaliser: bool, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor | None]:
    """Output (B, N, H, D) from the mixed summaries (B, H, M, D + normalize, D), normaliser float32 (B, N, H, 1)."""
    shape = KernelShape(call, "output", architecture)
    output = like(call.query)
    normaliser = None
    if with_normaliser:
        normaliser = allocate((*call.query.shape[:3], 1), torch.float32, call.query.device)
    arguments = {
        "query": rows(call.query),
        "rotary": rotary_rows(call),
        "mixed": mixed,
        "output_norm": call.output_norm,
        "output_gate": _optional(rows, call.output_gate),
        "output": output,
        "normalisers": _optional(numbers, normaliser),
        "layout": shape.layout,
        "eps": call.eps,
        "norm_eps": OUTPUT_NORM_EPS,
    }
    return shape.launch(output_kernel, arguments, "BLOCK_C"), output, normaliser


@dataclass(frozen=True)
class QueryGradients:
    """What the query kernel of the backward pass writes."""

    query: torch.Tensor
    """(B, N, H, D)."""
    gate: torch.Tensor | None
    """(B, N, H, D)."""
    norm: torch.Tensor | None
    """One share of the norm weight's gradient per program: float32 (programs, D)."""
    token_numbers: torch.Tensor
    """For :func:`summary_gradient_launch`: float32 (B, H, 3, N)."""


def query_gradient_launch(
    call: Call,
    mixed: torch.Tensor,
    output_gradient: torch.Tensor,
    normaliser_gradient: torch.Tensor | None,
    architecture: str | None = None,
) -> tuple[Launch, QueryGradients]:
    """Gradients of what belongs to the query's side."""
    shape = KernelShape(call, "query_gradient", architecture)
    batch, tokens, heads, head_dim = call.query.shape
    device = call.query.device
    gradients = QueryGradients(
        query=like(call.query),
        gate=like(call.output_gate) if call.output_gate is not None else None,
        norm=allocate((shape.programs, head_dim), torch.float32, device) if call.output_norm is not None else None,
        token_numbers=allocate((batch, heads, 3, tokens), torch.float32, device),
    )
    arguments = {
        "query": rows(call.query),
        "rotary": rotary_rows(call),
        "mixed": mixed,
        "output_norm": call.output_norm,
        "output_gate": _optional(rows, call.output_gate),
        "output_gradient": rows(output_gradient),
        "of_normalisers": _optional(numbers, normaliser_gradient),
        "query_gradient": gradients.query,
        "gate_gradient": gradients.gate,
        "norm_gradients": gradients.norm,
        "token_numbers": gradients.token_numbers,
        "layout": shape.layout,
        "eps": call.eps,
        "norm_eps": OUTPUT_NORM_EPS,
    }
    return shape.launch(query_gradient_kernel, arguments, "BLOCK_C"), gradients


def summary_gradient_launch(
    call: Call,
    mixed: torch.Tensor,
    output_gradient: torch.Tensor,
    token_numbers: torch.Tensor,
    architecture: str | None = None,
) -> tuple[Launch, torch.Tensor]:
    """Gradient of the mixed summaries: float32 (B, H, M, parts, D + normalize, D)."""
    shape = KernelShape(call, "summary_gradient", architecture)
    gradients = shape.new_partial_states()
    arguments = {
        "query": rows(call.query),
        "rotary": rotary_rows(call),
        "mixed": mixed,
        "output_norm": call.output_norm,
        "output_gate": _optional(rows, call.output_gate),
        "output_gradient": rows(output_gradient),
        "token_numbers": token_numbers,
        "summary_gradients": gradients,
        "layout": shape.layout,
        "eps": call.eps,
    }
    return shape.launch(summary_gradient_kernel, arguments, "BLOCK_E"), gradients


def key_value_gradient_launch(
    call: Call, summary_gradient: torch.Tensor, architecture: str | None = None
) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of key and value (B, N, H, D) from that of the summaries (B, H, M, D + normalize, D)."""
    shape = KernelShape(call, "key_value_gradient", architecture)
    key_gradient, value_gradient = like(call.key), like(call.value)
    arguments = {
        "key": rows(call.key),
        "value": rows(call.value),
        "rotary": rotary_rows(call),
        "key_mask": call.key_mask,
        "summary_gradient": summary_gradient,
        "key_gradient": key_gradient,
        "value_gradient": value_gradient,
        "layout": shape.layout,
        "eps": call.eps,
    }
    return shape.launch(key_value_gradient_kernel, arguments, "BLOCK_C"), (key_gradient, value_gradient)


class KernelShape:
    """Tiles, programs and layout of one kernel for one call."""

    def __init__(self, call: Call, kernel: str, architecture: str | None) -> None:
        batch, _, heads, head_dim = call.query.shape
        name = architecture or architecture_of(call.query.device)
        longest_block = math.prod(-(-n // b) for n, b in zip(call.grid, call.blocks, strict=True))
        self.call = call
        self.tiles = tiling(kernel, head_dim, call.query.dtype, longest_block, name)
        columns = -(-head_dim // self.tiles.channels) if kernel in SUMMARY_KERNELS else 1
        whole_blocks = batch * heads * math.prod(call.blocks) * columns
        parts = parts_per_block(whole_blocks, longest_block, self.tiles.tokens, processors_of(call.query.device, name))
        self.programs = whole_blocks * parts
        self.parts = parts
        self.precision = precision_of(call.query.dtype, name)
        self.layout: Layout = layout(heads, call.grid, call.blocks, parts)

    def new_partial_states(self) -> torch.Tensor:
        """float32 (B, H, M, parts, D + normalize, D), not filled."""
        *blocks, channels, columns = state_shape(self.call)
        return allocate((*blocks, self.parts, channels, columns), torch.float32, self.call.query.device)

    def launch(self, kernel: Any, arguments: dict[str, Any], channels_name: str) -> Launch:
        """``kernel`` with those of the shared constants that it takes; ``channels_name`` is BLOCK_C or BLOCK_E."""
        head_dim = self.call.query.shape[3]
        constants = {
            "HEAD_DIM": head_dim,
            "BLOCK_D": max(16, triton.next_power_of_2(head_dim)),
            channels_name: self.tiles.channels,
            "BLOCK_T": self.tiles.tokens,
            "FEATURE_MAP": self.call.feature_map,
            "ROPE_BEFORE": self.call.rope == "before",
            "NORMALIZE": self.call.normalize,
            "PRECISION": self.precision,
        }
        taken = {name: value for name, value in constants.items() if name in kernel.arg_names}
        return Launch(kernel, self.programs, arguments, taken, self.tiles)


def _tensors_of(values: Iterable[Any]) -> Iterator[torch.Tensor]:
    for value in values:
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors_of(value)


def _optional(
    as_argument: Callable[[torch.Tensor], Rows | Numbers], tensor: torch.Tensor | None
) -> Rows | Numbers | None:
    return as_argument(tensor) if tensor is not None else None
