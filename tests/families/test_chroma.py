"""What is particular to Chroma: padded text, its masks of both types, gradient checkpointing that drops them."""

import torch

import mhla_diffusers as mhla
from mhla_diffusers.families.chroma import CHROMA

from ..models import relative_change
from ..refusals import refused
from .cases import ROUNDING, all_listed, case_of, output, plain
from .recording import forwards

chroma = case_of("chroma")

FAMILY = CHROMA
SETTINGS = plain("chroma")


def test_padding_takes_no_part():
    """A sample is what it is alone, whose text ends before its padding."""
    model, (latents, conditioning) = mhla.apply_mhla(chroma.transformer(), **SETTINGS), chroma.drawn((8, 8), 2, 1)
    assert not conditioning["attention_mask"].all()
    time = torch.tensor([0.5, 0.5])
    batch = output(model, FAMILY.forward.arguments(model, latents, time, conditioning))
    for place in range(2):
        of_one = {name: x[place : place + 1] for name, x in conditioning.items()}
        alone = FAMILY.forward.arguments(model, latents[place : place + 1], time[:1], of_one)
        assert "attention_mask" not in alone
        assert relative_change(batch[place], output(model, alone)[0]) < ROUNDING


def test_a_mask_of_floating_point_is_added_as_diffusers_adds_it():
    """For every query of the image."""
    model = chroma.transformer(num_layers=1, num_single_layers=0)
    arguments = chroma.inputs()
    masked = output(model, arguments)
    arguments["attention_mask"] = arguments["attention_mask"].float()
    expected = output(model, arguments)
    assert relative_change(masked, expected) > ROUNDING
    mhla.apply_mhla(model, **all_listed("chroma"))
    assert relative_change(output(model, arguments), expected) < ROUNDING


def test_prompts_are_encoded_as_the_pipeline_hands_them_over():
    """Which also fills the longer text up."""
    pipe, prompts = chroma.pipeline(), ["a red ball", "dog"]
    given = forwards(pipe, **{**chroma.call, "prompt": prompts, "negative_prompt": ["", ""]})[0]
    samples = [FAMILY.training.encode_prompt(pipe, prompt, {"max_sequence_length": 8}) for prompt in prompts]
    conditioning = {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}
    found = FAMILY.forward.arguments(pipe.transformer, torch.zeros(2, *chroma.latents), given["timestep"], conditioning)
    tokens = found["encoder_hidden_states"].shape[1]
    assert tokens < given["encoder_hidden_states"].shape[1]
    torch.testing.assert_close(found["encoder_hidden_states"], given["encoder_hidden_states"][:, :tokens])
    mask = given["attention_mask"].bool()
    assert torch.equal(found["attention_mask"][:, :tokens], mask[:, :tokens]) and not mask[:, tokens:8].any()
    assert torch.equal(found["attention_mask"][:, tokens:], mask[:, 8:]) and mask[:, 8:].all()
    for name in ("img_ids", "timestep"):
        assert torch.equal(found[name], given[name])


def test_a_mask_under_gradient_checkpointing_is_refused():
    model = mhla.apply_mhla(chroma.transformer(), **SETTINGS).train()
    model.enable_gradient_checkpointing()
    with refused("attention_mask", "batch_size: 1"):
        model(**chroma.inputs())
    assert output(model, chroma.inputs()).isfinite().all()  # without gradients nothing is checkpointed
