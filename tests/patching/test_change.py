"""Settings of a patched model are changed in place."""

import math
import warnings

import pytest
import torch
from peft import LoraConfig

import mhla_diffusers as mhla
from mhla_diffusers.attention import extend_mixing
from mhla_diffusers.attention.mixing import causal_mixing

from ..families.cases import case_of
from ..families.cases import output as case_output
from ..models import FAMILIES, inputs, output, patched
from ..pipelines import wan22_pipeline
from ..refusals import refused
from .shared import (
    EVERYTHING,
    ONE_PER_CLASS,
    assert_equal_up_to_order,
    assert_same_footprint,
    footprint,
    mixings,
    own_form,
    trained,
)


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_other_blocks_and_layers_are_those_that_load_mhla_opens(name, tmp_path):
    case = FAMILIES[name]
    blocks = tuple(2 * count for count in case.blocks[:-1]) + case.blocks[-1:]
    model = trained(name)
    mhla.save_mhla(model, tmp_path)
    assert mhla.change_mhla(model, blocks=blocks) is model
    loaded = mhla.load_mhla(case.build(), tmp_path, blocks=blocks)
    assert torch.equal(output(model, inputs(name)), output(loaded, inputs(name)))
    mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs(name)), output(case.build(), inputs(name)))


def own_parameters(model):
    return {name: parameter for name, parameter in model.named_parameters() if ".mhla." in name}


@pytest.mark.parametrize(
    ("change", "keeps"),
    [
        ({"dense_first": 2}, True),
        ({"backend": "eager"}, True),
        ({"eps": 1e-5}, True),
        ({"rope": "before"}, True),
        ({"blocks": (1, 2, 3)}, False),
        ({"output_norm": True}, False),
    ],
    ids=str,
)
def test_which_changes_keep_the_parameters(change, keeps):
    """Those that stay are the same objects, so an optimizer that was made before goes on training them."""
    model = trained("wan")
    before = own_parameters(model)
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    optimizer = torch.optim.SGD(before.values(), lr=0.1)
    mhla.change_mhla(model.train(), **change)
    after = own_parameters(model)
    assert set(before) <= set(after)
    assert all((after[name] is parameter) is keeps for name, parameter in before.items())
    if not keeps:
        return
    assert all(torch.equal(after[name], value) for name, value in values.items())
    output_before = output(model, inputs("wan"))
    model(**inputs("wan")).sample.square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(after[name], value) for name, value in values.items() if name.endswith("mixing"))
    assert not torch.equal(output(model, inputs("wan")), output_before)


@pytest.mark.parametrize(
    ("name", "before", "change"),
    [
        ("wan", {"density": 0.1}, {"density": 0.3, "block_size": 8, "far": "means"}),
        ("wan", {"blocks": (1, 1, 1)}, {"blocks": (2, 2, 2), "mixing_per_head": True}),
        ("wan", {"blocks": (2, 2, 3), "block_length": 2}, {"own": "linear"}),
        ("wan", {"blocks": (2, 2, 3), "block_length": 2, "own": "linear"}, {"own": "softmax"}),
    ],
    ids=str,
)
def test_what_has_learned_nothing_is_as_fresh_and_as_loaded(name, before, change, tmp_path):
    case = case_of(name)
    fresh = mhla.apply_mhla(case.transformer(), **before | change)
    model = mhla.change_mhla(mhla.apply_mhla(case.transformer(), **before), **change)
    assert torch.equal(case_output(model, case.inputs()), case_output(fresh, case.inputs()))
    mhla.save_mhla(model, tmp_path)
    loaded = mhla.load_mhla(case.transformer(), tmp_path)
    assert torch.equal(case_output(model, case.inputs()), case_output(loaded, case.inputs()))


def test_layers_are_added_and_taken_away():
    """Kept ones keep what they have learned, new ones start fresh, others attend as before."""
    model, original = trained("wan", layers=[0, 1]), FAMILIES["wan"].build()
    before = {path: layer.mixing.detach().clone() for path, layer in mhla.mhla_layers(model).items()}
    mhla.change_mhla(model, layers=[1, 2])
    layers = mhla.mhla_layers(model)
    assert list(layers) == ["blocks.1.attn1.mhla", "blocks.2.attn1.mhla"]
    assert torch.equal(layers["blocks.1.attn1.mhla"].mixing, before["blocks.1.attn1.mhla"])
    fresh = mhla.mhla_layers(patched("wan"))["blocks.2.attn1.mhla"]
    assert torch.equal(layers["blocks.2.attn1.mhla"].mixing, fresh.mixing)
    assert [layer.runs_mhla for layer in mhla.describe(model)] == [False, True, True, False]
    output(model, inputs("wan"))
    mhla.remove_mhla(model)
    assert torch.equal(output(model, inputs("wan")), output(original, inputs("wan")))


@pytest.mark.parametrize("name", ["output_norm", "output_gate", "convolution"])
def test_a_change_tells_what_is_lost_of_what_was_learned(name):
    model = patched("wan", **EVERYTHING)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mhla.change_mhla(model, **{name: None if name == "convolution" else False})  # nothing was learned
    model = trained("wan", **EVERYTHING)
    for layer in mhla.mhla_layers(model).values():
        for parameter in layer.parameters():
            torch.nn.init.uniform_(parameter)
    with pytest.warns(UserWarning, match=f"{name.removeprefix('output_gate') or 'gate'}.* is dropped"):
        mhla.change_mhla(model, **{name: None if name == "convolution" else False})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mhla.change_mhla(model, mixing_learnable=False)


