"""Self-attentions of transformers' vision models, with a processor. Imported when a model is patched."""

from typing import Any

import torch
from transformers.models.deit import modeling_deit
from transformers.models.dinov2 import modeling_dinov2
from transformers.models.dinov2_with_registers import modeling_dinov2_with_registers
from transformers.models.siglip import modeling_siglip
from transformers.models.vit import modeling_vit

from .attention_classes import WithProcessor, refuse_weights


class _VisionAttention(WithProcessor):
    """Runs its processor, if it has one, and else what it inherits."""

    def forward(
        self, hidden_states: torch.Tensor, attention_mask: torch.Tensor | None = None, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """As the class of transformers beside this one.

        Args:
            hidden_states: (B, N, hidden size).
            attention_mask: what transformers has made of the model's mask for its attention implementation.
            **kwargs: what the model's caller tells attention implementations besides.

        Returns:
            (B, N, hidden size), and weights where an attention that is not replaced gives them.

        Raises:
            ValueError: dropout of weights of softmax, or a wish for them, and what the processor refuses.
        """
        inherited: Any = super()
        if not self.has_processor:
            return inherited.forward(hidden_states, attention_mask, **kwargs)
        own: Any = self
        dropout = own.dropout if isinstance(own, modeling_siglip.SiglipAttention) else own.attention_dropout
        asked = kwargs.get("output_attentions", own.config.output_attentions)
        refuse_weights(dropout if own.training else 0.0, bool(asked))
        return self.processor(self, hidden_states, attention_mask=attention_mask)


class ViTAttention(_VisionAttention, modeling_vit.ViTAttention):
    """Of ViT, and of DeiT with average pooling."""


class DeiTAttention(_VisionAttention, modeling_deit.DeiTAttention):
    """Of DeiT."""


class Dinov2Attention(_VisionAttention, modeling_dinov2.Dinov2Attention):
    """Of DINOv2."""


class Dinov2WithRegistersAttention(_VisionAttention, modeling_dinov2_with_registers.Dinov2WithRegistersAttention):
    """Of DINOv2 with registers."""


class SiglipAttention(_VisionAttention, modeling_siglip.SiglipAttention):
    """Of SigLIP's vision tower."""


CLASSES: dict[type, type] = {
    modeling_vit.ViTAttention: ViTAttention,
    modeling_deit.DeiTAttention: DeiTAttention,
    modeling_dinov2.Dinov2Attention: Dinov2Attention,
    modeling_dinov2_with_registers.Dinov2WithRegistersAttention: Dinov2WithRegistersAttention,
    modeling_siglip.SiglipAttention: SiglipAttention,
}
"""transformers' class → the one with a processor."""
