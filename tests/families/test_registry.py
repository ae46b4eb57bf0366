"""A family from outside the package."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers import families
from mhla_diffusers.families import register_family

from ..models import assert_changed, output
from ..patching.shared import assert_same_footprint, footprint
from .cogview3plus import CogView3PlusFamily
from .cogview3plus_tiny import cogview3plus_transformer


@pytest.fixture
def added(monkeypatch):
    """A CogView3-Plus transformer and its inputs; what a test registers is forgotten after it."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    model = cogview3plus_transformer()
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 4, 16, 12, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, model.config.text_embed_dim, generator=generator),
        "timestep": torch.tensor([500, 250]),
        **dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.tensor([[128.0, 96.0]] * 2)),
    }
    return model, arguments


def test_a_new_family_is_patched_once_it_is_registered(added):
    """On a grid that is not square; and removed again."""
    model, arguments = added
    with pytest.raises(ValueError, match=r"CogView3PlusTransformer2DModel is not supported.*register_family\(\)"):
        mhla.apply_mhla(model)
    before, expected = footprint(model), output(model, arguments)
    register_family(CogView3PlusFamily())
    mhla.apply_mhla(model, layers="2/3", sparse="none")
    assert_changed(output(model, arguments), expected)
    found = [(layer.replaced, layer.grid) for layer in mhla.describe(model)]
    assert found == [(replaced, (8, 6)) for replaced in (False, True, True, False)]
    mhla.remove_mhla(model)
    assert_same_footprint(model, before)
    assert torch.equal(output(model, arguments), expected)


def test_a_family_cannot_take_a_name_that_is_taken(added):
    class OtherFamily(CogView3PlusFamily):
        pass

    register_family(CogView3PlusFamily())
    with pytest.raises(
        ValueError, match=r"'cogview3plus' is already registered by .*CogView3PlusFamily; .* for .*OtherFamily"
    ):
        register_family(OtherFamily())


def test_a_family_may_be_defined_and_registered_again(added):
    """As a notebook does when its cell is run again."""

    def cell():
        class AgainFamily(CogView3PlusFamily):
            pass

        return AgainFamily()

    first, second = cell(), cell()
    assert type(first) is not type(second)
    register_family(first)
    register_family(second)
    assert families.get_family(added[0]) is second
