"""The handle of a patched transformer: puts the patch in, takes it away, and knows what belongs to it."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..config import PatchConfig
from ..families import Family, get_family
from .context import current, enter
from .forwards import Forwards
from .layer import PatchedLayer, attentions_of, layer_of, replaced_processor
from .processor import (
    MHLAProcessor,
    default_cross_attention_processor,
    holds_weights,
    is_fused,
    runs_mhla,
    with_backend_of,
)
from .weights import base_weights, check_writable, has_lora, remove_lora, runs_lora

if TYPE_CHECKING:
    from .few_step_scheduler import FewSteps

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
        self.forwards = Forwards(self)
        """What happens around every forward."""
        self.replaced_weights: dict[str, torch.Tensor] | None = {}
        """Weights of the model that the patch replaced, as they were; None if they were not kept."""
        self.lora: str | None = None
        """Name of the LoRA that belongs to the patch; None without one."""
        self.few_steps: FewSteps | None = None
        """How it samples, if it was distilled to a few steps."""
        self.replaced_scheduler: Any = None
        """The pipeline's own scheduler, while it has that of few steps."""

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
        if self.processor is None:
            raise ValueError("This transformer is not patched with MHLA.")
        return self.processor.config

    @property
    def is_installed(self) -> bool:
        """Whether it has hooks: not in diffusers' own form, and not any more after removal."""
        return vars(self.family.trunk(self.transformer)).get(ATTRIBUTE) is self

    @property
    def is_off(self) -> bool:
        """Whether it is within ``mhla_disabled`` in this thread."""
        return self.processor is not None and self.processor.is_off

    # Putting in and taking away

    def install(self, layers: Mapping[str, PatchedLayer], pipe: Any) -> None:
        """Patch the transformer.

        Args:
            layers: name of every self-attention to be patched, with its new layer.
            pipe: pipeline that calls the transformer; a transformer or None where that is not known.
        """
        processor, trunk = self.running_processor(), self.family.trunk(self.transformer)
        self.family.prepare(self.transformer)
        for name, layer in layers.items():
            attn = self.attentions[name]
            layer.original_processor = processor.enter(attn)
            attn.mhla = layer
            if getattr(attn.processor, "_parallel_config", None) is not None:
                processor._parallel_config = attn.processor._parallel_config
            attn.set_processor(processor)
        setattr(trunk, ATTRIBUTE, self)
        if self.family.kind != "language":  # to which transformers passes everything they need
            self.forwards.install(trunk, pipe)

    @torch.no_grad()
    def replace_weights(self, tensors: Mapping[str, torch.Tensor], keep: bool) -> None:
        """Write an adapted patch's weights over those of the model.

        Args:
            tensors: name in a plain model → value.
            keep: whether to keep those that change, on the CPU, for :meth:`remove`.
        """
        places = base_weights(self.transformer)
        replaced: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            first = places[name][0]
            new = tensor.to(first.device, first.dtype)
            if first.is_meta or torch.equal(first, new):
                continue
            if keep:
                replaced[name] = first.to("cpu", copy=True)
            self.replaced_weights = replaced if keep else None  # before it is written, should that be interrupted
            for place in places[name]:
                place.copy_(new)

    def check_removable(self) -> None:
        """Raise unless weights of the model that the patch replaced can be brought back.

        Raises:
            ValueError: they were not kept, or cannot be written, or the patch's LoRA is fused with weights.
        """
        for name, part in self.transformer.named_modules():
            if self.lora in (getattr(part, "merged_adapters", None) or ()):
                raise ValueError(
                    f"The patch's LoRA {self.lora!r} is fused with the weights of {name}; call unfuse_lora() before "
                    "remove_mhla()."
                )
        if self.replaced_weights is None:
            raise ValueError(
                "The patch replaced weights of the model, which load_mhla(..., keep_replaced=False) did not keep, so "
                "they cannot be brought back; load the model again with from_pretrained()."
            )
        check_writable(self.transformer, self.replaced_weights, "remove the patch")

    @torch.no_grad()
    def remove(self, model: Any = None) -> None:
        """Take everything away that :meth:`install` has put in, and bring back weights that were replaced.

        Args:
            model: pipeline that the patch is removed from; a transformer or None where that is not known.
        """
        if self.lora is not None and has_lora(self.transformer, self.lora):
            remove_lora(self.transformer, self.lora)
        elif self.lora is not None:
            logger.warning(
                "The patch's LoRA %r was unloaded by something else. If it was fused first, its weights stay in "
                "the model; load the model again with from_pretrained() then.",
                self.lora,
            )
        if self.few_steps is not None:
            from .few_step_scheduler import restore_scheduler

            for pipe in (self.forwards.loop.pipe, model):  # a copied pipeline is known only as the one that is given
                restore_scheduler(pipe, self.few_steps, self.replaced_scheduler)
        if self.replaced_weights:
            places = base_weights(self.transformer)
            for name, tensor in self.replaced_weights.items():
                for place in places[name]:
                    place.copy_(tensor)
        self.lora = self.few_steps = self.replaced_scheduler = None
        self.replaced_weights = {}
        for attn in attentions_of(self.transformer).values():
            if isinstance(attn.processor, MHLAProcessor) or hasattr(attn, "mhla"):
                original = self.original_processor(attn)
                if self.processor is not None:
                    self.processor.leave(attn, original)
                attn.set_processor(original)
            if hasattr(attn, "mhla"):
                del attn.mhla
        self.forwards.remove()
        if self.is_installed:
            delattr(self.family.trunk(self.transformer), ATTRIBUTE)
        self.family.restore(self.transformer)

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
            original = self.family.self_attention_processor(attn)
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

    @contextmanager
    def disabled(self) -> Iterator[None]:
        """Let the transformer attend as before the patch within the context, in this thread, with the same weights."""
        processors = {id(attn.processor): attn.processor for attn in attentions_of(self.transformer).values()}
        processors[id(self.processor)] = self.processor  # where guidance has put others
        switched = [one for one in processors.values() if isinstance(one, MHLAProcessor)]
        enter(current()._replace(off=(*current().off, *switched)))
        try:
            yield
        finally:  # takes out its own alone, as contexts of generators may end in any order
            off = list(current().off)
            for one in switched:
                if one in off:
                    off.remove(one)
            enter(current()._replace(off=tuple(off)))

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
