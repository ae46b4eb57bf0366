"""The three attentions of a patch, which names of settings choose; and sparse attention, which learns nothing."""

import logging
import math

import pytest
import torch

from mhla_diffusers import (
    CausalConfig,
    MHLAConfig,
    SparseConfig,
    apply_mhla,
    change_mhla,
    describe,
    load_mhla,
    mhla_layers,
    remove_mhla,
    save_mhla,
    set_attn_processor,
)
from mhla_diffusers.patching.layer import SparseLayer
from mhla_diffusers.patching.processor import MHLAProcessor

from .. import models
from ..refusals import refused
from .shared import footprint

SOFTMAX = ["wan", "dit"]
CAUSAL = {"blocks": (2, 2, 3), "causal": "block", "block_length": 2}


def patched(name, **settings):
    model, arguments = models.FAMILIES[name].build(), models.inputs(name)
    before = models.output(model, arguments)
    return apply_mhla(model, **{"block_size": 4, "density": 0.2} | settings), arguments, before


def configs(model):
    return {layer.config for layer in mhla_layers(model).values()}


@pytest.mark.parametrize(
    ("name", "settings", "kind", "words"),
    [
        ("wan", {}, SparseConfig, "sparse attention: "),
        ("dit", {"layers": [1]}, SparseConfig, "sparse attention: "),
        ("dit", {"far": "means"}, SparseConfig, "sparse attention: "),
        ("wan", {"density": 1.0}, SparseConfig, "sparse attention: all pairs listed"),
        ("wan", {"blocks": (2, 2, 3)}, MHLAConfig, "MHLA: "),
        ("dit", {"feature_map": "elu+1"}, MHLAConfig, "MHLA: "),
        ("sana", {}, MHLAConfig, "MHLA: "),
        ("wan", CAUSAL, CausalConfig, "causal MHLA: softmax within the own block"),
        ("wan", CAUSAL | {"own": "linear"}, CausalConfig, "causal MHLA: MHLA throughout"),
    ],
    ids=str,
)
def test_names_decide_which_attention_runs_and_describe_says_it_first(name, settings, kind, words):
    model = apply_mhla(models.FAMILIES[name].build(), **settings)
    (config,) = configs(model)
    assert type(config) is kind
    assert all(isinstance(layer, SparseLayer) is (kind is SparseConfig) for layer in mhla_layers(model).values())
    assert str(describe(model)).startswith(words)
    models.output(model, models.inputs(name))
    assert str(describe(model)).startswith(words)


@pytest.mark.parametrize(
    "settings", [{"density": 0.1, "blocks": (2, 2, 3)}, {"far": "means", "block_length": 2}], ids=str
)
def test_settings_of_two_attentions_are_refused_with_both_names(settings):
    model = models.wan()
    before = footprint(model)
    one, other = settings
    for patch in (lambda: apply_mhla(model, **settings), lambda: MHLAProcessor(**settings)):
        with refused(one, other):
            patch()
    assert footprint(model)["processors"] == before["processors"]


@pytest.mark.parametrize(
    ("before", "change"),
    [({"density": 0.1}, {"blocks": (2, 2, 3)}), ({"blocks": (2, 2, 3)}, {"density": 0.1})],
    ids=str,
)
def test_a_change_stays_within_the_kind(before, change):
    model = apply_mhla(models.wan(), **before)
    config, (name,) = configs(model), change
    with refused(name, "remove_mhla()"):
        change_mhla(model, **change)
    assert configs(model) == config


@pytest.mark.parametrize(
    ("settings", "warns"),
    [({}, False), ({"density": 0.1}, False), ({"blocks": (2, 2, 3)}, True), (CAUSAL, True)],
    ids=str,
)
def test_what_has_to_be_adapted_warns_once(caplog, settings, warns):
    with caplog.at_level(logging.WARNING, "mhla_diffusers"):
        model = apply_mhla(models.wan(), **settings)
        models.output(model, models.inputs("wan"))
    found = [one.getMessage() for one in caplog.records if "adapted" in one.getMessage()]
    assert len(found) == warns
    assert all("MHLA in 4 of the 4 self-attentions" in one for one in found)
    caplog.clear()
    apply_mhla(models.sana(), blocks=(4, 2))  # whose own attention is linear
    assert not caplog.records


