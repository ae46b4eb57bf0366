"""Times of the frames of a training video for patches with ``causal="block"``, which see only earlier frames.

In generation the frames before a frame block are clean, which one time for all frames never shows. So every frame block
has its own, as in diffusion forcing; in half of the samples the first ones are clean and not predicted.
"""

from typing import Any

import torch

from ...config import CausalConfig
from ...families import get_family
from ...patching import mhla_layers


def frames_together(transformer: Any) -> int | None:
    """Return the number of latent frames that share a time, those of a frame block; None if all frames share one.

    ValueError for a patch with ``causal="block"`` of a model that takes one time for all frames, or that does not cover
    all self-attentions.
    """
    layers = {
        name: layer.config
        for name, layer in mhla_layers(transformer).items()
        if isinstance(layer.config, CausalConfig) and layer.config.causal == "block"
    }
    if not layers:
        return None
    family = get_family(transformer)
    if type(transformer).__name__ not in family.times_per_frame:
        raise ValueError(
            f"Training a patch with causal='block' needs a timestep per frame block, but {type(transformer).__name__} "
            f"takes one for all frames; classes of the family {family.name!r} that take several: "
            f"{', '.join(family.times_per_frame) or 'none'}."
        )
    attentions = family.self_attentions(transformer)
    others = [name for name in attentions if f"{name}.mhla" not in layers]
    if others:
        raise ValueError(
            f"In a patch with causal='block' no frame may see later ones, but {len(others)} of {len(attentions)} "
            f"self-attentions do: {', '.join(others)}. Patch with layers='all' and causal='block'."
        )
    (length,) = {config.block_length for config in layers.values()}
    return length * int(transformer.config.patch_size[0])


def random_quantiles(frames: int, together: int, generator: torch.Generator) -> torch.Tensor:
    """Draw quantiles of the training distribution of times, one per frame, 0 for clean: float64 (F,)."""
    count = -(-frames // together)
    quantiles = inside_unit_interval(torch.rand(count, dtype=torch.float64, generator=generator))
    has_begun = torch.rand((), generator=generator) < 0.5  # independent times are hardly ever all near 0
    clean = int(torch.randint(count, (), generator=generator))
    quantiles[: clean if has_begun else 0] = 0
    return quantiles.repeat_interleave(together)[:frames]


def even_quantiles(first: torch.Tensor, frames: int, together: int) -> torch.Tensor:
    """Return fixed quantiles for every frame of a validation sample, from that of the first block: float64 (F,)."""
    # the fractional parts of any number of multiples of the golden ratio cover (0, 1) evenly
    blocks = torch.arange(-(-frames // together), dtype=first.dtype, device=first.device)
    golden = 0.5 * (5**0.5 - 1)
    return inside_unit_interval((first + golden * blocks) % 1).repeat_interleave(together)[:frames]


def inside_unit_interval(quantiles: torch.Tensor) -> torch.Tensor:
    """Clamp quantiles away from 0 and 1, which mean no noise and pure noise."""
    return quantiles.clamp(1e-6, 1 - 1e-6)
