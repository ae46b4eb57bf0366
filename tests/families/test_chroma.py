"""What is particular to Chroma: padded text and its masks of both types."""

import torch

import mhla_diffusers as mhla

from ..models import relative_change
from .cases import ROUNDING, all_listed, case_of, output, plain

chroma = case_of("chroma")

SETTINGS = plain("chroma")


def test_padding_takes_no_part():
    """A sample is what it is alone, whose text ends before its padding."""
    model, (latents, conditioning) = mhla.apply_mhla(chroma.transformer(), **SETTINGS), chroma.drawn((8, 8), 2, 1)
    assert not conditioning["attention_mask"].all()
    time = torch.tensor([0.5, 0.5])
    batch = output(model, chroma.of_inputs.arguments(model, latents, time, conditioning))
    for place in range(2):
        of_one = {name: x[place : place + 1] for name, x in conditioning.items()}
        alone = chroma.of_inputs.arguments(model, latents[place : place + 1], time[:1], of_one)
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