@pytest.mark.parametrize("name", models.FAMILIES)
def test_sparse_attention_has_no_parameters_and_no_training(name):
    if name.startswith("sana"):
        with refused("SanaTransformer2DModel is linear"):
            apply_mhla(models.FAMILIES[name].build(), density=0.1)
        return
    model, arguments, before = patched(name)
    assert list(model.state_dict()) == list(models.FAMILIES[name].build().state_dict())
    for layer in mhla_layers(model).values():
        assert list(layer.parameters()) == list(layer.buffers()) == []
    expected = models.output(model, arguments)
    models.assert_changed(expected, before)
    for is_training in (True, False):
        for layer in mhla_layers(model).values():
            layer.train(is_training)
        assert torch.equal(models.output(model, arguments), expected)
    assert sum(layer.extra_parameters for layer in describe(model)) == 0
    remove_mhla(model)
    assert torch.equal(models.output(model, arguments), before)


@pytest.mark.parametrize("far", ["first-order", "means"])
@pytest.mark.parametrize("name", SOFTMAX)
def test_the_higher_the_density_the_smaller_the_change(name, far):
    model, arguments, before = patched(name, density=0.05, far=far)
    changes = [models.relative_change(models.output(model, arguments), before)]
    for density in (0.1, 0.3, 0.6, 0.9, 1.0):
        change_mhla(model, density=density)
        changes.append(models.relative_change(models.output(model, arguments), before))
    assert changes == sorted(changes, reverse=True)
    assert changes[-1] < 1e-6 < 1e-3 < changes[0]


@pytest.mark.parametrize(
    "settings", [{"density": 1.0}, {"block_size": 1024}, {"density": 0.99}, {"block_size": 1, "density": 0.05}], ids=str
)
@pytest.mark.parametrize("name", SOFTMAX)
def test_where_nothing_is_left_out_it_is_softmax_attention(name, settings):
    """At density 1, on a grid of one block, at a density that lists every block, and with blocks of one token."""
    model, arguments, before = patched(name, **settings)
    # the same sums in another order
    torch.testing.assert_close(models.output(model, arguments), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.1), (torch.float16, 0.02)], ids=str)
@pytest.mark.parametrize("name", SOFTMAX)
def test_half_precision(name, dtype, tolerance):
    """Some lists differ from those of float32, by blocks that matter alike."""
    model, arguments, _ = patched(name)
    expected = models.output(model, arguments)
    halved = {key: x.to(dtype) if x.is_floating_point() else x for key, x in arguments.items()}
    found = models.output(model.to(dtype), halved)
    assert found.dtype == dtype and models.relative_change(found, expected) < tolerance


def test_saved_loaded_and_opened_with_another_density(tmp_path):
    model, arguments, _ = patched("wan")
    expected = models.output(model, arguments)
    save_mhla(model, tmp_path / "patch")
    opened = load_mhla(models.wan(), tmp_path / "patch")
    assert torch.equal(models.output(opened, arguments), expected)
    save_mhla(opened, tmp_path / "again")  # since what is loaded can be saved
    assert torch.equal(models.output(load_mhla(models.wan(), tmp_path / "again"), arguments), expected)
    denser = load_mhla(models.wan(), tmp_path / "patch", density=0.5)
    assert configs(denser) == {SparseConfig(block_size=4, density=0.5)}
    wide = arguments | {"hidden_states": arguments["hidden_states"].repeat(1, 1, 1, 2, 1)}
    assert models.output(denser, wide).isfinite().all(), "another resolution"
    with refused("blocks"):
        load_mhla(models.wan(), tmp_path / "patch", blocks=(1, 1, 1))


def test_gradients_reach_the_model():
    model, arguments, _ = patched("wan")
    model.train()(**arguments).sample.square().mean().backward()
    for block in model.blocks:
        assert all(block.attn1.get_submodule(name).weight.grad.abs().sum() > 0 for name in ("to_q", "to_k", "to_v"))


@pytest.mark.slow
def test_compiles_to_one_graph():
    model, arguments, _ = patched("wan")
    del model.blocks[1:]
    expected = models.output(model, arguments)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(models.output(compiled, arguments), expected, rtol=1e-4, atol=1e-5)


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


def test_the_blocks_of_a_family_fit_short_clips():
    model = apply_mhla(models.wan(), eps=1e-5)
    arguments = models.inputs("wan")
    for frames in (1, 2):
        short = arguments | {"hidden_states": arguments["hidden_states"][:, :, :frames]}
        assert models.output(model, short).isfinite().all()
        (found,) = {layer.blocks for layer in describe(model)}
        assert math.prod(found) <= 1.5 * math.sqrt(2 * math.prod(describe(model)[0].grid)), "up to rounding"


def test_a_hybrid_of_a_processor_of_ours():
    model = models.wan()
    set_attn_processor(model, MHLAProcessor(density=0.2, layers="1/2"))
    assert [layer.runs_mhla for layer in describe(model)] == [False, True, False, True]
