"""Weights of the model itself that an adapted patch replaces: fused or not, under adapters, and back at removal."""

import copy

import pytest
import torch
from peft import LoraConfig

import mhla_diffusers as mhla

from ..models import FAMILIES, assert_changed, inputs, output
from ..pipelines import wan22_pipeline
from ..refusals import refused
from .shared import PROJECTIONS, assert_same_footprint, footprint, with_lora

FUSABLE = ["wan", "wan_i2v", "sana"]
"""Models whose class fuses projections of self- or cross-attention; "wan_i2v" also those of the image tokens."""


def adapted(name: str, seed: int = 3):
    """A patched model all of whose weights were trained a little."""
    model = mhla.apply_mhla(FAMILIES[name].build(), blocks=FAMILIES[name].blocks)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.rand(parameter.shape, generator=generator))
    return model


def base_for(weights: str, name: str):
    """What ``save_mhla`` is to compare with, if it compares."""
    return FAMILIES[name].build() if weights == "changed" else None


def saved(name: str, folder, weights: str = "changed", seed: int = 3):
    """Folder of such a model, and what it computes."""
    model = adapted(name, seed)
    mhla.save_mhla(model, folder, weights=weights, base=base_for(weights, name))
    return folder, output(model, inputs(name))


@pytest.mark.parametrize("weights", ["changed", "all"])
@pytest.mark.parametrize("name", FUSABLE)
def test_fused_projections_are_saved_and_loaded_by_their_parts(name, weights, tmp_path):
    """Saved from either form, loaded into either, and fused or unfused afterwards."""
    model = adapted(name)
    expected = output(model, inputs(name))
    mhla.save_mhla(model, tmp_path / "single", weights=weights, base=base_for(weights, name))
    model.fuse_qkv_projections()
    mhla.save_mhla(model, tmp_path / "fused", weights=weights, base=base_for(weights, name))
    records = [mhla.patching.read_record(tmp_path / form) for form in ("single", "fused")]
    assert records[0] == records[1]
    for is_fused in (False, True):
        other = FAMILIES[name].build()
        if is_fused:
            other.fuse_qkv_projections()
        before = copy.deepcopy(other.state_dict())
        mhla.load_mhla(other, tmp_path / "fused")
        torch.testing.assert_close(output(other, inputs(name)), expected, rtol=1e-4, atol=1e-4)
        other.unfuse_qkv_projections() if is_fused else other.fuse_qkv_projections()
        torch.testing.assert_close(output(other, inputs(name)), expected, rtol=1e-4, atol=1e-4)
        other.fuse_qkv_projections() if is_fused else other.unfuse_qkv_projections()
        mhla.remove_mhla(other)
        assert all(torch.equal(tensor, before.pop(key)) for key, tensor in other.state_dict().items())
        assert not before


@pytest.mark.parametrize("weights", ["changed", "all"])
@pytest.mark.parametrize("name", ["wan_vace", "sana", "dit"])
def test_removal_of_an_adapted_patch_is_exact_and_two_do_not_mix(name, weights, tmp_path):
    first, expected_first = saved(name, tmp_path / "first", weights)
    second, expected_second = saved(name, tmp_path / "second", weights, seed=4)
    model = FAMILIES[name].build()
    before, untouched = footprint(model), output(model, inputs(name))
    for folder, expected in ((first, expected_first), (second, expected_second), (first, expected_first)):
        mhla.load_mhla(model, folder)
        assert torch.equal(output(model, inputs(name)), expected)
        assert_changed(expected, untouched)
        mhla.remove_mhla(model)
        assert_same_footprint(model, before)


