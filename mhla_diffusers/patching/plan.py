"""One transformer's patch: check everything first, then carry it out."""

from dataclasses import dataclass
from typing import Any

from torch import nn

from ..config import choose_layers
from ..families import Family, get_family
from ..layer import MHLALayer
from ..processor import MHLAProcessor, make_layer
from .finding import is_patched
from .grid_hook import TokenGridHook


@dataclass(frozen=True)
class Plan:
    """A checked patch of one transformer."""

    transformer: nn.Module
    family: Family
    processor: MHLAProcessor
    layers: list[tuple[Any, MHLALayer]]
    """Attentions to patch, each with its new layer."""


def make_plan(transformer: nn.Module, processor: MHLAProcessor) -> Plan:
    """Check everything and change nothing.

    Raises:
        ValueError: unsupported or offloaded transformer, already patched, or settings that do not fit.
    """
    family, config = get_family(transformer), processor.config
    if is_patched(transformer):
        raise ValueError(f"This {type(transformer).__name__} is already patched with MHLA; call remove_mhla() first.")
    if len(config.blocks) != family.axes:
        raise ValueError(
            f"blocks={config.blocks} has {len(config.blocks)} axes, but {type(transformer).__name__} has "
            f"{family.axes}; for example blocks={family.default_config.blocks}."
        )
    if any(_is_group_offloaded(module) for module in transformer.modules()):
        raise ValueError("The weights of this model are offloaded; patch it before you enable offloading.")
    attentions = list(family.self_attentions(transformer).values())
    indices = choose_layers(config.layers, len(attentions))
    if not indices:
        raise ValueError(f"layers={config.layers!r} chooses none of the {len(attentions)} layers.")
    layers = [(attentions[index], make_layer(attentions[index], config)) for index in indices]
    return Plan(transformer, family, processor, layers)


def _is_group_offloaded(module: nn.Module) -> bool:
    hooks: Any = getattr(module, "_diffusers_hook", None)
    return hooks is not None and hooks.get_hook("group_offloading") is not None


def carry_out(plan: Plan) -> None:
    """Patch the transformer."""
    hook = TokenGridHook(plan.family)
    for attn, layer in plan.layers:
        layer.original_processor = attn.processor
        layer.token_grid = hook.token_grid
        attn.mhla = layer
        attn.set_processor(plan.processor)
    hook.handle = plan.transformer.register_forward_pre_hook(hook, with_kwargs=True)
    plan.family.prepare(plan.transformer)
