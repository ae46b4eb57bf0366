"""Running a tiny pipeline."""

import torch

from mhla_diffusers.families import get_family
from mhla_diffusers.tiny import call_settings


def run_tiny(pipe, steps=3):
    family = get_family(pipe.transformer)
    prompt = "7" if family.calling.prompts_are_classes else "a seven moving left"
    settings = {**call_settings(family.name), "num_inference_steps": steps}
    return lambda: family.calling.call(pipe, [prompt], [torch.Generator().manual_seed(0)], **settings)
