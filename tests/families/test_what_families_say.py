"""What families say of sizes, pictures and strides of autoencoders, against diffusers' own modules."""

import pytest
import torch
from diffusers import AutoencoderDC

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family
from mhla_diffusers.families.models import strides_of

from ..models import relative_change
from ..pipelines import sana_pipeline, wan_pipeline
from ..refusals import refused
from .cases import ROUNDING, all_listed, case_of, kl_autoencoder, output

SIZES = {
    "cogvideox": [((49, 480, 720), (13, 30, 45))],
    "hunyuan_video": [((129, 720, 1280), (33, 45, 80))],
    "ltx2": [((121, 512, 768), (31, 32, 48))],
    "mochi": [((163, 480, 848), (28, 30, 53))],
    "skyreels_v2": [((97, 544, 960), (25, 34, 60)), ((121, 720, 1280), (31, 45, 80))],
}


@pytest.mark.parametrize("name", SIZES)
def test_grid_of_a_size(name):
    pipe = case_of(name).pipeline()
    for (frames, height, width), grid in SIZES[name]:
        assert {one.grid for one in mhla.describe(pipe, height=height, width=width, num_frames=frames)} == {grid}


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [("skyreels_v2", 544, 960)],
)
def test_suggested_blocks_at_the_usual_size_are_the_defaults(name, height, width):
    pipe = case_of(name).pipeline()
    assert mhla.suggest_blocks(pipe, height, width) == get_family(name).mhla_blocks


WITH_PICTURES = {
    "cogvideox": ("cogvideox", {"in_channels": 8}, "hidden_states"),
    "hunyuan_video, beside": (
        "hunyuan_video",
        {"in_channels": 9, "image_condition_type": "latent_concat"},
        "hidden_states",
    ),
    "hunyuan_video, in place": ("hunyuan_video", {"image_condition_type": "token_replace"}, "hidden_states"),
    "hunyuan_video15": ("hunyuan_video15", {"task_type": "i2v"}, "hidden_states"),
}


@pytest.mark.parametrize(("name", "settings", "latents"), WITH_PICTURES.values(), ids=WITH_PICTURES)
def test_image_to_video_is_patched(name, settings, latents):
    case = case_of(name)
    pipe, arguments = case.pipeline(**settings), case.inputs()
    model, axis = pipe.transformer, 2 if name == "cogvideox" else 1
    given = arguments[latents]
    arguments[latents] = torch.cat([given] * 3, dim=axis).narrow(axis, 0, model.config.in_channels)
    expected = output(model, arguments)
    mhla.apply_mhla(pipe, **all_listed(name))
    assert relative_change(output(model, arguments), expected) < ROUNDING


@pytest.mark.parametrize("values", [{"fps": 0}, {"fps": -1.0}, {"frames": 0}, {"sizes": ()}, {"sizes": ((0, 8),)}])
def test_clips_that_cannot_be(values):
    with refused(next(iter(values))):
        Clip(**{"frames": 1, "fps": 1.0, "sizes": ((8, 8),), **values})


def test_strides_are_those_of_the_autoencoder():
    ltx = case_of("ltx").pipeline().vae
    assert strides_of(ltx.config) == (ltx.temporal_compression_ratio, ltx.spatial_compression_ratio) == (4, 16)
    assert strides_of({**ltx.config, "spatial_compression_ratio": 8}) == (4, 8)
    assert strides_of(kl_autoencoder().config) == (1, 8)
    assert strides_of(case_of("mochi").pipeline().vae.config) == (6, 8)  # which expands by stages
    assert isinstance(sana_pipeline().vae, AutoencoderDC)
    assert strides_of(sana_pipeline().vae.config) == (1, sana_pipeline().vae_scale_factor)


def test_strides_of_wan_before_they_were_told():
    """diffusers' first configurations of it have none, and its stages are those of the later ones."""
    config = dict(wan_pipeline().vae.config)
    told = config.pop("scale_factor_temporal"), config.pop("scale_factor_spatial")
    assert (
        strides_of({**config, "dim_mult": [1, 2, 4, 4], "temperal_downsample": [False, True, True]}) == told == (4, 8)
    )


def test_autoencoders_without_strides_are_refused():
    """An image's stride of frames is 1, a video's must be told."""
    for config, of_videos in ((kl_autoencoder().config, True), ({}, False)):
        with refused("strides"):
            strides_of(config, of_videos=of_videos)
