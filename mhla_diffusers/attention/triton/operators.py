"""The two steps of MHLA, forward and backward, as PyTorch operators, for autograd, torch.compile and checkpointing.

``summaries`` is what the tokens of a call bring, ``read`` what its queries take from the summaries of all tokens. They
are two so that processes that hold a share of the tokens each can add up their summaries in between.

An operator takes tensors and numbers side by side: those fields of :class:`Call` that it needs, see :class:`Taken`.
Importing this file registers the operators without importing Triton, which the first call does.
"""

from collections.abc import Sequence
from dataclasses import fields
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
_KINDS = {field.name: _TYPES.get(field.type, "") for field in fields(Call)}
_OF_BOTH = ("grid", "blocks", "first", "feature_map", "eps", "normalize", "rope", "rotary_axes")


class Taken:
    """The fields of a :class:`Call` that an operator takes, in the order of its arguments."""

    def __init__(self, differentiable: Sequence[str], tensors: Sequence[str]) -> None:
        """Of both kinds their names; all else about the call comes by itself."""
        self.differentiable = tuple(differentiable)
        self._tensors = *differentiable, *tensors
        self._names = *self._tensors, *_OF_BOTH
        self.schema = ", ".join(f"{_KINDS[name]} {name}" for name in self._names)
        """In the language of PyTorch's operator schemas."""

    def flat(self, call: Call) -> tuple[Any, ...]:
        """The arguments of the operator."""
        return tuple(getattr(call, name) for name in self._names)

    def call(self, arguments: Sequence[Any]) -> Call:
        """The call from the arguments, which come with lists for tuples.

        Query, key, value and mixing matrix that the operator does not take are its first tensor, of which the kernels
        read shape and type alone then.
        """
        given: dict[str, Any] = dict.fromkeys(("query", "key", "value", "mixing"), arguments[0])
        given |= zip(self._names, arguments, strict=True)
        given |= {name: tuple(x) for name, x in given.items() if isinstance(x, list)}
        return Call(**given)

    def save(self, ctx: Any, arguments: Sequence[Any], *tensors: torch.Tensor) -> None:
        """Keep the arguments and further tensors for the backward pass."""
        count = len(self._tensors)
        ctx.save_for_backward(*tensors, *arguments[:count])
        ctx.settings = arguments[count:]

    def saved(self, ctx: Any) -> tuple[Any, ...]:
        """The tensors and the arguments that :meth:`save` kept."""
        return *ctx.saved_tensors, *ctx.settings  # read once, as activation checkpointing wants it

    def one_per_argument(self, gradients: Sequence[torch.Tensor | None]) -> tuple[torch.Tensor | None, ...]:
        """With None for the arguments that have no gradient."""
        return *gradients, *(None,) * (len(self._names) - len(self.differentiable))


BY_SUMMARIES = Taken(["key", "value"], ["key_mask", "rotary"])
BY_READ = Taken(["query", "mixing", "output_norm", "output_gate"], ["rotary"])


@torch.library.custom_op("mhla_diffusers::summaries", mutates_args=(), schema=f"({BY_SUMMARIES.schema}) -> Tensor")
def summaries(*arguments: Any) -> torch.Tensor:
    """Of the tokens of a call, float32 (B, H, M, D + normalize, D); the arguments are the call's ``BY_SUMMARIES``."""
    return summarise(BY_SUMMARIES.call(arguments))


