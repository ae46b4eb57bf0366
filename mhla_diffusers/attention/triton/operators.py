"""How the kernels become operators of PyTorch, which torch.compile takes as a whole."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch

from ..derivatives import NAMESPACE, is_transformed


def operator(schema: str) -> Callable[[Callable[..., Any]], Any]:
    """Register a function as operator ``<namespace>::<its name>``, run on the device of its first tensor."""

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def on_device(*arguments: Any) -> Any:
            if is_transformed():  # a custom operator would drop the tangents
                raise NotImplementedError(
                    "The Triton kernels support neither forward-mode derivatives nor transforms of torch.func; use "
                    'backend="eager" under torch.func.jvp and the like.'
                )
            device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
            with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
                return function(*arguments)

        name = f"{NAMESPACE}::{function.__name__}"
        return torch.library.custom_op(name, on_device, mutates_args=(), schema=schema)

    return register


def allocate(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """An unfilled contiguous tensor; the tests fill it with NaN, so that an element that no kernel wrote shows."""
    return torch.empty(tuple(shape), dtype=dtype, device=device)


def refuse_second_derivative(*_: Any) -> tuple[Any, ...]:
    """The gradient of every backward operator: no kernel computes it."""
    raise NotImplementedError(
        'The Triton kernels of MHLA have no second derivative; use backend="eager" to differentiate a gradient.'
    )
