"""What is particular to HunyuanVideo: text behind the video, and what conditions it."""

import pytest
import torch
from diffusers.models.transformers.transformer_hunyuan_video import HunyuanVideoRotaryPosEmbed

import mhla_diffusers as mhla
from mhla_diffusers.attention.rope import axial_table, rotary_table, table_of_tokens
from mhla_diffusers.families import Clip, get_family

from ..models import relative_change
from .recording import forwards
from .test_every_family import ROUNDING, output
from .tiny.hunyuan_video import CASE, pipeline, transformer

ALL_LISTED = {"blocks": (1, 1, 1), "sparse": "content", "density": 1.0}
CLIP = Clip(9, 24.0, ((64, 96),))


@torch.no_grad()
def test_forward_is_called_as_by_the_pipeline():
    pipe = pipeline()
    family = get_family(pipe.transformer)
    call = CASE.call | {"num_inference_steps": 1, "output_type": "latent"}
    (given,) = forwards(pipe, **call)
    settings = {key: call[key] for key in ("prompt_template", "max_sequence_length")}
    conditioning = {key: x[None] for key, x in family.encode_prompt(pipe, call["prompt"], settings).items()}
    made = family.forward_arguments(pipe.transformer, given["hidden_states"], given["timestep"], conditioning)
    assert {key for key in given if given[key] is not None} == {*made, "return_dict"}
    # which the pipeline makes a float, and the transformer counts
    assert made["encoder_attention_mask"].dtype == torch.int64 and made["encoder_attention_mask"].sum() < 6
    for key, argument in made.items():
        assert torch.equal(argument.to(given[key].dtype), given[key])


@torch.no_grad()
def test_conditioning_has_the_shapes_that_are_told():
    pipe = pipeline()
    family = get_family(pipe.transformer)
    template = {"prompt_template": CASE.call["prompt_template"]}
    shapes = {key: (x.shape, x.dtype) for key, x in family.conditioning_shapes(pipe.transformer.config).items()}
    for prompt in ("a red ball", ""):
        encoded = family.encode_prompt(pipe, prompt, template)
        assert {key: (x.shape, x.dtype) for key, x in encoded.items()} == shapes
        assert encoded["encoder_attention_mask"].any()  # without a token the model would divide by their number


@torch.no_grad()
def test_encoding_is_the_inverse_of_what_the_pipeline_decodes():
    pipe = pipeline()
    family = get_family(pipe.transformer)
    pixels = torch.rand(1, 3, 9, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = family.encode_pixels(pipe, pixels)
    assert family.latent_shape(pipe.transformer.config, pipe.vae.config, CLIP) == latents.shape[1:]
    decoded = {
        kind: torch.as_tensor(
            pipe(**CASE.call | {"output_type": kind, "num_inference_steps": 1}, generator=torch.manual_seed(0)).frames
        )
        for kind in ("latent", "pt")
    }
    expected = pipe.vae.decode(decoded["latent"] / pipe.vae.config.scaling_factor).sample
    # as pixels in [0, 1], frames before channels
    torch.testing.assert_close(decoded["pt"], (expected / 2 + 0.5).clamp(0, 1).transpose(1, 2))
    own = pipe.vae.encode(pixels).latent_dist.mode()
    torch.testing.assert_close(latents / pipe.vae.config.scaling_factor, own)


def test_rope_turns_channels_with_one_axis_each():
    grid, axes = (2, 3, 4), get_family(transformer()).rotary_axes(128)
    tables = HunyuanVideoRotaryPosEmbed(2, 1, list(axes))(torch.empty(1, 16, 2, 6, 8))
    rotary = tuple(table[None, :, None] for table in tables)
    assert torch.equal(table_of_tokens(axial_table(rotary, grid), grid, axes), rotary_table(rotary))
    assert get_family(transformer()).rotary_axes(12) is None


def test_grid_of_a_size():
    pipe = mhla.apply_mhla(pipeline(), blocks=(1, 2, 2), sparse="none")
    assert {layer.grid for layer in mhla.describe(pipe, height=64, width=96, num_frames=9)} == {(3, 4, 6)}
    assert mhla.suggest_blocks(pipe, height=720, width=1280) == (11, 3, 5)


def test_text_refiner_is_left_alone():
    model = mhla.apply_mhla(transformer(), blocks=(1, 2, 2), sparse="none")
    kinds = {name: type(processor).__name__ for name, processor in model.attn_processors.items()}
    assert {kinds[name] for name in kinds if "refiner" in name} == {"AttnProcessor2_0"}


@pytest.mark.parametrize(
    "config", [{"in_channels": 9, "image_condition_type": "latent_concat"}, {"image_condition_type": "token_replace"}]
)
def test_image_to_video_is_patched_but_not_trained(config):
    model = transformer(**config)
    family, arguments = get_family(model), CASE.inputs()
    latents = arguments["hidden_states"]
    arguments["hidden_states"] = torch.cat([latents, latents, latents[:, :1]], dim=1)[:, : model.config.in_channels]
    expected = output(model, arguments)
    mhla.apply_mhla(model, **ALL_LISTED)
    assert relative_change(output(model, arguments), expected) < ROUNDING
    pipe = pipeline()
    pipe.transformer = model
    for refused in (lambda: family.encode_prompt(pipe, "a"), lambda: family.process(model, 7.0)):
        with pytest.raises(ValueError, match="conditioned on pictures"):
            refused()
