"""What each kernel is launched with, and what it writes."""

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from ..blocks import Shape
from ..call import Call
from ..reference import OUTPUT_NORM_EPS
from .arguments import Layout, Numbers, Rows, allocate, angles_of, layout, like, numbers, rows, state_shape
from .backward_kernels import key_value_gradient_kernel, query_gradient_kernel, summary_gradient_kernel
from .forward_kernels import output_kernel, summary_kernel
from .tilings import AnyTiling, Place, Tiling, wished
from .tuning import (
    SUMMARY_KERNELS,
    architecture_of,
    name_of,
    parts_per_block,
    power_of_two,
    precision_of,
    processors_of,
    tiling,
)


@dataclass(frozen=True)
class Launch:
    """One kernel with everything it takes."""

    kernel: Any
    programs: int
    arguments: dict[str, Any]
    constants: dict[str, Any]
    place: Place
    tiles: AnyTiling

    @property
    def name(self) -> str:
        """Of the kernel, as :mod:`.tuning` spells it."""
        return self.place.kernel

    @property
    def moved_bytes(self) -> int:
        """Of all tensors that the kernel reads or writes, each once: about the least that must move."""
        return sum(map(_bytes_of, {id(x): x for x in _tensors_of(self.arguments.values())}.values()))

    @property
    def options(self) -> dict[str, Any]:
        """What Triton compiles the kernel with besides its constants."""
        return {"num_warps": self.tiles.warps, "num_stages": self.tiles.stages, "enable_fp_fusion": True}

    def run(self) -> None:
        """Launch the kernel on the device of its tensors, or do what :func:`launched_by` says."""
        (_LAUNCHERS[-1] if _LAUNCHERS else Launch.start)(self)

    def start(self) -> None:
        """Launch the kernel on the device of its tensors."""
        device = next(_tensors_of(self.arguments.values())).device
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            self.kernel[(self.programs,)](**self.arguments, **self.constants, **self.options)


_LAUNCHERS: list[Callable[[Launch], None]] = []


@contextmanager
def launched_by(launch: Callable[[Launch], None]) -> Iterator[None]:
    """Within the context every launch is handed to a function instead: for looking at them, or leaving them out."""
    _LAUNCHERS.append(launch)
    try:
        yield
    finally:
        _LAUNCHERS.pop()


def summary_launch(call: Call, architecture: str | None = None) -> tuple[Launch, torch.Tensor]:
    """KV summaries and key sums of all blocks: float32 (B, H, M, parts, D + normalize, D)."""
    plan = plan_of(summary_kernel, call, architecture)
    summaries = plan.new_partial_states(call)
    arguments = {
        "key": rows(call.key),
        "value": rows(call.value),
        "angles": angles_of(call),
        "key_mask": call.key_mask,
        "summaries": summaries,
        "eps": call.eps,
    }
    return plan.launch(arguments), summaries


def output_launch(
    call: Call, mixed: torch.Tensor, with_normaliser: bool, architecture: str | None = None
) -> tuple[Launch, torch.Tensor, torch.Tensor | None]:
    """Output (B, N, H, D) from the mixed summaries (B, H, M, D + normalize, D), normaliser float32 (B, N, H, 1)."""
    plan = plan_of(output_kernel, call, architecture)
    output = like(call.query)
    normaliser = None
    if with_normaliser:
        normaliser = allocate((*call.query.shape[:3], 1), torch.float32, call.query.device)
    arguments = {
        "query": rows(call.query),
        "angles": angles_of(call),
        "mixed": mixed,
        "output_norm": call.output_norm,
        "output_gate": _optional(rows, call.output_gate),
        "output": output,
        "normalisers": _optional(numbers, normaliser),
        "eps": call.eps,
        "norm_eps": OUTPUT_NORM_EPS,
    }
    return plan.launch(arguments), output, normaliser


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
    plan = plan_of(query_gradient_kernel, call, architecture)
    batch, tokens, heads, head_dim = call.query.shape
    device = call.query.device
    gradients = QueryGradients(
        query=like(call.query),
        gate=like(call.output_gate) if call.output_gate is not None else None,
        norm=allocate((plan.programs, head_dim), torch.float32, device) if call.output_norm is not None else None,
        token_numbers=allocate((batch, heads, 3, tokens), torch.float32, device),
    )
    arguments = {
        "query": rows(call.query),
        "angles": angles_of(call),
        "mixed": mixed,
        "output_norm": call.output_norm,
        "output_gate": _optional(rows, call.output_gate),
        "output_gradient": rows(output_gradient),
        "of_normalisers": _optional(numbers, normaliser_gradient),
        "query_gradient": gradients.query,
        "gate_gradient": gradients.gate,
        "norm_gradients": gradients.norm,
        "token_numbers": gradients.token_numbers,
        "eps": call.eps,
        "norm_eps": OUTPUT_NORM_EPS,
    }
    return plan.launch(arguments), gradients


