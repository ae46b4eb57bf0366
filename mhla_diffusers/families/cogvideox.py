"""CogVideoX: ``CogVideoXTransformer3DModel`` (2B, 5B and 1.5).

Joint attention with the same projections for all tokens, the text before the video. The transformer takes latents with
their frames before their channels, and the tables of RoPE as an argument; 2B has none, but adds positions to the tokens
once. A token of 1.5 is made of two latent frames, so its latents have an even number of them.
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from ..config import MHLAConfig
from .adapters import JointAdapter
from .base import Family
from .processes import DiffusionProcess, VelocityDDPM
from .sizes import Clip, Model
from .structure import Sample


def _model(
    name: str, heads: int, layers: int, frames: int, size: tuple[int, int], grid: tuple[int, ...], **settings: Any
) -> Model:
    return Model(
        name,
        "CogVideoXTransformer3DModel",
        {"num_attention_heads": heads, **settings},
        heads,
        64,
        layers,
        (4, 3, 5),
        stride=8,
        patch=2,
        sizes=(size,),
        frames=frames,
        temporal_stride=4,
        temporal_patch=settings.get("patch_size_t", 1),
        grids={f"{size[0]}p": grid},
    )


_TINY = Model(
    "tiny-cogvideox",
    "CogVideoXTransformer3DModel",
    {
        "num_attention_heads": 2,
        "attention_head_dim": 16,
        "in_channels": 4,
        "out_channels": 4,
        "time_embed_dim": 8,
        "text_embed_dim": 32,
        "max_text_seq_length": 8,
        "use_rotary_positional_embeddings": True,
    },
    2,
    16,
    3,
    blocks=(1, 2, 2),
    stride=8,
    patch=2,
    sizes=((64, 96),),
    frames=9,
    temporal_stride=4,
)

_ROPE = {"use_rotary_positional_embeddings": True}
# 300 is what diffusers' conversion script writes: the longest side of the tables of RoPE, not a usual size
_OF_1_5 = {**_ROPE, "patch_size_t": 2, "patch_bias": False, "sample_height": 300, "sample_width": 300}


class CogVideoXFamily(Family):
    """Text-to-video transformers with a (frames, height, width) token grid."""

    name = "cogvideox"
    transformers = ("CogVideoXTransformer3DModel",)
    axes = 3
    block_lists = ("transformer_blocks",)
    adapter = JointAdapter(context_first=True)
    extra_tokens = 226
    # of 13x30x45 tokens, 49 frames at 480x720: blocks of three latent frames by ten by nine tokens
    default_config = MHLAConfig(blocks=(4, 3, 5), mixing_per_head=True, sparse="content")
    default_clip = Clip(frames=49, fps=8.0, sizes=((480, 720),))
    # numbers as in diffusers' conversion script; of 1.5 the pipeline makes 85 frames where it is asked for 81
    models = (
        _model("cogvideox-2b", 30, 30, 49, (480, 720), (13, 30, 45)),
        _model("cogvideox-5b", 48, 42, 49, (480, 720), (13, 30, 45), **_ROPE),
        _model("cogvideox1.5-5b", 48, 42, 85, (768, 1360), (11, 48, 85), **_OF_1_5),
        _TINY,
    )

    def self_attention_processor(self) -> Any:
        """``CogVideoXAttnProcessor2_0``."""
        from diffusers.models.attention_processor import CogVideoXAttnProcessor2_0

        return CogVideoXAttnProcessor2_0()

    def rotary_axes(self, head_dim: int) -> tuple[int, ...]:
        """A quarter for the frames, the others halve the rest."""
        return head_dim // 4, head_dim // 8 * 3, head_dim // 8 * 3

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """Of latents (B, C, F, H, W), as files hold them.

        Raises:
            ValueError: latent frames that do not fill the last token.
        """
        frames, height, width = latents.shape[2:]
        patch, frames_per_token = transformer.config.patch_size, transformer.config.patch_size_t or 1
        if frames % frames_per_token:
            raise ValueError(
                f"Latents of {frames} frames do not fill tokens of {frames_per_token}, of which CogVideoX 1.5 makes "
                "its grid; give a multiple, as mhla encode and mhla synthesize do."
            )
        return frames // frames_per_token, height // patch, width // patch

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Of ``hidden_states`` (B, F, C, H, W)."""
        return self.token_grid(transformer, arguments["hidden_states"].transpose(1, 2))

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Of as many latent frames as fill the last token; the pipeline makes the others as well."""
        stride = self.temporal_stride(pipe)
        frames = _whole_tokens(transformer.config, (clip.frames - 1) // stride + 1)
        return super().grid_of_clip(pipe, transformer, replace(clip, frames=(frames - 1) * stride + 1))

    def forward_arguments(
        self, transformer: Any, latents: torch.Tensor, timestep: torch.Tensor, conditioning: Sample
    ) -> dict[str, Any]:
        """Frames before channels, and the tables of RoPE where the model has one."""
        arguments: dict[str, Any] = {"hidden_states": latents.transpose(1, 2), "timestep": timestep, **conditioning}
        if transformer.config.use_rotary_positional_embeddings:
            grid = self.token_grid(transformer, latents)
            arguments["image_rotary_emb"] = _rotary_tables(transformer.config, grid, latents.device)
        return arguments

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """Channels before frames."""
        predicted: torch.Tensor = output.transpose(1, 2)
        return predicted

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Diffusion to pure noise whose velocity is predicted; 2B without RoPE has noisier steps.

        Raises:
            ValueError: a transformer that is conditioned on pictures.
        """
        self._check_is_text_to_video(transformer.config)
        return VelocityDDPM(snr_shift=1.0 if transformer.config.use_rotary_positional_embeddings else 3.0)

    def encode_pixels(self, pipe: Any, pixels: torch.Tensor) -> torch.Tensor:
        """(B, 16, F, H, W); the first frame is repeated before it where frames are missing in a token.

        There the pipeline makes the frames that it does not decode.
        """
        latents = super().encode_pixels(pipe, pixels)
        frames = latents.shape[2]
        missing = _whole_tokens(pipe.transformer.config, frames) - frames
        return torch.cat([latents[:, :, :1].expand(-1, -1, missing, -1, -1), latents], dim=2)

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """``encoder_hidden_states`` (226, channels) of T5, whose padding is attended to.

        Raises:
            ValueError: a transformer that is conditioned on pictures.
        """
        config = pipe.transformer.config
        self._check_is_text_to_video(config)
        chosen = {"max_sequence_length": config.max_text_seq_length, **(settings or {})}
        text, _ = self.encode_text(pipe, prompt, chosen)
        return {"encoder_hidden_states": text[0]}

    def conditioning_shapes(self, transformer: Any) -> Sample:
        """``encoder_hidden_states`` (226, channels)."""
        shape = transformer.max_text_seq_length, transformer.text_embed_dim
        return {"encoder_hidden_states": torch.empty(shape, device="meta")}

    def latent_shape(self, transformer: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """(C, F, H, W), with as many frames as fill the last token."""
        channels, frames, height, width = super().latent_shape(transformer, vae, clip)
        return channels, _whole_tokens(transformer, frames), height, width

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """Channels before frames."""
        return super().generate_latents(pipe, prompt, clip, steps, guidance, generator).transpose(0, 1)

    def _check_is_text_to_video(self, config: Any) -> None:
        if config.in_channels != config.out_channels:
            raise self._needs_pictures()


def _whole_tokens(config: Any, frames: int) -> int:
    """Latent frames, rounded up to what fills tokens."""
    frames_per_token = int(config.patch_size_t or 1)
    return math.ceil(frames / frames_per_token) * frames_per_token


def _rotary_tables(config: Any, grid: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each (N, D), as the pipeline makes them: of 1.0 scaled to the size of training, of 1.5 cut out."""
    from diffusers.models.embeddings import get_3d_rotary_pos_embed
    from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

    frames, height, width = grid
    usual = config.sample_height // config.patch_size, config.sample_width // config.patch_size
    crop, settings = None, {"grid_type": "slice", "max_size": usual}
    if config.patch_size_t is None:
        crop, settings = get_resize_crop_region_for_grid((height, width), usual[1], usual[0]), {}
    tables: tuple[torch.Tensor, torch.Tensor] = get_3d_rotary_pos_embed(
        config.attention_head_dim, crop, (height, width), frames, device=device, **settings
    )
    return tables
