"""What is particular to CogView4: no masks, one size for a batch, text that is padded on the left."""

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


def test_text_is_padded_as_among_longer_texts():
    pipe, family = CASE.pipeline(), CASE.of_family
    longer = "the red dog on " * 8
    expected = pipe.encode_prompt(["the red dog", longer], do_classifier_free_guidance=False)[0]
    found = family.training.encode_prompt(pipe, "the red dog", {"max_sequence_length": expected.shape[1]})
    torch.testing.assert_close(found["encoder_hidden_states"], expected[0], rtol=1e-5, atol=1e-6)


def test_control_is_patched_but_not_trained():
    model = CASE.transformer(in_channels=8)
    with refused("pictures"):
        CASE.of_family.training.process(model, 3.0)
