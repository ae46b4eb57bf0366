"""Classifiers of every kind take pictures of other sizes, or say that they do not."""

import pytest
import torch
from transformers import Dinov2ForImageClassification, ResNetConfig, ResNetForImageClassification

from mhla_diffusers.training.classify.sizes import call_settings, own_size

from ..paper_models.shared import tiny_vlt
from ..vision.models import dinov2, pooled_vit, registers, siglip, vit

MODELS = {
    "vit": vit,
    "pooled-vit": pooled_vit,
    "dinov2": lambda: dinov2(Dinov2ForImageClassification),
    "registers": registers,
    "siglip": siglip,
    "list": lambda: vit(image_size=[32, 32]),
}


@pytest.mark.parametrize("name", MODELS)
def test_pictures_of_another_size_are_taken(name):
    model = MODELS[name]()
    assert own_size(model) == 32 and call_settings(model, 32) == {}
    with torch.no_grad():
        assert model(torch.randn(1, 3, 48, 48), **call_settings(model, 48)).logits.isfinite().all()


def test_sizes_that_a_model_does_not_tell_or_take():
    assert own_size(tiny_vlt()) is None and call_settings(tiny_vlt(), 48) == {}
    with pytest.raises(ValueError, match="ViTForImageClassification takes pictures of 32 x 48 pixels; only squares"):
        own_size(vit(image_size=[32, 48]))
    fixed = ResNetForImageClassification(ResNetConfig(embedding_size=4, hidden_sizes=[4], depths=[1], image_size=32))
    with pytest.raises(ValueError, match="ResNetForImageClassification takes pictures of 32 pixels, and size=48"):
        call_settings(fixed, 48)
