"""What families say of RoPE, sizes and pictures, against diffusers' own modules."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family

from ..models import relative_change
from .cases import ROUNDING, all_exact, case_of, output

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
    [("cogvideox", 480, 720), ("hunyuan_video", 720, 1280), ("mochi", 480, 848), ("skyreels_v2", 544, 960)],
)
def test_suggested_blocks_at_the_usual_size_are_the_defaults(name, height, width):
    pipe = case_of(name).pipeline()
    assert mhla.suggest_blocks(pipe, height, width) == get_family(name).default_config.blocks


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
    mhla.apply_mhla(pipe, **all_exact(name))
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_image_to_video_of_hunyuan_video_15_is_not_trained():
    case = case_of("hunyuan_video15")
    pipe, family = case.pipeline(task_type="i2v"), case.of_family
    for refused in (lambda: family.encode_prompt(pipe, "a"), lambda: family.process(pipe.transformer, 7.0)):
        with pytest.raises(ValueError, match="conditioned on pictures"):
            refused()


@pytest.mark.parametrize("values", [{"fps": 0}, {"fps": -1.0}, {"frames": 0}, {"sizes": ()}, {"sizes": ((0, 8),)}])
def test_clips_that_cannot_be(values):
    with pytest.raises(ValueError, match=next(iter(values))):
        Clip(**{"frames": 1, "fps": 1.0, "sizes": ((8, 8),), **values})
