"""PixArt: the size that α is told and Σ is not, and diffusers' own way of setting processors."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families.pixart import PixArtFamily

from ..models import assert_changed, output, relative_change
from .tiny.pixart import CALL, CASE, SIGMA_CASE, pipeline

ALL_LISTED = {"blocks": (1, 1), "sparse": "content", "density": 1.0}


@pytest.mark.parametrize(("sample_size", "width"), [(128, 64), (128, 192), (64, 192)])
def test_size_of_the_picture_is_what_the_pipeline_tells(sample_size, width):
    pipe, given = pipeline(sample_size), {}
    pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: given.update(kwargs), with_kwargs=True)
    pipe(**{**CALL, "width": width, "guidance_scale": 1.0})
    latents = torch.zeros(1, 4, 16, width // 8)
    found = PixArtFamily().forward_arguments(pipe.transformer, latents, given["timestep"], {})["added_cond_kwargs"]
    assert (found["resolution"] is not None) == (sample_size == 128)
    torch.testing.assert_close(found, given["added_cond_kwargs"])


def test_sigma():
    model, arguments = SIGMA_CASE.transformer(), SIGMA_CASE.inputs(ragged=True)
    expected = output(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert relative_change(output(model, arguments), expected) < 2e-5  # float32 sums in another order
    pipe = SIGMA_CASE.pipeline()
    before = pipe(**SIGMA_CASE.call, generator=torch.Generator().manual_seed(3)).images
    mhla.apply_mhla(pipe, blocks=(4, 2), sparse="none")
    assert_changed(pipe(**SIGMA_CASE.call, generator=torch.Generator().manual_seed(3)).images, before)


def test_text_of_sigma_is_longer():
    pipe = SIGMA_CASE.pipeline()
    found, shapes = PixArtFamily().encode_prompt(pipe, ""), PixArtFamily().conditioning_shapes(pipe.transformer.config)
    assert {name: x.shape for name, x in found.items()} == {name: x.shape for name, x in shapes.items()}
    assert found["encoder_attention_mask"].shape == (300,)


def test_cross_attention_is_its_own_in_the_single_instance_form():
    model, arguments = CASE.transformer(), CASE.inputs()
    kinds = {path: type(processor) for path, processor in mhla.attn_processors(model).items()}
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2), grid=CASE.grid))
    found = output(model, arguments)
    mhla.remove_mhla(model)
    assert {path: type(processor) for path, processor in mhla.attn_processors(model).items()} == kinds
    patched = mhla.apply_mhla(model, blocks=(2, 2), sparse="none")
    assert torch.equal(found, output(patched, arguments))
