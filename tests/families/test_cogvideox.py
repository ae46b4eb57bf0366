"""What is particular to CogVideoX: frames before channels, tables of RoPE, tokens of two latent frames."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import Clip, get_family

from ..models import relative_change
from ..refusals import refused
from .cases import ROUNDING, case_of, output
from .recording import forwards

CASE, TWO_FRAMES_CASE = case_of("cogvideox"), case_of("cogvideox_two_frames")

CASES = pytest.mark.parametrize("case", [CASE, TWO_FRAMES_CASE], ids=["1.0", "1.5"])
NO_ROPE = {"use_rotary_positional_embeddings": False}
CLIP = Clip(9, 8.0, ((64, 96),))


def test_softmax_in_place_of_mhla_without_rope():
    """CogVideoX-2B, whose positions are added to the tokens."""
    model, arguments = CASE.transformer(**NO_ROPE), CASE.inputs() | {"image_rotary_emb": None}
    expected = output(model, arguments)
    mhla.apply_mhla(model, density=1.0)
    assert relative_change(output(model, arguments), expected) < ROUNDING


@torch.no_grad()
@CASES
def test_rope_at_another_size_is_the_pipelines(case):
    """Its tables are scaled to the size of training, or cut out of it."""
    pipe = case.pipeline()
    family = get_family(pipe.transformer)
    call = case.call | {"height": 48, "width": 32, "num_inference_steps": 1, "output_type": "latent"}
    (given,) = forwards(pipe, **call)
    text, latents = (given[key][1:] for key in ("encoder_hidden_states", "hidden_states"))
    text = {"encoder_hidden_states": text}
    made = family.inputs.arguments(pipe.transformer, latents.transpose(1, 2), given["timestep"][1:], text)
    for table, expected in zip(made["image_rotary_emb"], given["image_rotary_emb"], strict=True):
        assert torch.equal(table, expected)
    grid = family.calling.grid(pipe, pipe.transformer, Clip(call["num_frames"], 8.0, ((48, 32),)))
    assert family.grid(pipe.transformer, given) == grid


@torch.no_grad()
@CASES
def test_encoding_is_the_inverse_of_what_the_pipeline_decodes(case):
    pipe = case.pipeline()
    family = get_family(pipe.transformer)
    pixels = torch.rand(1, 3, CLIP.frames, 64, 96, generator=torch.Generator().manual_seed(0)) * 2 - 1
    latents = family.training.encode_pixels(pipe, pixels)
    own = pipe.vae.encode(pixels).latent_dist.mode()
    # the pipeline makes the latent frame that 1.5 misses before the others, and does not decode it
    missing = 0 if case is CASE else 1
    assert latents.shape[2] == 3 + missing
    assert torch.equal(latents[:, :, 0], latents[:, :, missing])
    torch.testing.assert_close(
        pipe.decode_latents(latents[:, :, missing:].transpose(1, 2)), pipe.vae.decode(own).sample
    )
    assert family.inputs.latent_shape(pipe.transformer.config, pipe.vae.config, CLIP) == latents.shape[1:]
    assert family.token_grid(pipe.transformer, latents) == family.calling.grid(pipe, pipe.transformer, CLIP)


def test_latents_that_do_not_fill_a_token_are_refused():
    model = TWO_FRAMES_CASE.transformer()
    with refused("3 latent frames", 2):
        get_family(model).token_grid(model, torch.empty(1, 4, 3, 8, 12))
