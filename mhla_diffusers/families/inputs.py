"""Arguments of a transformer's forward, for families that can be benchmarked and trained."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .grids import keep_with
from .models import Clip, strides_of

Kwargs = dict[str, Any]
_CLIP_TOKENS = 257
_TEXT_TOKENS = 256
_SHOWN_TOKENS = {"latent_concat": 252 + 576 // 2, "token_replace": 252 + 576 // 4}
Sample = Mapping[str, Tensor]
"""``latents`` (C, ...) as the transformer takes them, and further arguments of its forward, without a batch axis."""


class Condition(NamedTuple):
    """An argument of the transformer's forward that is made from a prompt."""

    name: str
    shape: tuple[int | str, ...]
    """Without a batch axis; a string names a size in the transformer's configuration."""
    output: int = 0
    """Index in what the pipeline's ``encode_prompt`` returns."""
    dtype: torch.dtype = torch.float32
    """int64 or bool for a mask; floating-point values keep the text encoder's type."""

    def sizes(self, config: Any) -> list[int]:
        """Return the shape for a transformer of this configuration."""
        return [int(getattr(config, size)) if isinstance(size, str) else size for size in self.shape]


def masked_text(tokens: int, width: str, dtype: torch.dtype) -> tuple[Condition, Condition]:
    """Return the usual arguments for a text of so many padded tokens, and its mask."""
    mask = Condition("encoder_attention_mask", (tokens,), 1, dtype)
    return Condition("encoder_hidden_states", (tokens, width)), mask


