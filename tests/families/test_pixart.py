"""PixArt: α takes the size of the picture as a condition, Σ does not."""

import pytest
import torch

from .cases import case_of

CASE = case_of("pixart")


@pytest.mark.parametrize(("sample_size", "width"), [(128, 64), (128, 192), (64, 192)])
def test_size_of_the_picture_is_what_the_pipeline_tells(sample_size, width):
    pipe, given = CASE.pipeline(sample_size=sample_size), {}
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    pipe(**{**CASE.call, "width": width, "guidance_scale": 1.0})
    latents = torch.zeros(1, 4, 16, width // 8)
    found = CASE.of_inputs.arguments(pipe.transformer, latents, given["timestep"], {})["added_cond_kwargs"]
    assert (found["resolution"] is not None) == (sample_size == 128)
    torch.testing.assert_close(found, given["added_cond_kwargs"])
