"""A patch is switched off for a while, or for good."""

import pytest
import torch

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched
from .shared import MODELS, assert_same_footprint, footprint


@pytest.mark.parametrize("name", MODELS)
def test_disabled_within_the_context_only(name):
    """With the same weights, and also when an exception leaves the context."""
    expected = output(FAMILIES[name].build(), inputs(name))
    model = patched(name)
    before, found = footprint(model), output(model, inputs(name))
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, inputs(name)), expected)
    with pytest.raises(KeyError), mhla.mhla_disabled(model):
        raise KeyError
    assert_same_footprint(model, before)
    assert torch.equal(output(model, inputs(name)), found)


def test_what_is_not_patched_can_be_neither_disabled_nor_removed():
    model = FAMILIES["sana"].build()
    with pytest.raises(ValueError, match="not patched"):
        mhla.remove_mhla(model)
    with pytest.raises(ValueError, match="not patched"), mhla.mhla_disabled(model):
        pass


def test_removal_while_switched_off_stays_removed():
    model, arguments = FAMILIES["wan"].build(), inputs("wan")
    expected = output(model, arguments)
    mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3))
    with mhla.mhla_disabled(model):
        mhla.remove_mhla(model)
    assert not mhla.is_patched(model)
    assert torch.equal(output(model, arguments), expected)


def test_switched_off_before_the_first_forward_of_diffusers_own_form():
    """There are no layers yet, and the processors come back all the same."""
    model = FAMILIES["wan"].build()
    processor = mhla.MHLAProcessor(blocks=FAMILIES["wan"].blocks)
    model.set_attn_processor(processor)
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, inputs("wan")), output(FAMILIES["wan"].build(), inputs("wan")))
    assert set(model.attn_processors.values()) == {processor}
