"""What is particular to Qwen-Image: masked text of any length, the pipeline's packed latents, several pictures."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..refusals import refused
from .cases import case_of, output, plain
from .recording import forwards

qwenimage = case_of("qwenimage")

FAMILY = get_family("qwenimage")


def test_prompts_are_encoded_as_the_pipeline_hands_them_over():
    """Two texts of other lengths in one batch, the shorter one masked, and one text alone, without a mask."""
    pipe = qwenimage.pipeline()
    prompts = ["a red ball", "dog"]
    batch = forwards(pipe, **{**qwenimage.call, "prompt": prompts, "negative_prompt": None})[0]
    alone = forwards(pipe, **{**qwenimage.call, "prompt": prompts[0], "negative_prompt": None})[0]
    assert alone["encoder_hidden_states_mask"] is None
    for place, prompt in enumerate(prompts):
        found = FAMILY.training.encode_prompt(pipe, prompt, {"max_sequence_length": 8})
        text, mask = batch["encoder_hidden_states"][place], batch["encoder_hidden_states_mask"][place]
        tokens = len(text)
        assert tokens < 8 and mask.equal(found["encoder_hidden_states_mask"][:tokens])
        # a batch with another text: the same operations, summed in another order
        torch.testing.assert_close(found["encoder_hidden_states"][:tokens], text, rtol=1e-4, atol=1e-5)
        assert (
            not found["encoder_hidden_states"][tokens:].any() and not found["encoder_hidden_states_mask"][tokens:].any()
        )
    assert not batch["encoder_hidden_states_mask"].all()
    own = len(alone["encoder_hidden_states"][0])
    found = FAMILY.training.encode_prompt(pipe, prompts[0], {"max_sequence_length": 8})
    assert found["encoder_hidden_states"][:own].equal(alone["encoder_hidden_states"][0])


def test_text_is_cut_as_the_pipeline_cuts_it():
    pipe = qwenimage.pipeline()
    call = {**qwenimage.call, "negative_prompt": None, "max_sequence_length": 2}
    found = FAMILY.training.encode_prompt(pipe, call["prompt"], {"max_sequence_length": 2})
    assert found["encoder_hidden_states"].equal(forwards(pipe, **call)[0]["encoder_hidden_states"][0])


@pytest.mark.parametrize("pictures", [[(1, 8, 8), (1, 7, 5)], [(2, 8, 8)]], ids=["another picture", "frames"])
def test_several_pictures_are_refused(pictures):
    model, arguments = mhla.apply_mhla(qwenimage.transformer(), **plain("qwenimage")), qwenimage.inputs()
    tokens = sum(torch.Size(picture).numel() for picture in pictures)
    arguments["hidden_states"] = torch.randn(2, tokens, 16)
    arguments["img_shapes"] = [pictures] * 2
    with refused("Qwen-Image-Edit", "remove_mhla(pipe)"):
        output(model, arguments)
    assert output(mhla.remove_mhla(model), arguments).isfinite().all()


def test_another_mask_is_refused():
    model, arguments = mhla.apply_mhla(qwenimage.transformer(), **plain("qwenimage")), qwenimage.inputs()
    with refused("encoder_hidden_states_mask", "attention_mask"):
        output(model, {**arguments, "attention_kwargs": {"attention_mask": torch.ones(2, 70, dtype=torch.bool)}})
