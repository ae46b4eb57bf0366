"""What can be told to be wrong before any training time is spent."""

from typing import Any

import torch

from ..attention.blocks import check_layout
from ..families import get_family
from ..patching import mhla_layers
from .latents.data import TrainingData


def check_data_fits(transformer: Any, data: TrainingData) -> None:
    """Raise unless a transformer can take latents of every shape in the data.

    Raises:
        ValueError: wrong number of channels or axes, or fewer tokens than blocks on an axis.
    """
    family = get_family(transformer)
    channels, axes = int(transformer.config.in_channels), family.axes + 1
    for shape in sorted(set(data.shapes)):
        if len(shape) != axes or shape[0] != channels:
            raise ValueError(
                f"The data holds latents of shape {shape}, but {type(transformer).__name__} takes {channels} channels "
                f"and {axes - 1} further axes. Was the data encoded for another model?"
            )
        grid = family.token_grid(transformer, torch.empty(1, *shape, device="meta"))
        for layer in mhla_layers(transformer).values():
            check_layout(grid, layer.config.blocks)
