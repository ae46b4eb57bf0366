"""Seeded attentions of a shape with everything they are given, and what a backend or the reference makes of them."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ..attention import Call, ContentRule, initial_mixing, mhla_attention, reference_attention
from ..attention.rope import rotary_table, table_of_tokens
from .lists import draw_lists
from .shapes import Shape

OUTPUT = "output"
"""Name of the output beside the gradients."""
CUT_HEADS = 2
_CHECKED_DENSITY = 0.25
"""On a small grid, which has few uniform blocks."""


@dataclass(frozen=True)
class Problem:
    """One attention with everything it is given."""

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
        settings = {name: x for name, x in self.settings.items() if name != "rotary_axes"}
        settings["lists"] = settings.pop("sparse", None)
        if (rotary := settings.pop("rotary", None)) is not None:
            settings["rotary"] = rotary_table(rotary)
        doubles = {name: x.double() for name, x in self.tensors.items()}
        return differentiate(lambda **x: reference_attention(Call(**x, **settings)), doubles, self.upstream)


def draw_problem(shape: Shape, device: torch.device, dtype: torch.dtype, kind: str) -> Problem:
    """A seeded call of :func:`mhla_attention`, with RoPE where the model has it.

    Args:
        shape: the attention; with a block size where the kind is sparse.
        device: where.
        dtype: of query, key, value, gate and the output's gradient.
        kind: one of plain, sparse (with lists given), sparse by content (for which there is no reference), everything,
            sparse and everything, causal, causal softmax. Everything: RoPE for images too, key mask, output norm and
            output gate. Causal: :func:`_causal_problem`.
    """
    torch.manual_seed(0)
    if kind in ("causal", "causal softmax"):
        return _causal_problem(shape, device, dtype, has_softmax=kind == "causal softmax")
    tensors = dict(zip(("query", "key", "value"), make_inputs(shape, device, dtype), strict=True))
    mixing = initial_mixing(shape.blocks).to(device)
    tensors["mixing"] = mixing + 0.1 * torch.rand_like(mixing)
    settings: dict[str, Any] = {"grid": shape.grid, "blocks": shape.blocks}
    if shape.rotary_axes is not None or "everything" in kind:
        settings |= {"rotary": random_rotary(shape, device), "rotary_axes": shape.rotary_axes}
    if "everything" in kind:
        tensors["output_norm"] = 1 + 0.3 * torch.randn(shape.head_dim, device=device)
        tensors["output_gate"] = torch.randn_like(tensors["query"])
        settings["key_mask"] = torch.rand(1, shape.tokens, device=device) > 0.3
    if "sparse" in kind:
        tensors |= branch_weights(shape.heads, device)
        by_content = "by content" in kind
        settings["sparse"] = rule_of(shape, fit_pooled_bias=False) if by_content else draw_lists(shape, device)
    return Problem(tensors, settings, torch.randn_like(tensors["query"]))


def _causal_problem(shape: Shape, device: torch.device, dtype: torch.dtype, *, has_softmax: bool) -> Problem:
    """The tokens of a shape as a sequence in as many blocks, with RoPE, whose last block is not full."""
    tensors = dict(zip(("query", "key", "value"), make_inputs(shape, device, dtype), strict=True))
    count = math.prod(shape.blocks)
    mixing = initial_mixing((count,)).to(device)
    tensors["mixing"] = mixing + 0.1 * torch.rand_like(mixing)
    if has_softmax:
        tensors["linear_weight"] = torch.ones(shape.heads, device=device)
    settings: dict[str, Any] = {"grid": (shape.tokens + 1,), "blocks": (count,), "causal": "token"}
    # before the feature map: after it, the first tokens may have nearly no normaliser to divide by
    settings |= {"rotary": random_rotary(replace(shape, rotary_axes=None), device), "rope": "before"}
    return Problem(tensors, settings, torch.randn_like(tensors["query"]))


def make_inputs(shape: Shape, device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Seeded query, key and value, each (1, N, H, D)."""
    generator = torch.Generator(device).manual_seed(0)
    size = (1, shape.tokens, shape.heads, shape.head_dim)
    return tuple(torch.randn(size, generator=generator, device=device).to(dtype) for _ in range(3))


def branch_weights(heads: int, device: torch.device) -> dict[str, torch.Tensor]:
    """λ of the linear branch and β of pooled keys, each (H,)."""
    return {
        "linear_weight": torch.ones(heads, device=device),
        "pooled_bias": torch.zeros(heads, device=device),
    }


def rule_of(shape: Shape, *, fit_pooled_bias: bool) -> ContentRule:
    """By which lists are chosen at every call, and β is fitted if so asked."""
    return ContentRule(int(shape.block_size or 0), shape.density, fit_pooled_bias)


def random_rotary(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) of random angles, each (1, N, 1, D), of one axis for each channel where the model's are."""
    if shape.rotary_axes is None:
        angles = torch.randn(1, shape.tokens, 1, shape.head_dim // 2, device=device)
    else:
        table = torch.randn(1, sum(shape.grid), 1, shape.head_dim // 2, device=device)
        angles = table_of_tokens(table, shape.grid, tuple(count // 2 for count in shape.rotary_axes))
    angles = angles.repeat_interleave(2, dim=-1)
    return angles.cos(), angles.sin()


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
    counts = _most_blocks(shape.blocks, most_tokens // math.prod(lengths))
    grid = tuple(count * length for count, length in zip(counts, lengths, strict=True))
    rows = math.prod(grid[:-1])
    if shape.block_size is not None and math.prod(grid) <= shape.block_size:  # at least two, so that not all is listed
        grid = (*grid[:-1], shape.block_size // rows + 1)
    return replace(shape, grid=grid, blocks=counts, heads=CUT_HEADS, density=_CHECKED_DENSITY)


def _most_blocks(blocks: tuple[int, ...], most: int) -> tuple[int, ...]:
    """Block counts of at most ``blocks``, grown one after the other from the last axis, whose product is not above."""
    counts = [1] * len(blocks)
    for _ in range(max(blocks)):
        for axis in reversed(range(len(counts))):
            product = math.prod(counts) // counts[axis] * (counts[axis] + 1)
            if product <= most and counts[axis] < blocks[axis]:
                counts[axis] += 1
    return tuple(counts)
