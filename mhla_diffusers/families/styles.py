"""What models of one style share: images, videos, packed images, models of transformers."""

import inspect
from collections.abc import Mapping
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..config import PatchConfig
from .adapters import AttentionAdapter, JointAdapter
from .family import Family, Sample
from .processes import KNOWN_FRAMES, DiffusionProcess, FlowMatching
from .trained import TrainedFamily

_TRANSFORMERS = (5, 23)
"""Oldest version of transformers whose attentions, masks and caches are these; the version that is tested."""


class ImageFamily(TrainedFamily):
    """Text-to-image transformers with a (height, width) token grid."""

    axes = 2
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    process_class: ClassVar[type[DiffusionProcess] | None] = FlowMatching
    # at 1024 px blocks of 16x16 tokens
    mhla_blocks: ClassVar[tuple[int, ...]] = (4, 4)


class VideoFamily(TrainedFamily):
    """Text- and image-to-video transformers with a (frames, height, width) token grid."""

    axes = 3
    block_lists: ClassVar[tuple[str, ...]] = ("transformer_blocks",)
    process_class: ClassVar[type[DiffusionProcess] | None] = FlowMatching

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Leave channels of a picture, which the transformer takes and does not predict, clean."""
        process, config = super().process(transformer, flow_shift), transformer.config
        if config.in_channels != (config.get("out_channels") or config.in_channels):
            process.channels = int(config.out_channels)
        return process

    def times_of_tokens(self, transformer: Any, latents: Tensor, timestep: Tensor) -> Tensor:
        """Repeat times of frames (B, F) for their tokens, (B, N); one time for all frames is unchanged."""
        if timestep.ndim == 1:
            return timestep
        frames, height, width = self.token_grid(transformer, latents)
        return timestep[:, :: timestep.shape[1] // frames].repeat_interleave(height * width, dim=1)

    def encode_pixels(self, pipe: Any, pixels: Tensor) -> Tensor:
        """Encode to (B, C, F, H, W); a first latent frame that is a picture is encoded by itself."""
        latents = super().encode_pixels(pipe, pixels)
        if not self.keeps_first_frame(pipe, pipe.transformer.config):
            return latents
        return torch.cat([super().encode_pixels(pipe, pixels[:, :, :1]), latents[:, :, 1:]], dim=2)

    def encode_picture(self, pipe: Any, pixels: Tensor) -> Sample:
        """Return the number of given frames, where the first latent frame is a picture."""
        return {KNOWN_FRAMES: torch.tensor(1)} if self.keeps_first_frame(pipe, pipe.transformer.config) else {}

    def picture_settings(self, pipe: Any, pixels: Tensor) -> Mapping[str, Any]:
        """Return the first frame as ``image``, where prompts are encoded with a picture."""
        takes_picture = "image" in inspect.signature(pipe.encode_prompt).parameters
        return {"image": first_picture(pipe, pixels)} if takes_picture else {}

    def beside(self, pipe: Any, latents: Tensor, *pictures: Tensor) -> Tensor:
        """Add channels of pictures, each (B, C, F, H, W) with at most the latents' frames, filled up with zeros.

        Raises:
            ValueError: the transformer takes another number of channels.
        """
        frames, wanted = latents.shape[2], self.channels(pipe.transformer.config)
        filled = [functional.pad(one, (0, 0, 0, 0, 0, frames - one.shape[2])) for one in pictures]
        found = torch.cat([latents, *filled], dim=1)
        if wanted != found.shape[1]:
            raise ValueError(
                f"{type(pipe.transformer).__name__} takes {wanted} channels, not the {latents.shape[1]} of latents or "
                f"the {found.shape[1]} with a first frame; give the samples as InMemoryData."
            )
        return found


class PackedImageFamily(ImageFamily):
    """Joint attention over images whose latents are packed 2x2 to a token, as in Flux."""

    adapter: ClassVar[AttentionAdapter] = JointAdapter(context_first=True)
    dispatches_attention = True
    packs_latents = True
    takes_sigma = True
    fixed_patch = (2, 2)
    # 16 channels that rotate with the index of the picture, counted as height, and 56 for each axis
    has_rope = True

    def channels(self, config: Any) -> int:
        """Return the channels of a token, without packing."""
        return int(config.in_channels) // 4


class TransformersAdapter(AttentionAdapter):
    """Attentions of transformers; SigLIP calls the last layer ``out_proj``."""

    inputs = ("q_proj", "k_proj", "v_proj")
    outputs = ("o_proj", "out_proj")

    def heads(self, attn: Any) -> tuple[int, int]:
        """Return the number of the queries' heads and head dim."""
        return int(attn.config.num_attention_heads), int(attn.head_dim)


class TransformersFamily(Family):
    """Models of transformers: no denoising steps; their attentions get a processor while patched."""

    library = "transformers"
    processor = "mhla_diffusers.families.patched_classes.OwnAttention"

    def why_not_patched(self, transformer: Any, config: PatchConfig) -> str | None:
        """Refuse an old transformers version, and settings for denoising steps."""
        kind, installed = type(transformer).__name__, version("transformers")
        if tuple(map(int, installed.split(".")[:2])) < _TRANSFORMERS:
            needed = ".".join(map(str, _TRANSFORMERS))
            return (
                f"A patch of {kind} needs the attentions, masks and caches of transformers {needed} or newer, and "
                f"{installed} is installed: pip install --upgrade transformers."
            )
        if config.asks_for_dense_steps:
            return f"{config.dense_words} counts denoising steps, which {kind} does not have; leave it out."
        return None


def first_picture(pipe: Any, pixels: Tensor) -> Any:
    """Return the first frame of a clip (1, 3, F, H, W) as a PIL image."""
    return pipe.video_processor.postprocess(pixels[:, :, 0].float(), output_type="pil")[0]


def takes_picture(pipe: Any) -> bool:
    """Whether a pipeline, or its class, begins every video with a picture; one that takes any conditions need not."""
    known = inspect.signature(pipe.__call__).parameters
    return "image" in known and "conditions" not in known
