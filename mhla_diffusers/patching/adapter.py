"""The LoRA that belongs to a patch: it is saved with it, comes with it, and goes with it."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..files import file_hash, write_tensors

ADAPTER = "mhla"
"""Name of the adapter that :func:`mhla_diffusers.load_mhla` loads, for diffusers' ``set_adapters``."""


def adapter_weights(transformer: nn.Module, adapter: str) -> dict[str, torch.Tensor]:
    """Weights of a LoRA by their names in files: ``blocks.0.attn1.to_q.lora_A.weight``."""
    return {
        name.replace(f".{adapter}.", "."): parameter.detach()
        for name, parameter in transformer.named_parameters()
        if f".lora_A.{adapter}." in name or f".lora_B.{adapter}." in name
    }


def write_adapters(folder: Path, adapters: Mapping[str, Mapping[str, torch.Tensor]]) -> tuple[str, str]:
    """Write the LoRA of every transformer into one file in diffusers' form.

    Returns:
        Its name, which is that of its content, and its SHA-256.
    """
    tensors = {
        f"{name}.{key}": tensor.cpu().contiguous() for name, part in adapters.items() for key, tensor in part.items()
    }
    aside = folder / ".lora.safetensors"
    try:
        write_tensors(tensors, aside, {"format": "pt"})
        digest = file_hash(aside)
        aside.replace(folder / (file := f"lora-{digest[:12]}.safetensors"))
    finally:
        aside.unlink(missing_ok=True)
    return file, digest


def check_adapter(transformer: Any, adapter: str | None) -> None:
    """Raise unless a patch's LoRA, if it has one, can be taken away.

    Raises:
        ValueError: it is fused with the model's weights.
    """
    fused = [
        name for name, part in transformer.named_modules() if adapter in (getattr(part, "merged_adapters", None) or ())
    ]
    if fused:
        raise ValueError(
            f"The patch's LoRA {adapter!r} is fused with the weights of {fused[0]}; call unfuse_lora() before "
            "remove_mhla()."
        )


def load_adapter(transformer: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Give a transformer the LoRA of a patch, beside others that it has.

    Raises:
        ValueError: it has an adapter of that name.
    """
    if has_adapter(transformer, ADAPTER):
        raise ValueError(
            f"The patch has a LoRA, which is loaded as the adapter {ADAPTER!r}, but the model has "
            f"another adapter of that name; unload that one with delete_adapters({ADAPTER!r}), or give it another name."
        )
    if hasattr(transformer, "load_lora_adapter"):
        first = next(iter(transformer.parameters()))
        state = {name: tensor.to(first.device, first.dtype) for name, tensor in tensors.items()}
        transformer.load_lora_adapter(state, prefix=None, adapter_name=ADAPTER)
        return
    # a class to which diffusers gives no methods for LoRA, such as DiT's
    from peft import LoraConfig, inject_adapter_in_model

    targets = [name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")]
    rank = len(tensors[f"{targets[0]}.lora_A.weight"])
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=rank, target_modules=targets), transformer, ADAPTER)
    for name, weight in adapter_weights(transformer, ADAPTER).items():
        weight.copy_(tensors[name])


def has_adapter(transformer: nn.Module, adapter: str) -> bool:
    """Whether a transformer has a LoRA of that name: something else may have unloaded that of a patch."""
    return adapter in getattr(transformer, "peft_config", {})


def remove_adapter(transformer: Any, adapter: str) -> None:
    """Take the LoRA of a patch away; a model without another one has its plain layers again."""
    if set(transformer.peft_config) == {adapter}:
        if hasattr(transformer, "unload_lora"):
            transformer.unload_lora()
            return
        from diffusers.utils import recurse_remove_peft_layers

        recurse_remove_peft_layers(transformer)
        del transformer.peft_config
    else:
        transformer.delete_adapters(adapter)
