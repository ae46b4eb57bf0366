"""Exact tiles in patched models: every choice, calibration, saving and opening at other settings."""

import re

import pytest
import torch

from mhla_diffusers import (
    MHLAConfig,
    apply_mhla,
    calibrate_sparse,
    load_mhla,
    mhla_disabled,
    mhla_layers,
    patch_names,
    remove_mhla,
    save_mhla,
)
from mhla_diffusers.attention.tile_scores import spend
from mhla_diffusers.config import load_patch
from mhla_diffusers.patching.tile_choice import TileChoice

from .. import models

SOFTMAX = ["wan", "dit"]


def inputs_and_output(name):
    model = models.FAMILIES[name].build()
    arguments = models.inputs(name)
    return model, arguments, models.output(model, arguments)


def tiles(name):
    """The blocks of a tiny model, and tiles that are these blocks."""
    return {"blocks": models.FAMILIES[name].blocks, "exact_tiles": None}


def calibrated(name, share=0.3, **settings):
    model, arguments, before = inputs_and_output(name)
    settings = {**tiles(name), "sparse": "calibrated", "density": share} | settings
    apply_mhla(model, **settings, calibration=lambda: models.output(model, arguments))
    return model, arguments, before


@pytest.mark.parametrize("name", SOFTMAX)
@pytest.mark.parametrize("exact", ["own", "content"])
def test_all_exact_is_the_softmax_attention_of_the_model(name, exact):
    model, arguments, before = inputs_and_output(name)
    blocks = models.FAMILIES[name].blocks
    own = {"exact_tiles": (1,) * len(blocks)} if exact == "own" else {"exact_tiles": None, "density": 1.0}
    apply_mhla(model, blocks=blocks, sparse=exact, **own)
    # the same sums in another order
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)
    remove_mhla(model)
    assert torch.equal(models.output(model, arguments), before)


@pytest.mark.parametrize("name", SOFTMAX)
def test_the_larger_the_share_the_smaller_the_change(name, tmp_path):
    model, arguments, before = calibrated(name, 0.1)
    changes = [models.relative_change(models.output(model, arguments), before)]
    save_mhla(model, tmp_path)
    for share in (0.3, 0.6, 1.0):
        model = load_mhla(models.FAMILIES[name].build(), tmp_path, density=share)
        changes.append(models.relative_change(models.output(model, arguments), before))
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 1e-6 < changes[0]


@pytest.mark.parametrize("name", SOFTMAX)
def test_calibrated_tiles_change_less_than_others(name):
    model, arguments, before = inputs_and_output(name)
    mhla = models.relative_change(models.output(apply_mhla(model, **tiles(name), sparse="none"), arguments), before)
    model, arguments, before = inputs_and_output(name)
    own = apply_mhla(model, **tiles(name), sparse="own", calibration=lambda: models.output(model, arguments))
    own = models.relative_change(models.output(own, arguments), before)
    model, arguments, before = calibrated(name, 0.3)
    assert models.relative_change(models.output(model, arguments), before) < own < mhla


def test_every_query_tile_has_a_key_tile_and_the_share_is_kept():
    model, _, _ = calibrated("wan", 0.25)
    shares = []
    for layer in mhla_layers(model).values():
        mask = layer.sparse.mask
        assert mask.any(dim=-1).all()
        shares.append(float(mask.float().mean()))
    assert sum(shares) / len(shares) == pytest.approx(0.25, abs=0.01)


def test_calibration_finds_the_weights_that_were_hidden():
    """Where every token looks alike, the means miss nothing, and a far field has nothing to add that is not there."""
    model, arguments, _ = inputs_and_output("dit")
    for block in model.transformer_blocks:
        for projection in (block.attn1.to_q, block.attn1.to_k):
            torch.nn.init.zeros_(projection.weight)
            torch.nn.init.constant_(projection.bias, 2.0)
    before = models.output(model, arguments)
    apply_mhla(model, **tiles("dit"), sparse="own", mixing_init="uniform")
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.pooled_bias.fill_(3.0)
    assert models.relative_change(models.output(model, arguments), before) > 1e-6
    calibrate_sparse(model, lambda: models.output(model, arguments))
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("exact", ["own", "content", "calibrated"])
def test_a_layer_knows_whether_it_was_calibrated(exact):
    model = models.patched("wan", **tiles("wan"), sparse=exact)
    assert all(layer.needs_calibration for layer in mhla_layers(model).values())
    calibrate_sparse(model, lambda: models.output(model, models.inputs("wan")))
    assert not any(layer.needs_calibration for layer in mhla_layers(model).values())
    assert not any(layer.needs_calibration for layer in mhla_layers(models.patched("wan")).values())


