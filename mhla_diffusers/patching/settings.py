"""Which settings a transformer can have, and which of its layers they choose."""

from fractions import Fraction
from typing import Any

from torch import nn

from ..config import AUTOMATIC, LayerChoice, MHLAConfig, is_automatic, parse_layers
from ..families import get_family
from .handle import Patched
from .hooks import is_group_offloaded
from .processor import holds_weights

_SHOWN_NAMES = 4
"""How many layers an error names."""


def chosen_attentions(patched: Patched, config: MHLAConfig) -> dict[str, Any]:
    """Name and module of every self-attention that settings choose, after checking that the transformer can have them.

    Raises:
        ValueError: settings that do not fit, offloaded weights, or attentions whose processors have weights.
    """
    family, kind = patched.family, type(patched.transformer).__name__
    if len(config.blocks) != family.axes:
        raise ValueError(
            f"blocks={config.blocks} has {len(config.blocks)} axes, but {kind} has {family.axes}; for example "
            f"blocks={family.default_config.blocks}."
        )
    if config.sparse != "none" and family.own_attention != "softmax":
        raise ValueError(
            f"sparse={config.sparse!r} approximates softmax attention, and the own attention of {kind} is "
            f"{family.own_attention}; leave it at 'none'."
        )
    if family.adapter.has_extra and not config.normalize:
        raise ValueError(
            f"normalize=False leaves {kind} no common denominator with the softmax over its extra tokens; leave it at "
            "True."
        )
    refuse_order(patched.transformer, config.causal)
    if family.adapter.rope_by_head and config.rope != "before":
        raise ValueError(
            f"rope={config.rope!r} would need one table for all heads, and {kind} rotates every head by other angles; "
            "set rope='before'."
        )
    if (why := family.why_not_patched(patched.transformer, config)) is not None:
        raise ValueError(why)
    if is_group_offloaded(patched.transformer):
        raise ValueError("The weights of this model are offloaded; patch it before you enable offloading.")
    found = list(patched.attentions.items())
    indices = choose_layers(config.layers, len(found))
    if not indices:
        raise ValueError(f"layers={config.layers!r} chooses none of the {len(found)} layers.")
    _refuse_processors_with_weights(found, indices)
    return dict(found[index] for index in indices)


def _refuse_processors_with_weights(found: list[tuple[str, Any]], indices: list[int]) -> None:
    processors = [getattr(attn, "processor", None) for _, attn in found]
    holding = [index for index in indices if holds_weights(processors[index])]
    if not holding:
        return
    names = ", ".join(found[index][0] for index in holding[:_SHOWN_NAMES])
    more = f" and {len(holding) - _SHOWN_NAMES} more" if len(holding) > _SHOWN_NAMES else ""
    kind = type(processors[holding[0]]).__name__
    others = [index for index in indices if index not in holding]
    way_out = f"Leave these layers as they are with layers={others}, or take" if others else "Take"
    raise ValueError(
        f"{names}{more} run {kind}, which has weights of its own, as those of IP-Adapters have, and what it adds "
        f"would be lost. {way_out} the adapter away first, for example with pipe.unload_ip_adapter()."
    )


def refuse_order(transformer: nn.Module, causal: object) -> None:
    """Raise if a patch is to be causal whose transformer attends to tokens that stand in no order.

    Raises:
        ValueError: naming the way out.
    """
    if causal is not None and get_family(transformer).adapter.has_extra:
        raise ValueError(
            f"causal={causal!r} orders the tokens of the grid, and {type(transformer).__name__} attends to extra "
            "tokens too, such as text or a class token, which have no place in that order; leave it at None."
        )


def automatic_count(choice: LayerChoice, count: int) -> int:
    """How many of ``count`` layers an automatic choice replaces: as many as the same fraction without "auto:"."""
    return len(choose_layers(str(choice).removeprefix(AUTOMATIC), count))


def choose_layers(choice: LayerChoice, count: int) -> list[int]:
    """Indices of the layers to replace, ascending.

    A fraction keeps the remaining layers evenly spread, beginning with layer 0: "2/3" keeps layers 0, 3, 6, …, the
    hybrid of the paper's Sec. 5.3.

    Args:
        choice: "all", a fraction as text or number, or indices; negative indices count from the end.
        count: number of self-attentions of the model.

    Raises:
        ValueError: unknown choice, an index out of range or given twice, or a choice that is made by measuring.
    """
    parsed = parse_layers(choice)
    if is_automatic(choice):
        raise ValueError(
            f"layers={choice!r} is chosen by measuring the model: call apply_mhla(model, layers={choice!r}, "
            "calibration=run), with run() a function that runs the model on typical inputs, or give the list of layers "
            "that it chose."
        )
    if isinstance(parsed, Fraction):
        kept = 1 - parsed
        return [i for i in range(count) if not kept or (i > 0 and int(i * kept) == int((i - 1) * kept))]
    for index in parsed:
        if not -count <= index < count:
            raise ValueError(f"Layer {index} is out of range: the model has {count} layers, {-count} to {count - 1}.")
    chosen = sorted(index % count for index in parsed)
    twice = sorted({index for index in chosen if chosen.count(index) > 1})
    if twice:
        raise ValueError(f"layers={parsed} names layer {', '.join(map(str, twice))} more than once; name each once.")
    return chosen
