"""What is patched is found: layers, processors, mixing matrices of an optimizer."""

import pytest
import torch

import mhla_diffusers as mhla

from ..models import FAMILIES, patched
from .shared import MODELS, OWN_METHODS


@pytest.mark.parametrize("name", OWN_METHODS)
def test_attn_processors_is_the_property_of_diffusers(name):
    for model in (FAMILIES[name].build(), patched(name)):
        assert mhla.attn_processors(model) == model.attn_processors


@pytest.mark.parametrize("name", MODELS)
def test_mhla_layers_are_modules_of_the_model(name):
    assert mhla.mhla_layers(FAMILIES[name].build()) == {}
    model = patched(name)
    modules = dict(model.named_modules())
    layers = mhla.mhla_layers(model)
    assert len(layers) == FAMILIES[name].self_attentions
    assert all(modules[path] is layer and isinstance(layer, mhla.MHLALayer) for path, layer in layers.items())


def test_mixing_is_clipped_after_every_step_until_the_hook_is_removed():
    for clip, inside in ((True, True), (False, False)):
        model = patched("sana", mixing_clip=clip)
        matrices = [layer.mixing for layer in mhla.mhla_layers(model).values()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle = mhla.register_mixing_clip(optimizer, model)
        for direction in (100.0, -100.0):
            for matrix in matrices:
                matrix.grad = torch.full_like(matrix, direction)
            optimizer.step()
            assert all(bool(((matrix > 0) & (matrix < 1)).all()) is inside for matrix in matrices)
        handle.remove()
        optimizer.step()
        assert all(matrix.max() > 1 for matrix in matrices)


def test_mixing_clip_needs_a_patched_model():
    model = FAMILIES["sana"].build()
    with pytest.raises(ValueError, match=r"not patched with MHLA; call apply_mhla\(\)"):
        mhla.register_mixing_clip(torch.optim.SGD(model.parameters()), model)


def test_an_optimizer_made_too_early_is_refused():
    model = FAMILIES["wan"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3))
    with pytest.raises(ValueError, match="optimizer lacks a mixing matrix.*after apply_mhla"):
        mhla.register_mixing_clip(optimizer, model)
