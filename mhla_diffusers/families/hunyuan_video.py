"""HunyuanVideo: ``HunyuanVideoTransformer3DModel``.

Joint attention, the text after the video: first blocks of two streams, each with projections of its own, then blocks of
one, whose attention has no output projection. Text is padded and masked. What refines the text before the blocks is
attention as well, but over the text alone, and stays as it is.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from ..config import MHLAConfig
from .adapters import JointAdapter
from .base import Family
from .processes import DiffusionProcess, FlowMatching
from .sizes import Clip, Model
from .structure import Sample

_TEXT_TOKENS = 256
_GUIDANCE = 6000.0
"""A thousand times the pipeline's default, for models that embed it."""

_REAL = Model(
    "hunyuan-video",
    "HunyuanVideoTransformer3DModel",
    {},
    24,
    128,
    20,
    (11, 3, 5),
    stride=8,
    patch=2,
    sizes=((720, 1280),),
    frames=129,
    temporal_stride=4,
    more_layers={"num_single_layers": 40},
    passes=1,
    grids={"720p": (33, 45, 80)},
)

_TINY = Model(
    "tiny-hunyuan_video",
    "HunyuanVideoTransformer3DModel",
    {
        "in_channels": 4,
        "out_channels": 4,
        "num_attention_heads": 2,
        "attention_head_dim": 12,
        "num_refiner_layers": 1,
        "text_embed_dim": 16,
        "pooled_projection_dim": 12,
        "rope_axes_dim": (4, 4, 4),
    },
    2,
    12,
    2,
    blocks=(1, 2, 2),
    stride=8,
    patch=2,
    sizes=((64, 96),),
    frames=9,
    temporal_stride=4,
    more_layers={"num_single_layers": 1},
)


class HunyuanVideoFamily(Family):
    """Text-to-video transformers with a (frames, height, width) token grid."""

    name = "hunyuan_video"
    transformers = ("HunyuanVideoTransformer3DModel",)
    axes = 3
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks", "single_transformer_blocks")
    attentions = ("attn",)
    adapter = JointAdapter()
    extra_tokens = _TEXT_TOKENS
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ff_context", "proj_mlp", "proj_out")
    # of 33x45x80 tokens, 129 frames at 720p: blocks of three latent frames by 15 by 16 tokens
    default_config = MHLAConfig(blocks=(11, 3, 5), mixing_per_head=True, sparse="content")
    dispatches_attention = True
    # as many frames a second as the scripts of its authors write
    default_clip = Clip(frames=129, fps=24.0, sizes=((720, 1280),))
    models = (_REAL, _TINY)

    def self_attention_processor(self) -> Any:
        """``HunyuanVideoAttnProcessor2_0``."""
        from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoAttnProcessor2_0

        return HunyuanVideoAttnProcessor2_0()

    def rotary_axes(self, head_dim: int) -> tuple[int, ...] | None:
        """16 channels for the frames and 56 for each side."""
        return (16, 56, 56) if head_dim == 128 else None

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """Of latents (B, C, F, H, W)."""
        frames, height, width = latents.shape[2:]
        patch = transformer.config.patch_size
        return frames // transformer.config.patch_size_t, height // patch, width // patch

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """With the scale of guidance, where the model embeds it."""
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        if transformer.config.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, _GUIDANCE, dtype=latents.dtype)
        return arguments

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching.

        Raises:
            ValueError: a transformer that is conditioned on pictures.
        """
        self._check_is_text_to_video(transformer.config)
        return FlowMatching(flow_shift)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (256, channels), ``encoder_attention_mask`` (256,), ``pooled_projections``.

        The tokens of Llama behind the pipeline's own instruction, and the text of CLIP.

        Raises:
            ValueError: a transformer that is conditioned on pictures.
        """
        self._check_is_text_to_video(pipe.transformer.config)
        text, pooled, mask = self.encode_text(pipe, prompt, {"max_sequence_length": _TEXT_TOKENS, **(settings or {})})
        return {"encoder_hidden_states": text[0], "encoder_attention_mask": mask[0], "pooled_projections": pooled[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (256, channels), ``encoder_attention_mask`` (256,), ``pooled_projections``."""
        return {
            "encoder_hidden_states": torch.empty(_TEXT_TOKENS, transformer.text_embed_dim, device="meta"),
            "encoder_attention_mask": torch.empty(_TEXT_TOKENS, dtype=torch.int64, device="meta"),
            "pooled_projections": torch.empty(transformer.pooled_projection_dim, device="meta"),
        }

    def _check_is_text_to_video(self, config: Any) -> None:
        if config.image_condition_type is not None or config.in_channels != config.out_channels:
            raise self._needs_pictures()
