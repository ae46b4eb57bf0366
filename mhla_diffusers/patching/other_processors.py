"""What happens when something else sets processors on patched attentions, as guidance and adapters of diffusers do."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from ..families import Family
from ..families.adapters import AttentionInput
from .finding import hook_of
from .layer import layer_of
from .processor import MHLAProcessor, adapter_of

logger = logging.getLogger(__name__)


class PerturbedMHLAProcessor(MHLAProcessor):
    """MHLA under perturbed-attention guidance: the last part of the batch attends to itself alone.

    Args:
        processor: of the other parts.
        parts: of the batch: 3 with classifier-free guidance, 2 without.
    """

    def __init__(self, processor: MHLAProcessor, parts: int) -> None:
        super().__init__(processor.config, grid=processor.grid, backend=processor.backend)
        self.parts = parts

    def __call__(
        self,
        attn: Any,
        hidden_states: torch.Tensor,
        encoder_hidden_states: torch.Tensor | None = None,
        attention_mask: torch.Tensor | None = None,
        rotary_emb: Any = None,
        *,
        image_rotary_emb: Any = None,
        **others: Any,
    ) -> Any:
        """Run one self-attention; arguments as of :class:`MHLAProcessor`, by name where models hand them over by name.

        diffusers' ``Attention`` drops those that a processor's signature does not name.

        Raises:
            ValueError: a batch that is not cut into so many parts, as after a call of guidance that was interrupted.
        """
        if len(hidden_states) % self.parts:
            raise ValueError(
                f"This layer is set up for perturbed-attention guidance with a batch of {self.parts} parts, but got "
                f"{len(hidden_states)} samples: a guided call was interrupted. change_mhla(model) sets it up anew."
            )
        *parts, perturbed = hidden_states.chunk(self.parts)
        mask = attention_mask[: -len(perturbed)] if attention_mask is not None else None
        others |= {"image_rotary_emb": image_rotary_emb}
        attended = super().__call__(attn, torch.cat(parts), encoder_hidden_states, mask, rotary_emb, **others)
        adapter, alone = adapter_of(attn), AttentionInput(perturbed)
        return torch.cat([attended, adapter.project_output(attn, adapter.project(attn, alone)[2], alone)])


class ProcessorWatch:
    """Forward pre-hook of a patched transformer that looks at the processors of its patched attentions.

    Where perturbed-attention guidance has put its own, MHLA goes on in the branches that are not perturbed, and where
    diffusers has put a blank one of the same class, the processor of the patch comes back. Of others there is one
    warning, since MHLA does not run in these layers any more.
    """

    def __init__(self, family: Family, processor: MHLAProcessor) -> None:
        self.family = family
        self.processor = processor
        self.handle: RemovableHandle | None = None
        self.paused = 0
        """How many contexts have other processors run on purpose."""
        self._has_warned = False

    def __call__(self, transformer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Before every forward."""
        if self.paused:
            return
        strange = {}
        for name, attn in self.family.self_attentions(transformer).items():
            if layer_of(attn) is None:
                continue
            if isinstance(attn.processor, MHLAProcessor):
                if attn.processor.is_blank:
                    attn.processor = self.processor
                continue
            parts = self.family.perturbed_parts(attn.processor)
            if _is_of_fusing(attn):
                attn.processor = self.processor
            elif parts is not None:
                attn.processor = PerturbedMHLAProcessor(self.processor, parts)
            else:
                strange[name] = type(attn.processor).__name__
        if not torch.compiler.is_compiling():
            if strange and not self._has_warned:
                name, kind = next(iter(strange.items()))
                logger.warning(
                    "%d patched layers do not run MHLA, for example %s, which runs %s: something has set their "
                    "processors since. describe(model) tells what every layer runs, change_mhla(model) brings MHLA "
                    "back, remove_mhla(model) takes it away.",
                    len(strange),
                    name,
                    kind,
                )
            self._has_warned = bool(strange)


def _is_of_fusing(attn: Any) -> bool:
    """Whether diffusers has set the processor that only runs fused projections, as a patched attention does too."""
    return bool(attn.fused_projections) and type(attn.processor).__name__.startswith("Fused")


@contextmanager
def other_processors_wanted(transformer: nn.Module) -> Iterator[None]:
    """Within the context no other processor of a patched transformer is warned of or replaced."""
    watch = hook_of(transformer, ProcessorWatch)
    if watch is None:
        yield
        return
    watch.paused += 1
    try:
        yield
    finally:
        watch.paused -= 1
