"""Weights of the model itself that an adapted patch replaces: under adapters, and back at removal."""

import copy
import tempfile

import pytest
import torch
from peft import LoraConfig

import mhla_diffusers as mhla

from ..families.cases import footprint
from ..models import FAMILIES, assert_changed, inputs, output, patched
from ..pipelines import wan22_pipeline
from ..refusals import refused
from .shared import PROJECTIONS, shake, with_lora


def saved(name, folder, seed=3):
    """Folder of a patched model all of whose weights were trained a little, and what it computes."""
    model = patched(name)
    shake(model, seed=seed)
    return mhla.save_mhla(model, folder, weights="all"), output(model, inputs(name))


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """Folder of a saved patch for a tiny Wan."""
    return saved("wan", tmp_path_factory.mktemp("adapted"))


@pytest.mark.parametrize("name", ["wan_vace", "sana", "dit"])
def test_removal_of_an_adapted_patch_is_exact_and_two_do_not_mix(name, tmp_path):
    first, second = saved(name, tmp_path / "first"), saved(name, tmp_path / "second", seed=4)
    model = FAMILIES[name].build()
    before, untouched = footprint(model), output(model, inputs(name))
    for folder, expected in (first, second, first):
        mhla.load_mhla(model, folder)
        assert torch.equal(output(model, inputs(name)), expected)
        assert_changed(expected, untouched)
        mhla.remove_mhla(model)
        assert footprint(model) == before


def test_removal_of_an_adapted_patch_from_a_copy_and_in_another_type(adapted):
    model = FAMILIES["wan"].build()
    before = copy.deepcopy(model.state_dict())
    mhla.load_mhla(model, adapted[0])
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
    pipe, base = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1)), wan22_pipeline()
    shake(pipe.transformer, pipe.transformer_2)
    mhla.save_mhla(pipe, tmp_path, weights="all")
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
    assert footprint(base.transformer) == before[0]
    assert footprint(base.transformer_2) == before[1]


def test_an_adapted_patch_under_lora(adapted):
    """Its weights go under the adapters, before or after which it is loaded, and removal brings back the model's."""
    only_lora = with_lora(FAMILIES["wan"].build(), *PROJECTIONS)
    before = output(only_lora, inputs("wan"))
    first_patch = with_lora(mhla.load_mhla(FAMILIES["wan"].build(), adapted[0]), *PROJECTIONS)
    expected = output(first_patch, inputs("wan"))
    mhla.load_mhla(only_lora, adapted[0])
    assert torch.equal(output(only_lora, inputs("wan")), expected)
    for model in (first_patch, only_lora):
        assert torch.equal(output(mhla.remove_mhla(model), inputs("wan")), before)
    # PEFT's modules_to_save puts a module that the patch changed into a wrapper
    model = mhla.load_mhla(FAMILIES["wan"].build(), adapted[0])
    model.add_adapter(LoraConfig(r=2, target_modules=["to_q"], modules_to_save=["proj_out"]))
    mhla.remove_mhla(model)
    assert torch.equal(model.proj_out.original_module.weight, FAMILIES["wan"].build().proj_out.weight)


class Int8Params(torch.nn.Parameter):
    """As libraries hold quantised weights, of a class of their own whose data is a plain tensor."""


def quantise(model):
    layer = model.blocks[0].ffn.net[2]
    layer.weight = Int8Params(layer.weight.detach().to(torch.int8)[:, :16], requires_grad=False)


def offload_to_files(model):
    """So that the weights in memory are no values."""
    cpu, folder = torch.device("cpu"), tempfile.mkdtemp()
    model.enable_group_offload(cpu, cpu, offload_type="leaf_level", offload_to_disk_path=folder)


OBSTACLES = {
    "fused projections": (lambda model: model.fuse_qkv_projections(), "unfuse_qkv_projections() before you"),
    "fused LoRA": (lambda model: with_lora(model, "to_q").fuse_lora(), "blocks.0...unfuse_lora() before you"),
    "offloaded": (offload_to_files, "offload"),
    "quantised": (quantise, "blocks.0.ffn.net.2.weight...Int8Params"),
}


@pytest.mark.parametrize(("prevent", "words"), OBSTACLES.values(), ids=OBSTACLES)
def test_weights_that_cannot_be_replaced_are_refused_by_name(prevent, words, adapted):
    """When a patch is loaded, saved and removed; nothing has changed then."""
    model, loaded = FAMILIES["wan"].build(), mhla.load_mhla(FAMILIES["wan"].build(), adapted[0])
    prevent(model)
    with refused(words):
        mhla.load_mhla(model, adapted[0])
    assert not mhla.is_patched(model)
    prevent(loaded)
    for change in (mhla.remove_mhla, lambda model: mhla.save_mhla(model, adapted[0] / "again", weights="all")):
        with refused(words):
            change(loaded)
    assert mhla.is_patched(loaded)
