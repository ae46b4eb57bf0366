"""Weights that a patch brings: those of the model that it replaces, and its own at other block counts.

Weights of the model go by the names that they have in a plain model, whatever it looks like at the moment: with
projections that are fused, or with adapters around its layers.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import nn

from ..attention import extend_mixing, resize_mixing
from ..attention.mixing import causal_mixing
from ..config import MHLAConfig, check
from .hooks import refuse_weights_on_disk
from .layer import attentions_of

_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
"""Projections that diffusers joins into one, which it keeps beside them and uses in their place."""

_NOT_OF_THE_MODEL = (".mhla.", "lora_", ".modules_to_save.")
"""Parts of the names of weights that patches and adapters have added."""


def base_weights(transformer: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Name of every tensor that is not MHLA's → where it lies, the place that counts first.

    A fused projection is given by its parts, which lie there and in the single projections.
    """
    state = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): [tensor]
        for name, tensor in transformer.state_dict(keep_vars=True).items()
        if not any(mark in name for mark in _NOT_OF_THE_MODEL)
    }
    for path in attentions_of(transformer):
        for fused, parts in _FUSED.items():
            for kind in ("weight", "bias"):
                joined = state.pop(f"{path}.{fused}.{kind}", None)
                if joined is not None:
                    places = [state[f"{path}.{part}.{kind}"] for part in parts]
                    pieces = joined[0].split([len(place[0]) for place in places])
                    for place, piece in zip(places, pieces, strict=True):
                        place.insert(0, piece)
    return state


@torch.no_grad()
def write_weights(transformer: nn.Module, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write weights of the model, by their names in a plain model, wherever they lie."""
    if tensors:
        places = base_weights(transformer)
        for name, tensor in tensors.items():
            for place in places[name]:
                place.copy_(tensor)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds its values as they are: no quantised parameter, no part of a sharded one."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


def check_writable(transformer: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raise unless weights of the model can be written.

    Args:
        transformer: the model.
        names: of what is to be written.
        purpose: for the error.

    Raises:
        ValueError: they are merged with adapters, quantised, sharded, or offloaded.
    """
    names = list(names)
    if not names:
        return
    merged = [name for name, module in transformer.named_modules() if getattr(module, "merged", False) is True]
    if merged:
        raise ValueError(
            f"LoRA adapters are merged into {merged[0]}, whose weights cannot be replaced under them; call "
            f"unfuse_lora() before you {purpose}."
        )
    refuse_weights_on_disk(transformer, purpose)
    places = base_weights(transformer)
    whole = all(tensor.is_meta for tensor in transformer.state_dict().values())
    for name in names:
        place = places[name][0]
        if not is_plain(place):
            raise ValueError(
                f"{name} is no plain tensor but a {type(place).__name__}: quantised or sharded weights cannot be "
                f"replaced; {purpose} before that, or load the model again with from_pretrained()."
            )
        if place.is_meta and not whole:
            raise ValueError(f"{name} is offloaded; switch offloading off before you {purpose}.")


def resized(tensors: Mapping[str, torch.Tensor], before: MHLAConfig, after: MHLAConfig) -> dict[str, torch.Tensor]:
    """The tensors that a patch with other settings has.

    Mixing matrices are interpolated over block positions. Those of causal patches go on along the first axis as
    :func:`extend_mixing` says, or end earlier there, since a block stands for as many tokens as before.

    Args:
        tensors: name → tensor, for example ``blocks.0.attn1.mhla.mixing``; others are left as they are.
        before: settings that they belong to.
        after: settings that they shall fit.

    Raises:
        ValueError: other blocks together with another order or another length of causal blocks, or more causal blocks
            than a single one can be extended to, or entries below 0 where their logarithm is taken.
    """
    part = dict(tensors)
    if after.needs_positive_mixing:
        _check_positive(part, before.blocks)
    if before.blocks != after.blocks:
        for key in part:
            if key.endswith(".mhla.mixing"):
                part[key] = _resized_mixing(part[key], before, after)
    return part


def _check_positive(part: Mapping[str, torch.Tensor], blocks: tuple[int, ...]) -> None:
    for key, mixing in part.items():
        # one of another size is refused where it is loaded
        fits = key.endswith(".mhla.mixing") and mixing.shape[-1] == math.prod(blocks)
        if fits and not mixing.is_meta:
            least = causal_mixing(mixing, blocks, own=True).min().item()
            check(
                least >= 0,
                f"{key} has entries down to {least:.3g}, and this causal patch takes the logarithm of what blocks "
                "weigh, which must be positive. Train with register_mixing_clip(), which keeps them in (0, 1), or "
                "choose normalize=False with output_norm=True and sparse='none'.",
            )


def _resized_mixing(mixing: torch.Tensor, before: MHLAConfig, after: MHLAConfig) -> torch.Tensor:
    """A mixing matrix for other blocks."""
    changes = [
        f"{name}={old!r} to {new!r}"
        for name, old, new in (
            ("causal", before.causal, after.causal),
            ("block_length", before.block_length, after.block_length),
        )
        if old != new and (name == "block_length" or None in (old, new))
    ]
    check(
        not changes,
        f"Blocks cannot go from {before.blocks} to {after.blocks} together with {' and '.join(changes)}: a mixing "
        "matrix would have to be interpolated and take another order at once. Change one after the other, with "
        "change_mhla().",
    )
    if after.causal is None:
        return resize_mixing(mixing, before.blocks, after.blocks)
    rows, others = after.blocks[0], after.blocks[1:]
    # places on the first axis stay what they are, so that no later one gets into what is seen
    mixing = resize_mixing(mixing, before.blocks, (before.blocks[0], *others))
    if rows > before.blocks[0]:
        return extend_mixing(mixing, (before.blocks[0], *others), rows)
    count = rows * math.prod(others)
    return causal_mixing(mixing[..., :count, :count], after.blocks, own=True)
