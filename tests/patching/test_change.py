"""Settings of a patched model are changed in place."""

import pytest
import torch

import mhla_diffusers as mhla

from ..families.cases import footprint
from ..models import FAMILIES, inputs, output, patched
from ..pipelines import wan22_pipeline
from ..refusals import refused
from .shared import CAUSAL, assert_equal_up_to_order, own_form, trained


@pytest.mark.parametrize(
    "change", [{"dense_first": 2}, {"backend": "eager"}, {"eps": 1e-5}, {"rope": "before"}], ids=str
)
def test_parameters_stay(change):
    """They are the same objects, so an optimizer that was made before goes on training them."""
    model = trained("wan")
    before = {name: one for name, one in model.named_parameters() if ".mhla." in name}
    values = {name: parameter.detach().clone() for name, parameter in before.items()}
    optimizer = torch.optim.SGD(before.values(), lr=0.1)
    mhla.change_mhla(model.train(), **change)
    after = {name: one for name, one in model.named_parameters() if ".mhla." in name}
    assert set(before) == set(after)
    assert all(after[name] is parameter for name, parameter in before.items())
    assert all(torch.equal(after[name], value) for name, value in values.items())
    output_before = output(model, inputs("wan"))
    model(**inputs("wan")).sample.square().mean().backward()
    optimizer.step()
    assert not any(torch.equal(after[name], value) for name, value in values.items() if name.endswith("mixing"))
    assert not torch.equal(output(model, inputs("wan")), output_before)


def test_changed_sparse_attention_is_that_of_a_fresh_patch():
    before, change = {"density": 0.1}, {"density": 0.3, "block_size": 8, "far": "means"}
    fresh, model = patched("wan", **before | change), mhla.change_mhla(patched("wan", **before), **change)
    assert torch.equal(output(model, inputs("wan")), output(fresh, inputs("wan")))


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


def test_both_transformers_of_a_pipeline_and_diffusers_own_form():
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    mhla.change_mhla(pipe, eps=1e-5)
    assert {layer.config.eps for layer in mhla.describe(pipe)} == {1e-5}
    model = own_form("wan", blocks=(2, 2, 3))
    mhla.change_mhla(model, rope="before")
    expected = output(patched("wan", blocks=(2, 2, 3), rope="before"), inputs("wan"))
    assert_equal_up_to_order(output(model, inputs("wan")), expected)
    mhla.change_mhla(model, layers=[1])
    expected = output(patched("wan", blocks=(2, 2, 3), rope="before", layers=[1]), inputs("wan"))
    assert_equal_up_to_order(output(model, inputs("wan")), expected)


REFUSED = {
    "another number of axes": ({}, {"blocks": (2, 2)}, "blocks=(2, 2)"),
    "a layer that is not there": ({}, {"layers": [9]}, "9 must be"),
    "other blocks": ({}, {"blocks": (1, 2, 3)}, "blocks=(1, 2, 3)...load_mhla"),
    "another part": ({}, {"output_norm": True}, "output_norm=True...apply_mhla"),
    "a matrix per head": ({}, {"mixing_per_head": True}, "mixing_per_head=True"),
    "a backend that there is not": ({}, {"backend": "eagre"}, "'eagre'"),
    "another length of causal blocks": (CAUSAL, {"block_length": 1}, "block_length=1"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_changes_nothing(case):
    before_settings, settings, value = REFUSED[case]
    model = trained("wan", **before_settings)
    before = footprint(model)
    with refused(value):
        mhla.change_mhla(model, **settings)
    assert footprint(model) == before


def test_models_that_cannot_be_changed():
    with refused("not patched"):
        mhla.change_mhla(FAMILIES["wan"].build(), rope="before")
    model = trained("wan")
    with mhla.mhla_disabled(model), refused("mhla_disabled()"):
        mhla.change_mhla(model, rope="before")
