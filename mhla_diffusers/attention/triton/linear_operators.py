"""MHLA as PyTorch operators, for autograd, torch.compile and checkpointing: block states, and reading their mixtures.

Tokens are read as they come, (B, N, H, D), or as rows in the order of sparse attention's blocks, (B, H, R, D). Mixing
is a product of PyTorch between the two operators; processes that hold a share of the tokens each add up their states
there. Importing this file registers the operators without importing Triton, which the first call does.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch

from ..blocks import Shape, blocks_of_range, tokens_by_block
from ..call import Call
from ..layout import layout_of
from ..precision import without_autocast
from ..reference import OUTPUT_NORM_EPS

if TYPE_CHECKING:
    from .linear import Blocks, Reading
    from .linear_features import Features

Branches = tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]
"""Block-sparse attention's: output and LSE of listed keys, (B * H, R, D) and (B * H, R), and of pooled ones or None."""

_PLACE = "SymInt[] grid, SymInt[] blocks, SymInt first, SymInt block_size, str feature_map, float eps, bool rope_before"
"""``block_size`` is 0 for tokens as they come; they are then those of the grid from ``first`` on."""
_STATES = f"Tensor key, Tensor value, Tensor? key_mask, Tensor? angles, {_PLACE}, bool normalize"
_READ = (
    "Tensor query, Tensor states, Tensor? sums, Tensor? listed, Tensor? listed_lse, Tensor? pooled, "
    "Tensor? pooled_lse, Tensor? linear_weight, Tensor? output_norm, Tensor? gate, Tensor? angles, "
    f"{_PLACE}, bool with_normaliser"
)
_STATES_TENSORS, _READ_TENSORS, _READ_DIFFERENTIABLE = 4, 11, 10


def linear_attention(call: Call) -> torch.Tensor:
    """MHLA alone: (B, N, H, D)."""
    return _read(call, *_states(call), False)[0]


def linear_states(call: Call) -> torch.Tensor:
    """States of all blocks from the tokens of a call, to be added up: float32 (B, H, M, D + normalize, D).

    The normaliser state is the last row.
    """
    states, sums = _states(call)
    return states.float() if sums is None else torch.cat([states.float(), sums[..., None, :]], dim=-2)


