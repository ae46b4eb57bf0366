"""LoRA and fused projections on patched models, and the LoRA that belongs to a patch."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model_state_dict
from peft.tuners.lora import LoraLayer
from peft.utils import ModulesToSaveWrapper
from safetensors.torch import load_file

import mhla_diffusers as mhla
from mhla_diffusers.patching import find_patched, register_mixing_clip

from ..families.cases import case_of
from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import wan_pipeline
from ..refusals import refused
from .shared import ONE_PER_CLASS, PROJECTIONS, assert_equal_up_to_order, mixings, with_lora


def lora_layers(model):
    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_patching_and_removing_under_lora(name, tmp_path):
    """In either order, merged and unmerged; removal leaves the adapter in place, and its file holds nothing else."""
    only_lora, both = (with_lora(one, *PROJECTIONS) for one in (FAMILIES[name].build(), patched(name)))
    before, expected = output(only_lora, inputs(name)), output(both, inputs(name))
    assert_changed(expected, output(patched(name), inputs(name)))
    mhla.apply_mhla(only_lora, find_patched(both)["transformer"].config)
    assert torch.equal(output(only_lora, inputs(name)), expected)
    merged = copy.deepcopy(both)
    for change in ("merge", "unmerge"):
        for layer in lora_layers(merged):
            getattr(layer, change)()
        assert_equal_up_to_order(output(merged, inputs(name)), expected)
    if name != "dit":  # diffusers has no LoRA files of DiT
        both.save_lora_adapter(tmp_path)
        (file,) = tmp_path.glob("*.safetensors")
        assert all("lora_" in key and "mhla" not in key for key in load_file(file))
    for model in (only_lora, both):
        assert torch.equal(output(mhla.remove_mhla(model), inputs(name)), before)


def with_copies(model):
    """An adapter with a copy of every MHLA layer, which PEFT trains and saves along with LoRA."""
    model.add_adapter(LoraConfig(r=4, target_modules=["to_q", "to_v"], modules_to_save=["mhla"]))
    return model


def test_lora_with_mixing_trains_the_copy_at_every_size(tmp_path):
    """PEFT copies the layers; the copies see the grid, and are what is found, clipped, saved and trained."""
    model, reference = (patched("wan", blocks=(2, 2, 2), convolution=3) for _ in range(2))
    layers = mhla.mhla_layers(with_copies(model))
    assert list(layers) == [f"blocks.{index}.attn1.mhla" for index in range(4)]
    with torch.no_grad():
        for layer in layers.values():
            layer.convolution.weight.add_(0.1)
            layer.mixing.mul_(0.5)
    for layer in mhla.mhla_layers(reference).values():
        layer.load_state_dict(next(iter(layers.values())).state_dict())
    wide = inputs("wan")
    for arguments in (wide, wide | {"hidden_states": wide["hidden_states"].mT}, inputs("wan", ragged=True)):
        assert torch.equal(output(model, arguments), output(reference, arguments))
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    register_mixing_clip(optimizer, model)
    model(**wide).sample.square().mean().backward()
    assert all(layer.mixing.grad is not None for layer in layers.values())
    loaded = mhla.load_mhla(FAMILIES["wan"].build(), mhla.save_mhla(model, tmp_path))
    assert all(torch.equal(one, other) for one, other in zip(mixings(model), mixings(loaded), strict=True))
    with refused("LoRA...weights='all'"):
        mhla.save_mhla(model, tmp_path, weights="all")
    for module in model.modules():
        if isinstance(module, ModulesToSaveWrapper):  # diffusers' disable_adapters() leaves these on
            module.enable_adapters(False)
    model.disable_adapters()
    assert torch.equal(output(model, wide), output(patched("wan", blocks=(2, 2, 2), convolution=3), wide))
    mhla.remove_mhla(model)
    assert not mhla.is_patched(model)


@torch.no_grad()
@pytest.mark.parametrize("name", ["wan", "wan_i2v", "sana"])
@pytest.mark.parametrize("fused", ["before", "after"])
def test_fused_projections(name, fused):
    """Fused and unfused again, whose weights are then read by nobody; and removed in between."""
    model, expected = FAMILIES[name].build(), output(patched(name), inputs(name))
    plain = output(model, inputs(name))
    if fused == "before":
        model.fuse_qkv_projections()
    mhla.apply_mhla(model, find_patched(patched(name))["transformer"].config)
    if fused == "after":
        model.fuse_qkv_projections()
    assert_equal_up_to_order(output(model, inputs(name)), expected)
    removed = mhla.remove_mhla(copy.deepcopy(model))
    assert_equal_up_to_order(output(removed, inputs(name)), plain)
    removed.unfuse_qkv_projections()
    assert torch.equal(output(removed, inputs(name)), plain)
    model.unfuse_qkv_projections()
    if fused == "before":  # with the processors of before the patch
        mhla.change_mhla(model)
    assert torch.equal(output(model, inputs(name)), expected)
    for attn in find_patched(model)["transformer"].attentions.values():
        attn.to_v.weight.mul_(1.5)
    assert_changed(output(model, inputs(name)), expected)
    with_plain = FAMILIES[name].build()
    with_plain.load_state_dict(mhla.remove_mhla(model).state_dict(), strict=False)
    assert torch.equal(output(model, inputs(name)), output(with_plain, inputs(name)))


def test_fused_weights_that_unfusing_leaves_are_not_read():
    """diffusers keeps them in PixArt's class, where a LoRA that comes later makes them stale."""
    case, found = case_of("pixart"), []
    for is_fused in (False, True):
        model = mhla.apply_mhla(case.transformer(), blocks=(4, 2))
        if is_fused:
            model.fuse_qkv_projections()
            output(model, case.inputs())
            model.unfuse_qkv_projections()
        with_lora(model, "to_q", "to_k", "to_v")
        found += [output(model, case.inputs()), output(mhla.remove_mhla(model), case.inputs())]
    assert_equal_up_to_order(found[2], found[0])
    assert_equal_up_to_order(found[3], found[1])


