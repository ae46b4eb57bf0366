"""FLOPs of a transformer by part, counted on the meta device."""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from ..config import MHLAConfig, PatchConfig
from ..families import get_family
from ..patching.describe import sizes_of
from ..patching.patch import choose_layers
from .cases import Case

ATTENTION = "self-attention"
"""Without its projections."""
_PROJECTIONS, _REST = "projections", "rest"
PARTS = (ATTENTION, _PROJECTIONS, "cross-attention", "feed-forward", _REST)


def count_parts(
    transformer: Any, inputs: Mapping[str, Any], config: PatchConfig | None = None, share: float = 1.0
) -> dict[str, float]:
    """Count the FLOPs of each part of one forward of an unpatched transformer, on the meta device as its inputs.

    Operator by operator; the self-attention of a patch, in a ``share`` of the layers, follows from its sizes: eager
    operations pad short blocks, kernels do not.
    """
    family = get_family(transformer)
    grid = family.grid(transformer, inputs)
    if isinstance(config, MHLAConfig):
        config.layout_on(grid)  # raises if the blocks cannot cut the grid
    modules = [one for block in family.blocks_of(transformer).values() for one in family.parts_of(block).values()]
    patched = 0

    def count_patched(module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal patched
        given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim == 3]
        text = kwargs.get("encoder_hidden_states")  # where it is an argument of its own
        tokens = kwargs.get("hidden_states", given[0]).shape[1] + (0 if text is None else text.shape[1])
        extra = 0 if family.extra == (0, 0) else tokens - math.prod(grid)
        patched += len(given[0]) * sizes_of(module, family, config, grid, extra).flops

    hooks = [
        module.register_forward_pre_hook(count_patched, with_kwargs=True)
        for part, module in modules
        if part == ATTENTION and config is not None
    ]
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        transformer(**inputs)
    for hook in hooks:
        hook.remove()
    by_name = {name: sum(counts.values()) for name, counts in counter.get_flop_counts().items()}
    names = {module: f"{type(transformer).__name__}.{name}" for name, module in transformer.named_modules()}

    def counted(module: nn.Module) -> int:
        return by_name.get(names[module], 0)

    flops: dict[str, float] = dict.fromkeys(PARTS, 0)
    for part, module in modules:
        flops[part] += counted(module)
        if part == ATTENTION:
            flops[_PROJECTIONS] += sum(counted(one) for one in module.modules() if isinstance(one, nn.Linear))
    flops[_REST] = counter.get_total_flops() - sum(flops.values()) + flops[_PROJECTIONS]
    flops[ATTENTION] -= flops[_PROJECTIONS]
    if config is not None:
        flops[ATTENTION] = share * patched + (1 - share) * flops[ATTENTION]
    return flops


def count_forward(
    case: Case, config: PatchConfig | None = None, *, change: Callable[[Any], object] | None = None
) -> dict[str, int]:
    """Count the FLOPs of one forward by part, from those of one layer and of two, since all are alike.

    A patch counts in the layers that ``config`` names; ``change`` is called with the transformer before. ValueError for
    a patch that does not fit the model or the size, or a size that the model does not take.
    """
    layers = case.model.layers
    share = 1.0 if config is None else len(choose_layers(config.layers, layers)) / layers
    found = []
    for count in (1, 2) if layers > 1 else (1,):
        transformer = case.build(torch.device("meta"), torch.bfloat16, count)
        if change is not None:
            change(transformer)
        try:
            found.append(count_parts(transformer, case.inputs(transformer, torch.bfloat16), config, share))
        except RuntimeError as error:  # of shapes, as where RoPE's table ends
            raise ValueError(
                f"{case.model.name} cannot run at {case.size}: {error}. Ask for fewer frames, or less."
            ) from error
    return {part: round(first + (layers - 1) * (found[-1][part] - first)) for part, first in found[0].items()}
