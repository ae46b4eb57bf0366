"""PixArt: the size that α is told and Σ is not, and diffusers' own way of setting processors."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families.pixart import PixArtFamily
from mhla_diffusers.patching import attn_processors

from ..models import output
from .cases import case_of

CASE, SIGMA_CASE = case_of("pixart"), case_of("pixart_sigma")


@pytest.mark.parametrize(("sample_size", "width"), [(128, 64), (128, 192), (64, 192)])
def test_size_of_the_picture_is_what_the_pipeline_tells(sample_size, width):
    pipe, given = CASE.pipeline(sample_size=sample_size), {}
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    pipe(**{**CASE.call, "width": width, "guidance_scale": 1.0})
    latents = torch.zeros(1, 4, 16, width // 8)
    found = PixArtFamily().forward_arguments(pipe.transformer, latents, given["timestep"], {})["added_cond_kwargs"]
    assert (found["resolution"] is not None) == (sample_size == 128)
    torch.testing.assert_close(found, given["added_cond_kwargs"])


def test_text_of_sigma_is_longer():
    pipe = SIGMA_CASE.pipeline()
    found, shapes = PixArtFamily().encode_prompt(pipe, ""), PixArtFamily().conditioning_shapes(pipe.transformer.config)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in shapes.items()}
    assert found["encoder_attention_mask"].shape == (300,)


def test_cross_attention_is_its_own_in_the_single_instance_form():
    model, arguments = CASE.transformer(), CASE.inputs()
    kinds = {path: type(processor) for path, processor in attn_processors(model).items()}
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2), grid=CASE.grid))
    found = output(model, arguments)
    mhla.remove_mhla(model)
    assert {path: type(processor) for path, processor in attn_processors(model).items()} == kinds
    patched = mhla.apply_mhla(model, blocks=(2, 2), sparse="none")
    assert torch.equal(found, output(patched, arguments))
