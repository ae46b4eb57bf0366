"""Checks that an attention is correct on this device and in this type, before anything is timed."""

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch

from ..attention import MHLACall, SparseCall, initial_mixing, mhla_attention, reference_attention, sparse_attention
from ..families import AttentionInputs
from ..patching import mhla_layers
from ..patching.layer import PatchedLayer
from .shapes import Shape, draw_lists, make_inputs, random_rotary

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class IncorrectAttentionError(ValueError):
    """An attention differs from the reference; nothing is timed."""


def check_operation(
    shape: Shape, device: torch.device, dtype: torch.dtype, backend: str, *, sparse: bool = False
) -> float:
    """Compare output and gradients of MHLA, or of sparse attention, with the float64 reference, on some blocks.

    MHLA blocks, up to 1024 tokens, are as long as the shape's, and uniform blocks have as many tokens.

    Returns:
        Relative error of the output.

    Raises:
        IncorrectAttentionError: it, or that of a gradient, is too large.
    """
    small = cut(shape, 1024)
    torch.manual_seed(0)
    tensors = dict(zip(("query", "key", "value"), make_inputs(small, device, dtype), strict=True))
    settings: dict[str, Any] = {"grid": small.grid, "rotary": random_rotary(small, device) if small.rope else None}

    def attend(**given: Any) -> torch.Tensor:
        if sparse:
            return sparse_attention(**given, **settings, **weights, lists=lists, backend=backend)
        return mhla_attention(**given, **settings, blocks=small.blocks, backend=backend)

    def attend_slowly(**given: Any) -> torch.Tensor:
        if sparse:
            return reference_attention(SparseCall(**given, **settings, **weights, sparse=lists))
        return reference_attention(MHLACall(**given, **settings, blocks=small.blocks))

    if sparse:
        lists = draw_lists(small, device)
        half = torch.full((small.heads,), 0.5, device=device)
        weights: dict[str, Any] = {"pooled_bias": half, "state_weight": half}
    else:
        mixing = initial_mixing(small.blocks).to(device)
        tensors["mixing"] = mixing + 0.1 * torch.rand_like(mixing)
    upstream = torch.randn_like(tensors["query"])
    found = differentiate(attend, tensors, upstream)
    expected = differentiate(attend_slowly, {name: x.double() for name, x in tensors.items()}, upstream)
    errors = {name: relative_error(found[name], x) for name, x in expected.items()}
    _require(errors, dtype, f"{'Sparse attention' if sparse else 'MHLA'} {backend} on {device} in {dtype}")
    return errors["output"]


def cut(shape: Shape, most_tokens: int) -> Shape:
    """Cut a shape to two heads on a grid of fewer MHLA blocks, each as long as the real ones; uniform blocks stay.

    Args:
        shape: of a real model; a block of it has two tokens per axis at least.
        most_tokens: of the cut grid, unless two uniform blocks have more; a block that is longer is shortened.
    """
    lengths = [max(2, size // count) for size, count in zip(shape.grid, shape.blocks, strict=True)]
    while math.prod(lengths) > max(most_tokens, 2 ** len(lengths)):
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] //= 2
    counts, most = [1] * len(lengths), most_tokens // math.prod(lengths)
    for _ in range(max(shape.blocks)):  # grown one after the other, from the last axis
        for axis in reversed(range(len(counts))):
            product = math.prod(counts) // counts[axis] * (counts[axis] + 1)
            if product <= most and counts[axis] < shape.blocks[axis]:
                counts[axis] += 1
    grid = tuple(count * length for count, length in zip(counts, lengths, strict=True))
    if shape.block_size is not None and math.prod(grid) <= shape.block_size:  # at least two, so that not all is listed
        grid = (*grid[:-1], shape.block_size // math.prod(grid[:-1]) + 1)
    # a small grid has few uniform blocks, so more of them are listed
    return replace(shape, grid=grid, blocks=tuple(counts), heads=2, density=0.25)


def differentiate(
    attend: Callable[..., torch.Tensor], tensors: Mapping[str, torch.Tensor], upstream: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the output of an attention, and the gradients of the tensors that it takes by name."""
    inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    output = attend(**inputs)
    gradients = torch.autograd.grad(output, list(inputs.values()), upstream.to(output.dtype))
    return {"output": output.detach(), **dict(zip(inputs, gradients, strict=True))}


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Return ‖found − expected‖ / ‖expected‖, in float64."""
    one, other = found.detach().double(), expected.detach().double()
    return float((one - other).norm() / other.norm())


def check_same(found: torch.Tensor, eager: torch.Tensor, what: str) -> None:
    """Raise IncorrectAttentionError unless it is as eager at full size, where the reference is too large."""
    # each may be as far from the truth as is allowed
    _require({"output": relative_error(found, eager) / 2}, eager.dtype, f"{what} beside the eager backend")


@torch.no_grad()
def check_patched(transformer: Any, inputs: dict[str, Any]) -> None:
    """Run a model with MHLA and compare its first and last MHLA layer with the reference, on the same inputs.

    The model is fresh, so that gates are 1, and in the type to measure; inputs are of few tokens.

    Raises:
        IncorrectAttentionError: the relative error of a layer is too large.
    """
    layers = list(mhla_layers(transformer).values())

    def compare(layer: PatchedLayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        given: AttentionInputs = args[0]
        weights, value = layer.weights(given), given.value
        error = relative_error(output, torch.einsum("bhqk,bkhd->bqhd", weights, value.to(weights.dtype)))
        _require(
            {"output": error}, output.dtype, f"The attention of patched layers on {output.device} in {output.dtype}"
        )

    with ExitStack() as hooks:
        for layer in {layers[0], layers[-1]}:
            hooks.enter_context(layer.register_forward_hook(compare, with_kwargs=True))
        transformer(**inputs)


def _require(errors: Mapping[str, float], dtype: torch.dtype, what: str) -> None:
    """Raise if an error is above its limit; one that is no number is."""
    limits = {name: (LARGEST_ERROR if name == "output" else LARGEST_GRADIENT_ERROR)[dtype] for name in errors}
    wrong = [f"{name} {error:.1e} of {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]]
    if wrong:
        raise IncorrectAttentionError(
            f"{what} has a relative error that is too large: {', '.join(wrong)}. Nothing was timed."
        )
