"""What is particular to CogView4: no masks, one size for a batch."""

import torch

import mhla_diffusers as mhla

from ..refusals import refused
from .cases import case_of, output, plain

CASE = case_of("cogview4")


def test_masks_and_packed_samples_are_refused():
    model, arguments = mhla.apply_mhla(CASE.transformer(), **plain("cogview4")), CASE.inputs()
    mask = torch.ones(arguments["encoder_hidden_states"].shape[:2])
    with refused("attention_mask"):
        output(model, {**arguments, "attention_mask": mask})
    for name in ("batch_flag", "text_attn_mask"):
        with refused(name):
            output(model, {**arguments, "attention_kwargs": {name: mask}})
    output(model, {**arguments, "attention_kwargs": {"scale": 1.0}})