def summary_gradient_launch(
    call: Call,
    mixed: torch.Tensor,
    output_gradient: torch.Tensor,
    token_numbers: torch.Tensor,
    architecture: str | None = None,
) -> tuple[Launch, torch.Tensor]:
    """Gradient of the mixed summaries: float32 (B, H, M, parts, D + normalize, D)."""
    plan = plan_of(summary_gradient_kernel, call, architecture)
    gradients = plan.new_partial_states(call)
    arguments = {
        "query": rows(call.query),
        "angles": angles_of(call),
        "mixed": mixed,
        "output_norm": call.output_norm,
        "output_gate": _optional(rows, call.output_gate),
        "output_gradient": rows(output_gradient),
        "token_numbers": token_numbers,
        "summary_gradients": gradients,
        "eps": call.eps,
    }
    return plan.launch(arguments), gradients


def key_value_gradient_launch(
    call: Call, summary_gradient: torch.Tensor, architecture: str | None = None
) -> tuple[Launch, tuple[torch.Tensor, torch.Tensor]]:
    """Gradients of key and value (B, N, H, D) from that of the summaries (B, H, M, D + normalize, D)."""
    plan = plan_of(key_value_gradient_kernel, call, architecture)
    key_gradient, value_gradient = like(call.key), like(call.value)
    arguments = {
        "key": rows(call.key),
        "value": rows(call.value),
        "angles": angles_of(call),
        "key_mask": call.key_mask,
        "summary_gradient": summary_gradient,
        "key_gradient": key_gradient,
        "value_gradient": value_gradient,
        "eps": call.eps,
    }
    return plan.launch(arguments), (key_gradient, value_gradient)


@dataclass(frozen=True)
class Plan:
    """How one kernel runs: the same for all calls of one size, so it is made once for each."""

    kernel: Any
    place: Place
    tiles: Tiling
    programs: int
    parts: int
    """Programs that share the tokens of one block."""
    layout: Layout
    constants: dict[str, Any]
    """Those of the shared ones that the kernel takes."""

    def new_partial_states(self, call: Call) -> torch.Tensor:
        """float32 (B, H, M, parts, D + normalize, D), not filled."""
        *blocks, channels, columns = state_shape(call)
        return allocate((*blocks, self.parts, channels, columns), torch.float32, call.query.device)

    def launch(self, arguments: dict[str, Any]) -> Launch:
        """With the arguments of the kernel besides the layout."""
        arguments = arguments | {"layout": self.layout}
        return Launch(self.kernel, self.programs, arguments, self.constants, self.place, self.tiles)


def plan_of(kernel: Any, call: Call, architecture: str | None) -> Plan:
    """Looked up by what tiles and constants depend on."""
    settings = call.feature_map, call.rope, call.normalize
    cut = call.grid, call.blocks, call.first
    query = call.query
    card = architecture or architecture_of(query.device)
    return _plan(kernel, query.shape, query.dtype, query.device, cut, settings, card, wished(name_of(kernel)))


@lru_cache(maxsize=1024)
def _plan(
    kernel: Any,
    size: Shape,
    dtype: torch.dtype,
    device: torch.device,
    cut: tuple[Shape, Shape, int],
    settings: tuple[str, str, bool],
    card: str,
    _wish: AnyTiling | None,  # read by the tables themselves; here it tells calls apart
) -> Plan:
    batch, tokens, heads, head_dim = size
    (grid, blocks, first), (feature_map, rope, normalize) = cut, settings
    name = name_of(kernel)
    longest_block = min(tokens, math.prod(-(-n // b) for n, b in zip(grid, blocks, strict=True)))
    place = Place(card, name, head_dim, dtype, longest_block)
    tiles = tiling(place)
    columns = -(-head_dim // tiles.channels) if name in SUMMARY_KERNELS else 1
    whole_blocks = batch * heads * math.prod(blocks) * columns
    parts = parts_per_block(whole_blocks, longest_block, tiles.tokens, processors_of(device, card))
    constants = {
        "HEAD_DIM": head_dim,
        "BLOCK_D": power_of_two(head_dim),
        "BLOCK_E" if name in SUMMARY_KERNELS else "BLOCK_C": tiles.channels,
        "BLOCK_T": tiles.tokens,
        "FEATURE_MAP": feature_map,
        "ROPE_BEFORE": rope == "before",
        "NORMALIZE": normalize,
        "PRECISION": precision_of(dtype, card),
    }
    taken = {key: value for key, value in constants.items() if key in kernel.arg_names}
    return Plan(
        kernel, place, tiles, whole_blocks * parts, parts, layout(heads, grid, blocks, parts, tokens, first), taken
    )


def _bytes_of(tensor: torch.Tensor) -> int:
    """What an expanded tensor repeats counts once."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return math.prod(sizes) * tensor.itemsize


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