def linear_read(call: Call, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """What the queries of a call read from the :func:`linear_states` of all tokens.

    Returns:
        Output (B, N, H, D) and, with ``normalize``, normaliser float32 (B, N, H, 1).
    """
    dtype = torch.bfloat16 if call.query.dtype == torch.bfloat16 else torch.float32
    head_dim = call.query.shape[3]
    sums = states[..., head_dim, :].float() if call.normalize else None
    found = _read(call, states[..., :head_dim, :].to(dtype), sums, call.normalize)
    return found if call.normalize else found[:1]


def linear_beside(
    call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, block_size: int, branches: Branches
) -> torch.Tensor:
    """MHLA beside block-sparse attention under one denominator, with norm and gate, in raster order: (B, N, H, D).

    Args:
        call: whose mixing, λ and key mask weigh the linear branch; with normaliser.
        query: (B, H, R, D), rows of blocks of so many tokens after RoPE.
        key: likewise.
        value: likewise.
        block_size: of the blocks.
        branches: of all rows of the query.
    """
    place = list(call.grid), list(call.blocks), 0, block_size, call.feature_map, call.eps, False
    states = block_states(key, value, call.key_mask, None, *place, True)
    weight = None if call.linear_weight is None else call.linear_weight.float()
    others = *branches, weight, call.output_norm, call.output_gate, None
    return read_states(query, *mixed(call.mixing, *states), *others, *place, False)[0]


def _place(call: Call) -> tuple[Any, ...]:
    return list(call.grid), list(call.blocks), call.first, 0, call.feature_map, call.eps, call.rope == "before"


def _states(call: Call) -> tuple[torch.Tensor, torch.Tensor | None]:
    tensors = call.key, call.value, call.key_mask, call.rotary
    states, sums = block_states(*tensors, *_place(call), call.normalize)
    return states, sums if call.normalize else None


def _read(
    call: Call, states: torch.Tensor, sums: torch.Tensor | None, with_normaliser: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    mixture = mixed(call.mixing[..., call.own_blocks, :], states, sums)
    tensors = *(None,) * 5, call.output_norm, call.output_gate, call.rotary
    output, normaliser = read_states(call.query, *mixture, *tensors, *_place(call), with_normaliser)
    return output, normaliser


def mixed(
    mixing: torch.Tensor, states: torch.Tensor, sums: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Multi-Head Mixing: Σ_j m_ij S_j in the type of the states, and Σ_j m_ij z_j in float32.

    Args:
        mixing: (m, M) or (H, m, M), the rows of the blocks that are wanted; its gradient is added up in float32.
        states: (B, H, M, D, D).
        sums: float32 (B, H, M, D), or None.
    """
    mixing = mixing.float().expand(*states.shape[:2], -1, -1)
    mixture = _product(mixing, states.flatten(3)).unflatten(3, states.shape[3:])
    return mixture, None if sums is None else _product(mixing, sums)


def _product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    function: type[torch.autograd.Function] = _Product
    found: torch.Tensor = function.apply(left, right)
    return found


class _Product(torch.autograd.Function):
    """A float32 matrix times one of any type, in that type whatever autocast says, forward and backward."""

    @staticmethod
    def forward(ctx: Any, left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        """(..., m, M) and (..., M, n) to (..., m, n)."""
        ctx.save_for_backward(left, right)
        with without_autocast(right.device):
            return torch.matmul(left.to(right.dtype), right)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Of both."""
        (upstream,), (left, right) = gradients, ctx.saved_tensors
        with without_autocast(right.device):
            of_left = torch.matmul(upstream, right.mT)
            return of_left.to(left.dtype), torch.matmul(left.to(right.dtype).mT, upstream)


@lru_cache(maxsize=64)
def _tables(
    grid: Shape, blocks: Shape, first: int, count: int, block_size: int, device: torch.device
) -> tuple["Blocks", "Blocks"]:
    """How kernels find the tokens of all MHLA blocks, and of those that the call's tokens may lie in."""
    from .linear import Blocks

    # kept for calls that take gradients, and made on the CPU whatever the default device is
    with torch.inference_mode(False), torch.device("cpu"):
        places, starts = tokens_by_block(grid, blocks, first, count)
        members = places if not block_size else layout_of(grid, block_size).rows[places]
        longest = int(starts.diff().max())
        members, places, starts = (x.to(torch.int32).to(device) for x in (members, places, starts))
    own = blocks_of_range(grid, blocks, first, count)
    whole = Blocks(members, places, starts, longest)
    return whole, Blocks(members, places, starts[own.start : own.stop + 1], longest)


def _tables_and_features(
    x: torch.Tensor, angles: torch.Tensor | None, place: Sequence[Any]
) -> tuple[torch.Tensor, "Blocks", "Blocks", "Features"]:
    """Rows (B, N, H, D) of an operator's tensor, and what its other arguments say."""
    from .linear_features import Features

    grid, blocks, first, block_size, feature_map, eps, rope_before = place
    rows = _rows(x, block_size)
    count = math.prod(grid) if block_size else rows.shape[1]
    tables = _tables(tuple(grid), tuple(blocks), first, count, block_size, x.device)
    return rows, *tables, Features(feature_map, eps, angles, rope_before)


def _rows(x: torch.Tensor, block_size: int) -> torch.Tensor:
    return x.transpose(1, 2) if block_size else x


def refuse_second_derivative(*_: Any) -> tuple[Any, ...]:
    """Stands for the derivative of a backward pass, which no kernel computes.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        'The Triton kernels of MHLA have no second derivative; use backend="eager" to differentiate a gradient.'
    )


@torch.library.custom_op("mhla_diffusers::block_states", mutates_args=(), schema=f"({_STATES}) -> (Tensor, Tensor)")
def block_states(
    key: torch.Tensor, value: torch.Tensor, key_mask: torch.Tensor | None, angles: torch.Tensor | None, *others: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`mhla_diffusers.attention.triton.linear.states_launch`; without normaliser the second is empty."""
    from .linear import states_launch, states_of

    *place, normalize = others
    rows, blocks, _, features = _tables_and_features(key, angles, place)
    states, sums = states_of(states_launch(rows, _rows(value, place[3]), blocks, features, key_mask, normalize))
    return states, key.new_empty(0, dtype=torch.float32) if sums is None else sums


@torch.library.custom_op(
    "mhla_diffusers::block_states_backward",
    mutates_args=(),
    schema=f"(Tensor states_gradient, Tensor? sums_gradient, {_STATES}) -> (Tensor, Tensor)",
)
def block_states_backward(
    states_gradient: torch.Tensor,
    sums_gradient: torch.Tensor | None,
    key: torch.Tensor,
    value: torch.Tensor,
    key_mask: torch.Tensor | None,
    angles: torch.Tensor | None,
    *others: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of key and value, contiguous."""
    from .linear_backward import key_gradient_launch

    *place, _ = others
    rows, blocks, _, features = _tables_and_features(key, angles, place)
    values = _rows(value, place[3])
    launch = key_gradient_launch(states_gradient, sums_gradient, rows, values, blocks, features, key_mask)
    launch.run()
    found = (launch.arguments[name] for name in ("key_gradient", "value_gradient"))
    of_key, of_value = (_rows(x, place[3]).contiguous() for x in found)
    return of_key, of_value


@block_states.register_fake
def _state_shapes(key: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, blocks, _first, block_size, _map, _eps, _before, normalize = arguments
    batch, heads, head_dim = len(key), key.shape[1 if block_size else 2], key.shape[3]
    count = math.prod(list(blocks))
    dtype = torch.bfloat16 if key.dtype == torch.bfloat16 else torch.float32
    states = key.new_empty((batch, heads, count, head_dim, head_dim), dtype=dtype)
    return states, key.new_empty((batch, heads, count, head_dim) if normalize else (0,), dtype=torch.float32)


@block_states_backward.register_fake
def _state_gradient_shapes(states: Any, sums: Any, key: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return key.new_empty(key.shape), key.new_empty(key.shape)


def _save_states(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:_STATES_TENSORS])
    ctx.settings = inputs[_STATES_TENSORS:]


def _differentiate_states(ctx: Any, of_states: torch.Tensor, of_sums: torch.Tensor) -> tuple[Any, ...]:
    upstream = of_states.contiguous(), of_sums.contiguous() if ctx.settings[-1] else None
    found = block_states_backward(*upstream, *ctx.saved_tensors, *ctx.settings)
    return *found, *(None,) * (_STATES_TENSORS - len(found) + len(ctx.settings))


block_states.register_autograd(_differentiate_states, setup_context=_save_states)
block_states_backward.register_autograd(refuse_second_derivative)


@torch.library.custom_op("mhla_diffusers::read_states", mutates_args=(), schema=f"({_READ}) -> (Tensor, Tensor)")
def read_states(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`mhla_diffusers.attention.triton.linear.read_launch`; a normaliser that is not wanted is empty."""
    from .linear import read_launch

    launch = read_launch(_reading(arguments), arguments[-1])
    launch.run()
    output, normaliser = launch.arguments["output"], launch.arguments["normalisers"]
    return output, output.new_empty(0, dtype=torch.float32) if normaliser is None else normaliser


@torch.library.custom_op(
    "mhla_diffusers::read_states_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? normaliser_gradient, {_READ}) -> "
    f"({', '.join(['Tensor'] * _READ_DIFFERENTIABLE)})",
)
def read_states_backward(
    output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of the tensors up to ``gate``, contiguous; an absent one is empty."""
    from .linear_backward import read_backward

    reading = _reading(arguments)
    found = read_backward(reading, output_gradient, normaliser_gradient)
    of_query = _rows(found.query, arguments[_READ_TENSORS + 3]).contiguous()
    of_norm = found.output_norm
    if of_norm is not None and reading.output_norm is not None:
        of_norm = of_norm.to(reading.output_norm.dtype)
    gradients = of_query, *found[1:8], of_norm, found.gate
    return tuple(output_gradient.new_empty(0) if x is None else x for x in gradients)


def _reading(arguments: Sequence[Any]) -> "Reading":
    from .linear import Branches, Reading

    query, states, sums, *branches, norm, gate, angles = arguments[:_READ_TENSORS]
    rows, _, blocks, features = _tables_and_features(query, angles, arguments[_READ_TENSORS:-1])
    gate = None if gate is None else gate.contiguous()
    return Reading(rows, states, sums, blocks, features, Branches(*branches), norm, OUTPUT_NORM_EPS, gate)


@read_states.register_fake
def _read_shapes(query: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    grid, _blocks, _first, block_size, *_, with_normaliser = arguments[_READ_TENSORS - 1 :]
    shape = query.shape
    if block_size:
        shape = torch.Size((shape[0], math.prod(list(grid)), shape[1], shape[3]))
    normaliser = (*shape[:3], 1) if with_normaliser else (0,)
    return query.new_empty(shape), query.new_empty(normaliser, dtype=torch.float32)


@read_states_backward.register_fake
def _read_gradient_shapes(output_gradient: torch.Tensor, _: Any, *arguments: Any) -> tuple[torch.Tensor, ...]:
    tensors = arguments[:_READ_DIFFERENTIABLE]
    return tuple(output_gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[:_READ_TENSORS])
    ctx.settings = inputs[_READ_TENSORS:]
    ctx.mark_non_differentiable(*(() if inputs[-1] else output[1:]))


def _differentiate_read(ctx: Any, of_output: torch.Tensor, of_normaliser: torch.Tensor) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    upstream = of_output.contiguous(), of_normaliser.contiguous() if ctx.settings[-1] else None
    found = read_states_backward(*upstream, *tensors, *ctx.settings)
    present = (None if x is None else gradient for x, gradient in zip(tensors, found, strict=False))
    return *present, *(None,) * (_READ_TENSORS - len(found) + len(ctx.settings))


read_states.register_autograd(_differentiate_read, setup_context=_save_read)
read_states_backward.register_autograd(refuse_second_derivative)