def test_removal_of_an_adapted_patch_from_a_copy_and_in_another_type(tmp_path):
    folder, _ = saved("wan", tmp_path)
    model = FAMILIES["wan"].build()
    before = copy.deepcopy(model.state_dict())
    mhla.load_mhla(model, folder)
    clone = mhla.remove_mhla(copy.deepcopy(model).to(torch.bfloat16))
    assert all(torch.equal(x, before[name].to(torch.bfloat16)) for name, x in clone.state_dict().items())
    assert mhla.is_patched(model)
    mhla.remove_mhla(model)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())
    # what was brought back is forgotten, so that a second removal leaves later training alone
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    with torch.no_grad():
        model.blocks[0].attn1.to_q.weight.zero_()
    mhla.remove_mhla(model)
    assert not model.blocks[0].attn1.to_q.weight.any()


def test_an_interruption_while_loading_leaves_the_model_as_it_was(tmp_path):
    pipe, base = wan22_pipeline(), wan22_pipeline()
    mhla.apply_mhla(pipe, blocks=(1, 1, 1))
    with torch.no_grad():
        for transformer in (pipe.transformer, pipe.transformer_2):
            transformer.blocks[0].attn1.to_q.weight.mul_(1.5)
    mhla.save_mhla(pipe, tmp_path, weights="changed", base=base)
    before = footprint(base.transformer), footprint(base.transformer_2)
    interrupted = []

    def interrupt(module, *_):
        if mhla.is_patched(module) and not interrupted:
            interrupted.append(mhla.is_patched(base.transformer))
            raise KeyboardInterrupt

    hook = base.transformer_2.register_state_dict_post_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        mhla.load_mhla(base, tmp_path)
    hook.remove()
    assert interrupted == [True], "the first transformer was patched already"
    assert_same_footprint(base.transformer, before[0])
    assert_same_footprint(base.transformer_2, before[1])


def test_an_adapted_patch_under_lora(tmp_path):
    """Its weights go under the adapters, before or after which it is loaded, and removal brings back the model's."""
    folder, _ = saved("wan", tmp_path)
    only_lora = with_lora(FAMILIES["wan"].build(), *PROJECTIONS)
    before = output(only_lora, inputs("wan"))
    first_patch = with_lora(mhla.load_mhla(FAMILIES["wan"].build(), folder), *PROJECTIONS)
    expected = output(first_patch, inputs("wan"))
    mhla.load_mhla(only_lora, folder)
    assert torch.equal(output(only_lora, inputs("wan")), expected)
    for model in (first_patch, only_lora):
        assert torch.equal(output(mhla.remove_mhla(model), inputs("wan")), before)
    # PEFT's modules_to_save puts a module that the patch changed into a wrapper
    model = mhla.load_mhla(FAMILIES["wan"].build(), folder)
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["proj_out"]))
    mhla.remove_mhla(model)
    assert torch.equal(model.proj_out.original_module.weight, FAMILIES["wan"].build().proj_out.weight)


def test_an_adapted_patch_and_lora_that_is_merged_are_refused_by_name(tmp_path):
    folder, expected = saved("wan", tmp_path)
    model = with_lora(FAMILIES["wan"].build(), "to_q")
    model.fuse_lora()
    before = footprint(model)
    with refused("blocks.0", "unfuse_lora() before you load"):
        mhla.load_mhla(model, folder)
    assert_same_footprint(model, before)
    patched = mhla.load_mhla(FAMILIES["wan"].build(), folder)
    patched.add_adapter(LoraConfig(r=4, target_modules=["to_q"]))
    patched.fuse_lora()
    with refused("unfuse_lora() before you remove the patch"):
        mhla.remove_mhla(patched)
    torch.testing.assert_close(output(patched, inputs("wan")), expected)


class Int8Params(torch.nn.Parameter):
    """As libraries hold quantised weights, of a class of their own whose data is a plain tensor."""


def test_quantised_parameters_are_refused_by_their_class(tmp_path):
    folder, _ = saved("wan", tmp_path)
    model = FAMILIES["wan"].build()
    layer = model.blocks[0].ffn.net[2]
    layer.weight = Int8Params(layer.weight.detach().to(torch.int8)[:, :16], requires_grad=False)
    with refused("blocks.0.ffn.net.2.weight", "Int8Params"):
        mhla.load_mhla(model, folder)
    assert not mhla.mhla_layers(model)
