"""Wan's pipelines get as many frames as a clip has."""

import pytest
import torch
from diffusers import WanImageToVideoPipeline

from mhla_diffusers.families import Clip, get_family
from mhla_diffusers.generation import PipelineChoice
from mhla_diffusers.tiny import call_settings, load_tiny

from ..pipelines import wan_pipeline


@pytest.mark.parametrize("frames", [1, 9])
def test_temporal_stride_of_four(frames):
    pipe = wan_pipeline()
    clip = Clip(frames, 16.0, ((32, 48),))
    arguments = get_family(pipe.transformer).calling.clip_arguments(pipe, clip)
    assert arguments == {"height": 32, "width": 48, "num_frames": frames}


def test_temporal_stride_of_one():
    """diffusers rounds a number of frames that the stride divides, and adds one."""
    pipe = load_tiny("wan")
    family, clip = get_family(pipe.transformer), Clip(9, 6.0, ((64, 64),))
    settings = call_settings("wan") | family.calling.clip_arguments(pipe, clip) | {"num_inference_steps": 1}
    latents = family.calling.call(
        pipe, ["a seven"], [torch.Generator().manual_seed(0)], output_type="latent", **settings
    )
    assert latents.shape[2] == clip.frames
    choice = PipelineChoice("wan", settings={"num_frames": 9, "num_inference_steps": 1, "output_type": "latent"})
    (latents,) = choice.call(pipe, ["a seven"], [torch.Generator().manual_seed(0)])
    assert latents.shape[1] == 9


def test_prompts_of_pipelines_that_need_ftfy():
    """diffusers' own cleaning of prompts, for which the extra ``wan`` is there."""
    pytest.importorskip("ftfy")
    components = wan_pipeline().components
    components = {name: components[name] for name in ("tokenizer", "text_encoder", "vae", "scheduler")}
    pipe = WanImageToVideoPipeline(**components, transformer=None)
    embedded, _ = pipe.encode_prompt("a cat â€” surfing", do_classifier_free_guidance=False, max_sequence_length=8)
    assert embedded.shape[1] == 8
