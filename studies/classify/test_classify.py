"""The classifiers: a short comparison, the counts beside the paper's, and VLT on pictures of other sizes."""

import json
import shutil
from pathlib import Path

import classify
import counts
import pytest
import torch
from pooled_vit import PooledViT
from vlt import VLT

from mhla_diffusers import apply_mhla, mhla_layers, remove_mhla
from studies.adaptation.digits import load_digits

HERE = Path(__file__).parent


def test_a_comparison_is_written_and_goes_on_where_it_was_stopped(tmp_path):
    text = classify.compare([0], steps=2, held_out=9, folder=tmp_path)
    rows = [line.split(" | ") for line in text.splitlines()[2:]]
    assert [row[1] for row in rows] == ["251,059", "251,827", "251,827", "254,707"]
    assert (tmp_path / "attention-maps.png").stat().st_size > 5000
    kept = tmp_path / "mhla-seed-0.json"
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"rank": 12.5}))
    assert "12.5" in classify.compare([0], steps=2, held_out=9, folder=tmp_path)
    with pytest.raises(ValueError, match="another --output"):
        classify.compare([0], steps=3, held_out=9, folder=tmp_path)


def test_table_is_that_of_the_results(tmp_path):
    for file in HERE.glob("*.json"):
        shutil.copy(file, tmp_path)
    assert classify.compare([0, 1, 2], 800, 1000, tmp_path) == (HERE / "comparison.md").read_text()


def test_pictures_hold_two_digits_and_their_sum():
    pictures, labels = classify.draw_pictures(load_digits("train"), 40, "key")
    again, _ = classify.draw_pictures(load_digits("train"), 40, "key")
    assert pictures.equal(again)
    assert pictures.shape == (40, 3, 64, 64)
    assert (pictures.min(), pictures.max()) == (-1, 1)
    assert len(labels.unique()) > 8
    assert labels.max() <= 18


def test_a_patch_is_taken_back_and_full_density_is_softmax():
    torch.manual_seed(0)
    model, pixels = PooledViT(32, 4, 5, width=24, layers=2, heads=2, inner=32).eval(), torch.randn(2, 3, 32, 32)
    own = model(pixels)[0]
    torch.testing.assert_close(apply_mhla(model, density=1.0)(pixels)[0], own, rtol=1e-5, atol=1e-6)
    remove_mhla(model)
    apply_mhla(model, blocks=(2, 2))(pixels)[0].sum().backward()
    assert all(layer.mixing.grad.abs().sum() > 0 for layer in mhla_layers(model).values())
    assert remove_mhla(model)(pixels)[0].equal(own)


@pytest.mark.parametrize("name", counts.MODELS)
def test_counts_are_those_of_the_paper_and_of_the_table(name):
    """As near as the paper's two digits are: 16.45 M stands there as 16 M, and 1.07 G as 1.1 G."""
    build, million, giga = counts.MODELS[name]
    found = counts.count(build(), 224)
    assert found.parameters / 1e6 == pytest.approx(float(million), rel=0.03)
    assert found.weight_macs / 1e9 == pytest.approx(float(giga), rel=0.03)
    table = (HERE / "counts.md").read_text()
    (row,) = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith(f"| {name} |")]
    shown = [f"{value / 1e9:.3f}" for value in found[1:]]
    assert [row[1], row[3], row[5]] == [f"{found.parameters / 1e6:.2f}", *shown]


@pytest.mark.parametrize("size", [(64, 64), (96, 64)])
def test_vlt_takes_pictures_of_any_size_and_learns(size):
    torch.manual_seed(0)
    model = VLT((8, 16, 16, 24), (1, 1, 1, 1), (1, 2, 2, 3), ((3, 3), (2, 2), None, None), head=32, classes=5)
    model(torch.randn(2, 3, *size)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(stage.layers[0].attn.mixing.grad.abs().sum() > 0 for stage in model.stages[:2])
