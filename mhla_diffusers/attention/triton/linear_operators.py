"""MHLA's linear branch as PyTorch operators, for autograd and torch.compile: states, mixing, reading.

Query, key and value are rows in the order of sparse attention's blocks, (B, H, R, D), after RoPE. Importing this file
registers the operators without importing Triton, which the first call does.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..blocks import Shape, block_index, smallest_and_largest
from ..layout import layout_of
from ..reference import OUTPUT_NORM_EPS
from .operators import refuse_second_derivative

if TYPE_CHECKING:
    from .linear import Blocks, Branches

_PLACE = "SymInt[] grid, SymInt[] blocks, SymInt block_size, str feature_map, float eps"
_STATES = f"Tensor key, Tensor value, Tensor? key_mask, {_PLACE}"


@lru_cache(maxsize=64)
def _blocks_of(grid: Shape, blocks: Shape, block_size: int, device: torch.device) -> "Blocks":
    """MHLA's blocks as the kernels find their tokens."""
    from .linear import Blocks

    index = block_index(grid, blocks)
    places = index.argsort(stable=True)
    starts = torch.nn.functional.pad(index.bincount(minlength=int(index.max()) + 1).cumsum(dim=0), (1, 0))
    members = layout_of(grid, block_size).rows[places]
    members, places, starts = (x.to(torch.int32).to(device) for x in (members, places, starts))
    return Blocks(members, places, starts, smallest_and_largest(grid, blocks)[1])


def _place(key: torch.Tensor, place: Sequence[Any]) -> tuple["Blocks", Any]:
    """Tables and features, of the last arguments of an operator."""
    from .linear_features import Features

    grid, blocks, block_size, feature_map, eps = place
    return _blocks_of(tuple(grid), tuple(blocks), block_size, key.device), Features(feature_map, eps)


