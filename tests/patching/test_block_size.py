"""Patches whose exact tiles are uniform blocks along a curve, with β fitted at every call."""

import pytest
import torch

from mhla_diffusers import (
    MHLAConfig,
    apply_mhla,
    audit,
    calibrate_sparse,
    change_mhla,
    densify,
    describe,
    load_mhla,
    mhla_layers,
    remove_mhla,
    save_mhla,
)
from mhla_diffusers.tiny import load_tiny

from .. import models

SOFTMAX = ["wan", "dit"]
SETTINGS = {"sparse": "content", "block_size": 4, "density": 0.2}


def patched(name, **settings):
    model, arguments = models.FAMILIES[name].build(), models.inputs(name)
    before = models.output(model, arguments)
    return apply_mhla(model, blocks=models.FAMILIES[name].blocks, **SETTINGS | settings), arguments, before


@pytest.mark.parametrize("name", SOFTMAX)
def test_a_patch_changes_the_output_and_comes_off(name):
    model, arguments, before = patched(name)
    change = models.relative_change(models.output(model, arguments), before)
    assert change > 1e-6
    remove_mhla(model)
    assert torch.equal(models.output(model, arguments), before)


@pytest.mark.parametrize("name", SOFTMAX)
def test_all_blocks_are_the_softmax_attention_of_the_model(name):
    model, arguments, before = patched(name, density=1.0)
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SOFTMAX)
def test_a_fitted_bias_is_no_parameter(name):
    fitted, arguments, before = patched(name)
    assert all(layer.pooled_bias is None for layer in mhla_layers(fitted).values())
    assert not any("pooled_bias" in key for key in fitted.state_dict())
    learned, _, _ = patched(name, fit_pooled_bias=False)
    assert all(layer.pooled_bias is not None for layer in mhla_layers(learned).values())
    changes = [models.relative_change(models.output(model, arguments), before) for model in (fitted, learned)]
    assert changes[0] != changes[1]


def test_saved_and_opened(tmp_path):
    model, arguments, _ = patched("wan")
    expected = models.output(model, arguments)
    save_mhla(model, tmp_path)
    opened = load_mhla(models.FAMILIES["wan"].build(), tmp_path)
    assert torch.equal(models.output(opened, arguments), expected)
    larger = load_mhla(models.FAMILIES["wan"].build(), tmp_path, block_size=8)
    assert {layer.config.block_size for layer in mhla_layers(larger).values()} == {8}
    with pytest.raises(ValueError, match="needs a patch whose tiles stand along the curve"):
        load_mhla(load_tiny("wan"), "tiny-wan-exact", block_size=8)
    (config,) = {layer.config for layer in mhla_layers(opened).values()}
    assert (config.block_size, config.fits_pooled_bias, config.rope) == (4, True, "before")


def test_changed_in_place():
    model, arguments, before = patched("wan")
    whole = models.output(change_mhla(model, density=1.0), arguments)
    torch.testing.assert_close(whole, before, rtol=1e-4, atol=1e-5)
    change_mhla(model, density=0.2, fit_pooled_bias=False)
    assert all(layer.pooled_bias is not None for layer in mhla_layers(model).values())
    change_mhla(model, block_size=8, fit_pooled_bias=None)
    assert all(layer.pooled_bias is None and layer.config.block_size == 8 for layer in mhla_layers(model).values())
    models.output(model, arguments)


def test_told():
    model, arguments, _ = patched("wan")
    assert "blocks of 4 tokens along a curve" in str(describe(model))
    models.output(model, arguments)
    assert "exact tiles: content, blocks of 4 tokens" in str(describe(model))


def test_audited_and_densified():
    model, arguments, before = patched("wan")

    def run():
        models.output(model, arguments)

    found = audit(model, run)
    assert all(layer.tiles.counts == 4 for layer in found.layers)
    first = models.relative_change(models.output(model, arguments), before)
    densify(model, found, 0.6)
    assert models.relative_change(models.output(model, arguments), before) < first
    assert {layer.config.block_size for layer in mhla_layers(model).values()} == {4}


def test_calibration_fits_the_linear_branch_beside_the_fitted_bias():
    model, arguments, _ = patched("wan")
    before = [layer.linear_log_weight.clone() for layer in mhla_layers(model).values()]
    calibrate_sparse(model, lambda: models.output(model, arguments))
    after = [layer.linear_log_weight for layer in mhla_layers(model).values()]
    assert any(not torch.equal(*both) for both in zip(before, after, strict=True))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"block_size": 0}, "positive number of tokens"),
        ({"block_size": 10**9}, "at most 1024"),
        ({"block_size": True}, "positive number of tokens"),
        ({"block_size": "64"}, "positive number of tokens"),
        ({"block_size": 64, "sparse": "calibrated"}, "needs sparse='content'"),
        ({"block_size": 64, "exact_tiles": (2, 2)}, "without exact_tiles"),
        ({"block_size": None, "fit_pooled_bias": True}, "needs block_size"),
        ({"pooled": False, "fit_pooled_bias": True}, "pooled=False"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings, words):
    with pytest.raises(ValueError, match=words):
        MHLAConfig(**{"blocks": (2, 2), "sparse": "content", "block_size": 4} | settings)


def test_one_way_to_cut_takes_the_place_of_the_other():
    boxes = MHLAConfig(blocks=(2, 2), sparse="content", exact_tiles=(4, 4))
    along = boxes.replace(block_size=16)
    assert (along.exact_tiles, along.block_size, along.rope) == (None, 16, "before")
    assert along.replace(exact_tiles=(4, 4)).block_size is None
    assert along.replace(sparse="none").block_size is None
    assert along.replace(tile_means=False).fits_pooled_bias is False
