"""Rank, entropy and pictures of the attention on real activations of the tiny pipelines."""

import json

import pytest
import torch
from mhla_diffusers.demo.building import FAMILIES
from mhla_diffusers.patching.sensitivity import TransformerCall, record_calls
from PIL import Image

from mhla_diffusers import apply_mhla
from mhla_diffusers.analysis import analyze_layers, each_attention_matrix, rank
from mhla_diffusers.analysis.pictures import (
    draw_attention_maps,
    draw_mixing_matrices,
    middle_of,
    position_of,
    side_by_side,
)
from mhla_diffusers.analysis.run import analyze
from mhla_diffusers.families import get_family
from mhla_diffusers.tiny import call_settings, load_tiny

from .. import models
from ..evaluation.pictures import mhla

HEAD_DIM = 32


def run_tiny(pipe, family, steps=3):
    settings = {**call_settings(family), "num_inference_steps": steps}
    subject = {"class_labels": [7]} if family == "dit" else {"prompt": "a seven moving left"}
    return lambda: pipe(**subject, **settings, generator=torch.Generator().manual_seed(0))


def real_call(pipe, family):
    return record_calls({"transformer": pipe.transformer}, run_tiny(pipe, family))["transformer"][1]


@pytest.mark.parametrize("family", FAMILIES)
def test_rank_of_mhla_exceeds_the_head_dim_and_that_of_linear_attention_never_does(family):
    axes = get_family(load_tiny(family).transformer).axes
    ranks = {}
    for name, blocks in {"linear": (1,) * axes, "MHLA": (4,) * 2 if axes == 2 else (3, 4, 4)}.items():
        pipe = load_tiny(family)
        apply_mhla(pipe, blocks=blocks)
        call = real_call(pipe, family)
        layers = analyze_layers(pipe.transformer, call)
        for layer, (_, matrix) in zip(layers, each_attention_matrix(pipe.transformer, call), strict=True):
            assert layer.rank <= layer.rank_bound
            # of every sample and head, and with all digits of float64
            assert int(torch.linalg.matrix_rank(matrix, rtol=1e-11).max()) <= layer.rank_bound
        ranks[name] = layers
    assert all(layer.rank_bound == HEAD_DIM for layer in ranks["linear"])
    assert all(layer.rank > HEAD_DIM for layer in ranks["MHLA"])


@pytest.mark.parametrize(("blocks", "bound"), [((1, 1, 2), 24), ((2, 1, 1), 24), ((1, 1, 1), 12), ((2, 2, 3), 96)])
def test_bound_counts_tokens_of_blocks_where_they_are_fewer_than_the_head_dim(blocks, bound):
    model = models.wan()
    call = TransformerCall((), models.inputs("wan"))
    apply_mhla(model, blocks=blocks)
    for layer in analyze_layers(model, call):
        assert layer.rank_bound == bound
        assert layer.rank <= bound
        assert (layer.tokens, layer.attention) == (96, "MHLA")


def test_unpatched_attention_is_told_by_its_kind():
    (softmax, *_) = analyze_layers(models.dit(), TransformerCall((), models.inputs("dit")))
    assert (softmax.attention, softmax.rank_bound) == ("softmax", 64)
    assert softmax.rank > 12
    (linear, *_) = analyze_layers(models.sana(), TransformerCall((), models.inputs("sana")))
    assert (linear.attention, linear.rank_bound) == ("linear", 16)
    assert linear.rank <= 16
    assert 0 < linear.entropy < torch.tensor(64.0).log()


def test_rank_is_relative_to_the_largest_singular_value():
    matrix = 1e6 * torch.diag(torch.tensor([1.0, 2e-4, 0.5e-4], dtype=torch.float64))[None, None]
    assert rank(matrix) == 2
    assert rank(matrix, tolerance=1e-5) == 3


def test_unknown_layers_and_large_grids_are_refused():
    call = TransformerCall((), models.inputs("dit"))
    with pytest.raises(ValueError, match="blocks.9 is no self-attention; allowed: transformer_blocks.0.attn1"):
        analyze_layers(models.dit(), call, ["blocks.9"])
    large = TransformerCall((), {**models.inputs("dit"), "hidden_states": torch.zeros(1, 4, 160, 160)})
    with pytest.raises(ValueError, match="6400 tokens.*smaller resolution"):
        analyze_layers(models.dit(), large)


def test_places_of_tokens_in_the_picture():
    values = torch.arange(24.0)
    picture = side_by_side(values, (2, 3, 4))
    assert picture.shape == (3, 9)
    assert picture[:, 4].isnan().all()
    for token in (0, 5, 12, 23):
        assert picture[position_of(token, (2, 3, 4))] == token
    assert middle_of((3, 4, 4)) == 26
    assert side_by_side(values[:12], (3, 4)).equal(values[:12].view(3, 4))


