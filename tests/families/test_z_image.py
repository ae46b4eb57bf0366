"""What is particular to Z-Image: texts of their own lengths, padding, reversed time, methods that its class lacks."""

import copy
import pickle

import pytest
import torch
from diffusers import ZImageTransformer2DModel

import mhla_diffusers as mhla
from mhla_diffusers.families.z_image import ZImageFamily

from ..models import relative_change
from .cases import ROUNDING, case_of, output, plain
from .recording import forwards

z_image, uneven = case_of("z_image"), case_of("z_image_uneven")

FAMILY = ZImageFamily()
SETTINGS = plain("z_image")


@pytest.mark.parametrize("ragged", [False, True])
def test_a_sample_is_what_it_is_alone(ragged):
    """Under MHLA too its batch's other texts change nothing, however long they are."""
    model, arguments = mhla.apply_mhla(z_image.transformer(), **SETTINGS), uneven.inputs(ragged=ragged)
    batch = output(model, arguments)
    for place in range(2):
        alone = {name: values[place : place + 1] for name, values in arguments.items()}
        assert relative_change(batch[place], output(model, alone)[0]) < ROUNDING


def test_prompts_are_encoded_as_the_pipeline_hands_them_over():
    pipe = z_image.pipeline()
    prompts = ["a red ball", "dog"]
    texts = forwards(pipe, **{**z_image.call, "prompt": list(prompts), "negative_prompt": None})[0]["cap_feats"][:2]
    assert len(texts[0]) != len(texts[1])
    latents = torch.zeros(2, 4, 16, 16)
    samples = [FAMILY.encode_prompt(pipe, prompt, {"max_sequence_length": 8}) for prompt in prompts]
    conditioning = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    given = FAMILY.forward_arguments(pipe.transformer, latents, torch.tensor([0.5, 0.5]), conditioning)
    for found, expected in zip(given["cap_feats"], texts, strict=True):
        # encoded in one batch there: the same operations, summed in another order
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_step_of_the_pipeline_follows_the_prediction():
    """Sign and time are those of the pipeline: a step from given latents by the scheduler is the pipeline's own."""
    pipe = z_image.pipeline()
    call = {**z_image.call, "guidance_scale": 0.0, "negative_prompt": None, "num_inference_steps": 1}
    latents = torch.randn(1, 4, 16, 16, generator=torch.Generator().manual_seed(0))
    expected = pipe(**{**call, "output_type": "latent"}, latents=latents).images
    process = FAMILY.process(pipe.transformer, 1.0)
    text = FAMILY.encode_prompt(pipe, call["prompt"], {"max_sequence_length": 8})
    batch = process.make_batch(latents, latents, torch.tensor([0.5]), {name: x[None] for name, x in text.items()})
    sigma = pipe.scheduler.sigmas[:1]
    arguments = FAMILY.forward_arguments(pipe.transformer, latents, process.timestep(sigma), batch.conditioning)
    with torch.no_grad():
        velocity = FAMILY.prediction(pipe.transformer, pipe.transformer(**arguments, return_dict=False)[0], latents)
    # the last σ is 0
    torch.testing.assert_close(latents - sigma * velocity, expected, rtol=1e-5, atol=1e-6)
    timestep = FAMILY.scheduler_timestep(pipe.transformer, arguments["t"])
    torch.testing.assert_close(timestep, pipe.scheduler.timesteps[:1], rtol=1e-5, atol=1e-3)


def test_images_that_are_no_single_grid_are_refused():
    model, arguments = mhla.apply_mhla(z_image.transformer(), **SETTINGS), z_image.inputs()
    other = {**arguments, "x": [arguments["x"][0], torch.randn(4, 1, 14, 10)]}
    with pytest.raises(ValueError, match=r"sizes \[\(1, 14, 10\), \(1, 16, 16\)\].*one after another"):
        output(model, other)
    with pytest.raises(ValueError, match=r"x holds 2 pictures for a sample.*Z-Image-Omni.*remove_mhla\(pipe\)"):
        output(model, {**arguments, "x": [arguments["x"]] * 2})
    mhla.remove_mhla(model)
    with torch.no_grad():
        assert len(model(**other, return_dict=False)[0]) == 2


def test_methods_that_the_class_lacks_come_and_go():
    model, arguments = z_image.transformer(), z_image.inputs()
    assert not hasattr(model, "set_attn_processor")
    mhla.apply_mhla(model, **SETTINGS)
    processors = model.attn_processors
    assert sum(isinstance(one, mhla.MHLAProcessor) for one in processors.values()) == 3 < len(processors)
    model.set_attn_processor(processors)
    assert type(model).__name__ == "ZImageTransformer2DModel" and isinstance(model, ZImageTransformer2DModel)
    expected = output(model, arguments)
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):  # noqa: S301 - its own
        assert torch.equal(output(copied, arguments), expected)
    mhla.remove_mhla(model)
    assert type(model) is ZImageTransformer2DModel


def test_a_patched_pipeline_is_saved_under_its_own_names(tmp_path):
    pipe = mhla.apply_mhla(z_image.pipeline(), **SETTINGS)
    mhla.remove_mhla(pipe)
    pipe.save_pretrained(tmp_path)
    loaded = type(pipe).from_pretrained(tmp_path)
    assert type(loaded.transformer) is ZImageTransformer2DModel
