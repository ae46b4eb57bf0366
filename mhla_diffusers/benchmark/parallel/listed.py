"""Lists of exact tiles to count with: as far from each other as lists may be, and as near."""

from dataclasses import fields, is_dataclass, replace
from functools import cache
from typing import Any

import torch

from ...attention import BlockLists
from ...attention.parallel.tiles import fetch_plan
from ...attention.tile_scores import list_length
from ..lists import draw_mask
from ..shapes import Shape
from .world import World

_META = torch.device("meta")


def lists_of(shape: Shape, world: World, device: torch.device, near: bool) -> BlockLists:
    """Of the heads that a process attends with, which all have the same lists.

    On the meta device lists have no values. What a process of a ring fetches for them is worked out of lists that have
    some, by the same code as ever, and stands ready.

    Args:
        shape: with tile counts and the share of pairs that is exact.
        world: the processes.
        device: where the lists are.
        near: every query tile lists those around it; else a seed draws them.

    Raises:
        ValueError: the shape has no exact tiles.
    """
    if shape.tiles is None:
        raise ValueError(f"Shape {shape.name!r} has no exact tiles; give it tile counts.")
    mask = _near(shape) if near else draw_mask(shape.tiles, 1, shape.share)[0]
    parallel = world.parallel
    heads = len(range(shape.heads)[parallel.heads(shape.heads)])
    tiles = BlockLists.from_mask(shape.tiles, mask.expand(heads, -1, -1))
    if device.type != "meta":
        return tiles
    found = replace(tiles, offsets=tiles.offsets.to(_META), keys=tiles.keys.to(_META), plans={})
    if parallel.ring.size > 1:
        shares = tuple(parallel.segments(shape.tokens))
        plan = fetch_plan(tiles, shape.grid, shares, parallel.ring.rank)
        found.plans[shape.grid, shares, parallel.ring.rank] = _on_meta(plan)
    return found


def _on_meta(plan: Any) -> Any:
    """A plan, and the plans in it, with tensors that have no values."""
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return replace(
        plan,
        **{
            name: value.to(_META) if isinstance(value, torch.Tensor) else _on_meta(value)
            for name, value in values.items()
            if isinstance(value, torch.Tensor) or is_dataclass(value)
        },
    )


@cache
def _near(shape: Shape) -> torch.Tensor:
    """Bool (T, T): the tiles whose centres are fewest tokens away, as many as lists have."""
    counts = shape.tiles or ()
    lengths = [tokens / count for tokens, count in zip(shape.grid, counts, strict=True)]
    axes = [length * torch.arange(count) for count, length in zip(counts, lengths, strict=True)]
    centres = torch.stack([axis.flatten() for axis in torch.meshgrid(*axes, indexing="ij")], dim=-1)
    chosen = torch.cdist(centres, centres).topk(list_length(shape.share, len(centres)), largest=False).indices
    return torch.zeros(len(centres), len(centres), dtype=torch.bool).scatter_(-1, chosen, value=True)