@torch.library.custom_op("mhla_diffusers::block_states", mutates_args=(), schema=f"({_STATES}) -> (Tensor, Tensor)")
def block_states(
    key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None, *place: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`mhla_diffusers.attention.triton.linear.states_forward`."""
    from .linear import states_forward

    blocks, features = _place(key, place)
    states, sums = states_forward(key.transpose(1, 2), value.transpose(1, 2), blocks, features, key_mask, True)
    return states, key.new_empty(0) if sums is None else sums


@torch.library.custom_op(
    "mhla_diffusers::block_states_backward",
    mutates_args=(),
    schema=f"(Tensor states_gradient, Tensor sums_gradient, {_STATES}) -> (Tensor, Tensor)",
)
def block_states_backward(
    states_gradient: torch.Tensor,
    sums_gradient: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    *place: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of key and value, like them."""
    from .linear_backward import states_backward

    blocks, features = _place(key, place)
    rows = key.transpose(1, 2), value.transpose(1, 2)
    found = states_backward(states_gradient, sums_gradient, *rows, blocks, features, key_mask)
    of_key, of_value = (x.transpose(1, 2).contiguous() for x in found)
    return of_key, of_value


@block_states.register_fake
def _state_shapes(key: torch.Tensor, value: Any, key_mask: Any, *place: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, _, head_dim = key.shape
    count = 1
    for blocks in place[1]:
        count = count * blocks
    dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float32
    states = key.new_empty((batch, heads, count, head_dim, head_dim), dtype=dtype)
    return states, key.new_empty((batch, heads, count, head_dim), dtype=torch.float32)


@block_states_backward.register_fake
def _state_gradient_shapes(states: Any, sums: Any, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(key), torch.empty_like(key)


def _save_states(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:3])
    ctx.place = inputs[3:]


def _differentiate_states(ctx: Any, states_gradient: torch.Tensor, sums_gradient: torch.Tensor) -> tuple[Any, ...]:
    upstream = states_gradient.contiguous(), sums_gradient.contiguous()
    return *block_states_backward(*upstream, *ctx.saved_tensors, *ctx.place), *(None,) * 6


block_states.register_autograd(_differentiate_states, setup_context=_save_states)
block_states_backward.register_autograd(refuse_second_derivative)


@torch.library.custom_op("mhla_diffusers::mix_states", mutates_args=())
def mix_states(mixing: torch.Tensor, states: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`mhla_diffusers.attention.triton.linear.mix`."""
    from .linear import mix

    mixed, mixed_sums = mix(mixing, states, sums)
    return mixed, sums.new_empty(0) if mixed_sums is None else mixed_sums


@torch.library.custom_op("mhla_diffusers::mix_states_backward", mutates_args=())
def mix_states_backward(
    mixed_gradient: torch.Tensor,
    sums_gradient: torch.Tensor,
    mixing: torch.Tensor,
    states: torch.Tensor,
    sums: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of mixing matrix, states and normaliser states."""
    from .linear_backward import mix_backward

    of_mixing, of_states, of_sums = mix_backward(mixed_gradient, sums_gradient, mixing, states, sums)
    return of_mixing.to(mixing.dtype), of_states, torch.zeros_like(sums) if of_sums is None else of_sums


@mix_states.register_fake
def _mixed_shapes(mixing: torch.Tensor, states: torch.Tensor, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.empty_like(states), torch.empty_like(sums)


@mix_states_backward.register_fake
def _mixed_gradient_shapes(*arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(torch.empty_like(x) for x in arguments[2:])


def _save_mix(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate_mix(ctx: Any, mixed_gradient: torch.Tensor, sums_gradient: torch.Tensor) -> tuple[Any, ...]:
    return mix_states_backward(mixed_gradient.contiguous(), sums_gradient.contiguous(), *ctx.saved_tensors)


mix_states.register_autograd(_differentiate_mix, setup_context=_save_mix)
mix_states_backward.register_autograd(refuse_second_derivative)

_READ = (
    "Tensor query, Tensor states, Tensor sums, Tensor listed, Tensor listed_lse, Tensor? pooled, Tensor? pooled_lse, "
    f"Tensor linear_weight, Tensor? output_norm, Tensor? gate, {_PLACE}"
)
_READ_TENSORS = 10


def _branches(tensors: Sequence[torch.Tensor | None]) -> "Branches":
    """Of the tensors from ``listed`` to ``linear_weight``; β is in the LSE of the means already."""
    from .linear import Branches

    listed, listed_lse, pooled, pooled_lse, weight = tensors
    if listed is None or listed_lse is None or weight is None:
        raise ValueError("Reading beside sparse attention needs its output, its LSE and λ.")
    bias = None if pooled is None else torch.zeros_like(weight)
    return Branches(listed, listed_lse, pooled, pooled_lse, bias, weight)


@torch.library.custom_op("mhla_diffusers::read_states", mutates_args=(), schema=f"({_READ}) -> Tensor")
def read_states(query: torch.Tensor, states: torch.Tensor, sums: torch.Tensor, *others: Any) -> torch.Tensor:
    """See :func:`mhla_diffusers.attention.triton.linear.read_forward`: (B, N, H, D) in raster order."""
    from .linear import read_forward

    blocks, features = _place(query, others[7:])
    norm, gate = others[5:7]
    gate = None if gate is None else gate.contiguous()
    branches = _branches(others[:5])
    return read_forward(query.transpose(1, 2), states, sums, blocks, features, branches, norm, OUTPUT_NORM_EPS, gate)


@torch.library.custom_op(
    "mhla_diffusers::read_states_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, {_READ}) -> ({', '.join(['Tensor'] * _READ_TENSORS)})",
)
def read_states_backward(
    output_gradient: torch.Tensor, query: torch.Tensor, states: torch.Tensor, sums: torch.Tensor, *others: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of all tensors; an absent one is empty."""
    from .linear_backward import read_backward

    blocks, features = _place(query, others[7:])
    norm, gate = others[5:7]
    gate = None if gate is None else gate.contiguous()
    found = read_backward(
        output_gradient,
        query.transpose(1, 2),
        states,
        sums,
        blocks,
        features,
        _branches(others[:5]),
        norm,
        OUTPUT_NORM_EPS,
        gate,
    )
    of_norm = None if norm is None or found.output_norm is None else found.output_norm.to(norm.dtype)
    gradients = (
        found.query.transpose(1, 2).contiguous(),
        found.states,
        found.sums,
        found.listed,
        found.listed_lse,
        found.pooled,
        found.pooled_lse,
        found.linear_weight,
        of_norm,
        found.gate,
    )
    return tuple(output_gradient.new_empty(0) if x is None else x for x in gradients)


@read_states.register_fake
def _read_shape(query: torch.Tensor, states: Any, sums: Any, *others: Any) -> torch.Tensor:
    batch, heads, _, head_dim = query.shape
    count = 1
    for size in others[7]:
        count = count * size
    return query.new_empty((batch, count, heads, head_dim))


@read_states_backward.register_fake
def _read_gradient_shapes(output_gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors = arguments[:_READ_TENSORS]
    return tuple(output_gradient.new_empty(0) if x is None else torch.empty_like(x) for x in tensors)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_READ_TENSORS])
    ctx.place = inputs[_READ_TENSORS:]


def _differentiate_read(ctx: Any, output_gradient: torch.Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    found = read_states_backward(output_gradient.contiguous(), *tensors, *ctx.place)
    present = (None if x is None else gradient for x, gradient in zip(tensors, found, strict=True))
    return *present, *(None,) * 5


read_states.register_autograd(_differentiate_read, setup_context=_save_read)
read_states_backward.register_autograd(refuse_second_derivative)
