"""Strides of autoencoders, told by their configurations as they lie on disk."""

import pytest
from diffusers import AutoencoderDC

from mhla_diffusers.families.models import strides_of

from ..pipelines import sana_pipeline, wan_pipeline
from .cases import case_of, kl_autoencoder


def test_strides_are_those_of_the_autoencoder():
    ltx = case_of("ltx").pipeline().vae
    assert strides_of(ltx.config) == (ltx.temporal_compression_ratio, ltx.spatial_compression_ratio) == (4, 16)
    assert strides_of({**ltx.config, "spatial_compression_ratio": 8}) == (4, 8)
    assert strides_of(kl_autoencoder().config) == (1, 8)
    assert isinstance(sana_pipeline().vae, AutoencoderDC)
    assert strides_of(sana_pipeline().vae.config) == (1, sana_pipeline().vae_scale_factor)


def test_strides_of_wan_before_they_were_told():
    """diffusers' first configurations of it have none, and its stages are those of the later ones."""
    config = dict(wan_pipeline().vae.config)
    told = config.pop("scale_factor_temporal"), config.pop("scale_factor_spatial")
    assert (
        strides_of({**config, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}) == told == (4, 8)
    )


def test_mochi_expands_by_stages():
    assert strides_of(case_of("mochi").pipeline().vae.config) == (6, 8)


def test_a_video_without_a_stride_of_frames_is_refused():
    """Which for images is 1."""
    with pytest.raises(ValueError, match="has no strides of frames; implement strides"):
        strides_of(kl_autoencoder().config, of_videos=True)


def test_an_autoencoder_that_tells_nothing_is_refused():
    with pytest.raises(ValueError, match="has no strides; implement strides"):
        strides_of({"latent_channels": 4})
