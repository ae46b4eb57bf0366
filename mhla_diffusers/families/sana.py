"""SANA: ``SanaTransformer2DModel`` (1.0, 1.5 with qk-norm, Sprint).

Its own self-attention is linear attention with φ = ReLU over the image alone, which equals MHLA with one block. There
is no positional embedding; the convolutional feed-forward needs the tokens in raster order. Default blocks are the
paper's 16, of 8x8 tokens at 1024 px.
"""

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .family import Attention, Family, Forward, Sample, Training, masked_text
from .models import Model, squares, tiny_image
from .processes import DiffusionProcess, FlowMatching

_CLASS = "SanaTransformer2DModel"
_TEXT_TOKENS = 300
_TINY = {"num_cross_attention_heads": 2, "cross_attention_head_dim": 16, "cross_attention_dim": 32}
_TINY |= {"caption_channels": 8, "in_channels": 4}


_SOURCE = "Efficient-Large-Model/Sana_{}M_1024px_diffusers"


def _model(name: str, heads: int, layers: int, cross_heads: int, cross_head_dim: int, **different: Any) -> Model:
    settings = {"num_cross_attention_heads": cross_heads, "cross_attention_head_dim": cross_head_dim}
    settings["cross_attention_dim"] = heads * 32
    sizes = squares(512, 1024, 2048, 4096)
    return Model(
        name, _CLASS, heads, 32, layers, (4, 4), sizes, settings, stride=32, patch=1, **different, has_rope=False
    )


class _Attention(Attention):
    def recognises_cross(self, attn: Any) -> bool:
        """Whether it norms query and key across heads, as SANA 1.5, which diffusers' common processor does not."""
        weight = getattr(attn.norm_q, "weight", None)
        return weight is not None and weight.numel() == attn.inner_dim


class _Forward(Forward):
    def scheduler_timestep(self, transformer: Any, timestep: Tensor) -> Tensor:
        """Drop the factor; for SANA-Sprint, which embeds its guidance, return t of sin t / (sin t + cos t)."""
        if transformer.config.guidance_embeds:
            return torch.atan2(timestep, 1 - timestep)
        return timestep / float(transformer.config.timestep_scale)


class SanaTraining(Training):
    """How SANA is trained and called."""

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return flow matching with the factor of SANA-Sprint's timesteps."""
        return FlowMatching(flow_shift, timestep_scale=float(transformer.config.timestep_scale))

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Encode with the pipeline's default instruction before the caption, unless the settings have another."""
        default = inspect.signature(pipe.__call__).parameters["complex_human_instruction"].default
        chosen = {"complex_human_instruction": default, **(settings or {})}
        if not prompt:
            chosen["complex_human_instruction"] = None
        return super().encode_prompt(pipe, prompt, chosen)


SANA = Family(
    name="sana",
    transformers=(_CLASS,),
    attention=_Attention(
        processor="diffusers.models.attention_processor.SanaLinearAttnProcessor2_0",
        cross_processor="diffusers.models.transformers.sana_transformer.SanaAttnProcessor2_0",
        softmax_processor="diffusers.models.transformers.sana_transformer.SanaAttnProcessor2_0",
        # SanaPAGPipeline's, with and without classifier-free guidance
        perturbed_processors={"PAGCFGSanaLinearAttnProcessor2_0": 3, "PAGIdentitySanaLinearAttnProcessor2_0": 2},
        computes="linear",
        eps=1e-15,
    ),
    forward=_Forward(
        # Gemma's
        conditions=masked_text(_TEXT_TOKENS, "caption_channels", torch.int64)
    ),
    trained=SanaTraining(),
    models=(
        _model("sana-0.6b", 36, 28, 16, 72, source=_SOURCE.format(600)),
        _model("sana-1.6b", 70, 20, 20, 112, source=_SOURCE.format(1600)),
        tiny_image("sana", _CLASS, _TINY, head_dim=16, sizes=squares(256), stride=32, patch=1, has_rope=False),
    ),
)
