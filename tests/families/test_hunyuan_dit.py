"""HunyuanDiT: RoPE from the pipeline."""

import pytest
import torch
from diffusers import HunyuanDiT2DModel

import mhla_diffusers as mhla

from ..models import assert_changed, output, relative_change, seeded
from .cases import ROUNDING, all_listed, case_of, plain

CASE = case_of("hunyuan_dit")


@pytest.mark.parametrize(("height", "width"), [(64, 96), (128, 128)])
def test_rope_and_size_are_those_of_the_pipeline(height, width):
    """Its places lie in a crop of a square, so they begin above 0 along the shorter side."""
    pipe, given = CASE.pipeline(), {}
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    pipe(**{**CASE.call, "height": height, "width": width, "guidance_scale": 1.0})
    latents = torch.zeros(1, 4, height // 8, width // 8)
    found = CASE.of_inputs.arguments(pipe.transformer, latents, torch.tensor([500]), {})
    for name in ("image_rotary_emb", "image_meta_size", "style"):
        torch.testing.assert_close(found[name], given[name], rtol=0, atol=0)
    assert found["timestep"].dtype == torch.float32


def test_a_model_that_is_told_no_size():
    """Version 1.2."""
    config = {**CASE.transformer().config, "use_style_cond_and_image_meta_size": False}
    model = seeded(HunyuanDiT2DModel, **{name: x for name, x in config.items() if not name.startswith("_")})
    expected = output(model, CASE.inputs())
    mhla.apply_mhla(model, **plain("hunyuan_dit"))
    assert_changed(output(model, CASE.inputs()), expected)


def test_a_model_without_rope_tables():
    """Which its forward takes."""
    model, arguments = CASE.transformer(), {**CASE.inputs(), "image_rotary_emb": None}
    expected = output(model, arguments)
    mhla.apply_mhla(model, **all_listed("hunyuan_dit"))
    assert relative_change(output(model, arguments), expected) < ROUNDING
