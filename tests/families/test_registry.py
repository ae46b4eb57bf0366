"""A family from outside the package."""

import pytest
import torch

import mhla_diffusers as mhla
from mhla_diffusers import families

from ..models import assert_changed, output
from ..patching.shared import assert_same_footprint, footprint
from .pixart import PixArtFamily
from .pixart_tiny import pixart_transformer


@pytest.fixture
def pixart(monkeypatch):
    """A PixArt transformer and its inputs; what a test registers is forgotten after it."""
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))
    model = pixart_transformer(sample_size=32)
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 4, 16, 12, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, model.config.caption_channels, generator=generator),
        "timestep": torch.tensor([500, 250]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, arguments


def test_a_new_family_is_patched_once_it_is_registered(pixart):
    """On a grid that is not square; and removed again."""
    model, arguments = pixart
    with pytest.raises(ValueError, match=r"PixArtTransformer2DModel is not supported.*register_family\(\)"):
        mhla.apply_mhla(model)
    before, expected = footprint(model), output(model, arguments)
    mhla.register_family(PixArtFamily())
    mhla.apply_mhla(model, layers="2/3")
    assert_changed(output(model, arguments), expected)
    assert [(layer.replaced, layer.grid) for layer in mhla.describe(model)][1:] == [(True, (8, 6))] * 2
    mhla.remove_mhla(model)
    assert_same_footprint(model, before)
    assert torch.equal(output(model, arguments), expected)


def test_a_family_cannot_take_a_name_that_is_taken(pixart):
    class OtherFamily(PixArtFamily):
        pass

    mhla.register_family(PixArtFamily())
    with pytest.raises(ValueError, match=r"'pixart' is already registered by .*PixArtFamily; .* for .*OtherFamily"):
        mhla.register_family(OtherFamily())


def test_a_family_may_be_defined_and_registered_again(pixart):
    """As a notebook does when its cell is run again."""

    def cell():
        class AgainFamily(PixArtFamily):
            pass

        return AgainFamily()

    first, second = cell(), cell()
    assert type(first) is not type(second)
    mhla.register_family(first)
    mhla.register_family(second)
    assert families.get_family(pixart[0]) is second


def test_cross_attention_of_a_new_family_is_its_own_in_the_single_instance_form(pixart):
    model, arguments = pixart
    mhla.register_family(PixArtFamily())
    kinds = {path: type(processor) for path, processor in mhla.attn_processors(model).items()}
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2), grid=(8, 6)))
    found = output(model, arguments)
    mhla.remove_mhla(model)
    assert {path: type(processor) for path, processor in mhla.attn_processors(model).items()} == kinds
    assert torch.equal(found, output(mhla.apply_mhla(model, blocks=(2, 2)), arguments))
