"""HunyuanDiT: ``HunyuanDiT2DModel``.

Softmax self-attention with LayerNorm of each head's query and key, and 2-D RoPE whose tables the pipeline makes and
hands to the transformer. The first half of a head's channels turns with the width, the second with the height; in the
cross-attentions the query turns alone. Later blocks also get what earlier ones gave, so their number is even.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..config import MHLAConfig
from .adapters import AttentionAdapter
from .base import Family
from .processes import DiffusionProcess, VelocityDDPM
from .sizes import GRIDS_OF_LARGE_SQUARES, LARGE_SQUARES, Model
from .structure import Sample

_PIXELS = 8
"""Per latent along height and width, as the pipeline takes it for granted."""
_BASE = 512
"""Pixels of the square in whose coordinates RoPE's places lie."""
_USUAL = 1024
"""Height and width that the pipeline says a picture had before it was cropped."""


_HUNYUAN_DIT = Model(
    "hunyuan-dit",
    "HunyuanDiT2DModel",
    # of 1.1, as published with its weights; the rest are the class's defaults
    {"in_channels": 4, "patch_size": 2, "hidden_size": 16 * 88, "mlp_ratio": 4.3637},
    16,
    88,
    40,
    (4, 4),
    stride=8,
    patch=2,
    sizes=LARGE_SQUARES,
    grids=GRIDS_OF_LARGE_SQUARES,
)
_TINY = Model(
    "tiny-hunyuan_dit",
    "HunyuanDiT2DModel",
    {
        "in_channels": 4,
        "patch_size": 2,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "hidden_size": 24,
        "cross_attention_dim": 16,
        "cross_attention_dim_t5": 32,
        "pooled_projection_dim": 16,
    },
    2,
    12,
    4,
    (2, 2),
    stride=8,
    patch=2,
    sizes=((64, 64),),
)


class HunyuanDiTFamily(Family):
    """Text-to-image transformers with a (height, width) token grid."""

    name = "hunyuan_dit"
    transformers = ("HunyuanDiT2DModel",)
    axes = 2
    block_lists = ("blocks",)
    adapter = AttentionAdapter("image_rotary_emb")
    # at 1024 px 16 tokens a side of a block
    default_config = MHLAConfig(blocks=(4, 4), mixing_per_head=True, sparse="content")
    forward_names = ("hidden_states", "timestep")
    models = (_HUNYUAN_DIT, _TINY)

    def self_attention_processor(self) -> Any:
        """``HunyuanAttnProcessor2_0``."""
        from diffusers.models.attention_processor import HunyuanAttnProcessor2_0

        return HunyuanAttnProcessor2_0()

    def cross_attention_processor(self) -> Any:
        """``HunyuanAttnProcessor2_0`` as well."""
        return self.self_attention_processor()

    def recognises_cross_attention(self, attn: Any) -> bool:
        """One with LayerNorm in every head, whose query may be turned."""
        return isinstance(getattr(attn, "norm_q", None), nn.LayerNorm)

    def perturbed_parts(self, processor: Any) -> int | None:
        """``HunyuanDiTPAGPipeline`` has two, with and without classifier-free guidance."""
        parts = {"PAGCFGHunyuanAttnProcessor2_0": 3, "PAGHunyuanAttnProcessor2_0": 2}
        return parts.get(type(processor).__name__)

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """With RoPE's tables, the size of the picture and the one style that there is; the timestep as a float."""
        height, width = (_PIXELS * side for side in latents.shape[2:])
        count = len(latents)
        return {
            **super().forward_arguments(transformer, latents, timestep.to(latents.dtype), conditioning),
            "image_meta_size": latents.new_tensor([[_USUAL, _USUAL, height, width, 0, 0]]).repeat(count, 1),
            "style": torch.zeros(count, dtype=torch.int64, device=latents.device),
            "image_rotary_emb": self._rope(transformer, latents),
        }

    def _rope(self, transformer: Any, latents: torch.Tensor) -> Any:
        """(cos, sin), each (N, D)."""
        from diffusers.models.embeddings import get_2d_rotary_pos_embed
        from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

        config, grid = transformer.config, self.token_grid(transformer, latents)
        region = get_resize_crop_region_for_grid(grid, _BASE // _PIXELS // config.patch_size)
        return get_2d_rotary_pos_embed(config.attention_head_dim, region, grid, device=latents.device)

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """Without the channels of a variance, which the pipeline drops too."""
        predicted: torch.Tensor = output[:, : latents.shape[1]]
        return predicted

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """A thousand steps of DDPM, of which it predicts the velocity."""
        return VelocityDDPM(last_beta=0.03, ends_in_noise=False)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Text of BERT (77, channels) and of T5 (256, channels), each with its mask."""
        sample: dict[str, torch.Tensor] = {}
        for index, suffix in enumerate(("", "_t5")):
            text, _, mask, _ = self.encode_text(pipe, prompt, {**(settings or {}), "text_encoder_index": index})
            sample |= {f"encoder_hidden_states{suffix}": text[0], f"text_embedding_mask{suffix}": mask[0]}
        return sample

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """Text of BERT (77, channels) and of T5 (256, channels), each with its mask."""
        return {
            "encoder_hidden_states": torch.empty(transformer.text_len, transformer.cross_attention_dim, device="meta"),
            "text_embedding_mask": torch.empty(transformer.text_len, dtype=torch.int64, device="meta"),
            "encoder_hidden_states_t5": torch.empty(
                transformer.text_len_t5, transformer.cross_attention_dim_t5, device="meta"
            ),
            "text_embedding_mask_t5": torch.empty(transformer.text_len_t5, dtype=torch.int64, device="meta"),
        }
