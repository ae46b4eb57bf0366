"""Weights of the model, by their names in a plain model; a patch's LoRA; its own weights at other block counts."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from ..attention import resize_mixing
from ..config import CausalConfig, LinearConfig, PatchConfig
from ..errors import check

LORA = "mhla"
"""Name under which PEFT holds the LoRA of a loaded patch, for diffusers' ``set_adapters``."""
_ADDED = (".mhla.", "lora_", ".modules_to_save.")
"""Parts of the names of weights that patches and PEFT have added."""


def base_weights(transformer: nn.Module) -> dict[str, torch.Tensor]:
    """Return every tensor but MHLA's and adapters' by its name in a plain model."""
    # some quantised parameters are not in the state by their own names
    tensors = dict(transformer.named_parameters()) | transformer.state_dict(keep_vars=True)
    return {
        name.replace(".base_layer.", ".").replace(".original_module.", "."): tensor
        for name, tensor in tensors.items()
        if not any(mark in name for mark in _ADDED)
    }


def check_writable(transformer: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raise ValueError if weights of a plain model's names are fused, merged, quantised, sharded or offloaded."""
    names = list(names)
    if not names:
        return
    refuse_fused(transformer, purpose)
    merged = [name for name, module in transformer.named_modules() if getattr(module, "merged", False) is True]
    check(not merged, f"LoRA adapters are fused into {merged and merged[0]}; call unfuse_lora() before you {purpose}.")
    refuse_weights_on_disk(transformer, purpose)
    weights = base_weights(transformer)
    whole = all(tensor.is_meta for tensor in transformer.state_dict().values())
    for name in filter(weights.__contains__, names):
        check_plain(name, weights[name], purpose, whole)


def check_plain(name: str, tensor: torch.Tensor, purpose: str, may_be_meta: bool = False) -> None:
    """Raise ValueError if a weight is quantised, sharded or, unless it may be on the meta device, offloaded."""
    if type(tensor) not in (torch.Tensor, nn.Parameter):
        raise ValueError(
            f"{name} is a {type(tensor).__name__}, quantised or sharded; {purpose} before that, save only MHLA's own "
            "tensors with weights='mhla', or load the model again with from_pretrained()."
        )
    check(may_be_meta or not tensor.is_meta, f"{name} is offloaded; disable offloading before you {purpose}.")


def refuse_fused(transformer: nn.Module, purpose: str) -> None:
    """Raise ValueError if diffusers has joined projections, whose single weights it then does not read."""
    for module in transformer.modules():
        is_fused = getattr(module, "fused_projections", False)
        if not hasattr(module, "unfuse_projections"):  # keeps its flag when it is unfused
            is_fused = type(getattr(module, "processor", None)).__name__.startswith("Fused")
        check(not is_fused, f"Projections are fused; call unfuse_qkv_projections() before you {purpose}.")


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
    """Whether a transformer has a LoRA of that name."""
    return name in getattr(transformer, "peft_config", {})


def inactive_lora(transformer: nn.Module, name: str) -> str:
    """Say that the LoRA of a patch does not run, and what to do; "" if it is active or fused, by its first layer."""
    for module in transformer.modules():
        layer: Any = module
        if name in getattr(layer, "lora_A", {}):
            if name in layer.merged_adapters or (not layer.disable_adapters and name in layer.active_adapters):
                return ""
            break
    return (
        f"The patch was made with its LoRA {name!r}, which is not active. Name it beside others, transformer."
        f"set_adapters([{name!r}, ...]), or if it was unloaded, call remove_mhla() and load_mhla() again."
    )


def lora_weights(transformer: nn.Module, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of a LoRA by their names in files, such as ``blocks.0.attn1.to_q.lora_A.weight``."""
    return {
        key.replace(f".{name}.", "."): parameter.detach()
        for key, parameter in transformer.named_parameters()
        if f".lora_A.{name}." in key or f".lora_B.{name}." in key
    }


def load_lora(transformer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Load the LoRA of a patch next to other adapters; ValueError if its name is taken."""
    from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    if has_lora(transformer, LORA):
        raise ValueError(
            f"The model already has an adapter named {LORA!r}, the name of the patch's LoRA. Remove it with "
            f"delete_adapters({LORA!r}), or rename it."
        )
    parts = transformer.named_modules()
    active = {name: part.active_adapters for name, part in parts if isinstance(part, BaseTunerLayer)}
    first = next(iter(transformer.parameters()))
    state = {name: tensor.to(first.device, first.dtype) for name, tensor in tensors.items()}
    targets = [name.removesuffix(".lora_A.weight") for name in state if name.endswith(".lora_A.weight")]
    rank = len(state[f"{targets[0]}.lora_A.weight"])
    config = LoraConfig(r=rank, lora_alpha=rank, target_modules=targets)
    inject_adapter_in_model(config, transformer, LORA, low_cpu_mem_usage=True)
    set_peft_model_state_dict(transformer, state, LORA, low_cpu_mem_usage=True)
    if hasattr(transformer, "add_adapter"):  # diffusers' mark that its methods for adapters work
        transformer._hf_peft_config_loaded = True
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
    """Return a patch's tensors with mixing matrices interpolated to other blocks; ValueError for a causal patch."""
    if not (isinstance(before, LinearConfig) and isinstance(after, LinearConfig)) or before.blocks == after.blocks:
        return dict(tensors)
    if isinstance(before, CausalConfig):
        raise ValueError(
            f"blocks={after.blocks} would change what a causal patch sees; use beyond='relative' for longer videos."
        )
    return {
        name: resize_mixing(x, before.blocks, after.blocks) if name.endswith(".mhla.mixing") else x
        for name, x in tensors.items()
    }
