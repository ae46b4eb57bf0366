"""Register the kernels as PyTorch operators, opaque to torch.compile."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
import triton

from ..layout import NAMESPACE
from ..precision import without_autocast


@triton.constexpr_function  # type: ignore[untyped-decorator]
def padded(head_dim: int) -> int:
    """Channels of a tile that holds all those of a head, within kernels: a power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())


def operator(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as operator ``<namespace>::<its name>``, run on the device of its first tensor."""

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def on_device(*arguments: Any) -> Any:
            device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
            current = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
            with current, without_autocast(device):  # backward() may be called under autocast
                return function(*arguments)

        name = f"{NAMESPACE}::{function.__name__}"
        return torch.library.custom_op(name, on_device, mutates_args=(), schema=schema)

    return register


def differentiable(forward: Any, backward: Any, count: int, *, outputs: Sequence[int] = ()) -> None:
    """Make ``backward`` the gradient of ``forward``, of its first ``count`` inputs, tensors or None.

    It takes the gradients of the outputs that are not integers, contiguous, then the outputs numbered ``outputs``, then
    the inputs, whose tensors come first. It returns a list of contiguous gradients, one per such input that is not
    None, and has no gradient itself.
    """

    def save(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        found = output if isinstance(output, tuple) else (output,)
        tensors = [x for x in inputs if x is None or isinstance(x, torch.Tensor)]
        ctx.settings, ctx.has_gradient = inputs[len(tensors) :], [x.is_floating_point() for x in found]
        ctx.mark_non_differentiable(*(x for x in found if not x.is_floating_point()))
        ctx.save_for_backward(*(found[i] for i in outputs), *tensors)

    def differentiate(ctx: Any, *upstream: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs = *saved[len(outputs) :], *ctx.settings
        of_outputs = (x.contiguous() for x, given in zip(upstream, ctx.has_gradient, strict=True) if given)
        found = iter(backward(*of_outputs, *saved[: len(outputs)], *inputs))
        return *(None if x is None else next(found) for x in inputs[:count]), *(None,) * (len(inputs) - count)

    inputs = len(forward._opoverload._schema.arguments)
    backward.register_fake(
        lambda *given: [x.new_empty(x.shape) for x in given[len(given) - inputs :][:count] if x is not None]
    )
    forward.register_autograd(differentiate, setup_context=save)
    backward.register_autograd(refuse_second_derivative)


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unfilled contiguous tensor; the tests fill it with NaN, so that an element that no kernel wrote shows."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def refuse_second_derivative(*_: Any) -> tuple[Any, ...]:
    """Raise for a second derivative, which no kernel computes."""
    raise NotImplementedError(
        'The Triton kernels of MHLA have no second derivative; use backend="eager" to differentiate a gradient.'
    )