@dataclass(kw_only=True, eq=False)
class Inputs:
    """Arguments of the forward of a family's transformers. A subclass overrides the methods that differ."""

    conditions: tuple[Condition, ...] = ()
    packs_latents: bool = False
    """Whether it takes latents as tokens, (B, N, C patch), and predicts them so."""
    takes_sigma: bool = False
    """Whether the transformer takes σ, in place of the scheduler's timestep of 1000 σ."""
    guidance: float | None = None
    family: Any = field(init=False)

    def channels(self, config: Any) -> int:
        """Return the channels of the latents that a transformer of this configuration takes, before any packing."""
        packed = self.family.patch if self.packs_latents and self.family.patch else ()
        return int(config.in_channels) // math.prod(packed)

    def latent_shape(self, config: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """Return the shape of a sample's latents, (C, H, W) or (C, F, H, W), by transformer's and vae's settings."""
        temporal, spatial = strides_of(vae, of_videos=self.family.axes == 3)
        frames = [self.family.latent_frames(config, clip.frames, temporal)] if self.family.makes_videos else []
        return self.channels(config), *frames, *(side // spatial for side in clip.sizes[0])

    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return what a transformer of this configuration gets from a prompt, by default :attr:`conditions`."""
        return self.conditions

    def conditioning_shapes(self, config: Any) -> Sample:
        """Return what conditions a transformer of this configuration, on the meta device, without values."""
        conditions = self.conditions_of(config)
        return {one.name: torch.empty(one.sizes(config), dtype=one.dtype, device="meta") for one in conditions}

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Make the forward's kwargs: latents (B, C, ...), time, conditioning, and guidance if the model embeds it.

        ``timestep`` is (B,), in the transformer's scale; for classes in :attr:`Family.times_per_frame` also (B, F).
        """
        if timestep.ndim == 2:  # of frames: the time of each token
            frames, *size = self.family.token_grid(transformer, latents)
            timestep = timestep[:, :: timestep.shape[1] // frames].repeat_interleave(math.prod(size), dim=1)
        taken = pack(latents, self.family.patch_of(transformer)) if self.packs_latents else latents
        arguments = {"hidden_states": taken, "timestep": timestep}
        if self.guidance is not None and transformer.config.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, self.guidance, dtype=latents.dtype)
        return {**arguments, **conditioning}


class FluxInputs(Inputs):
    """Flux's, with ids of every token."""

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add picture, row and column of the grid's tokens, (N, 3), and zeros for the text."""
        grid = self.family.token_grid(transformer, latents)
        ids = torch.cartesian_prod(torch.zeros(1), *(torch.arange(size).float() for size in grid)).to(latents)
        keep_with(ids, grid, 0)  # known here, and the ids may be on the meta device
        text_ids = torch.zeros(conditioning["encoder_hidden_states"].shape[1], 3).to(latents)
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {"img_ids": ids, "txt_ids": text_ids, **arguments}


class PixArtInputs(Inputs):
    """PixArt's. α's model for 1024 px also gets height, width and their ratio; its others and Σ's do not."""

    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return texts of 120 tokens, or of 300 in Σ, whose configurations have no additional conditions."""
        tokens = 300 if config.use_additional_conditions is False else 120
        return tuple(one._replace(shape=(tokens, *one.shape[1:])) for one in self.conditions)

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the picture's size in pixels, for models that take it."""
        size: Kwargs = {"resolution": None, "aspect_ratio": None}
        if transformer.use_additional_conditions:
            height, width = (8 * side for side in latents.shape[2:])  # pixels
            size["resolution"] = latents.new_tensor([[height, width]]).expand(len(latents), -1)
            size["aspect_ratio"] = latents.new_tensor([[height / width]]).expand(len(latents), -1)
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {**arguments, "added_cond_kwargs": size}


class WanInputs(Inputs):
    """Wan's. Image-to-video may also take a vision encoder's embedding of the first frame."""

    def conditioning_shapes(self, config: Any) -> Sample:
        """Add ``encoder_hidden_states_image``, if the transformer takes it."""
        shapes = dict(super().conditioning_shapes(config))
        if config.image_dim is not None:
            shapes["encoder_hidden_states_image"] = torch.empty(_CLIP_TOKENS, config.image_dim, device="meta")
        return shapes


class SkyReelsInputs(WanInputs):
    """SkyReels-V2's, with diffusion forcing and the frame rate."""

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Pass times of frames as diffusion forcing's, and the frame rate to models that take it."""
        arguments: Kwargs = {"hidden_states": latents, "timestep": timestep, **conditioning}
        if timestep.ndim == 2:
            frames = self.family.token_grid(transformer, latents)[0]
            arguments["timestep"] = timestep[:, :: timestep.shape[1] // frames]
            arguments["enable_diffusion_forcing"] = True
        if transformer.config.inject_sample_info:
            arguments["fps"] = [1] * len(latents)  # what any rate but 16 is called
        return arguments


class HunyuanVideoInputs(Inputs):
    """HunyuanVideo's. Image-to-video encodes the text together with a picture."""

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


class LTXInputs(Inputs):
    """LTX-Video's, with the grid as numbers."""

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the grid and RoPE's scale."""
        grid = self.family.token_grid(transformer, latents)
        size = dict(zip(("num_frames", "height", "width"), grid, strict=True))
        # the pipeline's scale at its usual 25 frames per second, with 8 frames and 32x32 pixels per latent
        scale = {"rope_interpolation_scale": (8 / 25, 32, 32)}
        return {**scale, **size, **super().arguments(transformer, latents, timestep, conditioning)}


class CogVideoXInputs(Inputs):
    """CogVideoX's: frames before channels, and RoPE as an argument."""

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Put frames before channels, and add the RoPE tables if the model has RoPE."""
        arguments = super().arguments(transformer, latents.transpose(1, 2), timestep, conditioning)
        config = transformer.config
        if config.use_rotary_positional_embeddings:
            from diffusers.models.embeddings import get_3d_rotary_pos_embed
            from diffusers.pipelines.cogvideo.pipeline_cogvideox import get_resize_crop_region_for_grid

            # (cos, sin), each (N, D), as the pipeline makes them: 1.0 scales them to the training size, 1.5 slices them
            frames, *size = self.family.token_grid(transformer, latents)
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


class QwenImageInputs(Inputs):
    """Qwen-Image's, with the grid as shapes of pictures."""

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Add the shape of one picture for every sample."""
        shape = (1, *self.family.token_grid(transformer, latents))
        arguments = super().arguments(transformer, latents, timestep, conditioning)
        return {"img_shapes": [[shape]] * len(latents), **arguments}


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
