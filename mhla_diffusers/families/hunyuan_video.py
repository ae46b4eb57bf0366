"""HunyuanVideo: ``HunyuanVideoTransformer3DModel``.

Joint attention with the text after the video: first dual-stream blocks, each stream with its own projections, then
single-stream blocks, whose attention has no output projection. Text is padded and masked. The attention that refines
the text before the blocks is not patched.
"""

from typing import Any

import torch

from ..config import MHLAConfig
from .family import Condition
from .models import Clip, Model, tiny_video
from .styles import JointFamily, VideoFamily

_CLASS = "HunyuanVideoTransformer3DModel"
_TEXT_TOKENS = 256
_TINY = {
    "in_channels": 4,
    "out_channels": 4,
    "num_refiner_layers": 1,
    "text_embed_dim": 16,
    "pooled_projection_dim": 12,
    "rope_axes_dim": (4, 4, 4),
}


class HunyuanVideoFamily(JointFamily, VideoFamily):
    """Text-to-video transformers with a (frames, height, width) token grid."""

    name = "hunyuan_video"
    transformers = (_CLASS,)
    block_lists = ("transformer_blocks", "single_transformer_blocks")
    processor = "diffusers.models.transformers.transformer_hunyuan_video.HunyuanVideoAttnProcessor2_0"
    extra_tokens = _TEXT_TOKENS
    feed_forwards = ("ff", "ff_context", "proj_mlp", "proj_out")
    rotary_channels = {128: (16, 56, 56)}
    # of 33x45x80 tokens, 129 frames at 720p: blocks of three latent frames by 15 by 16 tokens
    default_config = MHLAConfig(blocks=(11, 3, 5), mixing_per_head=True, sparse="content")
    # frames per second as in the authors' scripts
    default_clip = Clip(frames=129, fps=24.0, sizes=((720, 1280),))
    # Llama's tokens after the pipeline's own instruction, and CLIP's pooled text
    conditions = (
        Condition("encoder_hidden_states", (_TEXT_TOKENS, "text_embed_dim")),
        Condition("encoder_attention_mask", (_TEXT_TOKENS,), output=2, dtype=torch.int64),
        Condition("pooled_projections", ("pooled_projection_dim",), output=1),
    )
    guidance = 6000.0  # a thousand times the pipeline's default
    models = (
        Model(
            "hunyuan-video",
            _CLASS,
            24,
            128,
            20,
            (11, 3, 5),
            ((720, 1280),),
            frames=129,
            temporal_stride=4,
            more_layers={"num_single_layers": 40},
            passes=1,
            grids={"720p": (33, 45, 80)},
        ),
        tiny_video("hunyuan_video", _CLASS, layers=2, more_layers={"num_single_layers": 1}, settings=_TINY),
    )

    def needs_pictures(self, config: Any) -> bool:
        """Image-to-video takes a picture's latents beside the noised ones, or instead of the first frame."""
        return config.image_condition_type is not None or config.in_channels != config.out_channels
