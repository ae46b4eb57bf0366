"""Latte: frames that attend by themselves are a batch to the patch, and a video to all else."""

import mhla_diffusers as mhla

from ..models import assert_changed, output, relative_change
from .cases import ROUNDING, all_listed, case_of, plain

CASE = case_of("latte")

PLAIN = plain("latte")


def test_without_temporal_attentions():
    """For a single frame too, which the model takes as a picture."""
    model, arguments = CASE.transformer(), CASE.inputs()
    single = {**arguments, "hidden_states": arguments["hidden_states"][:, :, :1]}
    for changed in ({**arguments, "enable_temporal_attentions": False}, single):
        expected = output(model, changed)
        mhla.apply_mhla(model, **all_listed("latte"))
        assert relative_change(output(model, changed), expected) < ROUNDING
        mhla.remove_mhla(model)
        mhla.apply_mhla(model, **PLAIN)
        assert_changed(output(model, changed), expected)
        mhla.remove_mhla(model)