def test_both_transformers_of_a_pipeline_and_diffusers_own_form():
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    mhla.change_mhla(pipe, blocks=(2, 1, 1))
    assert {layer.blocks for layer in mhla.describe(pipe)} == {(2, 1, 1)}
    model = own_form("wan", blocks=(2, 2, 3))
    mhla.change_mhla(model, blocks=(1, 1, 1))
    # one block's weight divides out
    assert_equal_up_to_order(output(model, inputs("wan")), output(patched("wan", blocks=(1, 1, 1)), inputs("wan")))


def test_what_is_frozen_stays_frozen():
    model = trained("wan", output_norm=True)
    for mixing in mixings(model):
        mixing.requires_grad_(False)
    mhla.change_mhla(model, blocks=(1, 2, 3))
    flags = {name: parameter.requires_grad for name, parameter in own_parameters(model).items()}
    assert all(flag is not name.endswith("mixing") for name, flag in flags.items())
    mhla.change_mhla(model, mixing_learnable=False)
    mhla.change_mhla(model, mixing_learnable=True)
    assert all(mixing.requires_grad for mixing in mixings(model))


CAUSAL = {"own": "linear", "causal": "block", "block_length": 2, "blocks": (2, 2, 3)}
REFUSED = {
    "another number of axes": ({}, {"blocks": (2, 2)}, "blocks=(2, 2)"),
    "a layer that is not there": ({}, {"layers": [9]}, "9 must be"),
    "no layers": ({}, {"layers": []}, "layers=()"),
    "a matrix per head": ({}, {"mixing_per_head": True}, "(12, 12)...(2, 12, 12)"),
    "a setting that there is not": ({}, {"block": (1, 1, 1)}, "'block'"),
    "a backend that there is not": ({}, {"backend": "eagre"}, "'eagre'"),
    "how matrices begin": ({}, {"mixing_init": "identity"}, "'identity'"),
    "blocks and length": (CAUSAL, {"blocks": (4, 2, 3), "block_length": 1}, "block_length=2 to 1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case):
    before_settings, settings, value = REFUSED[case]
    model = trained("wan", **before_settings)
    before = footprint(model)
    with refused(value):
        mhla.change_mhla(model, **settings)
    assert_same_footprint(model, before)
    if before_settings:  # one after the other
        for name, value in settings.items():
            mhla.change_mhla(model, **{name: value})


def test_models_that_cannot_be_changed():
    with refused("not patched"):
        mhla.change_mhla(FAMILIES["wan"].build(), blocks=(1, 1, 1))
    model = trained("wan")
    with mhla.mhla_disabled(model), refused("mhla_disabled()"):
        mhla.change_mhla(model, blocks=(1, 1, 1))
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["mhla"]))
    with refused("modules_to_save"):
        mhla.change_mhla(model, blocks=(1, 1, 1))
    assert math.prod(mhla.describe(model)[0].blocks) == 12


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("rows", [2, 5])
def test_causal_matrices_keep_their_order(rows, per_head, tmp_path):
    """More blocks go on as the last one, fewer are the first ones; what is not seen is nowhere in it."""
    model = trained("wan", **CAUSAL | {"blocks": (3, 2, 3)}, mixing_per_head=per_head)
    with torch.no_grad():
        later = torch.ones(3, 3).triu(1).repeat_interleave(6, 0).repeat_interleave(6, 1)
        for mixing in mixings(model):
            mixing.masked_fill_(later.bool(), 1e6)  # no one reads it
    before = [mixing.detach().clone() for mixing in mixings(model)]
    mhla.save_mhla(model, tmp_path)
    mhla.change_mhla(model, blocks=(rows, 2, 3))
    for mixing, old in zip(mixings(model), before, strict=True):
        shared = 6 * min(rows, 3)
        expected = causal_mixing(old, (3, 2, 3), own=True)
        torch.testing.assert_close(mixing[..., :shared, :shared], expected[..., :shared, :shared])
        if rows > 3:
            torch.testing.assert_close(mixing.detach(), extend_mixing(old, (3, 2, 3), rows))
    loaded = mhla.load_mhla(FAMILIES["wan"].build(), tmp_path, blocks=(rows, 2, 3))
    assert torch.equal(output(model, inputs("wan")), output(loaded, inputs("wan")))
    mhla.change_mhla(model, blocks=(rows, 1, 1))
    assert all(mixing.max() < 1 for mixing in mixings(model))


@pytest.mark.parametrize("signed_entry", [(7, 7), (7, 0), (0, 7)])
def test_signed_matrices_do_not_come_to_a_patch_that_takes_their_logarithm(signed_entry):
    """A later block's entry is not seen, so that its sign does not matter."""
    model = trained("wan", **CAUSAL, mixing_clip=False)
    with torch.no_grad():
        mixings(model)[1][signed_entry] = -0.1
    settings = {"own": "softmax", "mixing_clip": True}
    if signed_entry == (0, 7):
        mhla.change_mhla(model, **settings)
        assert output(model, inputs("wan")).isfinite().all()
        return
    before = footprint(model)
    with refused("blocks.1.attn1.mhla.mixing", -0.1):
        mhla.change_mhla(model, **settings)
    assert_same_footprint(model, before)
