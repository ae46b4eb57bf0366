"""A family from outside the package."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers import families
from mhla_diffusers.families import register_family

from ..models import assert_changed, output
from ..patching.shared import assert_same_footprint, footprint
from .auraflow import AuraFlowFamily
from .auraflow_tiny import auraflow_transformer


@pytest.fixture
def added(monkeypatch):
    """An AuraFlow transformer and its inputs; what a test registers is forgotten after it."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    model = auraflow_transformer()
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 4, 16, 12, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, model.config.joint_attention_dim, generator=generator),
        "timestep": torch.tensor([0.5, 0.25]),
    }
    return model, arguments


def test_a_new_family_is_patched_once_it_is_registered(added):
    """On a grid that is not square; and removed again."""
    model, arguments = added
    with pytest.raises(ValueError, match=r"AuraFlowTransformer2DModel is not supported.*register_family\(\)"):
        mhla.apply_mhla(model)
    before, expected = footprint(model), output(model, arguments)
    register_family(AuraFlowFamily())
    mhla.apply_mhla(model, layers="2/3", sparse="none")
    assert_changed(output(model, arguments), expected)
    found = [(layer.replaced, layer.grid) for layer in mhla.describe(model)]
    assert found == [(replaced, (8, 6)) for replaced in (False, True, True, False)]
    mhla.remove_mhla(model)
    assert_same_footprint(model, before)
    assert torch.equal(output(model, arguments), expected)


def test_a_family_cannot_take_a_name_that_is_taken(added):
    class OtherFamily(AuraFlowFamily):
        pass

    register_family(AuraFlowFamily())
    with pytest.raises(ValueError, match=r"'auraflow' is already registered by .*AuraFlowFamily; .* for .*OtherFamily"):
        register_family(OtherFamily())


def test_a_family_may_be_defined_and_registered_again(added):
    """As a notebook does when its cell is run again."""

    def cell():
        class AgainFamily(AuraFlowFamily):
            pass

        return AgainFamily()

    first, second = cell(), cell()
    assert type(first) is not type(second)
    register_family(first)
    register_family(second)
    assert families.get_family(added[0]) is second
