"""What is particular to Lumina 2: images after texts of other lengths, keys that heads share, reversed time."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families.lumina2 import Lumina2Family

from ..models import relative_change
from .cases import ROUNDING, case_of, output, plain

lumina2 = case_of("lumina2")
FAMILY = Lumina2Family()


@pytest.mark.parametrize("settings", [{}, {"output_gate": True, "convolution": 3}], ids=["plain", "gated"])
@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
def test_a_sample_is_what_it_is_alone(ragged, settings):
    """The image of a shorter text begins earlier in a batch, which changes nothing."""
    torch.manual_seed(0)
    model = mhla.apply_mhla(lumina2.transformer(), **plain("lumina2", **settings))
    arguments = lumina2.inputs(ragged=ragged)
    assert len(set(arguments["encoder_attention_mask"].sum(dim=1).tolist())) > 1
    batch = output(model, arguments)
    for place in range(2):
        alone = {name: values[place : place + 1] for name, values in arguments.items()}
        assert relative_change(batch[place], output(model, alone)[0]) < ROUNDING


def test_audit_compares_tokens_of_the_image_in_every_sample():
    """Texts of other lengths: the unpatched attention's tokens are ordered as the patched one's."""
    model, arguments = lumina2.transformer(), lumina2.inputs()
    mhla.apply_mhla(model, blocks=lumina2.blocks, sparse="content", block_size=4, density=1.0)
    found = mhla.audit(model, lambda: output(model, arguments))
    assert found.moves < 1e-4


def test_text_is_an_extra_token_where_it_is_seen():
    model, arguments = lumina2.transformer(), lumina2.inputs()
    found = {}

    def note(attn, args, kwargs, name):
        found[name] = FAMILY.adapter.read(attn, FAMILY.adapter.arguments(args, kwargs), lumina2.grid, 64).extra

    for name, attn in FAMILY.self_attentions(model).items():
        attn.register_forward_pre_hook(
            lambda attn, args, kwargs, name=name: note(attn, args, kwargs, name), with_kwargs=True
        )
    output(model, arguments)
    assert found == {"noise_refiner.0.attn": (0, 0), **{f"layers.{layer}.attn": (6, 0) for layer in range(3)}}


def test_a_patched_model_fuses_shared_keys():
    arguments = lumina2.inputs()
    model = mhla.apply_mhla(lumina2.transformer(), **plain("lumina2"))
    expected = output(model, arguments)
    model.fuse_qkv_projections()
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_a_step_of_the_pipeline_follows_the_prediction():
    """Sign and time are those of the pipeline: a step from given latents by the scheduler is the pipeline's own."""
    pipe = lumina2.pipeline()
    call = {**lumina2.call, "guidance_scale": 1.0, "negative_prompt": None, "num_inference_steps": 1}
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = pipe(**{**call, "output_type": "latent"}, latents=latents).images
    process = FAMILY.process(pipe.transformer, 1.0)
    text = FAMILY.encode_prompt(pipe, call["prompt"], {"max_sequence_length": 8, "system_prompt": "the"})
    sigma = pipe.scheduler.sigmas[:1]
    conditioning = {name: x[None] for name, x in text.items()}
    arguments = FAMILY.forward_arguments(pipe.transformer, latents, process.timestep(sigma), conditioning)
    with torch.no_grad():
        velocity = FAMILY.prediction(pipe.transformer, pipe.transformer(**arguments, return_dict=False)[0], latents)
    torch.testing.assert_close(latents - sigma * velocity, expected, rtol=1e-5, atol=1e-6)
    timestep = FAMILY.scheduler_timestep(pipe.transformer, arguments["timestep"])
    torch.testing.assert_close(timestep, pipe.scheduler.timesteps[:1], rtol=1e-5, atol=1e-3)
    # which is 1000 times σ at any σ, and the pipeline's transformer takes 1 - σ
    quarter = process.timestep(torch.tensor([0.25]))
    torch.testing.assert_close(quarter, torch.tensor([0.75]))
    torch.testing.assert_close(FAMILY.scheduler_timestep(pipe.transformer, quarter), torch.tensor([250.0]))


def test_the_empty_prompt_is_the_negative_one():
    pipe = lumina2.pipeline()
    _, _, expected, mask = pipe.encode_prompt("a", True, max_sequence_length=8)
    found = FAMILY.encode_prompt(pipe, "", {"max_sequence_length": 8})
    assert torch.equal(found["encoder_hidden_states"], expected[0])
    assert torch.equal(found["encoder_attention_mask"], mask[0])
