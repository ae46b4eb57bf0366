"""Put a patch into a transformer, and take it away without a trace."""

import logging
from collections.abc import Mapping
from typing import Any

import torch

from ..families.patched_classes import prepare, switch_back
from .forwards import Forwards
from .handle import ATTRIBUTE, Patched
from .layer import PatchedLayer, attentions_of
from .processor import MHLAProcessor
from .weights import base_weights, check_writable, has_lora, remove_lora

logger = logging.getLogger(__name__)


def install(patched: Patched, layers: Mapping[str, PatchedLayer], pipe: Any) -> None:
    """Patch the transformer.

    Args:
        patched: its handle.
        layers: name of every self-attention to be patched, with its new layer.
        pipe: pipeline that calls the transformer; a transformer or None where that is not known.
    """
    processor, transformer = patched.running_processor(), patched.transformer
    prepare(patched.transformer, patched.attentions.values())
    for name, layer in layers.items():
        attn = patched.attentions[name]
        layer.original_processor = processor.enter(attn)
        attn.mhla = layer
        if getattr(attn.processor, "_parallel_config", None) is not None:
            processor._parallel_config = attn.processor._parallel_config
        attn.set_processor(processor)
    setattr(transformer, ATTRIBUTE, patched)
    forwards = Forwards(patched)
    forwards.install(pipe)
    patched.forwards = forwards


@torch.no_grad()
def replace_weights(patched: Patched, tensors: Mapping[str, torch.Tensor], keep: bool) -> None:
    """Write an adapted patch's weights over those of the model.

    Args:
        patched: its handle.
        tensors: name in a plain model → value.
        keep: whether to keep those that change, on the CPU, for :func:`remove`.
    """
    places = base_weights(patched.transformer)
    replaced: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        first = places[name][0]
        new = tensor.to(first.device, first.dtype)
        if first.is_meta or torch.equal(first, new):
            continue
        if keep:
            replaced[name] = first.to("cpu", copy=True)
        patched.replaced_weights = replaced if keep else None  # before it is written, should that be interrupted
        for place in places[name]:
            place.copy_(new)


def check_removable(patched: Patched) -> None:
    """Raise unless weights of the model that the patch replaced can be brought back.

    Raises:
        ValueError: they were not kept, or cannot be written, or the patch's LoRA is fused with weights.
    """
    for name, part in patched.transformer.named_modules():
        if patched.lora in (getattr(part, "merged_adapters", None) or ()):
            raise ValueError(
                f"The patch's LoRA {patched.lora!r} is fused with the weights of {name}; call unfuse_lora() before "
                "remove_mhla()."
            )
    if patched.replaced_weights is None:
        raise ValueError(
            "The patch replaced weights of the model, which load_mhla(..., keep_replaced=False) did not keep, so "
            "they cannot be brought back; load the model again with from_pretrained()."
        )
    check_writable(patched.transformer, patched.replaced_weights, "remove the patch")


@torch.no_grad()
def remove(patched: Patched, model: Any = None) -> None:
    """Take everything away that :func:`install` has put in, and bring back weights that were replaced.

    Args:
        patched: its handle.
        model: pipeline that the patch is removed from; a transformer or None where that is not known.
    """
    if patched.lora is not None and has_lora(patched.transformer, patched.lora):
        remove_lora(patched.transformer, patched.lora)
    elif patched.lora is not None:
        logger.warning(
            "The patch's LoRA %r was unloaded by something else. If it was fused first, its weights stay in "
            "the model; load the model again with from_pretrained() then.",
            patched.lora,
        )
    if patched.replaced_weights:
        places = base_weights(patched.transformer)
        for name, tensor in patched.replaced_weights.items():
            for place in places[name]:
                place.copy_(tensor)
    patched.lora = None
    patched.replaced_weights = {}
    for attn in attentions_of(patched.transformer).values():
        if isinstance(attn.processor, MHLAProcessor) or hasattr(attn, "mhla"):
            original = patched.original_processor(attn)
            if patched.processor is not None:
                patched.processor.leave(attn, original)
            attn.set_processor(original)
        if hasattr(attn, "mhla"):
            del attn.mhla
    if isinstance(patched.forwards, Forwards):
        patched.forwards.remove()
    patched.forwards = None
    if patched.is_installed:
        delattr(patched.transformer, ATTRIBUTE)
    for module in (patched.transformer, *patched.attentions.values()):
        switch_back(module)
