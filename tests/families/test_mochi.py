"""What is particular to Mochi: RoPE of every head, text that is cut off, reversed time, methods that are lacking."""

import copy
import pickle

import pytest
import torch
from diffusers import MochiTransformer3DModel
from diffusers.models.attention_processor import MochiAttention

import mhla_diffusers as mhla
from mhla_diffusers.families.mochi import MochiFamily

from ..models import relative_change
from .cases import ROUNDING, TEXT_TOKENS, all_exact, case_of, output, plain

CASE = case_of("mochi")
FAMILY = MochiFamily()
MASKS = {
    "whole": [1, 1, 1, 1, 1, 1],
    "none": [0, 0, 0, 0, 0, 0],
    "padded on the left": [0, 0, 1, 1, 1, 1],
    "with gaps": [1, 0, 0, 1, 0, 1],
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_text_that_is_left_out_is_cut_off(mask):
    """The processor moves the text that takes part to the front, also where the rest stands before it."""
    model, arguments = CASE.transformer(), CASE.inputs()
    arguments["encoder_attention_mask"] = torch.tensor([mask, [1] * TEXT_TOKENS]).bool()
    expected = output(model, arguments)
    mhla.apply_mhla(model, **all_exact("mochi"))
    assert relative_change(output(model, arguments), expected) < ROUNDING


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rope": "after"}, r"rotates every head by other angles; set rope='before'"),
        ({"causal": "block"}, "extra tokens"),
    ],
)
def test_what_it_cannot_be_is_refused(settings, message):
    model, arguments = CASE.transformer(), CASE.inputs()
    expected = output(model, arguments)
    with pytest.raises(ValueError, match=message):
        mhla.apply_mhla(model, **plain("mochi", **settings))
    assert not mhla.is_patched(model) and torch.equal(output(model, arguments), expected)


def test_methods_that_the_classes_lack_come_and_go():
    model, arguments = CASE.transformer(), CASE.inputs()
    assert not hasattr(model, "set_attn_processor")
    mhla.apply_mhla(model, **plain("mochi", layers=[0, 2]))
    processors = model.attn_processors
    assert sum(isinstance(one, mhla.MHLAProcessor) for one in processors.values()) == 2 < len(processors) == 3
    model.set_attn_processor(processors)
    assert type(model).__name__ == "MochiTransformer3DModel" and isinstance(model, MochiTransformer3DModel)
    expected = output(model, arguments)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - its own
        assert torch.equal(output(copied, arguments), expected)
    mhla.remove_mhla(model)
    assert type(model) is MochiTransformer3DModel
    assert {type(block.attn1) for block in model.transformer_blocks} == {MochiAttention}


def test_a_step_of_the_pipeline_follows_the_prediction():
    """Sign and time are those of the pipeline: a step from given latents by the scheduler is the pipeline's own."""
    pipe = CASE.pipeline()
    call = {**CASE.call, "guidance_scale": 1.0, "num_inference_steps": 2, "output_type": "latent"}
    latents = torch.randn(1, *CASE.latents, generator=torch.Generator().manual_seed(0))
    steps = []
    pipe(**call, latents=latents, callback_on_step_end=lambda *given: steps.append(given[-1]["latents"]) or {})
    process = FAMILY.process(pipe.transformer, 1.0)
    text = FAMILY.encode_prompt(pipe, call["prompt"], {"max_sequence_length": TEXT_TOKENS})
    sigma, after = 1 - pipe.scheduler.sigmas[:2]
    timestep = process.timestep(sigma[None])
    torch.testing.assert_close(timestep, pipe.scheduler.timesteps[:1], rtol=1e-5, atol=1e-3)
    arguments = FAMILY.forward_arguments(
        pipe.transformer, latents, timestep, {name: x[None] for name, x in text.items()}
    )
    velocity = FAMILY.prediction(pipe.transformer, output(pipe.transformer, arguments), latents)
    torch.testing.assert_close(latents + (after - sigma) * velocity, steps[0], rtol=1e-5, atol=1e-5)
