"""Checks that an attention is correct on this device and in this type, before anything is timed."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..attention import Call, ContentRule, initial_mixing, mhla_attention, reference_attention
from ..families import AttentionInputs
from ..patching import MHLALayer, mhla_layers
from .shapes import Shape, draw_lists

OUTPUT = "output"
"""Name of the output beside the gradients."""
CUT_HEADS = 2
LARGEST_ERROR = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}
"""‖found − reference‖ / ‖reference‖ of an output."""
LARGEST_GRADIENT_ERROR = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}


class IncorrectAttentionError(ValueError):
    """An attention differs from the reference; nothing is timed."""


# ---- seeded calls, by a backend and by the reference ----------------------------------------------------------------


@dataclass(frozen=True)
class Problem:
    """One attention with all its arguments."""

    tensors: dict[str, torch.Tensor]
    """What takes gradients, by the names of :func:`mhla_attention`."""
    settings: dict[str, Any]
    """Its other arguments."""
    upstream: torch.Tensor
    """Gradient of the output."""

    def attend(self, backend: str) -> dict[str, torch.Tensor]:
        """Output and gradients of a backend, see :func:`differentiate`."""
        return differentiate(partial(mhla_attention, backend=backend, **self.settings), self.tensors, self.upstream)

    def reference(self) -> dict[str, torch.Tensor]:
        """Output and gradients of the reference, in float64."""
        doubles = {name: x.double() for name, x in self.tensors.items()}
        return differentiate(lambda **x: reference_attention(Call(**x, **self.settings)), doubles, self.upstream)


def draw_problem(shape: Shape, device: torch.device, dtype: torch.dtype, kind: str) -> Problem:
    """A seeded call of :func:`mhla_attention`, with RoPE where the model has it.

    Args:
        shape: the attention; with a block size where the kind is sparse.
        device: where.
        dtype: of query, key, value, gate and the output's gradient.
        kind: one of plain, sparse (with lists given), sparse by content (for which there is no reference), everything,
            sparse and everything, causal, causal softmax. Everything: RoPE for images too, key mask, output norm and
            output gate. Causal: the tokens as a sequence in as many blocks, of which the last is not full.
    """
    torch.manual_seed(0)
    tensors = dict(zip(("query", "key", "value"), make_inputs(shape, device, dtype), strict=True))
    causal = kind.startswith("causal")
    blocks = (math.prod(shape.blocks),) if causal else shape.blocks
    mixing = initial_mixing(blocks).to(device)
    tensors["mixing"] = mixing + 0.1 * torch.rand_like(mixing)
    settings: dict[str, Any] = {"grid": shape.grid, "blocks": blocks}
    if causal:
        # before the feature map: after it, the first tokens may have nearly no normaliser to divide by
        rotary = random_rotary(shape, device)
        settings |= {"grid": (shape.tokens + 1,), "causal": "token", "rotary": rotary, "rope": "before"}
        if kind == "causal softmax":
            tensors["linear_weight"] = torch.ones(shape.heads, device=device)
    elif shape.rope or "everything" in kind:
        settings |= {"rotary": random_rotary(shape, device)}
    if "everything" in kind:
        tensors["output_norm"] = 1 + 0.3 * torch.randn(shape.head_dim, device=device)
        tensors["output_gate"] = torch.randn_like(tensors["query"])
        settings["key_mask"] = torch.rand(1, shape.tokens, device=device) > 0.3
    if "sparse" in kind:
        tensors |= branch_weights(shape.heads, device)
        by_content = "by content" in kind
        settings["sparse"] = rule_of(shape, fit_pooled_bias=False) if by_content else draw_lists(shape, device)
    return Problem(tensors, settings, torch.randn_like(tensors["query"]))


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Seeded query, key and value, each (1, N, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))


def branch_weights(heads: int, device: torch.device) -> dict[str, torch.Tensor]:
    """λ of the linear branch and β of pooled keys, each (H,)."""
    return {"linear_weight": torch.ones(heads, device=device), "pooled_bias": torch.zeros(heads, device=device)}


def rule_of(shape: Shape, *, fit_pooled_bias: bool) -> ContentRule:
    """By which lists are chosen at every call, and β is fitted if so asked."""
    return ContentRule(int(shape.block_size or 0), shape.density, fit_pooled_bias)


def random_rotary(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of random angles, each (1, N, 1, D)."""
    angles = torch.randn(1, shape.tokens, 1, shape.head_dim // 2, device=device).repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


def differentiate(
    attend: Callable[..., torch.Tensor], tensors: Mapping[str, torch.Tensor], upstream: torch.Tensor
) -> dict[str, torch.Tensor]:
    """The output of an attention, as ``OUTPUT``, and the gradients of the tensors that it takes by name."""
    inputs = {name: x.detach().requires_grad_() for name, x in tensors.items()}
    output = attend(**inputs)
    gradients = torch.autograd.grad(output, list(inputs.values()), upstream.to(output.dtype))
    return {OUTPUT: output.detach(), **dict(zip(inputs, gradients, strict=True))}


def cut(shape: Shape, most_tokens: int) -> Shape:
    """Two heads of a shape on a grid of fewer MHLA blocks, each as long as the real ones; uniform blocks stay.

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
    return replace(shape, grid=grid, blocks=tuple(counts), heads=CUT_HEADS, density=0.25)


# ---- errors and their limits ----------------------------------------------------------------------------------------


def errors_of(found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]) -> dict[str, float]:
    """‖found − expected‖ / ‖expected‖ of each tensor that is expected, by its name."""
    pairs = {name: (found[name].detach().double(), x.detach().double()) for name, x in expected.items()}
    return {name: float((one - other).norm() / other.norm()) for name, (one, other) in pairs.items()}


def limits_of(names: Iterable[str], dtype: torch.dtype) -> dict[str, float]:
    """The largest errors of an output, which is named ``OUTPUT``, and of gradients, against the reference."""
    return {name: (LARGEST_ERROR if name == OUTPUT else LARGEST_GRADIENT_ERROR)[dtype] for name in names}


def too_large(errors: Mapping[str, float], limits: Mapping[str, float]) -> str:
    """The errors above their limits, in words; empty if there are none. An error that is no number is above."""
    wrong = [f"{name} {error:.1e} of {limits[name]:.0e}" for name, error in errors.items() if not error <= limits[name]]
    return ", ".join(wrong)


def _require(errors: Mapping[str, float], limits: Mapping[str, float], what: str) -> None:
    if wrong := too_large(errors, limits):
        raise IncorrectAttentionError(f"{what} has a relative error that is too large: {wrong}. Nothing was timed.")


def check_operation(
    shape: Shape, device: torch.device, dtype: torch.dtype, backend: str, *, sparse: bool = False
) -> float:
    """Compare output and gradients with the float64 reference, on some blocks of a shape.

    MHLA blocks, up to 1024 tokens, are as long as the shape's, and uniform blocks have as many tokens.

    Returns:
        Relative error of the output.

    Raises:
        IncorrectAttentionError: it, or that of a gradient, is too large.
    """
    problem = draw_problem(cut(shape, 1024), device, dtype, "sparse" if sparse else "plain")
    errors = errors_of(problem.attend(backend), problem.reference())
    branch = " with the sparse branch" if sparse else ""
    _require(errors, limits_of(errors, dtype), f"MHLA{branch} {backend} on {device} in {dtype}")
    return errors[OUTPUT]


def check_agreement(found: torch.Tensor, eager: torch.Tensor, what: str) -> None:
    """Compare with the eager backend at full size, where the reference would be too large.

    Raises:
        IncorrectAttentionError: they differ.
    """
    errors, limits = errors_of({OUTPUT: found}, {OUTPUT: eager}), {OUTPUT: 2 * LARGEST_ERROR[eager.dtype]}
    _require(errors, limits, f"{what}, compared with the eager backend on {eager.device} in {eager.dtype},")


@torch.no_grad()
def check_patched(transformer: Any, inputs: dict[str, Any]) -> None:
    """Run a model with MHLA and compare its first and last MHLA layer with the reference, on the same inputs.

    The model is fresh, so that gates are 1, and in the type to measure; inputs are of few tokens.

    Raises:
        IncorrectAttentionError: the relative error of a layer is too large.
    """
    layers = list(mhla_layers(transformer).values())

    def compare(layer: MHLALayer, args: tuple[Any, ...], kwargs: dict[str, Any], output: torch.Tensor) -> None:
        given: AttentionInputs = args[0]
        weights, value = layer.weights(given), given.value
        errors = errors_of(
            {OUTPUT: output}, {OUTPUT: torch.einsum("bhqk,bkhd->bqhd", weights, value.to(weights.dtype))}
        )
        what = f"The attention of MHLA layers on {output.device} in {output.dtype}"
        _require(errors, limits_of(errors, output.dtype), what)

    handles = [layer.register_forward_hook(compare, with_kwargs=True) for layer in {layers[0], layers[-1]}]
    try:
        transformer(**inputs)
    finally:
        for handle in handles:
            handle.remove()
