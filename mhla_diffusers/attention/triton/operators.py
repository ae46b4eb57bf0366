"""Forward and backward pass, and both as PyTorch operators, for autograd, torch.compile and checkpointing.

An operator takes tensors and numbers side by side, so what it takes are the fields of :class:`Call`, in their order:
:data:`ARGUMENTS` is that list for PyTorch, :func:`flat` and :func:`call_of` go from one to the other. Importing this
file registers the operators without importing Triton, which the first call does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch

from ..blocks import Shape
from ..call import Call
from .arguments import mixed_dtype, state_shape

_TYPES: dict[Any, str] = {
    torch.Tensor: "Tensor",
    torch.Tensor | None: "Tensor?",
    Shape: "SymInt[]",
    Shape | None: "SymInt[]?",
    str: "str",
    bool: "bool",
    float: "float",
    int: "SymInt",
}
_UNKNOWN = ("exact", "mean_bias", "outside", "group", "shares", "by_content")
"""Of exact tiles, tokens outside the grid and other processes the kernels of MHLA know nothing."""
_FIELDS = {field.name: _TYPES[field.type] for field in fields(Call) if field.name not in _UNKNOWN}
_TENSORS = [name for name, kind in _FIELDS.items() if kind.startswith("Tensor")]
ARGUMENTS = ", ".join(f"{kind} {name}" for name, kind in _FIELDS.items())
"""The fields of :class:`Call` in the language of PyTorch's operator schemas."""


def flat(call: Call) -> tuple[Any, ...]:
    """The arguments of an operator."""
    return tuple(getattr(call, name) for name in _FIELDS)


def call_of(arguments: Sequence[Any]) -> Call:
    """The call from the arguments of an operator, which come with lists for tuples."""
    given: dict[str, Any] = dict(zip(_FIELDS, arguments, strict=True))
    given |= {name: tuple(value) for name, value in given.items() if isinstance(value, list)}
    return Call(**given)


def save_call(ctx: Any, call: Call, *tensors: torch.Tensor) -> None:
    """Keep a call and further tensors for the backward pass."""
    ctx.settings = {name: getattr(call, name) for name in _FIELDS if name not in _TENSORS}
    ctx.save_for_backward(*(getattr(call, name) for name in _TENSORS), *tensors)


def saved_call(ctx: Any) -> tuple[Call, tuple[torch.Tensor, ...]]:
    """What :func:`save_call` kept."""
    kept = ctx.saved_tensors  # read once, as activation checkpointing wants it
    named = dict(zip(_TENSORS, kept, strict=False))
    return Call(**named, **ctx.settings), kept[len(_TENSORS) :]


