"""The sparse branch of patched models: uniform blocks listed by content, all others as pooled keys."""

import math

import pytest
import torch

from mhla_diffusers import (
    apply_mhla,
    calibrate_sparse,
    change_mhla,
    describe,
    load_mhla,
    mhla_layers,
    remove_mhla,
    save_mhla,
)
from mhla_diffusers.config import load_patch, patch_names

from .. import models

SOFTMAX = ["wan", "dit"]
SETTINGS = {"sparse": "content", "block_size": 4, "density": 0.2}


def patched(name, **settings):
    model, arguments = models.FAMILIES[name].build(), models.inputs(name)
    before = models.output(model, arguments)
    return apply_mhla(model, blocks=models.FAMILIES[name].blocks, **SETTINGS | settings), arguments, before


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_higher_the_density_the_smaller_the_change(name):
    model, arguments, before = patched(name, density=0.05)
    changes = [models.relative_change(models.output(model, arguments), before)]
    for density in (0.1, 0.3, 0.6, 0.9, 1.0):
        change_mhla(model, density=density)
        changes.append(models.relative_change(models.output(model, arguments), before))
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 1e-6 < 1e-3 < changes[0]
    remove_mhla(model)
    assert torch.equal(models.output(model, arguments), before)


@pytest.mark.parametrize("settings", [{"density": 1.0}, {"block_size": 1024}, {"density": 0.99}], ids=str)
@pytest.mark.parametrize("name", SOFTMAX)
def test_where_all_pairs_are_listed_nothing_of_mhla_is_computed(name, settings):
    """As with density 1, so on a grid of one block, or at a density that lists every block."""
    model, arguments, before = patched(name, **settings)
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.mixing.fill_(torch.nan)  # would show
    # the same sums in another order
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


def test_blocks_of_one_token_are_their_own_pooled_keys():
    """So that nothing of softmax attention is left out."""
    model, arguments, before = patched("wan", block_size=1, density=0.05, fit_pooled_bias=False)
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.linear_log_weight.fill_(-30.0)
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


def test_a_fitted_bias_is_no_parameter():
    fitted, arguments, before = patched("wan")
    assert not any("pooled_bias" in key for key in fitted.state_dict())
    learned, _, _ = patched("wan", fit_pooled_bias=False)
    assert all(layer.pooled_bias is not None for layer in mhla_layers(learned).values())
    changes = [models.relative_change(models.output(model, arguments), before) for model in (fitted, learned)]
    assert changes[0] != changes[1]
    change_mhla(learned, fit_pooled_bias=None)
    assert torch.equal(models.output(learned, arguments), models.output(fitted, arguments))


@pytest.mark.parametrize("settings", [{}, {"fit_pooled_bias": False}, {"pooled": False}], ids=str)
def test_saved_loaded_and_resized(settings, tmp_path):
    model, arguments, _ = patched("wan", **settings)
    expected = models.output(model, arguments)
    save_mhla(model, tmp_path / "patch")
    opened = load_mhla(models.wan(), tmp_path / "patch")
    assert torch.equal(models.output(opened, arguments), expected)
    save_mhla(opened, tmp_path / "again")  # since what is loaded can be saved
    assert torch.equal(models.output(load_mhla(models.wan(), tmp_path / "again"), arguments), expected)
    with pytest.warns(UserWarning, match="block_size=4 and opens with block_size=8"):
        larger = load_mhla(models.wan(), tmp_path / "patch", block_size=8, density=0.5)
    assert {(layer.config.block_size, layer.config.density) for layer in mhla_layers(larger).values()} == {(8, 0.5)}
    wide = arguments | {"hidden_states": arguments["hidden_states"].repeat(1, 1, 1, 2, 1)}
    assert models.output(larger, wide).isfinite().all(), "another resolution"
    other = apply_mhla(models.wan(), next(iter(mhla_layers(model).values())).config)
    other.load_state_dict(model.state_dict())
    assert torch.equal(models.output(other, arguments), expected)


@pytest.mark.parametrize("settings", [{}, {"fit_pooled_bias": False}, {"pooled": False}], ids=str)
def test_gradients_reach_the_weights(settings):
    model, arguments, _ = patched("wan", **settings)
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.linear_log_weight.zero_()
    model.train()(**arguments).sample.square().mean().backward()
    for layer in mhla_layers(model).values():
        learned = [layer.mixing, layer.linear_log_weight, layer.pooled_bias]
        assert all(weight.grad.abs().sum() > 0 for weight in learned if weight is not None)


