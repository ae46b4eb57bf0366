"""HunyuanVideo: ``HunyuanVideoTransformer3DModel``.

Joint attention over the video, then 256 tokens of padded and masked text: first dual-stream blocks, each stream with
its own projections, then single-stream blocks, whose attention has no output projection. RoPE rotates the video alone.
The attention that refines the text before the blocks is not patched. Image-to-video takes a picture as the first latent
frame (``token_replace``) or as further channels (``latent_concat``, SkyReels), and encodes the text together with it.
Default blocks cut 33x45x80 tokens, 129 frames at 720p, into three latent frames by 15 by 16 tokens.
"""

from collections.abc import Mapping
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from .adapters import JointAdapter
from .family import Attention, Condition, Family, Forward, Kwargs, Sample, Training
from .models import Clip, Model, tiny_video

_CLASS = "HunyuanVideoTransformer3DModel"
_TEXT_TOKENS = 256
_SHOWN_TOKENS = {"latent_concat": 252 + 576 // 2, "token_replace": 252 + 576 // 4}
"""Tokens of image-to-video: a text without four of its instruction, and every second or fourth of the picture."""
_TINY: dict[str, Any] = {"in_channels": 4, "out_channels": 4, "num_refiner_layers": 1, "text_embed_dim": 16}
_TINY |= {"pooled_projection_dim": 12, "rope_axes_dim": (4, 4, 4)}
_REAL: dict[str, Any] = {"frames": 129, "temporal_stride": 4, "more_layers": {"num_single_layers": 40}}


class _Forward(Forward):
    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Give text that is encoded with a picture the tokens of both."""
        text, mask, pooled = self.conditions
        tokens = _SHOWN_TOKENS.get(config.image_condition_type, _TEXT_TOKENS)
        return text._replace(shape=(tokens, text.shape[1])), mask._replace(shape=(tokens,)), pooled

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass one time: the transformer knows of a picture by itself; SkyReels' pipeline has guidance 1."""
        timestep, config = timestep if timestep.ndim == 1 else timestep[:, -1], transformer.config
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        is_skyreels = config.in_channels != config.out_channels and config.image_condition_type is None
        if is_skyreels and "guidance" in arguments:
            arguments["guidance"] = torch.full_like(arguments["guidance"], 1000.0)
        return arguments


class _Training(Training):
    def encode_text(self, pipe: Any, prompt: str | list[str], settings: Mapping[str, Any]) -> Any:
        """Encode with the picture, or without one with a black one, as the pipeline's negative prompt."""
        every = {"latent_concat": 2, "token_replace": 4}.get(pipe.transformer.config.image_condition_type, 1)
        usual = {"image": Image.new("RGB", (336, 336)), "image_embed_interleave": every}
        return super().encode_text(pipe, prompt, {**usual, **settings})

    def keeps_first_frame(self, pipe: Any, config: Any) -> bool:
        """Whether it is the image-to-video model of this kind."""
        return bool(config.get("image_condition_type") == "token_replace")

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to (B, 16, F, H, W); image-to-video adds channels of the first frame and, but for SkyReels, a mask."""
        latents, config = super().encode_pixels(pipe, pixels), pipe.transformer.config
        if config.in_channels == config.out_channels:
            return latents
        first = super().encode_pixels(pipe, pixels[:, :, :1])
        mask = [torch.ones_like(first[:, :1])] if config.image_condition_type == "latent_concat" else []
        return self.beside(pipe, latents, first, *mask)


HUNYUAN_VIDEO = Family(
    name="hunyuan_video",
    transformers=(_CLASS,),
    attention=Attention(
        block_lists=("transformer_blocks", "single_transformer_blocks"),
        feed_forwards=("ff", "ff_context", "proj_mlp", "proj_out"),
        adapter=JointAdapter(),
        processor="diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0",
        dispatches=True,
        extra=(0, None),
        extra_tokens=_TEXT_TOKENS,
    ),
    forward=_Forward(
        axes=3,
        guidance=6000.0,  # a thousand times the pipeline's default
        # Llama's tokens after the pipeline's own instruction, and CLIP's pooled text
        conditions=(
            Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),
            Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=2, dtype=torch.int64),
            Condition("pooled_projections", ("pooled_projection_dim",), output=1),
        ),
    ),
    trained=_Training(text_settings={"max_sequence_length": _TEXT_TOKENS}),
    mhla_blocks=(11, 3, 5),
    # frames per second as in the authors' scripts
    default_clip=Clip(frames=129, fps=24.0, sizes=((720, 1280),)),
    models=(
        Model("hunyuan-video", _CLASS, 24, 128, 20, (11, 3, 5), ((720, 1280),), **_REAL),
        tiny_video("hunyuan_video", _CLASS, _TINY, layers=2, more_layers={"num_single_layers": 1}),
    ),
)
