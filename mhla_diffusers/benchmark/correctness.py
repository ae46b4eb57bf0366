"""Whether an attention is right on this device and in this type, asked before anything is timed."""

from typing import Any

import torch

from ..attention import Call, initial_mixing, mhla_attention, reference_attention
from ..patching import MHLALayer, mhla_layers
from .shapes import Shape

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class IncorrectAttentionError(ValueError):
    """An attention is not what the reference says; nothing is timed."""


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Seeded query, key and value, each (1, N, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))


def check_operation(
    shape: Shape, device: torch.device, dtype: torch.dtype, backend: str, *, near_field: bool = False
) -> float:
    """Compare output and gradients with the float64 reference, with the blocks of a shape on a smaller grid.

    Returns:
        Relative error of the output.

    Raises:
        IncorrectAttentionError: it, or that of a gradient, is too large.
    """
    grid = tuple(2 * count for count in shape.blocks)
    small = Shape(shape.name, grid, shape.blocks, 2, shape.head_dim)
    drawn = [*make_inputs(small, device, dtype), initial_mixing(shape.blocks).to(device)]
    if near_field:
        drawn.append(torch.ones(small.heads, device=device))
    upstream = make_inputs(small, device, dtype)[0]

    def differentiate(attend: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        inputs = tuple(x.detach().requires_grad_() for x in drawn)
        if near_field:
            options["far_field_weight"] = inputs[-1]
        output = attend(*inputs[:4], grid, shape.blocks, **options)
        return output, *torch.autograd.grad(output, inputs, upstream.to(output.dtype))

    found = differentiate(mhla_attention, backend=backend)
    expected = differentiate(lambda *inputs, **options: reference_attention(Call(*inputs, **options)))
    error = relative_error(found[0], expected[0])
    _require(error, LARGEST_ERROR[dtype], f"The output of MHLA {backend}", device, dtype)
    names = ("query", "key", "value", "mixing", "far_field_weight")[: len(drawn)]
    for name, one, other in zip(names, found[1:], expected[1:], strict=True):
        what = f"The gradient of {name} of MHLA {backend}"
        _require(relative_error(one, other), LARGEST_GRADIENT_ERROR[dtype], what, device, dtype)
    return error


def check_agreement(found: torch.Tensor, eager: torch.Tensor, what: str) -> None:
    """Compare with the eager backend at full size, where the reference would be too large.

    Raises:
        IncorrectAttentionError: they differ.
    """
    limit = 2 * LARGEST_ERROR[eager.dtype]
    _require(
        relative_error(found, eager), limit, f"{what}, compared with the eager backend,", eager.device, eager.dtype
    )


@torch.no_grad()
def check_patched(transformer: Any, inputs: dict[str, Any]) -> float:
    """Run a patched transformer and compare its first and last MHLA layer with the reference, on what they were given.

    Args:
        transformer: patched, in the type to measure.
        inputs: of its forward, few tokens.

    Returns:
        The larger relative error.

    Raises:
        IncorrectAttentionError: it is too large.
    """
    layers = list(mhla_layers(transformer).values())
    chosen = {id(layer): layer for layer in (layers[0], layers[-1])}.values()
    errors: list[float] = []
    types: list[torch.dtype] = []

    def compare(layer: MHLALayer, args: tuple[Any, ...], output: torch.Tensor) -> None:
        query, key, value, _, grid, rotary = args[:6]
        weights = layer.weights(query, key, grid, rotary)
        expected = torch.einsum("bhqk,bkhd->bqhd", weights, value.to(weights.dtype))
        errors.append(relative_error(output, expected))
        types.append(output.dtype)

    handles = [layer.register_forward_hook(compare) for layer in chosen]
    try:
        transformer(**inputs)
    finally:
        for handle in handles:
            handle.remove()
    _require(max(errors), LARGEST_ERROR[types[0]], "The patched attention", inputs["hidden_states"].device, types[0])
    return max(errors)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """‖found − expected‖ / ‖expected‖."""
    found, expected = found.detach().double(), expected.detach().double()
    return float((found - expected).norm() / expected.norm())


def _require(error: float, limit: float, what: str, device: torch.device, dtype: torch.dtype) -> None:
    if not error <= limit:
        raise IncorrectAttentionError(
            f"{what} has a relative error of {error:.2e} on {device} in {dtype}; at most {limit:.0e} is expected. "
            "Nothing was timed."
        )
