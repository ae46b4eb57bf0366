"""The weights of the model itself, which an adapted patch replaces and whose removal brings back.

They go by the names that they have in a plain model, whatever it looks like at the moment: with projections that are
fused, or with adapters around its layers.
"""

from collections.abc import Iterable, Mapping

import torch
from torch import nn

from .finding import attentions_of

_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
"""Projections that diffusers joins into one, which it keeps beside them and uses in their place."""

_NOT_OF_THE_MODEL = (".mhla.", "lora_", ".modules_to_save.")
"""Parts of the names of weights that patches and adapters have added."""

_REPLACED = "_mhla_replaced"
"""Attribute of a patched transformer: the weights that its patch replaced, or None where they were not kept."""


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
def replace_weights(transformer: nn.Module, tensors: Mapping[str, torch.Tensor], keep: bool) -> None:
    """Write an adapted patch's weights over those of the model.

    Args:
        transformer: that has all of them.
        tensors: name → value.
        keep: whether to keep those that change, on the CPU, for :func:`restore_weights`.
    """
    places = base_weights(transformer)
    replaced: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        counts = places[name][0]
        new = tensor.to(counts.device, counts.dtype)
        if counts.is_meta or torch.equal(counts, new):
            continue
        if keep:
            replaced[name] = counts.to("cpu", copy=True)
        setattr(transformer, _REPLACED, replaced if keep else None)  # before it is written, should that be interrupted
        for place in places[name]:
            place.copy_(new)


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor holds its values as they are: no quantised parameter, no part of a sharded one."""
    return type(tensor) in (torch.Tensor, nn.Parameter)


def has_replaced(transformer: nn.Module) -> bool:
    """Whether a patch has replaced weights of the model, kept or not."""
    return vars(transformer).get(_REPLACED, {}) != {}


def is_restorable(transformer: nn.Module) -> bool:
    """Whether nothing was replaced, or all of it was kept."""
    return vars(transformer).get(_REPLACED, {}) is not None


def check_restorable(transformer: nn.Module) -> None:
    """Raise unless :func:`restore_weights` can bring back what was replaced.

    Raises:
        ValueError: it was not kept, or :func:`check_writable` refuses.
    """
    if not is_restorable(transformer):
        raise ValueError(
            "The patch replaced weights of the model, which load_mhla(..., keep_replaced=False) did not keep, so they "
            "cannot be brought back; load the model again with from_pretrained()."
        )
    check_writable(transformer, vars(transformer).get(_REPLACED, {}), "remove the patch")


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


@torch.no_grad()
def restore_weights(transformer: nn.Module) -> None:
    """Bring back the weights that :func:`replace_weights` kept, bit for bit, and forget them."""
    replaced = vars(transformer).pop(_REPLACED, {})
    places = base_weights(transformer)
    for name, tensor in replaced.items():
        for place in places[name]:
            place.copy_(tensor)
