"""The handle of a patched transformer: what is known of it and of its patch."""

import logging
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from ..config import PatchConfig, Step
from ..families import Family, get_family
from .carry import DenoisingRun
from .context import Grid, current, switched_off
from .layer import PatchedLayer, attentions_of, layer_of, replaced_processor
from .processor import (
    MHLAProcessor,
    default_cross_attention_processor,
    holds_weights,
    is_fused,
    runs_mhla,
    with_backend_of,
)
from .steps import DenoisingLoop
from .weights import has_lora, runs_lora

logger = logging.getLogger(__name__)

ATTRIBUTE = "_mhla"
"""Holds the handle, on the module of a patched transformer that runs its blocks."""


class Patched:
    """One patched transformer: all that a patch has put into it, and all that is known of the two.

    :func:`apply_mhla` and :func:`load_mhla` make it, :func:`find_patched` finds it, and whatever works on a patch takes
    it. A transformer that was patched by diffusers' own ``set_attn_processor``, which passes no model, gets a handle
    without hooks on demand.

    Args:
        transformer: of a family.
        processor: that runs MHLA; None of such a transformer in which none runs now.
    """

    def __init__(self, transformer: nn.Module, processor: MHLAProcessor | None) -> None:
        self.transformer = transformer
        self.family: Family = get_family(transformer)
        self.attentions: dict[str, Any] = self.family.self_attentions(transformer)
        """Name and module of every self-attention, patched or not, in the order of the layer indices."""
        self.processor = processor
        self.forwards: object = None
        """The hooks that the patch has around every forward; None in diffusers' own form."""
        self.loop = DenoisingLoop(self.family, None)
        """The denoising loop of the pipeline that calls the transformer."""
        self.latest_grid: Grid | None = None
        """Token grid of the latest forward, to be shown; no attention reads it."""
        self.runs: dict[int, DenoisingRun] = {}
        """What dense steps have shown, of every thread that samples."""
        self.replaced_weights: dict[str, torch.Tensor] | None = {}
        """Weights of the model that the patch replaced, as they were; None if they were not kept."""
        self.lora: str | None = None
        """Name of the LoRA that belongs to the patch; None without one."""

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what dense steps have shown the original of a copied or pickled transformer."""
        return vars(self) | {"runs": {}}

    @property
    def layers(self) -> dict[str, PatchedLayer]:
        """Name of every patched self-attention, with its layer."""
        found = ((name, layer_of(attn)) for name, attn in self.attentions.items())
        return {name: layer for name, layer in found if layer is not None}

    @property
    def config(self) -> PatchConfig:
        """Settings of the patch."""
        for attn in self.attentions.values():  # every forward asks, so the first layer is enough
            layer = layer_of(attn)
            if layer is not None:
                return layer.config
        return self.running_processor().config

    @property
    def is_installed(self) -> bool:
        """Whether it has hooks: not in diffusers' own form, and not any more after removal."""
        return vars(self.transformer).get(ATTRIBUTE) is self

    @property
    def is_off(self) -> bool:
        """Whether it is within ``mhla_disabled`` in this thread."""
        return self.processor is not None and self.processor.is_off

    def step_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Step | None:
        """Return the denoising step of a forward with these arguments; None if it is unknown."""
        step = current().step
        return step if step is not None else self.loop.step_by_timestep(self.transformer, args, kwargs)

    # Which processors run

    def running_processor(self) -> MHLAProcessor:
        """Return the processor of the patch, also where something else has set others.

        Raises:
            ValueError: in diffusers' own form, where none runs.
        """
        if self.processor is None:
            raise ValueError(
                "No attention of this model runs MHLA now: its patch is switched off, or other processors have been "
                "set since. Leave mhla_disabled(), or set the processor again with transformer.set_attn_processor()."
            )
        return self.processor

    def original_processor(self, attn: Any) -> Any:
        """Return the processor that an attention had before the patch, or a fresh one where no record was kept.

        It gets the backend that ``set_attention_backend`` has set meanwhile. One with weights that was set since the
        patch, as loading an IP-Adapter does, stays.
        """
        if holds_weights(attn.processor) or self.is_unfused(attn):
            return attn.processor
        original = replaced_processor(attn)
        if original is None and any(attn is own for own in self.attentions.values()):
            original = self.family.adapter.own_processor(attn)
        elif original is None:
            original = default_cross_attention_processor(attn, self.family)
        return with_backend_of(attn.processor, original) if isinstance(attn.processor, MHLAProcessor) else original

    def is_unfused(self, attn: Any) -> bool:
        """Whether diffusers has brought back what ran before the projections were fused, and they were so when patched.

        Bringing back empties the dict in which it keeps those processors.
        """
        is_unfused = getattr(self.transformer, "original_attn_processors", None) == {}
        is_own = isinstance(attn.processor, MHLAProcessor) or is_fused(attn.processor)
        return is_unfused and is_fused(replaced_processor(attn)) and not is_own

    def running_attentions(self) -> dict[str, Any]:
        """Return every self-attention that runs MHLA now, in this thread, by name."""
        return {name: attn for name, attn in self.attentions.items() if runs_mhla(attn)}

    def disabled(self) -> AbstractContextManager[None]:
        """Let the transformer attend as before the patch within the context, in this thread, with the same weights."""
        processors = {id(attn.processor): attn.processor for attn in attentions_of(self.transformer).values()}
        processors[id(self.processor)] = self.processor  # where guidance has put others
        return switched_off([one for one in processors.values() if isinstance(one, MHLAProcessor)])

    def inactive_lora(self) -> str | None:
        """Return why the patch's LoRA does not run, and what to do; None if it does, or there is none."""
        if self.lora is None or runs_lora(self.transformer, self.lora):
            return None
        if not has_lora(self.transformer, self.lora):
            return (
                f"The patch's LoRA {self.lora!r} was unloaded, and the patch was made with it. Call remove_mhla() and "
                "load_mhla() again, and unload other adapters with delete_adapters()."
            )
        return (
            f"The patch's LoRA {self.lora!r} is not active, and the patch was made with it. Name it beside others: "
            f"transformer.set_adapters([{self.lora!r}, ...])."
        )
