"""What is particular to Z-Image: texts of their own lengths, and padding."""

import torch

import mhla_diffusers as mhla

from ..refusals import refused
from .cases import case_of, output, plain

z_image, uneven = case_of("z_image"), case_of("z_image_uneven")

SETTINGS = plain("z_image")


def test_images_that_are_no_single_grid_are_refused():
    model, arguments = mhla.apply_mhla(z_image.transformer(), **SETTINGS), z_image.inputs()
    other = {**arguments, "x": [arguments["x"][0], torch.randn(4, 1, 14, 10)]}
    with refused([(1, 14, 10), (1, 16, 16)]):
        output(model, other)
    with refused("Z-Image-Omni", "remove_mhla(pipe)"):
        output(model, {**arguments, "x": [arguments["x"]] * 2})
    mhla.remove_mhla(model)
    with torch.no_grad():
        assert len(model(**other, return_dict=False)[0]) == 2
