"""Which times the frames of a video are noised to, where a patch sees earlier frames alone (``causal="block"``).

Frame block after frame block is generated with frames before it that are clean, and none after it. One time for all
frames, as the model was trained with, never shows that. So every frame block has a time of its own, as in diffusion
forcing, and in half of the samples the video has begun: its first frame blocks are clean, and are not predicted.
"""

from typing import Any

import torch

from ...families import get_family
from ...patching import mhla_layers

_BEGUN = 0.5
"""Part of the samples of which the first frame blocks are clean. Their own times alone come near 0 hardly ever."""
_TURN = 0.5 * (5**0.5 - 1)
"""Golden section: its multiples, without their whole parts, lie evenly in (0, 1) however many there are."""


def frames_together(transformer: Any) -> int | None:
    """Latent frames of a frame block, which share a time; None if all frames do.

    Raises:
        ValueError: a patch with ``causal="block"`` in a model that takes one time for all frames, or not in all of its
            self-attentions.
    """
    layers = {name: layer for name, layer in mhla_layers(transformer).items() if layer.config.causal == "block"}
    lengths = {layer.config.block_length for layer in layers.values()}
    if not lengths:
        return None
    family = get_family(transformer)
    if type(transformer).__name__ not in family.streamed:
        raise ValueError(
            "A patch with causal='block' is trained with a time for every frame block, and "
            f"{type(transformer).__name__} takes one for all frames; those of its family {family.name!r} that take "
            f"more are: {', '.join(family.streamed) or 'none'}."
        )
    attentions = family.self_attentions(transformer)
    others = [name for name in attentions if f"{name}.mhla" not in layers]
    if others:
        raise ValueError(
            f"A patch with causal='block' is trained for frames that see no later ones, and {len(others)} of "
            f"{len(attentions)} self-attentions see them: {', '.join(others)}. Patch with layers='all' and "
            "causal='block'."
        )
    (length,) = lengths
    return int(length or 0) * int(transformer.config.patch_size[0])


def random_quantiles(frames: int, together: int, generator: torch.Generator) -> torch.Tensor:
    """Quantiles of the training distribution of times for every frame of a sample, 0 for clean: float64 (F,)."""
    count = -(-frames // together)
    quantiles = inside_unit_interval(torch.rand(count, dtype=torch.float64, generator=generator))
    begun = torch.rand((), generator=generator) < _BEGUN
    clean = int(torch.randint(count, (), generator=generator))
    quantiles[: clean if begun else 0] = 0
    return quantiles.repeat_interleave(together)[:frames]


def even_quantiles(first: torch.Tensor, frames: int, together: int) -> torch.Tensor:
    """Always the same quantiles for every frame of a sample, from that of the first frame block: float64 (F,)."""
    blocks = torch.arange(-(-frames // together), dtype=first.dtype, device=first.device)
    return inside_unit_interval((first + _TURN * blocks) % 1).repeat_interleave(together)[:frames]


def inside_unit_interval(quantiles: torch.Tensor) -> torch.Tensor:
    """Quantiles off 0 and 1, at which a time would be that of no noise or of nothing else."""
    return quantiles.clamp(1e-6, 1 - 1e-6)
