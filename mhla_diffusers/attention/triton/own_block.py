"""What a query takes from its own block up to itself as fused kernels: the operators, for autograd and torch.compile.

The formula is that of :mod:`mhla_diffusers.attention.own_block`. Importing this file registers the operators without
importing Triton, which the first call does.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..blocks import frame_block_starts
from ..call import Call
from ..own_block import Own, own_block_attention
from .arguments import angles
from .operators import Taken, readable_gradient, refuse_second_derivative

BY_OWN_BLOCK = Taken(["query", "key", "value"], ["key_mask", "rotary"])


def triton_own_block_attention(call: Call) -> Own:
    """What :func:`mhla_diffusers.attention.own_block.own_block_attention` returns.

    Softmax reads queries and keys after RoPE, which is applied once, before the kernels. The block's own entry m_ii of
    the mixing matrix weighs all that a query takes here, so it stays outside of them.

    Args:
        call: that :func:`mhla_diffusers.attention.triton.backend.usable_call` gave.
    """
    if call.causal == "block":
        return own_block_attention(call)
    has_softmax = call.linear_weight is not None
    if has_softmax:
        query, key = call.query, call.key
        if call.rotary is not None:
            query, key = (rotate(x, call.rotary, call.grid, call.rotary_axes, False) for x in (query, key))
        call = replace(call, query=query, key=key, rotary=None, feature_map="identity")
    output, log_sum = own_block(has_softmax, *BY_OWN_BLOCK.flat(call))
    if has_softmax:
        return output, log_sum
    own = own_mixing(call)
    return (output, log_sum + own.log()) if call.normalize else (output * own, None)


def own_mixing(call: Call) -> torch.Tensor:
    """The entry m_ii of every token's block, float32 (N, 1, 1) or (N, H, 1)."""
    tokens, device = call.query.shape[1], call.query.device
    ends = frame_block_starts(call.grid, call.blocks)[1:]
    # a count on the device: a table of the blocks would have to be copied there
    shortest, longer = divmod(ends[-1], len(ends))
    token = torch.arange(tokens, device=device)
    behind = token - longer * (shortest + 1)
    block = torch.where(behind < 0, token // (shortest + 1), longer + behind // max(shortest, 1))
    by_token = call.mixing.diagonal(dim1=-2, dim2=-1).float().movedim(-1, 0)[block]
    return by_token.view(tokens, -1, 1)


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


@torch.library.custom_op(
    "mhla_diffusers::own_block",
    mutates_args=(),
    schema=f"(bool has_softmax, {BY_OWN_BLOCK.schema}) -> (Tensor, Tensor)",
)
def own_block(has_softmax: bool, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and log of the sum of weights (B, N, H, 1), empty without normaliser, both float32.

    ``arguments`` are the call's ``BY_OWN_BLOCK``; weights are without m_ii. Softmax is between what
    the feature map "identity" gives, of queries and keys after RoPE.
    """
    from .own_block_forward import own_block_launch

    launch, output, log_sum = own_block_launch(BY_OWN_BLOCK.call(arguments), has_softmax)
    launch.run()
    return output, output.new_empty(0) if log_sum is None else log_sum


@torch.library.custom_op(
    "mhla_diffusers::own_block_backward",
    mutates_args=(),
    schema="(Tensor output_gradient, Tensor? log_sum_gradient, Tensor output, Tensor log_sum, bool has_softmax, "
    f"{BY_OWN_BLOCK.schema}) -> (Tensor, Tensor, Tensor)",
)
def own_block_backward(
    output_gradient: torch.Tensor,
    log_sum_gradient: torch.Tensor | None,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    has_softmax: bool,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    """Gradients of query, key and value."""
    from .own_block_backward import OutputSide, backward

    side = OutputSide(output, log_sum, output_gradient, log_sum_gradient)
    return backward(BY_OWN_BLOCK.call(arguments), has_softmax, side)


@own_block.register_fake
def _shapes(has_softmax: bool, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = BY_OWN_BLOCK.call(arguments)
    batch, tokens, heads, _ = call.query.shape
    output = call.query.new_empty(call.query.shape, dtype=torch.float32)
    if not call.normalize:
        return output, output.new_empty(0)
    return output, output.new_empty((batch, heads, tokens)).transpose(1, 2)[..., None]


@own_block_backward.register_fake
def _backward_shapes(
    output_gradient: torch.Tensor,
    log_sum_gradient: torch.Tensor | None,
    output: torch.Tensor,
    log_sum: torch.Tensor,
    has_softmax: bool,
    *arguments: Any,
) -> tuple[torch.Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in arguments[:3])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    ctx.has_softmax, *arguments = inputs
    BY_OWN_BLOCK.save(ctx, arguments, *output)
    normalize = BY_OWN_BLOCK.call(arguments).normalize
    ctx.mark_non_differentiable(*(() if normalize else output[1:]))
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, output_gradient: torch.Tensor | None, log_sum_gradient: torch.Tensor | None
) -> tuple[Any, ...]:
    output, log_sum, *arguments = BY_OWN_BLOCK.saved(ctx)
    if output_gradient is None and log_sum_gradient is None:
        return None, *BY_OWN_BLOCK.one_per_argument((None, None, None))
    output_gradient = readable_gradient(output_gradient, output)
    gradients = own_block_backward(output_gradient, log_sum_gradient, output, log_sum, ctx.has_softmax, *arguments)
    return None, *BY_OWN_BLOCK.one_per_argument(gradients)


own_block.register_autograd(_differentiate, setup_context=_save)
own_block_backward.register_autograd(refuse_second_derivative)
