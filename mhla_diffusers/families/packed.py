"""What Flux and Qwen-Image share: images whose latents their pipelines pack, 2x2 to a token."""

from typing import Any

import torch

from .base import Family
from .packing import pack, unpack
from .processes import DiffusionProcess, FlowMatching
from .sizes import Clip

_PACKED = 2
"""Latents per token along height and width."""


class PackedFamily(Family):
    """Images whose latents stand in the transformer's input as tokens, 2x2 to each."""

    axes = 2

    def rotary_axes(self, head_dim: int) -> tuple[int, ...] | None:
        """Of 128 channels 16 that turn with the number of the picture, counted to the height, and 56 for each axis."""
        return (72, 56) if head_dim == 128 else None

    def process(self, transformer: Any, flow_shift: float) -> DiffusionProcess:
        """Flow matching; the transformer takes σ."""
        return FlowMatching(flow_shift, timestep_scale=1e-3)

    def scheduler_timestep(self, transformer: Any, timestep: torch.Tensor) -> torch.Tensor:
        """A thousand times σ."""
        return 1000 * timestep

    def spatial_patch(self, transformer: Any) -> int:
        """2, by packing."""
        return _PACKED

    def token_grid(self, transformer: Any, latents: torch.Tensor) -> tuple[int, ...]:
        """(height, width) of packed latents."""
        return latents.shape[2] // _PACKED, latents.shape[3] // _PACKED

    def packed(self, latents: torch.Tensor) -> torch.Tensor:
        """Latents (B, C, H, W) as the transformer takes them: (B, N, 4 C)."""
        return pack(latents, (_PACKED, _PACKED))

    def prediction(self, transformer: Any, output: Any, latents: torch.Tensor) -> torch.Tensor:
        """Unpacked."""
        return unpack(output, self.token_grid(transformer, latents), (_PACKED, _PACKED))

    def channels(self, transformer: Any) -> int:
        """Those of a token, without packing."""
        return int(transformer.in_channels) // _PACKED**2

    def generate_latents(
        self, pipe: Any, prompt: str, clip: Clip, steps: int, guidance: float, generator: torch.Generator
    ) -> torch.Tensor:
        """What the pipeline hands to its autoencoder once it has unpacked it: (C, H, W)."""
        tokens = super().generate_latents(pipe, prompt, clip, steps, guidance, generator)
        return unpack(tokens[None], self.grid_of_clip(pipe, pipe.transformer, clip), (_PACKED, _PACKED))[0]
