"""What is particular to HunyuanVideo: text behind the video, and what conditions it."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family

from .cases import case_of
from .recording import forwards

CASE = case_of("hunyuan_video")

CLIP = Clip(9, 24.0, ((64, 96),))


@torch.no_grad()
def test_forward_is_called_as_by_the_pipeline():
    pipe = CASE.pipeline()
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
    pipe = CASE.pipeline()
    family = get_family(pipe.transformer)
    template = {"prompt_template": CASE.call["prompt_template"]}
    shapes = {key: (x.shape, x.dtype) for key, x in family.conditioning_shapes(pipe.transformer.config).items()}
    for prompt in ("a red ball", ""):
        encoded = family.encode_prompt(pipe, prompt, template)
        assert {key: (x.shape, x.dtype) for key, x in encoded.items()} == shapes
        assert encoded["encoder_attention_mask"].any()  # without a token the model would divide by their number


@torch.no_grad()
def test_encoding_is_the_inverse_of_what_the_pipeline_decodes():
    pipe = CASE.pipeline()
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


def test_text_refiner_is_left_alone():
    model = mhla.apply_mhla(CASE.transformer(), blocks=(1, 2, 2), sparse="none")
    kinds = {name: type(processor).__name__ for name, processor in model.attn_processors.items()}
    assert {kinds[name] for name in kinds if "refiner" in name} == {"AttnProcessor2_0"}
