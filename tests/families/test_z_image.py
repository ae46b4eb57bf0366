"""What is particular to Z-Image: texts of their own lengths, and padding."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families.z_image import Z_IMAGE

from ..refusals import refused
from .cases import case_of, output, plain
from .recording import forwards

z_image, uneven = case_of("z_image"), case_of("z_image_uneven")

FAMILY = Z_IMAGE
SETTINGS = plain("z_image")


def test_prompts_are_encoded_as_the_pipeline_hands_them_over():
    pipe = z_image.pipeline()
    prompts = ["a red ball", "dog"]
    texts = forwards(pipe, **{**z_image.call, "prompt": list(prompts), "negative_prompt": None})[0]["cap_feats"][:2]
    assert len(texts[0]) != len(texts[1])
    latents = torch.zeros(2, 4, 16, 16)
    samples = [FAMILY.training.encode_prompt(pipe, prompt, {"max_sequence_length": 8}) for prompt in prompts]
    conditioning = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    given = FAMILY.forward.arguments(pipe.transformer, latents, torch.tensor([0.5, 0.5]), conditioning)
    for found, expected in zip(given["cap_feats"], texts, strict=True):
        # encoded in one batch there: the same operations, summed in another order
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


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
