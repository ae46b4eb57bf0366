"""A near field in patched models: softmax attention inside a block."""

import pytest
import torch

from mhla_diffusers import (
    MHLAConfig,
    apply_mhla,
    calibrate_far_field,
    load_mhla,
    mhla_layers,
    patch_names,
    remove_mhla,
    save_mhla,
)

from .. import models


def inputs_and_output(name):
    model = models.FAMILIES[name].build()
    arguments = models.inputs(name)
    return model, arguments, models.output(model, arguments)


@pytest.mark.parametrize("name", ["wan", "dit"])
def test_one_block_is_the_softmax_attention_of_the_model(name):
    model, arguments, before = inputs_and_output(name)
    axes = len(models.FAMILIES[name].blocks)
    apply_mhla(model, blocks=(1,) * axes, near_field="softmax")
    # the same sums in another order
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)
    remove_mhla(model)
    assert torch.equal(models.output(model, arguments), before)


@pytest.mark.parametrize("name", ["wan", "dit"])
def test_a_calibrated_near_field_changes_less_than_mhla_alone(name):
    blocks = models.FAMILIES[name].blocks
    model, arguments, before = inputs_and_output(name)
    mhla = models.relative_change(models.output(apply_mhla(model, blocks=blocks), arguments), before)
    model, arguments, before = inputs_and_output(name)
    apply_mhla(model, blocks=blocks, near_field="softmax")
    calibrate_far_field(model, lambda: models.output(model, arguments))
    assert 0 < models.relative_change(models.output(model, arguments), before) < mhla


def test_calibration_finds_the_weight_that_was_hidden():
    """Where every token looks alike, softmax and MHLA differ by a factor alone, which calibration must find."""
    model, arguments, _ = inputs_and_output("dit")
    for block in model.transformer_blocks:
        for projection in (block.attn1.to_q, block.attn1.to_k):
            torch.nn.init.zeros_(projection.weight)
            torch.nn.init.constant_(projection.bias, 2.0)
    before = models.output(model, arguments)
    apply_mhla(model, blocks=models.FAMILIES["dit"].blocks, near_field="softmax", mixing_init="uniform")
    assert models.relative_change(models.output(model, arguments), before) > 1e-4
    calibrate_far_field(model, lambda: models.output(model, arguments))
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


def test_calibration_without_a_far_field_is_refused():
    with pytest.raises(ValueError, match="no far field weight"):
        calibrate_far_field(models.patched("wan"), lambda: None)
    with pytest.raises(ValueError, match="did not reach 4 of 4 layers"):
        calibrate_far_field(models.patched("wan", near_field="softmax"), lambda: None)


def test_gradients_reach_the_far_field_weight():
    model, arguments, _ = inputs_and_output("wan")
    apply_mhla(model, blocks=models.FAMILIES["wan"].blocks, near_field="softmax")
    model(**arguments).sample.square().mean().backward()
    for layer in mhla_layers(model).values():
        assert layer.far_field_log_weight.grad.abs().sum() > 0


def test_saved_and_loaded(tmp_path):
    model, arguments, _ = inputs_and_output("wan")
    apply_mhla(model, blocks=models.FAMILIES["wan"].blocks, near_field="softmax")
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.far_field_log_weight.fill_(0.3)
    save_mhla(model, tmp_path / "patch")
    other = load_mhla(models.wan(), tmp_path / "patch")
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


def test_compiles_to_one_graph():
    model, arguments, _ = inputs_and_output("wan")
    apply_mhla(model, blocks=models.FAMILIES["wan"].blocks, near_field="softmax")
    del model.blocks[1:]
    expected = models.output(model, arguments)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(models.output(compiled, arguments), expected, rtol=1e-4, atol=1e-5)


def test_softmax_patches_come_with_a_near_field_too():
    names = set(patch_names())
    for name in names:
        if not name.startswith("sana") and not name.endswith("-near"):
            assert f"{name}-near" in names
    assert not [name for name in names if name.startswith("sana") and name.endswith("-near")]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"near_field": "window"}, "near_field='window' is unknown; allowed: 'none', 'softmax'"),
        ({"near_field": "softmax", "normalize": False, "output_norm": True}, "needs normalize=True"),
        ({"near_field": "softmax", "eps": 0.0}, "eps=0.0"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MHLAConfig(blocks=(2, 2), **settings)
