"""Apply a patch to tiny instances of every supported diffusers class, and take it off again; what cannot be patched."""

import copy
import logging

import pytest
import torch
from diffusers import DDPMPipeline, DDPMScheduler, WanPipeline
from peft import get_peft_model

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family
from mhla_diffusers.patching import find_patched

from ..families.cases import case_of, footprint
from ..models import FAMILIES, assert_changed, attn_processors, inputs, output, patched
from ..pipelines import wan22_pipeline
from ..refusals import refused
from .shared import CAUSAL, COPIES, ONE_PER_CLASS, lora, shake, unet


@pytest.mark.parametrize("copied", COPIES)
@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_a_copy_is_patched_and_independent(name, copied):
    """Weights, token grid and removal of the copy do not touch the original, nor the reverse; nor do sizes mix."""
    model = patched(name)
    clone = copied(model)
    expected = output(model, inputs(name))
    ragged = output(clone, inputs(name, ragged=True))
    assert torch.equal(output(clone, inputs(name)), expected)
    assert mhla.describe(model)[-1].grid == FAMILIES[name].grid
    assert find_patched(clone)["transformer"] is not find_patched(model)["transformer"]
    with torch.no_grad():
        for layer in mhla.mhla_layers(clone).values():
            layer.mixing.fill_(0.5)
    assert torch.equal(output(model, inputs(name)), expected)
    mhla.remove_mhla(clone)
    assert not clone._forward_pre_hooks and type(clone) is type(FAMILIES[name].build())
    assert torch.equal(output(clone, inputs(name)), output(FAMILIES[name].build(), inputs(name)))
    assert mhla.is_patched(model)
    assert torch.equal(output(model, inputs(name, ragged=True)), ragged)
    assert torch.equal(output(model, inputs(name)), expected)


def fused():
    model = FAMILIES["wan"].build()
    model.fuse_qkv_projections()
    return model