def test_what_cannot_be_calibrated_is_refused():
    with pytest.raises(ValueError, match="no exact tiles to calibrate"):
        calibrate_sparse(models.patched("wan"), lambda: None)
    with pytest.raises(ValueError, match=r"run\(\) did not run transformer"):
        calibrate_sparse(models.patched("wan", sparse="own", exact_tiles=None), lambda: None)
    with pytest.raises(ValueError, match="own attention of SanaTransformer2DModel is linear"):
        models.patched("sana", sparse="content")


def test_a_calibration_that_fails_leaves_the_model_as_it_was():
    model, arguments, before = inputs_and_output("wan")
    with pytest.raises(ValueError, match="did not run transformer"):
        apply_mhla(model, **tiles("wan"), sparse="calibrated", calibration=lambda: None)
    assert not mhla_layers(model)
    assert torch.equal(models.output(model, arguments), before)


def test_tiles_that_are_not_calibrated_say_how():
    model = models.patched("wan", sparse="calibrated")
    with pytest.raises(ValueError, match=r"calibrate_sparse\(pipe, run\)"):
        models.output(model, models.inputs("wan"))


@pytest.mark.parametrize("exact", ["own", "content", "calibrated"])
def test_gradients_reach_the_weights(exact):
    model, arguments, _ = inputs_and_output("wan")
    apply_mhla(model, **tiles("wan"), sparse=exact)
    if exact == "calibrated":
        calibrate_sparse(model, lambda: models.output(model, arguments))
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.linear_log_weight.zero_()
    model(**arguments).sample.square().mean().backward()
    for layer in mhla_layers(model).values():
        assert layer.linear_log_weight.grad.abs().sum() > 0
        assert layer.pooled_bias.grad.abs().sum() > 0


@pytest.mark.parametrize("name", SOFTMAX)
def test_saved_and_loaded(name, tmp_path):
    model, arguments, _ = calibrated(name)
    save_mhla(model, tmp_path / "patch")
    other = load_mhla(models.FAMILIES[name].build(), tmp_path / "patch")
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))
    # and again, since what is loaded can be saved
    save_mhla(other, tmp_path / "again")
    again = load_mhla(models.FAMILIES[name].build(), tmp_path / "again")
    assert torch.equal(models.output(again, arguments), models.output(model, arguments))


def test_opened_at_other_tile_counts_and_at_another_resolution(tmp_path):
    model, arguments, before = calibrated("wan", 0.25)
    save_mhla(model, tmp_path)
    finer = tuple(2 * count for count in models.FAMILIES["wan"].blocks)
    other = load_mhla(models.wan(), tmp_path, exact_tiles=finer)
    share = sum(float(layer.sparse.mask.float().mean()) for layer in mhla_layers(other).values()) / 4
    assert share == pytest.approx(0.25, abs=0.01)
    assert models.relative_change(models.output(other, arguments), before) < 0.1
    larger = models.inputs("wan")
    larger["hidden_states"] = larger["hidden_states"].repeat(1, 1, 1, 2, 1)
    assert models.output(model, larger).isfinite().all()


def test_a_state_dict_brings_its_lists():
    model, arguments, _ = calibrated("wan")
    other = apply_mhla(models.wan(), next(iter(mhla_layers(model).values())).config)
    other.load_state_dict(model.state_dict())
    assert torch.equal(models.output(other, arguments), models.output(model, arguments))


def test_automatic_layers_with_exact_tiles():
    model, arguments, before = calibrated("wan", layers="auto:2/4")
    assert len(mhla_layers(model)) == 2
    assert models.relative_change(models.output(model, arguments), before) > 0


