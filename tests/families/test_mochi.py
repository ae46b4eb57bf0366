"""What is particular to Mochi: text that is cut off."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..models import relative_change
from .cases import ROUNDING, TEXT_TOKENS, all_listed, case_of, output

CASE = case_of("mochi")
FAMILY = get_family("mochi")
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
    mhla.apply_mhla(model, **all_listed("mochi"))
    assert relative_change(output(model, arguments), expected) < ROUNDING
