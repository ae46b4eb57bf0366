"""Softmax attention over exact tiles and means as fused kernels: the operators, for autograd and torch.compile.

The formula is that of :mod:`mhla_diffusers.attention.exact`. Importing this file registers the operators without
importing Triton, which the first call does.
"""

from collections.abc import Sequence
from typing import Any

import torch

from ..call import Call
from ..exact import exact_attention
from ..tiles import BlockLists, lists_with_extra, blocks_of_extra
from .arguments import angles
from .exact_lists import ExactCall
from .operators import readable_gradient, refuse_second_derivative

_FIELDS = {
    "query": "Tensor",
    "key": "Tensor",
    "value": "Tensor",
    "pooled_bias": "Tensor?",
    "key_mask": "Tensor?",
    "offsets": "Tensor",
    "tiles": "Tensor",
    "grid": "SymInt[]",
    "counts": "SymInt[]",
    "extra": "SymInt",
}
"""Of :class:`ExactCall`, in the language of PyTorch's operator schemas."""
_ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in _FIELDS.items())
_TENSORS = [name for name, kind in _FIELDS.items() if kind.startswith("Tensor")]


def triton_exact_attention(call: Call, tiles: BlockLists) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend to the exact tiles and, where the call has ``pooled_bias``, to the means of the others.

    RoPE is applied once, before the kernels, which read every key many times.

    Returns:
        Output (B, N + n, H, D) and log of the sum of weights (B, N + n, H, 1), both in float32, those of the n tokens
        outside the grid last. A query that attends to nothing gets 0 and the lowest finite number.
    """
    if isinstance(
        tiles.counts, int
    ):  # lists along the curve that are given; those by content have kernels of their own
        return exact_attention(call, tiles)
    query, key, value, mask = call.query, call.key, call.value, call.key_mask
    lists, extra = (tiles.offsets, tiles.keys), 0
    if call.rotary is not None:
        query, key = (rotate(x, call.rotary, call.grid, call.rotary_axes, False) for x in (query, key))
    if call.extra is not None:
        query, key, value, mask = call.extra.after(query, key, value, mask)
        extra = call.extra.count
        lists = lists_with_extra(tiles, blocks_of_extra(call.grid, tiles.counts, extra))
    output, log_sum = exact_tiles(
        query,
        key,
        value,
        call.pooled_bias.float().contiguous() if call.pooled_bias is not None else None,
        mask.float().contiguous() if mask is not None else None,
        *lists,
        call.grid,
        tiles.counts,
        extra,
    )
    return output, log_sum


@torch.library.custom_op(
    "mhla_diffusers::rotate",
    mutates_args=(),
    schema="(Tensor x, Tensor table, SymInt[] grid, SymInt[]? axes, bool backwards) -> Tensor",
)
def rotate(
    x: torch.Tensor, table: torch.Tensor, grid: Sequence[int], axes: Sequence[int] | None, backwards: bool
) -> torch.Tensor:
    """RoPE of queries or keys (B, N, H, D): ``table`` and ``axes`` are those of a :class:`Call`."""
    from .rotation import rotate_launch

    of_table = angles(table, tuple(grid), None if axes is None else tuple(axes))
    launch, turned = rotate_launch(x, of_table, tuple(grid), backwards)
    launch.run()
    return turned


@rotate.register_fake
def _rotate_shape(x: torch.Tensor, *_: Any) -> torch.Tensor:
    return x.new_empty(x.shape)


def _save_rotation(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, table, *ctx.settings = inputs
    ctx.save_for_backward(table)


def _rotate_back(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
    grid, axes, backwards = ctx.settings
    if gradient.stride(-1) != 1:
        gradient = gradient.contiguous()
    return rotate(gradient, *ctx.saved_tensors, grid, axes, not backwards), None, None, None, None


rotate.register_autograd(_rotate_back, setup_context=_save_rotation)


def _call_of(arguments: tuple[Any, ...]) -> ExactCall:
    """The call from the arguments of an operator, which come with lists for tuples."""
    given = dict(zip(_FIELDS, arguments, strict=True))
    return ExactCall(**given | {"grid": tuple(given["grid"]), "counts": tuple(given["counts"])})


@torch.library.custom_op("mhla_diffusers::exact_tiles", mutates_args=(), schema=f"({_ARGUMENTS}) -> (Tensor, Tensor)")
def exact_tiles(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), float32, of the fields of an ExactCall."""
    from .exact_forward import forward

    return forward(_call_of(arguments))


@torch.library.custom_op(
    "mhla_diffusers::exact_tiles_backward",
    mutates_args=(),
    schema="(Tensor output_gradient, Tensor? log_sum_gradient, Tensor output, Tensor log_sum, "
    f"{_ARGUMENTS}) -> (Tensor, Tensor, Tensor, Tensor)",
)
def exact_tiles_backward(
    output_gradient: torch.Tensor,
    log_sum_gradient: torch.Tensor | None,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *arguments: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradients of query, key, value and pooled_bias; the last is empty where there are no means."""
    from .exact_backward import backward
    from .exact_key_gradients import OutputSide

    return backward(_call_of(arguments), OutputSide(output, log_sum, output_gradient, log_sum_gradient))


@exact_tiles.register_fake
def _shapes(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query = arguments[0]
    batch, tokens, heads, _ = query.shape
    output = query.new_empty(query.shape, dtype=torch.float32)
    return output, output.new_empty((batch, heads, tokens)).transpose(1, 2)[..., None]


@exact_tiles_backward.register_fake
def _backward_shapes(
    output_gradient: torch.Tensor,
    log_sum_gradient: torch.Tensor | None,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    query, key, value, pooled_bias, *_ = arguments
    of_bias = output.new_empty((0,) if pooled_bias is None else pooled_bias.shape)
    return *(x.new_empty(x.shape) for x in (query, key, value)), of_bias


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.save_for_backward(*inputs[: len(_TENSORS)], *output)
    ctx.settings = inputs[len(_TENSORS) :]
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, output_gradient: torch.Tensor | None, log_sum_gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    *tensors, output, log_sum = ctx.saved_tensors
    unused = (None,) * (len(_FIELDS) - 4)
    if output_gradient is None and log_sum_gradient is None:
        return None, None, None, None, *unused
    output_gradient = readable_gradient(output_gradient, output)
    *gradients, of_bias = exact_tiles_backward(
        output_gradient, log_sum_gradient, output, log_sum, *tensors, *ctx.settings
    )
    return *gradients, of_bias if tensors[3] is not None else None, *unused


exact_tiles.register_autograd(_differentiate, setup_context=_save)
exact_tiles_backward.register_autograd(refuse_second_derivative)
