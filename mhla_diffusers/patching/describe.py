"""A table of what a patch did to every self-attention."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ..attention.blocks import block_sizes, check_layout
from ..families import get_family
from ..reporting import text_table
from .finding import find_transformers
from .processor import MHLAProcessor


@dataclass(frozen=True)
class LayerDescription:
    """One self-attention."""

    name: str
    replaced: bool
    grid: tuple[int, ...] | None
    """Token grid of the latest input, or the one given; None before the first forward."""
    blocks: tuple[int, ...] | None
    """Block counts; None for a layer that was kept."""
    tokens_per_block: tuple[int, int] | None
    """Smallest and largest block; None while the grid is unknown."""
    extra_parameters: int
    """Parameters that MHLA adds."""


class Description(list[LayerDescription]):
    """The layers of a model; printed, it is a table."""

    def __str__(self) -> str:
        header = ("layer", "attention", "grid", "blocks", "tokens per block", "extra parameters")
        replaced = sum(layer.replaced for layer in self)
        extra = sum(layer.extra_parameters for layer in self)
        total = f"{replaced} of {len(self)} self-attentions replaced, {extra:,} extra parameters"
        return f"{text_table(header, map(_cells, self))}\n{total}"


def describe(model: Any, grid: Sequence[int] | None = None) -> Description:
    """What is replaced and what is kept, layer by layer.

    Args:
        model: a pipeline or a transformer, patched or not.
        grid: token grid to describe; None for that of the latest forward.

    Raises:
        ValueError: unsupported model, or a grid that the blocks do not fit.
    """
    transformers = find_transformers(model)
    layers = Description()
    for component, transformer in transformers.items():
        prefix = f"{component}." if len(transformers) > 1 else ""
        for name, attn in get_family(transformer).self_attentions(transformer).items():
            layers.append(_describe_layer(prefix + name, attn, None if grid is None else tuple(grid)))
    return layers


def _describe_layer(name: str, attn: Any, grid: tuple[int, ...] | None) -> LayerDescription:
    layer, processor = getattr(attn, "mhla", None), attn.processor
    if layer is None and not isinstance(processor, MHLAProcessor):
        return LayerDescription(name, False, grid, None, None, 0)
    blocks = layer.config.blocks if layer is not None else processor.config.blocks
    tokens = None
    if grid is not None:
        check_layout(grid, blocks)
    else:
        remembered = layer.token_grid.shape if layer is not None and layer.token_grid is not None else None
        grid = getattr(processor, "grid", None) or remembered
    # a grid that was remembered may be the one that was refused
    if grid is not None and all(count <= size for count, size in zip(blocks, grid, strict=True)):
        sizes = block_sizes(grid, blocks)
        tokens = (min(sizes), max(sizes))
    extra = sum(parameter.numel() for parameter in layer.parameters()) if layer is not None else 0
    return LayerDescription(name, True, grid, blocks, tokens, extra)


def _cells(layer: LayerDescription) -> tuple[str, ...]:
    def times(shape: tuple[int, ...] | None) -> str:
        return "x".join(map(str, shape)) if shape else "-"

    blocks = f"{times(layer.blocks)} = {math.prod(layer.blocks)}" if layer.blocks else "-"
    tokens = "-"
    if layer.tokens_per_block is not None:
        low, high = layer.tokens_per_block
        tokens = str(low) if low == high else f"{low} to {high}"
    kind = "MHLA" if layer.replaced else "kept"
    return layer.name, kind, times(layer.grid), blocks, tokens, f"{layer.extra_parameters:,}"
