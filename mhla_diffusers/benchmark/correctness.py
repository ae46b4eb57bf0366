"""Checks that an attention is correct on this device and in this type, before anything is timed."""

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ..attention import MHLACall, SparseCall, initial_mixing, mhla_attention, reference_attention, sparse_attention
from ..attention.triton.backend import why_not
from ..patching import find_patched
from ..patching.call import Seen
from .cases import Shape

LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
_LONGEST = {1: 512, 2: 16, 3: 8}
"""Axes of a grid → most tokens along each axis of an MHLA block that is checked."""


class IncorrectAttentionError(ValueError):
    """An attention differs from the reference; nothing is timed."""


def why_no_triton(shape: Shape, device: torch.device, dtype: torch.dtype) -> str | None:
    """Return why the fused kernels cannot be timed; None if they can."""
    if device.type == "cpu":
        return "the fused kernels run on CUDA and ROCm devices"  # their interpreter is for tests and has no speed
    return why_not(torch.empty(1, 0, shape.heads, shape.head_dim, device=device, dtype=dtype), "relu")


def check_operator(shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
    """Compare MHLA, and sparse attention where it is measured, with the float64 reference, by every backend.

    Raises:
        IncorrectAttentionError: the relative error of an output or a gradient is too large.
    """
    small = cut(shape)
    torch.manual_seed(0)
    inputs = dict(zip(("query", "key", "value"), small.draw_inputs(device, dtype), strict=True))
    upstream = torch.randn_like(inputs["query"])
    common: dict[str, Any] = {"grid": small.grid, "rotary": small.draw_rotary(device) if small.rope else None}

    def differentiate(attend: Callable[..., torch.Tensor], tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        leaves = {name: x.detach().requires_grad_() for name, x in tensors.items()}
        output = attend(**leaves)
        gradients = torch.autograd.grad(output, list(leaves.values()), upstream.to(output.dtype))
        return {"output": output, **dict(zip(leaves, gradients, strict=True))}

    def check(what: str, attend: Any, reference: Any, tensors: dict[str, torch.Tensor]) -> None:
        expected = differentiate(reference, {name: x.double() for name, x in tensors.items()})
        for backend in ("eager",) if why_no_triton(shape, device, dtype) else ("eager", "triton"):
            found = differentiate(partial(attend, backend=backend), tensors)
            errors = {name: relative_error(found[name], x) for name, x in expected.items()}
            _require(errors, dtype, f"{what} {backend} on {device} in {dtype}")

    mixing = initial_mixing(small.blocks).to(device)
    check(
        "MHLA",
        partial(mhla_attention, **common, blocks=small.blocks),
        lambda **x: reference_attention(MHLACall(**x, **common, blocks=small.blocks)),
        {**inputs, "mixing": mixing + 0.1 * torch.rand_like(mixing)},
    )
    if small.block_size is not None:
        lists, half = small.draw_lists(device), torch.full((small.heads,), 0.5, device=device)
        common |= {"pooled_bias": half, "state_weight": half}
        check(
            "Sparse attention",
            partial(sparse_attention, **common, lists=lists),
            lambda **x: reference_attention(SparseCall(**x, **common, sparse=lists)),
            inputs,
        )


def cut(shape: Shape) -> Shape:
    """Cut a shape to two heads on a grid of at most two MHLA blocks per axis.

    Blocks are as long as the real ones up to a limit. Uniform blocks stay, and the grid holds more than one of them.
    """
    lengths = [max(2, size // count) for size, count in zip(shape.grid, shape.blocks, strict=True)]
    blocks = tuple(min(2, count) for count in shape.blocks)
    grid = tuple(n * min(length, _LONGEST[len(blocks)]) for n, length in zip(blocks, lengths, strict=True))
    if shape.block_size is not None and math.prod(grid) <= shape.block_size:
        grid = (*grid[:-1], shape.block_size // math.prod(grid[:-1]) + 1)
    # a small grid has few uniform blocks, so more of them are listed
    return replace(shape, grid=grid, blocks=blocks, heads=2, density=0.25)


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
    """Run a patched model and compare its first and last patched attention with the reference, on the same inputs.

    Args:
        transformer: freshly patched, so that gates are 1, and in the type to measure.
        inputs: of its forward, of few tokens.

    Raises:
        IncorrectAttentionError: the relative error of a layer is too large.
    """
    (patched,) = find_patched(transformer).values()

    def compare(seen: Seen) -> torch.Tensor:
        if seen.layer in (patched.chosen[0], patched.chosen[-1]):
            error = relative_error(seen.output, seen.reference())
            what = f"The attention of patched layers on {seen.output.device} in {seen.output.dtype}"
            _require({"output": error}, seen.output.dtype, what)
        return seen.output

    with patched.watched(compare):
        transformer(**inputs)


def _require(errors: Mapping[str, float], dtype: torch.dtype, what: str) -> None:
    """Raise if an error is above its limit or NaN."""
    limits = {name: (LARGEST_ERROR if name == "output" else LARGEST_GRADIENT_ERROR)[dtype] for name in errors}
    wrong = [f"{name} {error:.1e} of {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]]
    if wrong:
        raise IncorrectAttentionError(
            f"{what} has a relative error that is too large: {', '.join(wrong)}. Nothing was timed."
        )
