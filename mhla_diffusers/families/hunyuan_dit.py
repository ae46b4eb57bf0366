"""HunyuanDiT: ``HunyuanDiT2DModel``.

Softmax self-attention over the image alone with LayerNorm of each head's query and key, and 2-D RoPE, whose tables the
pipeline passes to the transformer. The first half of a head's channels rotates with the width, the second with the
height; in cross-attention only the query is rotated. Later blocks have skip connections from earlier ones, so the
number of blocks is even. Default blocks are those of all images.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from .adapters import AttentionAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import image_model, tiny_image
from .processes import VelocityDDPM

_CLASS = "HunyuanDiT2DModel"
_PROCESSOR = "diffusers.models.attention_processor.HunyuanAttnProcessor2_0"
_PIXELS = 8
"""Pixels per latent along height and width, which the pipeline assumes."""
_BASE = 512
"""Side in pixels of the square that RoPE's coordinates refer to."""
_USUAL = 1024
"""Original height and width that the pipeline states for every picture."""
# of 1.1, as published with its weights; the rest are the class's defaults
_REAL = {"in_channels": 4, "patch_size": 2, "hidden_size": 16 * 88, "mlp_ratio": 4.3637}
_TINY = {"in_channels": 4, "patch_size": 2, "hidden_size": 24, "cross_attention_dim": 16}
_TINY |= {"cross_attention_dim_t5": 32, "pooled_projection_dim": 16}


class _Attention(Attention):
    def recognises_cross(self, attn: Any) -> bool:
        """Whether it has LayerNorm in every head; its query may be rotated."""
        return isinstance(getattr(attn, "norm_q", None), nn.LayerNorm)


class _Forward(Forward):
    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add RoPE's tables, the picture's size and the only style; the timestep is a float."""
        from diffusers.models.embeddings import get_2d_rotary_pos_embed
        from diffusers.pipelines.hunyuandit.pipeline_hunyuandit import get_resize_crop_region_for_grid

        config, grid, count = transformer.config, self.token_grid(transformer, latents), len(latents)
        height, width = (_PIXELS * side for side in latents.shape[2:])
        region = get_resize_crop_region_for_grid(grid, _BASE // _PIXELS // config.patch_size)
        return {
            **super().arguments(transformer, latents, timestep.to(latents.dtype), conditioning),
            "image_meta_size": latents.new_tensor([[_USUAL, _USUAL, height, width, 0, 0]]).repeat(count, 1),
            "style": torch.zeros(count, dtype=torch.int64, device=latents.device),
            "image_rotary_emb": get_2d_rotary_pos_embed(config.attention_head_dim, region, grid, device=latents.device),
        }


class _Training(Training):
    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Drop the variance channels, as the pipeline does."""
        predicted: Tensor = output[:, : latents.shape[1]]
        return predicted

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Encode text by BERT (77, channels) and by T5 (256, channels), each with its mask."""
        sample: dict[str, Tensor] = {}
        for index, suffix in enumerate(("", "_t5")):
            text, _, mask, _ = self.encode_text(pipe, prompt, {**(settings or {}), "text_encoder_index": index})
            sample |= {f"encoder_hidden_states{suffix}": text[0], f"text_embedding_mask{suffix}": mask[0]}
        return sample


HUNYUAN_DIT = Family(
    name="hunyuan_dit",
    transformers=(_CLASS,),
    attention=_Attention(
        block_lists=("blocks",),
        adapter=AttentionAdapter("image_rotary_emb"),
        processor=_PROCESSOR,
        cross_processor=_PROCESSOR,
        # HunyuanDiTPAGPipeline's, with and without classifier-free guidance
        perturbed_processors={"PAGCFGHunyuanAttnProcessor2_0": 3, "PAGHunyuanAttnProcessor2_0": 2},
    ),
    forward=_Forward(
        # of BERT and of T5
        conditions=(
            Condition("encoder_hidden_states", ("text_len", "cross_attention_dim")),
            Condition("text_embedding_mask", ("text_len",), output=2, dtype=torch.int64),
            Condition("encoder_hidden_states_t5", ("text_len_t5", "cross_attention_dim_t5")),
            Condition("text_embedding_mask_t5", ("text_len_t5",), output=2, dtype=torch.int64),
        )
    ),
    trained=_Training(ddpm=partial(VelocityDDPM, last_beta=0.03, ends_in_noise=False)),
    models=(
        image_model("hunyuan-dit", _CLASS, 16, 88, 40, settings=_REAL, has_rope=False),
        tiny_image("hunyuan_dit", _CLASS, _TINY, layers=4, has_rope=False),
    ),
)