REFUSED = {
    "too few block counts": ("wan", {"blocks": (2, 2)}, "blocks=(2, 2)"),
    "too many block counts": ("sana", {"blocks": (2, 2, 2)}, "blocks=(2, 2, 2)"),
    "no such layer": ("dit", {"layers": [0, 4]}, "4...-4 to 3"),
    "no layers": ("wan", {"layers": []}, "layers=()"),
    "all layers dense": ("wan", {"density": 0.1, "dense_layers": 4}, "dense_layers=4"),
    "a number of layers": ("wan", {"layers": 1}, "layers=1...[0, 2"),
    "backend misspelt": ("wan", {"backend": "eagre"}, "'eagre'...'auto'...'eager'...'triton'"),
    "sparse attention of linear attention": ("sana", {"density": 0.1}, "linear...blocks="),
    "MHLA of another family": ("flux", {"blocks": (2, 2)}, "SANA, DiT and Wan...density"),
    "patch of another family": ("wan", {"patch": "dit-xl-2-256"}, "'dit'...'wan'"),
    "patch with weights": ("wan", {"patch": "tiny-wan-mhla"}, "load_mhla(model, 'tiny-wan-mhla')"),
    "empty name of a patch": ("wan", {"patch": ""}, "patch ''"),
    "patch of tuples": ("wan", {"patch": (4, 2)}, "(4, 2)"),
    "no latents of a class": ("wan", {"model": WanPipeline}, "WanPipeline is a class"),
    "a pipeline without a transformer": ("wan", {"model": DDPMPipeline(unet(), DDPMScheduler())}, "unet"),
    "nothing": ("wan", {"model": None}, "NoneType"),
    "fused projections": ("wan", {"model": fused(), "blocks": (2, 2, 3)}, "unfuse_qkv_projections()"),
    "causal MHLA without its normaliser": ("wan", CAUSAL | {"normalize": False, "output_norm": True}, "own='softmax'"),
    "extra tokens without a grid": ("wan", {"extra": (0, 8)}, "extra=(0, 8)...grid="),
    "an unknown transformer": ("wan", {"model": type("Flux9Transformer2DModel", (torch.nn.Module,), {})()}, "grid="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_is_named_and_changes_nothing(case):
    name, settings, value = REFUSED[case]
    model = FAMILIES[name].build() if name in FAMILIES else case_of(name).transformer()
    before = footprint(model)
    if not {"patch", "density"} & settings.keys():
        settings = {"blocks": (2,) * get_family(model).axes} | settings
    with refused(value):
        mhla.apply_mhla(**{"model": model} | settings)
    assert footprint(model) == before


ADAPTED = [("wan", {}, False), ("sana", {}, False), ("wan", {"blocks": (2, 2, 3)}, True), ("wan", CAUSAL, True)]


@pytest.mark.parametrize(("name", "settings", "warns"), ADAPTED, ids=str)
def test_what_has_to_be_adapted_is_warned_of(name, settings, warns, caplog):
    mhla.apply_mhla(FAMILIES[name].build(), **settings)
    assert any(one.levelno == logging.WARNING for one in caplog.records) is warns


def test_a_pipeline_of_which_one_transformer_is_patched_is_refused_as_a_whole_with_the_way_out():
    pipe = wan22_pipeline()
    mhla.apply_mhla(pipe.transformer_2, blocks=(1, 1, 1))
    before = footprint(pipe.transformer), footprint(pipe.transformer_2)
    with refused("already patched", "remove_mhla()"):
        mhla.apply_mhla(pipe, blocks=(1, 1, 1))
    assert (footprint(pipe.transformer), footprint(pipe.transformer_2)) == before


def test_what_is_not_patched_can_be_removed_again_but_not_disabled(caplog):
    model = FAMILIES["sana"].build()
    assert mhla.remove_mhla(model) is model, "as in the second run of a notebook's cell"
    assert "SanaTransformer2DModel is not patched; nothing was removed" in caplog.text
    with refused("SanaTransformer2DModel is a class"):
        mhla.remove_mhla(type(model))
    with refused("not patched"), mhla.mhla_disabled(model):
        pass


def test_a_shallow_copy_runs_its_own_layers():
    """As accelerate makes one, to compile blocks."""
    model = patched("dit", density=0.2)
    clone, last = copy.copy(model), copy.deepcopy(model.proj_out_2)
    clone._modules = model._modules | {"proj_out_2": last}
    shake(last)
    assert_changed(output(clone, inputs("dit")), output(model, inputs("dit")))


def test_attentions_need_no_processor():
    model = FAMILIES["wan"].build()
    del model.blocks[0].attn1.processor
    assert not mhla.is_patched(model)


def test_a_transformer_of_two_names_is_patched_once():
    pipe = wan22_pipeline()
    pipe.transformer_2, before = pipe.transformer, footprint(pipe.transformer)
    mhla.remove_mhla(mhla.apply_mhla(pipe, blocks=(1, 1, 1)))
    assert footprint(pipe.transformer) == before


def test_a_transformer_wrapped_by_peft_is_patched_inside():
    pipe = wan22_pipeline()
    inner = pipe.transformer
    pipe.transformer = get_peft_model(inner, lora("to_q"))
    expected = output(pipe.transformer, inputs("wan"))
    mhla.apply_mhla(pipe, blocks=(1, 1, 1))
    assert_changed(output(pipe.transformer, inputs("wan")), expected)
    assert mhla.is_patched(inner) and len(mhla.mhla_layers(pipe)) == 2 * len(mhla.mhla_layers(inner))
    mhla.remove_mhla(pipe)
    assert torch.equal(output(pipe.transformer, inputs("wan")), expected)


def test_an_interrupt_between_two_transformers_leaves_none_patched():
    pipe = wan22_pipeline()
    before = footprint(pipe.transformer), footprint(pipe.transformer_2)

    def interrupt(*_, **__):
        raise KeyboardInterrupt

    pipe.transformer_2.register_forward_pre_hook = interrupt  # which comes behind the layers
    with pytest.raises(KeyboardInterrupt):
        mhla.apply_mhla(pipe, blocks=(1, 1, 1))
    del pipe.transformer_2.register_forward_pre_hook
    assert (footprint(pipe.transformer), footprint(pipe.transformer_2)) == before


@pytest.mark.parametrize(
    ("layers", "indices"),
    [("all", [0, 1, 2, 3]), ("2/3", [1, 2]), (2 / 3, [1, 2]), (0.5, [1, 3]), ([2, 0], [0, 2]), ([1, -4], [0, 1])],
)
def test_layers_choose_what_is_replaced(layers, indices):
    """The others keep their processor and get no weights."""
    model = FAMILIES["dit"].build()
    before, footprint_before = attn_processors(model), footprint(model)
    mhla.apply_mhla(model, layers=layers, blocks=(4, 2))
    chosen = [f"transformer_blocks.{index}.attn1" for index in indices]
    assert list(mhla.mhla_layers(model)) == [f"{path}.mhla" for path in chosen]
    for path, processor in attn_processors(model).items():
        is_chosen = path.removesuffix(".processor") in chosen
        assert isinstance(processor, mhla.MHLAProcessor) if is_chosen else processor is before[path]
    assert footprint(mhla.remove_mhla(model)) == footprint_before
