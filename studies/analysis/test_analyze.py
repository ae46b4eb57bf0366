"""The analysis of tiny pipelines, whose attention matrices tests/studies compares with what attention computes."""

import json

import analyze
import pytest
import torch
from PIL import Image

from mhla_diffusers import apply_mhla
from mhla_diffusers.families import get_family
from mhla_diffusers.tiny import call_settings, load_tiny

HEAD_DIM = 32


def analyzed(pipe, folder, **settings):
    family = get_family(pipe.transformer)
    prompt = "7" if family.calling.prompts_are_classes else "a seven moving left"
    call = {**call_settings(family.name), "num_inference_steps": 1}

    def run():
        family.calling.call(pipe, [prompt], [torch.Generator().manual_seed(0)], **call)

    return analyze.analyze(pipe, run, folder, **settings)


def test_an_analysis_is_written(tmp_path):
    pipe = load_tiny("dit")
    apply_mhla(pipe, blocks=(4, 4), layers=[1, 2])
    layers = analyzed(pipe, tmp_path)
    assert [layer.attention for layer in layers] == ["softmax", "MHLA", "MHLA", "softmax"]
    assert [layer.moves is not None for layer in layers] == [False, True, True, False]
    assert json.loads((tmp_path / "analysis.json").read_text())["grid"] == [8, 8]
    # one layer instead of two: half the width; an unpatched layer has no mixing matrix
    analyzed(pipe, tmp_path / "one", layers=[1])
    widths = [Image.open(folder / "mixing-matrices.png").width for folder in (tmp_path / "one", tmp_path)]
    assert widths[0] < widths[1]
    analyzed(pipe, tmp_path / "none", layers=[0])
    assert [file.name for file in (tmp_path / "none").glob("*.png")] == ["attention-maps.png"]


@pytest.mark.parametrize(
    ("wrong", "message"), [({"token": 64}, "token=64.*64"), ({"layers": [4]}, "4 must be less than 4")]
)
def test_what_is_refused(tmp_path, wrong, message):
    with pytest.raises(ValueError, match=message):
        analyzed(load_tiny("dit"), tmp_path, **wrong)


@pytest.mark.parametrize(
    ("family", "blocks", "bound"),
    [("wan", (1, 1, 1), HEAD_DIM), ("dit", (1, 1), HEAD_DIM), ("wan", (3, 4, 4), None), ("dit", (4, 4), None)],
)
def test_rank_of_mhla_exceeds_the_head_dim_and_that_of_linear_attention_never_does(tmp_path, family, blocks, bound):
    for layer in analyzed(apply_mhla(load_tiny(family), blocks=blocks), tmp_path):
        assert layer.rank <= layer.rank_bound
        assert layer.rank_bound == bound if bound else layer.rank > HEAD_DIM


def test_places_of_tokens_in_the_picture():
    values = torch.arange(24.0)
    picture = analyze.side_by_side(values, (2, 3, 4))
    assert picture.shape == (3, 9)
    assert picture[:, 4].isnan().all()
    assert picture[:, :4].equal(values[:12].view(3, 4))
    assert picture[:, 5:].equal(values[12:].view(3, 4))
    assert analyze.middle_of((3, 4, 4)) == 26
