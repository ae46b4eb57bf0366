"""SANA: ``SanaTransformer2DModel`` (1.0, 1.5 with qk-norm, Sprint).

Its own self-attention is already plain linear attention with φ = ReLU, so MHLA with one block is what it has. There is
no positional embedding; the convolutional feed-forward needs the tokens in raster order.
"""

import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..config import MHLAConfig
from .base import Family
from .processes import DiffusionProcess, FlowMatching
from .sizes import Clip, Model
from .structure import Sample

_TEXT_TOKENS = 300


def _model(name: str, heads: int, layers: int, cross_heads: int, cross_head_dim: int, **more: Any) -> Model:
    settings = {
        "num_attention_heads": heads,
        "num_cross_attention_heads": cross_heads,
        "cross_attention_head_dim": cross_head_dim,
        "cross_attention_dim": heads * 32,
    }
    sizes = tuple((side, side) for side in (512, 1024, 2048, 4096))
    return Model(
        name, "SanaTransformer2DModel", settings, heads, 32, layers, (4, 4), stride=32, patch=1, sizes=sizes, **more
    )


_TINY = Model(
    "tiny-sana",
    "SanaTransformer2DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "num_cross_attention_heads": 2,
        "cross_attention_head_dim": 16,
        "cross_attention_dim": 32,
        "caption_channels": 8,
        "in_channels": 4,
    },
    2,
    16,
    3,
    blocks=(2, 2),
    stride=32,
    patch=1,
    sizes=((256, 256),),
)


class SanaFamily(Family):
    """Image transformers with a (height, width) token grid."""

    name = "sana"
    transformers = ("SanaTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    default_config = MHLAConfig(blocks=(4, 4))
    own_attention = "linear"
    own_attention_eps = 1e-15
    default_clip = Clip(frames=1, fps=1.0, sizes=((1024, 1024),))
    measured_unasked = True
    models: ClassVar[tuple[Model, ...]] = (
        _model("sana-0.6b", 36, 28, 16, 72),
        _model("sana-1.6b", 70, 20, 20, 112, grids={f"{32 * side}px": (side, side) for side in (32, 64, 128)}),
        _TINY,
    )

    def self_attention_processor(self) -> Any:
        """``SanaLinearAttnProcessor2_0``."""
        from diffusers.models.attention_processor import SanaLinearAttnProcessor2_0

        return SanaLinearAttnProcessor2_0()

    def softmax_processor(self) -> Any:
        """``SanaAttnProcessor2_0``, which SANA has in its cross-attentions."""
        return self.cross_attention_processor()

    def cross_attention_processor(self) -> Any:
        """``SanaAttnProcessor2_0``."""
        from diffusers.models.transformers.sana_transformer import SanaAttnProcessor2_0

        return SanaAttnProcessor2_0()

    def perturbed_parts(self, processor: Any) -> int | None:
        """``SanaPAGPipeline`` has two, with and without classifier-free guidance."""
        parts = {"PAGCFGSanaLinearAttnProcessor2_0": 3, "PAGIdentitySanaLinearAttnProcessor2_0": 2}
        return parts.get(type(processor).__name__)

    def recognises_cross_attention(self, attn: Any) -> bool:
        """SANA 1.5 norms query and key across heads, which diffusers' common processor does not."""
        weight = getattr(attn.norm_q, "weight", None)
        return weight is not None and weight.numel() == attn.inner_dim

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching; SANA-Sprint scales its timesteps."""
        return FlowMatching(flow_shift, timestep_scale=float(transformer.config.timestep_scale))

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """Without its factor; of SANA-Sprint, which embeds its guidance, the t of sin t / (sin t + cos t)."""
        if transformer.config.guidance_embeds:
            return torch.atan2(timestep, 1 - timestep)
        return timestep / float(transformer.config.timestep_scale)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (300, channels) and ``encoder_attention_mask`` (300,).

        Gemma embeddings, with the pipeline's own instruction before a caption unless the settings have another.
        """
        parameters = inspect.signature(pipe.__call__).parameters
        chosen = {"complex_human_instruction": parameters["complex_human_instruction"].default, **(settings or {})}
        if not prompt:
            chosen["complex_human_instruction"] = None
        embeddings, mask, *_ = self.encode_text(pipe, prompt, chosen)
        return {"encoder_hidden_states": embeddings[0], "encoder_attention_mask": mask[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (300, channels) and ``encoder_attention_mask`` (300,)."""
        return {
            "encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.caption_channels, device="meta"),
            "encoder_attention_mask": torch.empty(_TEXT_TOKENS, dtype=torch.int64, device="meta"),
        }
