"""Tiny VLTs whose parameters are all random, and pictures for them."""

from typing import Any

import torch

from mhla_diffusers import mhla_layers
from mhla_diffusers.models import VLTConfig, VLTForImageClassification
from mhla_diffusers.patching import MHLALayer

from ..models import seeded

MHLA = [{"blocks": [3, 3]}, {"blocks": [2, 2]}, None, None]


def tiny_config(**settings: Any) -> VLTConfig:
    size = {
        "hidden_sizes": (8, 16, 16, 24),
        "depths": (1, 1, 1, 1),
        "num_attention_heads": (1, 2, 2, 3),
        "mhla": MHLA,
        "head_size": 32,
        "num_labels": 5,
    }
    return VLTConfig(**(size | settings))


def tiny_vlt(**settings: Any) -> VLTForImageClassification:
    model = seeded(VLTForImageClassification, config=tiny_config(**settings))
    for layer in mhla_layers(model).values():
        if isinstance(layer, MHLALayer):
            layer.clip_mixing_()  # so that normalisers are positive
    return model


def pictures(height: int = 64, width: int = 64, count: int = 2) -> torch.Tensor:
    return torch.randn(count, 3, height, width, generator=torch.Generator().manual_seed(height + width))