def one_per_argument(gradients: Mapping[str, torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
    """Gradients by name in the order of the operator's arguments, None where there is none."""
    return tuple(gradients.get(name) for name in _FIELDS)


@dataclass(frozen=True)
class Gradients:
    """Of each differentiable argument, in its shape and type."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    mixing: torch.Tensor
    output_norm: torch.Tensor | None
    output_gate: torch.Tensor | None


_DIFFERENTIABLE = tuple(field.name for field in fields(Gradients))


@torch.library.custom_op(
    "mhla_diffusers::attention",
    mutates_args=(),
    schema=f"(bool with_normaliser, {ARGUMENTS}) -> (Tensor, Tensor, Tensor)",
)
def attention(with_normaliser: bool, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D), normaliser (B, N, H, 1), empty if not wanted, summaries (B, H, M, D + normalize, D).

    The arguments after the first are those of :func:`flat`. Normaliser and summaries are float32.
    """
    return forward(call_of(arguments), with_normaliser)


@torch.library.custom_op(
    "mhla_diffusers::attention_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? normaliser_gradient, Tensor summary, {ARGUMENTS}) -> "
    f"({', '.join(['Tensor'] * len(_DIFFERENTIABLE))})",
)
def attention_backward(
    output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """:class:`Gradients`, in their order; an absent one is empty."""
    gradients = backward(call_of(arguments), summary, output_gradient, normaliser_gradient)
    found = (getattr(gradients, name) for name in _DIFFERENTIABLE)
    return tuple(output_gradient.new_empty(0) if x is None else x for x in found)


@attention.register_fake
def _attention_shapes(with_normaliser: bool, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    call = call_of(arguments)
    normaliser = call.query.new_empty((*call.query.shape[:3], 1) if with_normaliser else (0,), dtype=torch.float32)
    return call.query.new_empty(call.query.shape), normaliser, normaliser.new_empty(state_shape(call))


@attention_backward.register_fake
def _attention_backward_shapes(
    output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    call = call_of(arguments)
    tensors = (getattr(call, name) for name in _DIFFERENTIABLE)
    return tuple(output_gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor, torch.Tensor]) -> None:
    with_normaliser, *arguments = inputs
    save_call(ctx, call_of(arguments), output[2])
    ctx.mark_non_differentiable(output[2], *(() if with_normaliser else output[1:2]))
    ctx.set_materialize_grads(False)


def _differentiate(
    ctx: Any, output_gradient: torch.Tensor | None, normaliser_gradient: torch.Tensor | None, _: torch.Tensor | None
) -> tuple[Any, ...]:
    call, (summary,) = saved_call(ctx)
    if output_gradient is None and normaliser_gradient is None:
        return None, *one_per_argument({})
    if output_gradient is None:
        output_gradient = torch.zeros_like(call.query)
    if output_gradient.stride(-1) != 1:
        output_gradient = output_gradient.contiguous()
    gradients = attention_backward(output_gradient, normaliser_gradient, summary, *flat(call))
    found = zip(_DIFFERENTIABLE, gradients, strict=True)
    return None, *one_per_argument({name: x for name, x in found if getattr(call, name) is not None})


attention.register_autograd(_differentiate, setup_context=_save)


def refuse_second_derivative(*_: Any) -> tuple[Any, ...]:
    """Stands for the derivative of a backward pass, which no kernel computes.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        'The Triton kernels of MHLA have no second derivative; use backend="eager" to differentiate a gradient.'
    )


attention_backward.register_autograd(refuse_second_derivative)


def forward(call: Call, with_normaliser: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Output, normaliser or an empty tensor, and the summaries before mixing, as the operator returns them."""
    from .launches import output_launch, summary_launch

    launch, parts = summary_launch(call)
    launch.run()
    summary = sum_parts(parts)
    mixed = mix(call.mixing, summary, call.query.dtype, mixed_dtype(call))
    launch, output, normaliser = output_launch(call, mixed, with_normaliser)
    launch.run()
    return output, summary.new_empty(0) if normaliser is None else normaliser, summary


def backward(
    call: Call, summary: torch.Tensor, output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None
) -> Gradients:
    """Gradients of a call, given what :func:`forward` returned as summaries."""
    from .launches import key_value_gradient_launch, query_gradient_launch, summary_gradient_launch

    dtype = call.query.dtype
    mixed = mix(call.mixing, summary, dtype)
    launch, of_query = query_gradient_launch(call, mixed, output_gradient, normaliser_gradient)
    launch.run()
    launch, parts = summary_gradient_launch(call, mixed, output_gradient, of_query.token_numbers)
    launch.run()
    mixed_gradient = sum_parts(parts)
    summary_gradient = mix(call.mixing.mT, mixed_gradient, dtype)
    launch, (key_gradient, value_gradient) = key_value_gradient_launch(call, summary_gradient)
    launch.run()
    norm_gradient = None
    if call.output_norm is not None and of_query.norm is not None:
        norm_gradient = of_query.norm.sum(dim=0).to(call.output_norm.dtype)
    of_mixing = mixing_gradient(call, summary, mixed_gradient)
    return Gradients(of_query.query, key_gradient, value_gradient, of_mixing, norm_gradient, of_query.gate)


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """(B, H, M, parts, ...) to (B, H, M, ...), always added in the same order."""
    return parts.squeeze(3) if parts.shape[3] == 1 else parts.sum(dim=3)


def mix(
    mixing: torch.Tensor, summary: torch.Tensor, dtype: torch.dtype, of_mixed: torch.dtype = torch.float32
) -> torch.Tensor:
    """Multi-Head Mixing: (B, H, M, ...), what each query block sees, as precise as ``dtype``, kept as ``of_mixed``."""
    from .mixing_kernels import mix_launch

    launch, mixed = mix_launch(mixing, summary, dtype, of_mixed)
    launch.run()
    return mixed


def mixing_gradient(call: Call, summary: torch.Tensor, mixed_gradient: torch.Tensor) -> torch.Tensor:
    """Gradient of the mixing matrix, in its shape and type."""
    from .mixing_kernels import mixing_gradient_launch

    launch, shares = mixing_gradient_launch(summary, mixed_gradient, call.query.dtype)
    launch.run()
    # always added in the same order
    of_heads = shares.sum(dim=(0, 2))
    return (of_heads if call.mixing.ndim == 3 else of_heads.sum(dim=0)).to(call.mixing.dtype)
