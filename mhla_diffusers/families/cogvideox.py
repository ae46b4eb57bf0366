"""CogVideoX: ``CogVideoXTransformer3DModel`` (2B, 5B and 1.5).

Joint attention with the same projections for all tokens: text, then video. The transformer takes latents with frames
before channels, and the RoPE tables as an argument; 2B has no RoPE and adds positions to the tokens once. In 1.5 a
token covers two latent frames, so the number of latent frames is even. Default blocks cut 13x30x45 tokens, 49 frames at
480x720, into three latent frames by ten by nine tokens.
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import Clip, Model, tiny_video
from .processes import DiffusionProcess, VelocityDDPM

_CLASS = "CogVideoXTransformer3DModel"
_ROPE = {"use_rotary_positional_embeddings": True}
# 300 is what diffusers' conversion script writes: the longest side of the RoPE tables, not a usual size
_SIDES = {"sample_height": 300, "sample_width": 300}
_VERSION_1_5 = {"settings": {**_ROPE, **_SIDES, "patch_size_t": 2, "patch_bias": False}, "temporal_patch": 2}
_TINY = {"in_channels": 4, "out_channels": 4, "time_embed_dim": 8, "text_embed_dim": 32, "max_text_seq_length": 8}


def _model(name: str, heads: int, layers: int, frames: int, size: tuple[int, int], **different: Any) -> Model:
    return Model(name, _CLASS, heads, 64, layers, (4, 3, 5), (size,), frames=frames, temporal_stride=4, **different)


class _Forward(Forward):
    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Read the grid from ``hidden_states`` (B, F, C, H, W)."""
        return self.token_grid(transformer, arguments["hidden_states"].transpose(1, 2))

    def latent_frames(self, config: Any, frames: int, stride: int) -> int:
        """Round up to whole tokens, as the pipeline does."""
        in_token = int(config.patch_size_t or 1)
        return math.ceil(super().latent_frames(config, frames, stride) / in_token) * in_token

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Put frames before channels, and add the RoPE tables if the model has RoPE."""
        arguments = super().arguments(transformer, latents.transpose(1, 2), timestep, conditioning)
        config = transformer.config
        if config.use_rotary_positional_embeddings:
            from diffusers.models.embeddings import get_3d_rotary_pos_embed
            from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

            # (cos, sin), each (N, D), as the pipeline makes them: 1.0 scales them to the training size, 1.5 slices them
            frames, *size = self.token_grid(transformer, latents)
            usual = config.sample_height // config.patch_size, config.sample_width // config.patch_size
            crop: Any = None
            settings: dict[str, Any] = {"grid_type": "slice", "max_size": usual}
            if config.patch_size_t is None:
                crop, settings = get_resize_crop_region_for_grid(tuple(size), usual[1], usual[0]), {}
            settings |= {"device": latents.device}
            tables = get_3d_rotary_pos_embed(config.attention_head_dim, crop, tuple(size), frames, **settings)
            arguments["image_rotary_emb"] = tables
        if config.ofs_embed_dim is not None:
            arguments["ofs"] = latents.new_full((1,), 2.0)  # what image-to-video of 1.5 always gets
        return arguments


class _Training(Training):
    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Put channels before frames."""
        return super().prediction(transformer, output, latents).transpose(1, 2)

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Return diffusion to pure noise with predicted velocity; 2B, without RoPE, has noisier steps."""
        snr_shift = 1.0 if transformer.config.use_rotary_positional_embeddings else 3.0
        return VelocityDDPM(snr_shift, channels=int(transformer.config.out_channels))

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to (B, 16, F, H, W); the first frame is repeated to fill its token.

        In its place the pipeline generates frames that it does not decode. For image-to-video (B, 32, F, H, W), with
        the latents of the first frame; some checkpoints have them on the autoencoder's scale, divided by its factor.
        """
        latents = super().encode_pixels(pipe, pixels)
        missing = self.forward.latent_frames(pipe.transformer.config, latents.shape[2], 1) - latents.shape[2]
        latents = torch.cat([latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents], dim=2)
        if self.forward.channels(pipe.transformer.config) == latents.shape[1]:
            return latents
        first, scale = super().encode_pixels(pipe, pixels[:, :, :1]), pipe.vae.config.scaling_factor
        return self.beside(pipe, latents, first / scale**2 if pipe.vae.config.invert_scale_latents else first)

    def generate_latents(self, *args: Any, **kwargs: Any) -> Tensor:
        """Put channels before frames."""
        return super().generate_latents(*args, **kwargs).transpose(0, 1)


COGVIDEOX = Family(
    name="cogvideox",
    transformers=(_CLASS,),
    attention=Attention(
        adapter=JointAdapter(context_first=True),
        processor="diffusers.models.attention_processor.CogVideoXAttnProcessor2_0",
        extra=(None, 0),
        extra_tokens=226,
    ),
    forward=_Forward(
        axes=3, conditions=(Condition("encoder_hidden_states", ("max_text_seq_length", "text_embed_dim")),)
    ),
    trained=_Training(),
    mhla_blocks=(4, 3, 5),
    default_clip=Clip(frames=49, fps=8.0, sizes=((480, 720),)),
    # numbers as in diffusers' conversion script; the pipeline of 1.5 generates 85 frames when asked for 81
    models=(
        _model("cogvideox-2b", 30, 30, 49, (480, 720)),
        _model("cogvideox-5b", 48, 42, 49, (480, 720), settings=_ROPE),
        _model("cogvideox1.5-5b", 48, 42, 85, (768, 1360), **_VERSION_1_5),
        tiny_video("cogvideox", _CLASS, {**_TINY, **_ROPE}, head_dim=16),
    ),
)