def test_brightest_point_of_a_map_is_where_the_attention_is(tmp_path):
    pytest.importorskip("matplotlib")
    row = torch.zeros(16)
    row[6] = 1
    with Image.open(draw_attention_maps({"layer": row}, (4, 4), 9, tmp_path / "map.png")) as image:
        pixels = image.convert("L")
        bright = [i for i, value in enumerate(pixels.crop((0, 60, 330, 320)).tobytes()) if 200 < value < 254]
        assert len(bright) > 500


def test_negative_weights_are_not_drawn_as_zero(tmp_path):
    pytest.importorskip("matplotlib")
    matrix = torch.zeros(4, 4)
    matrix[1, 1], matrix[2, 2] = 1, -1
    for weights, has_blue in ((matrix, True), (matrix.abs(), False)):
        with Image.open(draw_mixing_matrices({"layer": weights}, (2, 2), tmp_path / "matrix.png")) as image:
            red, _, blue = image.convert("RGB").crop((0, 0, 400, 300)).split()
        pairs = zip(red.tobytes(), blue.tobytes(), strict=True)
        assert (sum(r < 30 and b > 80 for r, b in pairs) > 300) == has_blue


def test_everything_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    pipe = load_tiny("dit")
    apply_mhla(pipe, blocks=(4, 4), layers=[1, 2])
    result = analyze(pipe, run_tiny(pipe, "dit"), tmp_path)
    assert [layer.attention for layer in result.layers] == ["softmax", "MHLA", "MHLA", "softmax"]
    assert set(result.sensitivity) == {"transformer_blocks.1.attn1", "transformer_blocks.2.attn1"}
    assert [picture.name for picture in result.pictures] == ["attention-maps.png", "mixing-matrices.png"]
    assert all(picture.stat().st_size > 5000 for picture in result.pictures)
    assert json.loads((tmp_path / "analysis.json").read_text())["grid"] == [8, 8]
    with pytest.raises(ValueError, match="token=64 is out of range.*0 to 63"):
        analyze(pipe, run_tiny(pipe, "dit"), tmp_path, token=64)
    with pytest.raises(ValueError, match="Layer 4 is out of range"):
        analyze(pipe, run_tiny(pipe, "dit"), tmp_path, layers=[4])


def test_command(tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "patch.yaml").write_text(
        "family: dit\nbase_model: tiny-dit\ndescription: half\nmhla:\n  blocks: [4, 4]\n  layers: [0, 3]\n"
    )
    patch = ("--patch", tmp_path / "patch.yaml")
    shown = mhla("analyze", "dit", "seven", *patch, "--output", tmp_path / "out", "--set", "num_inference_steps=2")
    assert shown.exit_code == 0, shown.output
    assert "mixing-matrices.png" in shown.output
    assert (tmp_path / "out" / "analysis.json").is_file()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("",), "'' is no class"),
        (("1001",), "'1001' is no class"),
        (("seven", "--device", "tpu9"), "device='tpu9'"),
        (("seven", "--set", "num_inference_step=2"), "did you mean 'num_inference_steps'"),
        (("seven", "--seed", "-1"), "seed -1 is out of range"),
    ],
)
def test_command_refuses_what_cannot_be(tmp_path, arguments, message):
    shown = mhla("analyze", "dit", *arguments, "--output", tmp_path / "out")
    assert isinstance(shown.exception, ValueError)
    assert message in str(shown.exception)


def test_automatic_choice_moves_the_output_no_more_than_the_fixed_one():
    """On the untrained patch, judged on other noise and another class than it was chosen on."""
    pipe = load_tiny("dit")
    judged = record_calls(
        {"transformer": pipe.transformer},
        lambda: pipe(class_labels=[4], num_inference_steps=6, generator=torch.Generator().manual_seed(9)),
    )["transformer"]
    with torch.no_grad():
        expected = [call.predict(pipe.transformer) for call in judged]
    changes = {}
    for layers in ("2/3", "auto:2/3"):
        patched = load_tiny("dit")
        calibration = {"calibration": run_tiny(patched, "dit", steps=6)} if layers.startswith("auto") else {}
        apply_mhla(patched, blocks=(4, 4), layers=layers, **calibration)
        with torch.no_grad():
            found = [call.predict(patched.transformer) for call in judged]
        changes[layers] = sum(models.relative_change(f, e) ** 2 for f, e in zip(found, expected, strict=True))
    assert changes["auto:2/3"] <= changes["2/3"]
