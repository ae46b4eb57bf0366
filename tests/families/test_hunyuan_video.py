"""What is particular to HunyuanVideo 1.5: three kinds of tokens as text, and guidance as a component."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family

from ..models import relative_change
from .cases import ROUNDING, all_listed, case_of, output

CASE = case_of("hunyuan_video15")

CLIP = Clip(7, 24.0, ((16, 24),))


@pytest.mark.parametrize("masked", [False, True])
def test_softmax_in_place_of_mhla_with_an_image(masked):
    """The image's tokens then take part; with a mask of no text but the image's, all others are behind them."""
    model, arguments = CASE.transformer(), CASE.inputs()
    arguments["image_embeds"] = torch.randn(arguments["image_embeds"].shape, generator=torch.manual_seed(2))
    if masked:
        arguments["encoder_attention_mask_2"] = torch.zeros_like(arguments["encoder_attention_mask_2"])
    expected = output(model, arguments)
    mhla.apply_mhla(model, **all_listed("hunyuan_video15"))
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_guidance_is_a_component():
    pipe = CASE.pipeline()
    family, guider = get_family(pipe.transformer), pipe.guider
    call = {"num_frames": 7, "height": 16, "width": 24, "num_inference_steps": 1, "output_type": "latent"}
    found = {
        scale: family.calling.call(pipe, ["a dog"], [torch.Generator().manual_seed(1)], guidance_scale=scale, **call)[0]
        for scale in (1.0, 6.0)
    }
    assert pipe.guider is guider
    expected = pipe("a dog", generator=torch.Generator().manual_seed(1), **call).frames[0]
    assert torch.equal(found[6.0], expected)
    assert not torch.equal(found[1.0], expected)
