"""What models of one style share: images or videos, text in one sequence with them, packed latents, padded texts."""

import inspect
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from ..config import PatchConfig
from .adapters import AttentionAdapter, JointAdapter
from .family import Family, Kwargs, Sample
from .models import Clip
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


class JointFamily(Family):
    """Text is in one sequence with the image or video, after it unless the adapter says otherwise."""

    attentions: ClassVar[tuple[str, ...]] = ("attn",)
    adapter = JointAdapter()
    feed_forwards: ClassVar[tuple[str, ...]] = ("ff", "ff_context")
    dispatches_attention = True


class PackedFamily(TrainedFamily):
    """The transformer's input is tokens of packed latents, (B, N, C patch)."""

    def forward_arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the latents packed."""
        arguments = super().forward_arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "hidden_states": pack(latents, self.patch(transformer))}

    def prediction(self, transformer: Any, output: Any, latents: Tensor) -> Tensor:
        """Unpack the transformer's output."""
        return unpack(output, self.token_grid(transformer, latents), self.patch(transformer))

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> Tensor:
        """Generate what the pipeline passes to its autoencoder once it has unpacked it: (C, ...)."""
        latents = super().generate_latents(pipe, prompt, clip, steps, guidance, generator)
        if latents.ndim > 2:
            return latents
        grid = self.grid_of_clip(pipe, pipe.transformer, clip)
        return unpack(latents[None], grid, self.patch(pipe.transformer))[0]


class PackedImageFamily(PackedFamily, JointFamily, ImageFamily):
    """Joint attention over images whose latents are packed 2x2 to a token, as in Flux."""

    takes_sigma = True
    fixed_patch = (2, 2)
    # 16 channels that rotate with the index of the picture, counted as height, and 56 for each axis
    has_rope = True

    def channels(self, config: Any) -> int:
        """Return the channels of a token, without packing."""
        return int(config.in_channels) // 4


class PaddedTextFamily(TrainedFamily):
    """Texts of a batch have different lengths; files hold them padded with zeros, with a mask.

    :attr:`conditions` are the text and its mask.
    """

    def encode_prompt(self, pipe: Any, prompt: str, settings: Mapping[str, Any] | None = None) -> Sample:
        """Return the text, padded to the pipeline's default maximum length, and the mask of its tokens."""
        text, mask = self.conditions
        tokens = {"max_sequence_length": text.shape[0], **(settings or {})}
        embeddings, own = self.encode_text(pipe, prompt, tokens)
        # encode_prompt gives a mask, or None, or texts of a negative prompt in its place
        found = embeddings[0][own[0].bool()] if isinstance(own, Tensor) else embeddings[0]
        missing = tokens["max_sequence_length"] - len(found)
        takes_part = torch.arange(tokens["max_sequence_length"], device=found.device) < len(found)
        return {text.name: functional.pad(found, (0, 0, 0, missing)), mask.name: takes_part.to(mask.dtype)}


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


def pack(latents: Tensor, patch: Sequence[int]) -> Tensor:
    """Return the patches of latents (B, C, ...) in raster order, each a token: (B, N, C patch), channels slowest."""
    for axis, size in enumerate(patch):
        latents = latents.unflatten(2 + 2 * axis, (-1, size))
    axes = range(len(patch))
    order = [0, *(2 + 2 * axis for axis in axes), 1, *(3 + 2 * axis for axis in axes)]
    return latents.permute(order).flatten(1, len(patch)).flatten(2)


def unpack(tokens: Tensor, grid: Sequence[int], patch: Sequence[int]) -> Tensor:
    """Undo :func:`pack`: (B, C, ...)."""
    latents = tokens.unflatten(2, (-1, *patch)).unflatten(1, tuple(grid)).movedim(1 + len(grid), 1)
    for axis in range(len(grid)):
        # the axes of the patch that are left come after those of the grid
        latents = latents.movedim(2 + len(grid), 3 + axis).flatten(2 + axis, 3 + axis)
    return latents
