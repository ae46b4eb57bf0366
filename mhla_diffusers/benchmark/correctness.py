"""Whether an attention is right on this device and in this type, asked before anything is timed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..attention import Call, initial_mixing, mhla_attention, reference_attention
from ..attention.rotary import rotary_table
from ..patching import MHLALayer, mhla_layers
from .lists import draw_tiles
from .shapes import Shape

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
OUTPUT = "output"
"""Name of the output beside the gradients."""
CUT_HEADS = 2
_MOST_TOKENS = 1024
_CHECKED_SHARE = 0.25
"""Of exact pairs of tiles, which are few on a small grid."""


class IncorrectAttentionError(ValueError):
    """An attention is not what the reference says; nothing is timed."""


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Seeded query, key and value, each (1, N, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))


def check_operation(
    shape: Shape, device: torch.device, dtype: torch.dtype, backend: str, *, exact: bool = False
) -> float:
    """Compare output and gradients with the float64 reference, on some blocks of a shape.

    Videos have RoPE. Blocks, up to 1024 tokens, and exact tiles are as long as the shape's: kernels cut whole tiles.

    Args:
        shape: the attention; with tile counts where ``exact`` is set.
        device: where.
        dtype: of query, key and value.
        backend: of :func:`mhla_attention`.
        exact: check MHLA with exact tiles as long as the shape's, their means, and the far field.

    Returns:
        Relative error of the output.

    Raises:
        IncorrectAttentionError: it, or that of a gradient, is too large.
    """
    small = cut(shape, _MOST_TOKENS)
    drawn = dict(zip(("query", "key", "value"), make_inputs(small, device, dtype), strict=True))
    drawn["mixing"] = initial_mixing(small.blocks).to(device)
    settings: dict[str, Any] = {"grid": small.grid, "blocks": small.blocks}
    rotary = random_rotary(small, device) if len(small.grid) == 3 and small.head_dim % 2 == 0 else None
    if exact:
        drawn |= beside_exact_tiles(small.heads, device)
        settings["exact"] = draw_tiles(small, device)
    upstream = make_inputs(small, device, dtype)[0]
    table = rotary_table(rotary) if rotary is not None else None
    found = differentiate(partial(mhla_attention, backend=backend, rotary=rotary, **settings), drawn, upstream)
    expected = differentiate(
        lambda **tensors: reference_attention(Call(**tensors, rotary=table, **settings)), drawn, upstream
    )
    error, what = (
        relative_error(found[OUTPUT], expected[OUTPUT]),
        f"MHLA{' with exact tiles' if exact else ''} {backend}",
    )
    _require(error, LARGEST_ERROR[dtype], f"The output of {what}", device, dtype)
    for name in drawn:
        error_of = relative_error(found[name], expected[name])
        _require(error_of, LARGEST_GRADIENT_ERROR[dtype], f"The gradient of {name} of {what}", device, dtype)
    return error


def differentiate(
    attend: Callable[..., torch.Tensor], tensors: Mapping[str, torch.Tensor], upstream: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The output of an attention, as ``OUTPUT``, and the gradients of its tensors by their names.

    Args:
        attend: takes the tensors by name.
        tensors: every one gets a gradient.
        upstream: the gradient of the output, in its shape.
    """
    inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    output = attend(**inputs)
    gradients = torch.autograd.grad(output, list(inputs.values()), upstream.to(output.dtype))
    return {OUTPUT: output.detach(), **dict(zip(inputs, gradients, strict=True))}


def beside_exact_tiles(heads: int, device: torch.device) -> dict[str, torch.Tensor]:
    """λ and β of exact tiles, each (H,): weights of the far field and of means."""
    return {
        "far_field_weight": torch.ones(heads, device=device),
        "mean_bias": torch.zeros(heads, device=device),
    }


def random_rotary(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of random angles, each (1, N, 1, D)."""
    angles = torch.randn(1, shape.tokens, 1, shape.head_dim // 2, device=device).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def cut(shape: Shape, most_tokens: int) -> Shape:
    """Two heads of a shape on a grid of fewer blocks, each as long as the real ones, and so are exact tiles.

    Args:
        shape: of a real model; a block of it has two tokens per axis at least.
        most_tokens: of the cut grid, unless two exact tiles have more; a block that is longer is shortened.
    """
    lengths = [max(2, size // count) for size, count in zip(shape.grid, shape.blocks, strict=True)]
    while math.prod(lengths) > max(most_tokens, 2 ** len(lengths)):
        longest = max(range(len(lengths)), key=lengths.__getitem__)
        lengths[longest] //= 2
    counts = [1] * len(lengths)
    for axis in (axis for _ in range(max(shape.blocks)) for axis in reversed(range(len(counts)))):
        more = [count + (place == axis) for place, count in enumerate(counts)]
        if math.prod(more) * math.prod(lengths) <= most_tokens and more[axis] <= shape.blocks[axis]:
            counts = more
    grid = tuple(count * length for count, length in zip(counts, lengths, strict=True))
    tiles = None
    if shape.tiles is not None:
        tile_lengths = [math.ceil(size / count) for size, count in zip(shape.grid, shape.tiles, strict=True)]
        if math.prod(grid) <= math.prod(tile_lengths):  # at least two, so that not all are exact
            grid = (*grid[:-1], 2 * tile_lengths[-1])
        tiles = tuple(math.ceil(size / length) for size, length in zip(grid, tile_lengths, strict=True))
    return replace(shape, grid=grid, blocks=tuple(counts), heads=CUT_HEADS, tiles=tiles, share=_CHECKED_SHARE)


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
