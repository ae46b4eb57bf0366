"""Weights of the model, by their names in a plain model; a patch's LoRA; its own weights at other block counts."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..attention import extend_mixing, resize_mixing
from ..attention.mixing import causal_mixing
from ..config import CausalConfig, LinearConfig, PatchConfig
from .layer import attentions_of

LORA = "mhla"
"""Name under which PEFT holds the LoRA of a loaded patch, for diffusers' ``set_adapters``."""
_FUSED = {
    "to_qkv": ("to_q", "to_k", "to_v"),
    "to_kv": ("to_k", "to_v"),
    "to_added_qkv": ("add_q_proj", "add_k_proj", "add_v_proj"),
    "to_added_kv": ("add_k_proj", "add_v_proj"),
}
"""Projections that diffusers joins into one, which it keeps beside the single ones and uses in their place."""
_ADDED = (".mhla.", "lora_", ".modules_to_save.")
"""Parts of the names of weights that patches and PEFT have added."""


def base_weights(transformer: nn.Module) -> dict[str, list[torch.Tensor]]:
    """Return every tensor but MHLA's by its name in a plain model, and where it lies; the first place counts."""
    # some quantised parameters are not in the state by their own names
    tensors = dict(transformer.named_parameters()) | transformer.state_dict(keep_vars=True)
    state = {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): [tensor]
        for name, tensor in tensors.items()
        if not any(mark in name for mark in _ADDED)
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


def check_writable(transformer: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raise ValueError if weights of a plain model's names are merged, quantised, sharded or offloaded."""
    names = list(names)
    if not names:
        return
    merged = [name for name, module in transformer.named_modules() if getattr(module, "merged", False) is True]
    if merged:
        raise ValueError(
            f"LoRA adapters are fused into {merged[0]}, so its weights cannot be replaced; call unfuse_lora() before "
            f"you {purpose}."
        )
    refuse_weights_on_disk(transformer, purpose)
    places = base_weights(transformer)
    whole = all(tensor.is_meta for tensor in transformer.state_dict().values())
    for name in filter(places.__contains__, names):
        place = places[name][0]
        check_plain(name, place, purpose, whole)


def check_plain(name: str, tensor: torch.Tensor, purpose: str, may_be_meta: bool = False) -> None:
    """Raise ValueError if a weight is quantised, sharded or, unless it may be on the meta device, offloaded."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, quantised or sharded; {purpose} before that, save only MHLA's own "
            "tensors with weights='mhla', or load the model again with from_pretrained()."
        )
    if tensor.is_meta and not may_be_meta:
        raise ValueError(f"{name} is offloaded; switch offloading off before you {purpose}.")


# Offloading


def group_offloading(transformer: nn.Module) -> list[Any]:
    """Return the hooks of diffusers' group offloading; empty while it is off."""
    registries = (getattr(module, "_diffusers_hook", None) for module in transformer.modules())
    hooks = (registry.hooks.get("group_offloading") for registry in registries if registry is not None)
    return [hook for hook in hooks if hook is not None]


def refuse_weights_on_disk(transformer: nn.Module, purpose: str) -> None:
    """Raise ValueError if group offloading keeps weights in files: those in memory are neither read nor kept."""
    folders = (hook.group.offload_to_disk_path for hook in group_offloading(transformer))
    folder = next(filter(None, folders), None)
    if folder is not None:
        raise ValueError(
            f"The weights of this {type(transformer).__name__} are in files, offload_to_disk_path={folder!r}: "
            f"{purpose} before enable_group_offload(), or load the model again with from_pretrained()."
        )


# The LoRA that belongs to a patch: it is saved with it, comes with it, and goes with it


def has_lora(transformer: nn.Module, name: str) -> bool:
    """Whether a transformer has a LoRA of that name: something else may have unloaded that of a patch."""
    return name in getattr(transformer, "peft_config", {})


def runs_lora(transformer: nn.Module, name: str) -> bool:
    """Whether a LoRA takes part in a forward: active, or fused with the weights, by its first layer."""
    for module in transformer.modules():
        layer: Any = module
        if name in getattr(layer, "lora_A", {}):
            return name in layer.merged_adapters or (not layer.disable_adapters and name in layer.active_adapters)
    return False


def lora_weights(transformer: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a LoRA by their names in files, such as ``blocks.0.attn1.to_q.lora_A.weight``."""
    return {
        key.replace(f".{name}.", "."): parameter.detach()
        for key, parameter in transformer.named_parameters()
        if f".lora_A.{name}." in key or f".lora_B.{name}." in key
    }


def load_lora(transformer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the LoRA of a patch beside other adapters; ValueError if there is one of its name."""
    from peft import LoraConfig, inject_adapter_in_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    if has_lora(transformer, LORA):
        raise ValueError(
            f"The model already has an adapter named {LORA!r}, the name of the patch's LoRA. Remove it with "
            f"delete_adapters({LORA!r}), or rename it."
        )
    parts = transformer.named_modules()
    active = {name: part.active_adapters for name, part in parts if isinstance(part, BaseTunerLayer)}
    if hasattr(transformer, "load_lora_adapter"):
        first = next(iter(transformer.parameters()))
        state = {name: tensor.to(first.device, first.dtype) for name, tensor in tensors.items()}
        transformer.load_lora_adapter(state, prefix=None, adapter_name=LORA)
    else:  # a class to which diffusers gives no methods for LoRA, such as DiT's
        targets = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
        rank = len(tensors[f"{targets[0]}.lora_A.weight"])
        inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), transformer, LORA)
        for name, weight in lora_weights(transformer, LORA).items():
            weight.copy_(tensors[name])
    for name, part in transformer.named_modules():
        if isinstance(part, BaseTunerLayer):  # PEFT activates the new one alone
            part._active_adapter = [*active.get(name, []), LORA]


def remove_lora(transformer: Any, name: str) -> None:
    """Remove the LoRA of a patch; without other adapters the model has plain layers again."""
    if set(transformer.peft_config) != {name}:
        transformer.delete_adapters(name)
    elif hasattr(transformer, "unload_lora"):
        transformer.unload_lora()
    else:
        from diffusers.utils import recurse_remove_peft_layers

        recurse_remove_peft_layers(transformer)
        del transformer.peft_config


# The patch's own weights


def resized(tensors: Mapping[str, torch.Tensor], before: PatchConfig, after: PatchConfig) -> dict[str, torch.Tensor]:
    """Return a patch's tensors at other blocks: mixing matrices are interpolated, causal ones extended or cut."""
    part = dict(tensors)
    if not (isinstance(before, LinearConfig) and isinstance(after, LinearConfig)) or before.blocks == after.blocks:
        return part
    for name in (name for name in part if name.endswith(".mhla.mixing")):
        if not isinstance(after, CausalConfig):
            part[name] = resize_mixing(part[name], before.blocks, after.blocks)
            continue
        rows, inner = after.blocks[0], after.blocks[1:]
        # positions on the first axis stay, so that no later one gets into what is seen
        mixing = resize_mixing(part[name], before.blocks, (before.blocks[0], *inner))
        if rows > before.blocks[0]:
            part[name] = extend_mixing(mixing, (before.blocks[0], *inner), rows)
        else:
            count = math.prod(after.blocks)
            part[name] = causal_mixing(mixing[..., :count, :count], after.blocks, own=True)
    return part