def saved_with_lora(folder):
    """A sparse patch with a LoRA of its own, as one of few steps has."""
    model = with_lora(patched("wan", density=0.2), "to_q", "to_k")
    find_patched(model)["transformer"].lora = "default"
    return mhla.save_mhla(model, folder)


@pytest.mark.parametrize("first", ["style", "patch"])
def test_the_lora_of_a_patch_and_that_of_a_user_run_together(first, tmp_path, caplog):
    folder, pipe = saved_with_lora(tmp_path), wan_pipeline()
    style = get_peft_model_state_dict(with_lora(FAMILIES["wan"].build(), "to_v", "to_k"), adapter_name="default")
    weights = {f"transformer.{key}": value for key, value in style.items()}
    if first == "style":
        pipe.load_lora_weights(weights, adapter_name="style")
        mhla.load_mhla(pipe, folder)
    else:
        mhla.load_mhla(pipe, folder)
        pipe.load_lora_weights(weights, adapter_name="style")  # which leaves it active alone
        for _ in range(2):
            output(pipe.transformer, inputs("wan"))
        assert sum("'mhla' is not active" in line for line in caplog.messages) == 1
        assert "'mhla' is not active" in str(mhla.describe(pipe))
        pipe.set_adapters(["mhla", "style"])
    caplog.clear()
    both = output(pipe.transformer, inputs("wan"))
    reference = mhla.load_mhla(wan_pipeline(), folder)
    reference.load_lora_weights(weights, adapter_name="style")
    reference.set_adapters(["style", "mhla"])
    assert_equal_up_to_order(both, output(reference.transformer, inputs("wan")))
    assert not caplog.messages and "not active" not in str(mhla.describe(pipe))
    mhla.remove_mhla(pipe)
    unpatched = wan_pipeline()
    unpatched.load_lora_weights(weights, adapter_name="style")
    assert_equal_up_to_order(output(pipe.transformer, inputs("wan")), output(unpatched.transformer, inputs("wan")))


@pytest.mark.parametrize(("change", "words"), [("disable_lora", "not active"), ("unload_lora_weights", "was unloaded")])
def test_a_forward_without_the_lora_of_its_patch_is_told_once(change, words, tmp_path, caplog):
    pipe = mhla.load_mhla(wan_pipeline(), saved_with_lora(tmp_path))
    getattr(pipe, change)()
    with mhla.mhla_disabled(pipe):
        output(pipe.transformer, inputs("wan"))
    assert not caplog.messages
    for _ in range(2):
        output(pipe.transformer, inputs("wan"))
    assert sum(words in line for line in caplog.messages) == 1
