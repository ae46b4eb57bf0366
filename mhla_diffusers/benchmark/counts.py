"""FLOPs of a transformer by part, counted on the meta device."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
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
REST = "rest"
_PROJECTIONS = "projections"
PARTS = (ATTENTION, _PROJECTIONS, "cross-attention", "feed-forward", REST)


def count_parts(transformer: Any, inputs: Mapping[str, Any], config: PatchConfig | None = None) -> dict[str, int]:
    """Count the FLOPs of each part of one forward of an unpatched transformer, on the meta device as its inputs.

    Operator by operator; the self-attention of a patch, counted in every layer in place of the model's own, follows
    from its sizes: eager operations pad short blocks, kernels do not.
    """
    flops = dict.fromkeys(PARTS, 0)
    patched = 0
    family = get_family(transformer)
    grid = family.grid(transformer, inputs)
    if isinstance(config, MHLAConfig):
        config.layout_on(grid)  # raises if the blocks cannot cut the grid
    begun: list[int] = []

    def begin(*_: Any) -> None:
        begun.append(int(counter.get_total_flops()))

    def end(part: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        nonlocal patched
        flops[part] += int(counter.get_total_flops()) - begun.pop()
        if part == ATTENTION and config is not None:
            given = [x for x in (*args, *kwargs.values()) if isinstance(x, torch.Tensor) and x.ndim == 3]
            text = kwargs.get("encoder_hidden_states")  # where it is an argument of its own
            tokens = kwargs.get("hidden_states", given[0]).shape[1] + (0 if text is None else text.shape[1])
            extra = 0 if family.extra == (0, 0) else tokens - math.prod(grid)
            patched += len(given[0]) * sizes_of(module, family, config, grid, extra).flops

    with torch.no_grad(), FlopCounterMode(display=False) as counter, ExitStack() as hooks:
        for part, module in _modules(transformer):
            hooks.enter_context(module.register_forward_pre_hook(begin))
            after = lambda module, args, kwargs, output, part=part: end(part, module, args, kwargs)  # noqa: E731
            hooks.enter_context(module.register_forward_hook(after, with_kwargs=True))
        transformer(**inputs)
        flops[REST] = int(counter.get_total_flops()) - sum(flops[part] for part in PARTS if part != _PROJECTIONS)
    # projections lie inside of self-attention
    flops[ATTENTION] = flops[ATTENTION] - flops[_PROJECTIONS] if config is None else patched
    return flops


def _modules(transformer: Any) -> Iterator[tuple[str, nn.Module]]:
    family = get_family(transformer)
    for block in family.blocks_of(transformer).values():
        for part, module in family.parts_of(block).values():
            yield part, module
            if part == ATTENTION:
                yield from ((_PROJECTIONS, linear) for linear in module.modules() if isinstance(linear, nn.Linear))


def count_forward(
    case: Case, config: PatchConfig | None = None, *, change: Callable[[Any], object] | None = None
) -> dict[str, int]:
    """Count the FLOPs of one forward by part, from those of one layer and of two, since all are alike.

    A patch counts in the layers that ``config`` names; ``change`` is called with the transformer before. ValueError for
    a patch that does not fit the model or the size, or a size that the model does not take.
    """
    built, meta = case.layers or case.model.layers, torch.device("meta")
    found: list[dict[str, float]] = []
    for count in (1, 2) if built > 1 else (1,):
        transformer = replace(case, layers=count).build(meta, torch.bfloat16)
        if change is not None:
            change(transformer)
        inputs = case.inputs(transformer, torch.bfloat16)
        try:
            plain = count_parts(transformer, inputs)
        except RuntimeError as error:  # of shapes, as where RoPE's table ends
            raise ValueError(
                f"{case.model.name} cannot run at {case.size}: {error}. Ask for fewer frames, or less."
            ) from error
        found.append({**plain})
        if config is not None:
            share = len(choose_layers(config.layers, built)) / built
            patched = count_parts(transformer, inputs, config)
            found[-1] = {part: share * patched[part] + (1 - share) * plain[part] for part in PARTS}
    return {part: round(first + (built - 1) * (found[-1][part] - first)) for part, first in found[0].items()}
