"""What a transformer's forward takes: its token grid, time, conditions and RoPE, from its own arguments."""

import inspect
import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .models import Clip, strides_of
from .packing import pack

Kwargs = dict[str, Any]
"""Keyword arguments of a transformer's forward."""
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


def masked_text(tokens: int, width: str, dtype: torch.dtype, output: int = 1) -> tuple[Condition, Condition]:
    """Return the usual arguments for a text, padded to a number of tokens, and for its mask.

    Args:
        tokens: of the padded text.
        width: setting of the transformer's configuration that holds the text's channels.
        dtype: of the mask, int64 or bool.
        output: index of the mask in what the pipeline's ``encode_prompt`` returns; the text's is 0.
    """
    mask = Condition("encoder_attention_mask", (tokens,), output, dtype)
    return Condition("encoder_hidden_states", (tokens, width)), mask


@dataclass(kw_only=True, eq=False)
class Forward:
    """The forward of a family's transformers. A subclass overrides the methods that differ."""

    axes: int = 2
    """Axes of the token grid: 3 for (frames, height, width), 2 for (height, width), 1 for text."""
    fixed_patch: tuple[int, ...] | None = None
    """Latents per token along each axis, where the transformer's configuration does not say."""
    latents_name: str = "hidden_states"
    """Name of the argument for the latents, from which the token grid is read."""
    packs_latents: bool = False
    """Whether it takes latents as tokens, (B, N, C patch), and predicts them so."""
    channels_name: str = "in_channels"
    """Name of the setting that counts the channels of the latents that the transformer takes."""
    timestep_name: str = "timestep"
    """Name of the argument for the time."""
    takes_sigma: bool = False
    """Whether the transformer takes σ, in place of the scheduler's timestep of 1000 σ."""
    time_is_reversed: bool = False
    """Whether time runs from the noise to the data: the model takes 1 − σ and predicts the velocity to the data."""
    guidance: float | None = None
    """Guidance scale for transformers that embed it."""
    conditions: tuple[Condition, ...] = ()
    """What the transformer gets from a prompt, texts first."""
    times_per_frame: tuple[str, ...] = ()
    """Classes of transformers in which every frame may have its own time, as causal patches are trained."""
    without_values: Callable[[], AbstractContextManager[Any]] = nullcontext
    """Makes the context for a forward on the meta device: ``WithoutValues`` for models that read their inputs."""

    @property
    def makes_videos(self) -> bool:
        """Whether a sample has frames."""
        return self.axes == 3

    # The token grid

    def patch(self, transformer: Any) -> tuple[int, ...]:
        """Return latents per token and axis: :attr:`fixed_patch`, else ``patch_size`` and ``patch_size_t``."""
        if self.fixed_patch is not None:
            return self.fixed_patch
        size = transformer.config.patch_size
        if not isinstance(size, int):
            return tuple(size)
        if self.axes < 3:
            return (size,) * self.axes
        return getattr(transformer.config, "patch_size_t", size) or 1, size, size

    def token_grid(self, transformer: Any, latents: Tensor) -> tuple[int, ...]:
        """Return the token grid of latents (B, C, ...); ValueError if frames do not fill the last token."""
        patch, frames = self.patch(transformer), latents.shape[2]
        if self.axes == 3 and frames % patch[0]:
            raise ValueError(
                f"{frames} latent frames are no multiple of {patch[0]}, the latent frames of a token of this "
                f"{type(transformer).__name__}; give a multiple, as mhla encode and mhla synthesize do."
            )
        return tuple(size // length for size, length in zip(latents.shape[2:], patch, strict=True))

    def named_arguments(self, transformer: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Kwargs:
        """Return the kwargs of the forward of a transformer by name."""
        forward: Any = type(transformer).forward
        return {**dict(zip(_names_of_arguments(forward), args, strict=False)), **kwargs} if args else {**kwargs}

    def grid_of_arguments(self, transformer: Any, arguments: Mapping[str, Any]) -> tuple[int, ...]:
        """Return the token grid of a forward of the transformer; by default the latents are (B, C, ...)."""
        return self.token_grid(transformer, arguments[self.latents_name])

    def grid_of_clip(self, pipe: Any, transformer: Any, clip: Clip) -> tuple[int, ...]:
        """Return the token grid of what a pipeline generates for frames and a size in pixels."""
        shape = self.latent_shape(transformer.config, pipe.vae.config, clip)
        return tuple(int(size) for size in self.token_grid(transformer, torch.empty(1, *shape, device="meta")))

    def latent_shape(self, config: Any, vae: Mapping[str, Any], clip: Clip) -> tuple[int, ...]:
        """Return the shape of a sample's latents, (C, H, W) or (C, F, H, W), by transformer's and vae's settings."""
        temporal, spatial = self.strides(vae)
        frames = [self.latent_frames(config, clip.frames, temporal)] if self.makes_videos else []
        return self.channels(config), *frames, *(side // spatial for side in clip.sizes[0])

    def strides(self, vae: Mapping[str, Any]) -> tuple[int, int]:
        """Return frames per latent frame after the first, and pixels per latent, by an autoencoder's configuration."""
        return strides_of(vae, of_videos=self.axes == 3)

    def latent_frames(self, config: Any, frames: int, stride: int) -> int:
        """Return the latent frames of a video with a stride of frames; by default the first becomes one of its own."""
        return (frames - 1) // stride + 1

    # Time and processes

    def time_of(self, arguments: Mapping[str, Any]) -> Any:
        """Return the time of the grid's tokens in a forward, in the transformer's scale; None if it is not given."""
        return arguments.get(self.timestep_name)

    def scheduler_timestep(self, transformer: Any, timestep: Tensor) -> Tensor:
        """Return the scheduler's timestep, from the transformer's argument for the time."""
        if not self.takes_sigma:
            return timestep
        return 1000 * (1 - timestep if self.time_is_reversed else timestep)

    # Making arguments

    def channels(self, config: Any) -> int:
        """Return the channels of the latents that a transformer of this configuration takes, before any packing."""
        packed = self.fixed_patch if self.packs_latents and self.fixed_patch else ()
        return int(getattr(config, self.channels_name)) // math.prod(packed)

    def conditions_of(self, config: Any) -> tuple[Condition, ...]:
        """Return what a transformer of this configuration gets from a prompt, by default :attr:`conditions`."""
        return self.conditions

    def conditioning_shapes(self, config: Any) -> Sample:
        """Return what conditions a transformer of this configuration, on the meta device, without values.

        Raises:
            ValueError: the family does not say what conditions the model.
        """
        conditions = self.conditions_of(config)
        if not conditions:
            raise undefined(self, "what conditions the model", "conditioning_shapes")
        return {one.name: torch.empty(one.sizes(config), dtype=one.dtype, device="meta") for one in conditions}

    def arguments(self, transformer: Any, latents: Tensor, timestep: Tensor, conditioning: Sample) -> Kwargs:
        """Make the forward's kwargs: latents, time, conditioning, and guidance if the model embeds it.

        Args:
            transformer: which.
            latents: (B, C, ...).
            timestep: (B,), in the transformer's scale; for classes in :attr:`times_per_frame` also (B, F).
            conditioning: as :meth:`conditioning_shapes`, each with a batch axis.
        """
        taken = pack(latents, self.patch(transformer)) if self.packs_latents else latents
        arguments = {self.latents_name: taken, self.timestep_name: timestep}
        if self.guidance is not None and transformer.config.guidance_embeds:
            arguments["guidance"] = torch.full_like(timestep, self.guidance, dtype=latents.dtype)
        return {**arguments, **conditioning}

    def times_of_tokens(self, transformer: Any, latents: Tensor, timestep: Tensor) -> Tensor:
        """Repeat times of frames (B, F) for their tokens, (B, N); one time for all frames is unchanged."""
        if timestep.ndim == 1:
            return timestep
        frames, height, width = self.token_grid(transformer, latents)
        return timestep[:, :: timestep.shape[1] // frames].repeat_interleave(height * width, dim=1)


def undefined(part: Any, what: str, method: str) -> ValueError:
    """Return the error about something that a part of a family does not define."""
    return ValueError(
        f"{type(part).__module__}.{type(part).__name__} does not define {what}; implement {method}() in a subclass."
    )


@cache
def _names_of_arguments(method: Any) -> tuple[str, ...]:
    return tuple(inspect.signature(method).parameters)[1:]


# the mark that torch.compiler.assume_constant_result sets, which imports all of torch.compile for it
vars(_names_of_arguments)["_dynamo_marked_constant"] = True
