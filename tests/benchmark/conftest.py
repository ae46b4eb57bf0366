"""A family outside the package, as a user registers one."""

import pytest
import torch
from diffusers.models.attention_processor import AttnProcessor2_0

import mhla_diffusers as mhla
from mhla_diffusers.families import Family, Model


class PixArt(Family):
    """PixArt-α, as far as ``mhla bench`` asks."""

    name = "pixart"
    transformers = ("PixArtTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    default_config = mhla.MHLAConfig(blocks=(2, 2))
    models = (
        Model(
            "tiny-pixart",
            "PixArtTransformer2DModel",
            {
                "num_attention_heads": 2,
                "attention_head_dim": 12,
                "cross_attention_dim": 24,
                "caption_channels": 8,
                "use_additional_conditions": True,
            },
            heads=2,
            head_dim=12,
            layers=3,
            blocks=(2, 2),
            stride=8,
            patch=2,
            sizes=((64, 64),),
            grids={"64px": (4, 4)},
        ),
    )

    def self_attention_processor(self):
        return AttnProcessor2_0()

    def conditioning_shapes(self, transformer):
        return {
            "encoder_hidden_states": torch.empty(5, transformer.caption_channels, device="meta"),
            "encoder_attention_mask": torch.empty(5, dtype=torch.int64, device="meta"),
            "added_cond_kwargs.resolution": torch.empty(2, device="meta"),
            "added_cond_kwargs.aspect_ratio": torch.empty(1, device="meta"),
        }


@pytest.fixture
def pixart(monkeypatch):
    """The family, forgotten after the test."""
    monkeypatch.setattr("mhla_diffusers.families._FAMILIES", dict(mhla.families._FAMILIES))
    mhla.register_family(PixArt())