@pytest.mark.slow
def test_compiles_to_one_graph():
    model, arguments, _ = patched("wan")
    del model.blocks[1:]
    expected = models.output(model, arguments)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(models.output(compiled, arguments), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_nothing_but_the_model_gives_a_sparse_branch_where_softmax_is_replaced(name):
    model = models.FAMILIES[name].build()
    blocks = (1,) * len(models.FAMILIES[name].blocks)
    (config,) = {layer.config for layer in mhla_layers(apply_mhla(model, blocks=blocks)).values()}
    assert config.sparse == ("none" if name.startswith("sana") else "content")
    assert math.prod(config.blocks) == 1


def test_softmax_patches_come_with_a_sparse_branch_too():
    names = set(patch_names())
    for name in names:
        if load_patch(name).config.sparse == "none" and not name.startswith("sana"):
            assert f"{name}-exact" in names
    assert not [name for name in names if name.startswith("sana") and name.endswith("-exact")]


def test_a_size_that_gains_nothing_is_told_once(caplog):
    """What is computed does not fall where one block covers the grid; where it does, nothing is said."""
    model, arguments, _ = patched("wan", block_size=1024)
    for _ in range(2):
        models.output(model, arguments)
    (record,) = [record for record in caplog.records if "gains nothing" in record.getMessage()]
    assert "On a grid of 96 tokens" in record.getMessage()
    caplog.clear()
    for settings in ({"block_size": 8, "density": 0.1}, {"density": 1.0}):
        model, arguments, _ = patched("wan", **settings)
        models.output(model, arguments)
    assert not [record for record in caplog.records if "gains nothing" in record.getMessage()]


def test_without_training_there_is_no_linear_branch():
    """It comes with training mode, loaded weights or the setting."""
    model, arguments, _ = patched("wan")
    off = models.output(model, arguments)
    state = {name: x.clone() for name, x in model.state_dict().items()}
    on = models.output(patched("wan", linear_branch=True)[0], arguments)
    assert not torch.equal(off, on)
    model.load_state_dict(state)
    assert torch.equal(models.output(model, arguments), off), "fresh weights"
    assert torch.equal(models.output(model.train().eval(), arguments), on)
    for learned in ("linear_log_weight", "mixing"):
        other = patched("wan")[0]
        other.load_state_dict({name: x.half() if "mhla" in name else x for name, x in state.items()})
        assert not any(layer.runs_linear for layer in mhla_layers(other).values()), "rounded"
        other.load_state_dict(state | {name: x + 1 for name, x in state.items() if name.endswith(learned)})
        assert not torch.equal(models.output(other, arguments), off), learned


def test_a_saved_patch_keeps_its_linear_branch(tmp_path):
    model, arguments, _ = patched("wan")
    save_mhla(model, tmp_path / "fresh")
    expected = models.output(model.train().eval(), arguments)
    save_mhla(model, tmp_path / "trained")
    fresh, trained = (load_mhla(models.wan(), tmp_path / name) for name in ("fresh", "trained"))
    assert torch.equal(models.output(trained, arguments), expected)
    assert not torch.equal(models.output(fresh, arguments), expected)


def test_the_blocks_of_a_family_fit_short_clips():
    model = apply_mhla(models.wan())
    arguments = models.inputs("wan")
    for frames in (1, 2):
        short = arguments | {"hidden_states": arguments["hidden_states"][:, :, :frames]}
        assert models.output(model, short).isfinite().all()
        (found,) = {layer.blocks for layer in describe(model)}
        assert math.prod(found) <= 1.5 * math.sqrt(2 * math.prod(describe(model)[0].grid)), "up to rounding"


@pytest.mark.parametrize("change", [{"blocks": (1, 2, 3)}, {"fit_pooled_bias": False}], ids=str)
def test_a_change_keeps_the_linear_branch(change):
    model, arguments, _ = patched("wan")
    calibrate_sparse(model, lambda: models.output(model, arguments))
    change_mhla(model, **change)
    assert all(layer.runs_linear for layer in mhla_layers(model).values())


def test_weights_of_a_calibrated_patch_bring_its_linear_branch():
    model, arguments, _ = patched("wan")
    calibrate_sparse(model, lambda: models.output(model, arguments))
    other = patched("wan")[0]
    other.load_state_dict(model.state_dict())
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))