@pytest.mark.parametrize("exact", ["own", "content", "calibrated"])
def test_compiles_to_one_graph(exact):
    model, arguments, _ = inputs_and_output("wan")
    del model.blocks[1:]
    settings = {**tiles("wan"), "exact": exact}
    apply_mhla(model, **settings, calibration=lambda: models.output(model, arguments))
    expected = models.output(model, arguments)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(models.output(compiled, arguments), expected, rtol=1e-4, atol=1e-5)


def test_softmax_patches_come_with_exact_tiles_too():
    names = set(patch_names())
    for name in names:
        if load_patch(name).config.sparse == "none" and not name.startswith("sana"):
            assert f"{name}-exact" in names
    assert not [name for name in names if name.startswith("sana") and name.endswith("-exact")]


def save_as_of_old(model, folder):
    """Save a patch with the own tile exact as the first format had it, when that was called near field."""
    save_mhla(model, folder)
    path = folder / "mhla_config.json"
    text = path.read_text().replace('"format_version": 2', '"format_version": 1').replace('"base_weights": []', "")
    for line in ('"exact_tiles": null,', '"density": null,', '"pooled": false,', ',\n "unpatched": []'):
        assert line in text
        text = text.replace(line, "")
    text = text.replace('"sparse": "own"', '"near_field": "softmax"')
    path.write_text(re.sub(r"},\s*}", "}}", text))
    assert '"near_field"' in path.read_text()


def test_a_near_field_of_old_opens_as_its_own_tile(tmp_path):
    """What a query's own block got from MHLA is nothing, as it was."""
    model, arguments, _ = inputs_and_output("wan")
    apply_mhla(model, **tiles("wan"), sparse="own", pooled=False)
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.mixing.diagonal(dim1=-2, dim2=-1).zero_()
    expected = models.output(model, arguments)
    save_as_of_old(model, tmp_path)
    other = load_mhla(models.wan(), tmp_path)
    assert torch.equal(models.output(other, arguments), expected)


@pytest.mark.parametrize("is_old", [False, True])
@pytest.mark.parametrize(("saved", "opened"), [((2, 2, 3), (1, 1, 1)), ((1, 1, 1), (2, 2, 3))])
def test_own_tiles_open_at_one_block_and_one_block_at_several(saved, opened, is_old, tmp_path):
    """One block is one tile, which is softmax attention over everything."""
    model, arguments, before = inputs_and_output("wan")
    apply_mhla(model, blocks=saved, sparse="own", exact_tiles=None, pooled=False)
    (save_as_of_old if is_old else save_mhla)(model, tmp_path)
    other = load_mhla(models.wan(), tmp_path, blocks=opened)
    found = models.output(other, arguments)
    assert {layer.config.blocks for layer in mhla_layers(other).values()} == {opened}
    if opened == (1, 1, 1):
        torch.testing.assert_close(found, before, rtol=1e-4, atol=1e-5)
    else:
        models.assert_changed(found, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparse": "window"}, "sparse='window' is unknown; allowed: 'none', 'own', 'calibrated', 'content'"),
        ({"sparse": "own", "normalize": False, "output_norm": True}, "needs normalize=True"),
        ({"sparse": "own", "eps": 0.0}, "eps=0.0"),
        ({"exact_tiles": (2, 2)}, "has no effect with sparse='none'"),
        ({"sparse": "content", "exact_tiles": (2, 2, 2)}, "as many axes as blocks"),
        ({"sparse": "content", "exact_tiles": (2, 0)}, r"exact_tiles=\(2, 0\) must hold positive integers"),
        ({"sparse": "own", "density": 0.1}, "density=0.1 has no effect with sparse='own'"),
        ({"sparse": "content", "density": 0.0}, r"must be in \(0, 1\]"),
        ({"sparse": "content", "density": "5%"}, "must be a number"),
        ({"sparse": "content", "pooled": 1}, "pooled=1 must be True or False"),
    ],
)
def test_what_does_not_fit_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        MHLAConfig(blocks=(2, 2), **settings)