@torch.library.custom_op(
    "mhla_diffusers::summaries_backward",
    mutates_args=(),
    schema=f"(Tensor summary_gradient, {BY_SUMMARIES.schema}) -> (Tensor, Tensor)",
)
def summaries_backward(summary_gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of key and value."""
    return summarise_backward(BY_SUMMARIES.call(arguments), summary_gradient)


@summaries.register_fake
def _summaries_shape(*arguments: Any) -> torch.Tensor:
    call = BY_SUMMARIES.call(arguments)
    return call.key.new_empty(state_shape(call), dtype=torch.float32)


@summaries_backward.register_fake
def _summaries_backward_shapes(summary_gradient: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    key, value, *_ = arguments
    return key.new_empty(key.shape), value.new_empty(value.shape)


def _save_summaries(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    BY_SUMMARIES.save(ctx, inputs)
    ctx.set_materialize_grads(False)


def _differentiate_summaries(ctx: Any, summary_gradient: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    if summary_gradient is None:
        return BY_SUMMARIES.one_per_argument((None, None))
    return BY_SUMMARIES.one_per_argument(summaries_backward(summary_gradient, *BY_SUMMARIES.saved(ctx)))


summaries.register_autograd(_differentiate_summaries, setup_context=_save_summaries)


@torch.library.custom_op(
    "mhla_diffusers::read",
    mutates_args=(),
    schema=f"(bool with_normaliser, Tensor summary, {BY_READ.schema}) -> (Tensor, Tensor)",
)
def read(with_normaliser: bool, summary: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Output (B, N, H, D) and normaliser, float32 (B, N, H, 1), empty if not wanted.

    ``summary`` is what :func:`summaries` returns, of all tokens; the arguments after it are the call's ``BY_READ``.
    """
    return read_summary(BY_READ.call(arguments), summary, with_normaliser)


@torch.library.custom_op(
    "mhla_diffusers::read_backward",
    mutates_args=(),
    schema=f"(Tensor output_gradient, Tensor? normaliser_gradient, Tensor summary, {BY_READ.schema}) -> "
    f"({', '.join(['Tensor'] * (1 + len(BY_READ.differentiable)))})",
)
def read_backward(
    output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    """Gradients of the summary and of ``BY_READ.differentiable``; an absent one is empty."""
    gradients = read_summary_backward(BY_READ.call(arguments), summary, output_gradient, normaliser_gradient)
    return tuple(output_gradient.new_empty(0) if x is None else x for x in gradients)


@read.register_fake
def _read_shapes(with_normaliser: bool, summary: torch.Tensor, *arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    query = BY_READ.call(arguments).query
    return query.new_empty(query.shape), summary.new_empty((*query.shape[:3], 1) if with_normaliser else (0,))


@read_backward.register_fake
def _read_backward_shapes(
    output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None, summary: torch.Tensor, *arguments: Any
) -> tuple[torch.Tensor, ...]:
    tensors = summary, *arguments[: len(BY_READ.differentiable)]
    return tuple(output_gradient.new_empty(0) if x is None else x.new_empty(x.shape) for x in tensors)


def _save_read(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    with_normaliser, summary, *arguments = inputs
    BY_READ.save(ctx, arguments, summary)
    ctx.mark_non_differentiable(*(() if with_normaliser else output[1:]))
    ctx.set_materialize_grads(False)


def _differentiate_read(
    ctx: Any, output_gradient: torch.Tensor | None, normaliser_gradient: torch.Tensor | None
) -> tuple[Any, ...]:
    summary, *arguments = BY_READ.saved(ctx)
    differentiated = summary, *arguments[: len(BY_READ.differentiable)]
    if output_gradient is None and normaliser_gradient is None:
        return None, *BY_READ.one_per_argument((None,) * len(differentiated))
    output_gradient = readable_gradient(output_gradient, arguments[0])
    gradients = read_backward(output_gradient, normaliser_gradient, summary, *arguments)
    found = (None if x is None else gradient for x, gradient in zip(differentiated, gradients, strict=True))
    return None, *BY_READ.one_per_argument(tuple(found))


read.register_autograd(_differentiate_read, setup_context=_save_read)


def readable_gradient(gradient: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor:
    """As kernels read it, with channels side by side; 0 like ``of`` for none."""
    if gradient is None:
        return torch.zeros_like(of)
    return gradient if gradient.stride(-1) == 1 else gradient.contiguous()


def refuse_second_derivative(*_: Any) -> tuple[Any, ...]:
    """Stands for the derivative of a backward pass, which no kernel computes.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        'The Triton kernels of MHLA have no second derivative; use backend="eager" to differentiate a gradient.'
    )


summaries_backward.register_autograd(refuse_second_derivative)
read_backward.register_autograd(refuse_second_derivative)


def summarise(call: Call) -> torch.Tensor:
    """What :func:`summaries` returns; blocks of which the call has no token have 0."""
    from .launches import summary_launch

    launch, parts = summary_launch(call)
    launch.run()
    return sum_parts(parts)


def summarise_backward(call: Call, summary_gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of key and value."""
    from .launches import key_value_gradient_launch

    launch, gradients = key_value_gradient_launch(call, summary_gradient.contiguous())
    launch.run()
    return gradients


def read_summary(call: Call, summary: torch.Tensor, with_normaliser: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """What :func:`read` returns."""
    from .launches import output_launch

    mixed = mix(call.mixing, summary.contiguous(), call.query.dtype, mixed_dtype(call), call.own_blocks)
    launch, output, normaliser = output_launch(call, mixed, with_normaliser)
    launch.run()
    return output, summary.new_empty(0) if normaliser is None else normaliser


def read_summary_backward(
    call: Call, summary: torch.Tensor, output_gradient: torch.Tensor, normaliser_gradient: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of summary, query, mixing matrix, output norm and gate, each in its shape and type."""
    from .launches import query_gradient_launch, summary_gradient_launch

    dtype, summary = call.query.dtype, summary.contiguous()
    mixed = mix(call.mixing, summary, dtype, rows=call.own_blocks)
    launch, of_query = query_gradient_launch(call, mixed, output_gradient, normaliser_gradient)
    launch.run()
    launch, parts = summary_gradient_launch(call, mixed, output_gradient, of_query.token_numbers)
    launch.run()
    mixed_gradient = sum_parts(parts)
    norm_gradient = None
    if call.output_norm is not None and of_query.norm is not None:
        norm_gradient = of_query.norm.sum(dim=0).to(call.output_norm.dtype)
    return (
        mix(call.mixing.mT, mixed_gradient, dtype),
        of_query.query,
        mixing_gradient(call, summary, mixed_gradient),
        norm_gradient,
        of_query.gate,
    )


def sum_parts(parts: torch.Tensor) -> torch.Tensor:
    """(B, H, M, parts, ...) to (B, H, M, ...), always added in the same order."""
    return parts.squeeze(3) if parts.shape[3] == 1 else parts.sum(dim=3)


def mix(
    mixing: torch.Tensor,
    summary: torch.Tensor,
    dtype: torch.dtype,
    of_mixed: torch.dtype = torch.float32,
    rows: slice | None = None,
) -> torch.Tensor:
    """Multi-Head Mixing: (B, H, M, ...), what each query block sees, as precise as ``dtype``, kept as ``of_mixed``.

    With ``rows``, what these blocks see; the others are not filled then.
    """
    from .mixing_kernels import mix_launch

    launch, mixed = mix_launch(mixing, summary, dtype, of_mixed, rows)
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