def test_tiles_must_fit_the_grid():
    model = models.patched("wan", sparse="own", exact_tiles=(2, 99, 2))
    with pytest.raises(ValueError, match="too few for 99 exact_tiles"):
        models.output(model, models.inputs("wan"))


def test_tiles_by_content_are_single_tokens_where_there_are_no_more():
    """Each tile is then its own mean, so that nothing of softmax attention is left out."""
    model, arguments, before = inputs_and_output("wan")
    apply_mhla(model, blocks=models.FAMILIES["wan"].blocks, sparse="content", exact_tiles=(99, 99, 99))
    with torch.no_grad():
        for layer in mhla_layers(model).values():
            layer.linear_log_weight.fill_(-30.0)
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


def test_the_budget_is_spent_where_it_is_worth_most():
    generator = torch.Generator().manual_seed(0)
    low, high = torch.rand(2, 6, 6, generator=generator) / 10, torch.rand(2, 6, 6, generator=generator)
    low_mask, high_mask = spend([low, high], 0.3)
    assert int(low_mask.sum() + high_mask.sum()) == round(0.3 * 2 * 72)
    assert int(low_mask.sum()) == 12, "one key tile for every query tile"
    assert low_mask.gather(-1, low.argmax(dim=-1, keepdim=True)).all()
    assert int(high_mask.sum(dim=-1).max()) == 4, "twice the average, rounded up"


def test_no_query_tile_starves():
    """One whose errors are small beside all others still gets its best key tiles, half as many as the average."""
    scores = torch.rand(2, 12, 12, generator=torch.Generator().manual_seed(0))
    scores[0] /= 1e6
    (mask,) = spend([scores], 0.5)
    assert int(mask.sum()) == 144
    starved = mask[0]
    assert (starved.sum(dim=-1) >= 3).all()
    assert starved.gather(-1, scores[0].topk(3, dim=-1).indices).all()


def heads_of(attn, run):
    """What every head of an attention adds to its output: (B, N, H, channels)."""
    found = []
    handle = attn.to_out[0].register_forward_pre_hook(lambda _, args: found.append(args[0].detach()))
    run()
    handle.remove()
    weight = attn.to_out[0].weight.unflatten(1, (attn.heads, -1))
    return torch.einsum("bnhd,chd->bnhc", found[0].unflatten(-1, (attn.heads, -1)), weight)


@pytest.mark.parametrize("exact", ["own", "content", "calibrated"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_fitted_weights_bring_heads_closer(name, exact):
    """Than other ones do, on the run that they were fitted on and with the same lists."""
    model, arguments, _ = inputs_and_output(name)

    def run():
        return models.output(model, arguments)

    apply_mhla(model, **tiles(name), sparse=exact, layers=[1], calibration=run)
    attn = model.get_submodule(next(iter(mhla_layers(model))).removesuffix(".mhla"))
    with mhla_disabled(model):
        softmax = heads_of(attn, run)

    def error():
        return (heads_of(attn, run) - softmax).square().sum(dim=(0, 1, 3))

    fitted = error()
    for pooled_bias in (-1.0, 0.0, 1.0):
        for log_weight in (-3.0, 0.0, 3.0):
            with torch.no_grad():
                attn.mhla.linear_log_weight.fill_(log_weight)
                attn.mhla.pooled_bias.fill_(pooled_bias)
            # some queries of every tile stand for all
            assert (fitted < 1.05 * error()).all()


def test_scores_are_kept_for_the_heaviest_pairs():
    config = MHLAConfig(blocks=(2, 3), sparse="calibrated")
    choice, scores = TileChoice(config, 3), torch.rand(3, 6, 6, generator=torch.Generator().manual_seed(0))
    choice.keep_scores(scores)
    kept = choice.all_scores()
    assert int((kept > 0).sum()) == 22, "a fifth of 108 pairs"
    torch.testing.assert_close(kept[kept > 0], scores[kept > 0], rtol=1e-3, atol=0)
    assert float(scores[kept == 0].max()) <= float(kept[kept > 0].min()) + 1e-3
