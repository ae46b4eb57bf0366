"""Apply a patch to tiny instances of every supported diffusers class, and take it off again."""

import copy
import inspect

import pytest
import torch
from diffusers import (
    DiTTransformer2DModel,
    SanaTransformer2DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0

import mhla_diffusers as mhla

from ..models import FAMILIES, assert_changed, inputs, output, patched, relative_change
from ..pipelines import PIPELINES, generate, wan22_pipeline
from .shared import EVERYTHING, MODELS, ONE_PER_CLASS, assert_same_footprint, footprint, unet


@pytest.mark.parametrize("name", MODELS)
def test_apply_changes_the_output_and_remove_leaves_no_trace(name):
    model, arguments = FAMILIES[name].build(), inputs(name)
    before, expected = footprint(model), output(model, arguments)
    assert not mhla.is_patched(model)

    assert mhla.apply_mhla(model, blocks=FAMILIES[name].blocks, sparse="none") is model
    assert mhla.is_patched(model)
    assert inspect.signature(model.forward) == before["signature"]
    assert_changed(output(model, arguments), expected)

    assert mhla.remove_mhla(model) is model
    assert not mhla.is_patched(model)
    assert_same_footprint(model, before)
    assert torch.equal(output(model, arguments), expected)


@pytest.mark.parametrize("name", PIPELINES)
def test_apply_and_remove_on_a_pipeline(name):
    case = PIPELINES[name]
    pipe = case.build()
    generate(name, pipe)  # diffusers keeps a registry of hooks on a transformer from its first call on
    before = {part: footprint(getattr(pipe, part)) for part in case.transformers}
    expected = generate(name, pipe)

    assert mhla.apply_mhla(pipe, blocks=case.blocks, sparse="none") is pipe
    assert {layer.partition(".")[0] for layer in mhla.mhla_layers(pipe)} == set(case.transformers)
    assert_changed(generate(name, pipe), expected)

    assert mhla.remove_mhla(pipe) is pipe
    assert torch.equal(generate(name, pipe), expected)
    for part, state in before.items():
        assert_same_footprint(getattr(pipe, part), state)


def test_both_transformers_of_wan_2_2_take_part():
    """Patching one of the two only gives another video than patching both."""
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=PIPELINES["wan22"].blocks, sparse="none")
    both = generate("wan22", pipe)
    mhla.remove_mhla(pipe.transformer_2)
    assert mhla.is_patched(pipe)
    assert_changed(generate("wan22", pipe), both)


@pytest.mark.parametrize("name", MODELS)
def test_patching_again_after_removal_gives_the_same_model(name):
    model = patched(name)
    first = output(model, inputs(name))
    mhla.apply_mhla(mhla.remove_mhla(model), sparse="none", blocks=FAMILIES[name].blocks)
    assert torch.equal(output(model, inputs(name)), first)


@pytest.mark.parametrize("name", MODELS)
def test_every_weight_appears_once_in_the_state_dict_and_the_dtype_stays(name):
    model = patched(name, output_norm=True, output_gate=True, convolution=3)
    case, base = FAMILIES[name], FAMILIES[name].build()
    added = [key for key in model.state_dict() if key not in base.state_dict()]
    ending = ("mixing", "output_norm", "gate.weight", "gate.bias", "convolution.weight", "convolution.bias")
    assert sorted(added) == sorted(f"{layer}.{end}" for layer in mhla.mhla_layers(model) for end in ending)
    storages = [model.state_dict()[key].data_ptr() for key in added]
    assert len(set(storages)) == len(added) == 6 * case.self_attentions
    assert model.dtype == base.dtype


def test_defaults_of_a_family_need_no_settings():
    """``apply_mhla(model)`` alone; the family's blocks fit its usual resolutions."""
    for name, blocks in (("wan", (7, 3, 5)), ("sana", (4, 4)), ("dit", (4, 4))):
        model = mhla.apply_mhla(FAMILIES[name].build())
        assert {layer.config.blocks for layer in mhla.mhla_layers(model).values()} == {blocks}


def test_a_patch_by_name_from_yaml_and_as_a_config_are_the_same(tmp_path):
    named = mhla.apply_mhla(FAMILIES["dit"].build(), "dit-xl-2-256")
    given = mhla.apply_mhla(FAMILIES["dit"].build(), mhla.MHLAConfig(blocks=(4, 4)))
    path = tmp_path / "mine.yaml"
    path.write_text("family: dit\nbase_model: none\ndescription: mine\nmhla: {blocks: [4, 4]}\n")
    read = mhla.apply_mhla(FAMILIES["dit"].build(), path)
    expected = output(named, inputs("dit"))
    assert torch.equal(output(given, inputs("dit")), expected)
    assert torch.equal(output(read, inputs("dit")), expected)


@pytest.mark.parametrize(
    ("settings", "shape", "trainable"),
    [
        ({}, (8, 8), True),
        ({"mixing_per_head": True}, (2, 8, 8), True),
        ({"mixing_learnable": False}, (8, 8), False),
    ],
)
def test_mixing_matrix_follows_the_settings(settings, shape, trainable):
    for layer in mhla.mhla_layers(patched("sana", **settings)).values():
        assert tuple(layer.mixing.shape) == shape
        assert layer.mixing.requires_grad is trainable


@pytest.mark.parametrize("name", MODELS)
def test_resolutions_may_alternate(name):
    """A patched model keeps no state of the latest resolution: a forward at another one changes nothing."""
    model = patched(name)
    even, ragged = output(model, inputs(name)), output(model, inputs(name, ragged=True))
    assert torch.equal(output(model, inputs(name)), even)
    assert torch.equal(output(model, inputs(name, ragged=True)), ragged)
    assert torch.equal(output(patched(name), inputs(name, ragged=True)), ragged)


@pytest.mark.parametrize("name", MODELS)
def test_our_set_attn_processor_with_mhla_is_apply(name):
    """For every family, DiT too; it reads the grid of every input, and keeps the record that removal needs."""
    model = FAMILIES[name].build()
    before = footprint(model)
    mhla.set_attn_processor(model, mhla.MHLAProcessor(blocks=FAMILIES[name].blocks))
    for ragged in (False, True):
        arguments = inputs(name, ragged=ragged)
        assert torch.equal(output(model, arguments), output(patched(name), arguments))
    assert_same_footprint(mhla.remove_mhla(model), before)


def test_our_set_attn_processor_honours_the_choice_of_layers():
    model = FAMILIES["dit"].build()
    mhla.set_attn_processor(model, mhla.MHLAProcessor(blocks=(4, 2), layers=[1]))
    assert list(mhla.mhla_layers(model)) == ["transformer_blocks.1.attn1.mhla"]


@pytest.mark.parametrize("name", MODELS)
def test_a_dict_of_processors_is_set_and_not_consumed(name):
    model = FAMILIES[name].build()
    processors = {path: copy.copy(processor) for path, processor in mhla.attn_processors(model).items()}
    given = dict(processors)
    mhla.set_attn_processor(model, given)
    assert given == processors == mhla.attn_processors(model)


def test_a_dict_that_does_not_match_changes_nothing():
    model = FAMILIES["sana"].build()
    before = footprint(model)
    processors = mhla.attn_processors(model)
    processors["transformer_blocks.9.attn1.processor"] = processors.pop("transformer_blocks.0.attn1.processor")
    with pytest.raises(ValueError, match=r"transformer_blocks\.0\.attn1.*transformer_blocks\.9\.attn1"):
        mhla.set_attn_processor(model, processors)
    assert_same_footprint(model, before)


def test_any_other_processor_goes_to_every_attention():
    model = FAMILIES["dit"].build()
    expected = output(model, inputs("dit"))
    slow = AttnProcessor()
    mhla.set_attn_processor(model, slow)
    assert all(processor is slow for processor in mhla.attn_processors(model).values())
    torch.testing.assert_close(output(model, inputs("dit")), expected, rtol=1e-4, atol=1e-5)


def test_set_attn_processor_refuses_unsupported_and_patched_transformers():
    with pytest.raises(ValueError, match="UNet2DModel is not supported"):
        mhla.set_attn_processor(unet(), AttnProcessor2_0())
    with pytest.raises(ValueError, match=r"already patched.*remove_mhla\(\)"):
        mhla.set_attn_processor(patched("sana"), mhla.MHLAProcessor(blocks=(2, 2)))


def test_a_dit_has_the_two_methods_while_it_is_patched():
    """The instance alone: diffusers' class and other instances stay as they are."""
    model, other = FAMILIES["dit"].build(), FAMILIES["dit"].build()
    mhla.apply_mhla(model, sparse="none", blocks=(4, 2))
    assert isinstance(model, DiTTransformer2DModel)
    assert model.attn_processors == mhla.attn_processors(model)
    for unpatched in (DiTTransformer2DModel, other):
        assert not hasattr(unpatched, "attn_processors")
        assert not hasattr(unpatched, "set_attn_processor")
    found = output(model, inputs("dit"))
    model.set_attn_processor(dict(model.attn_processors))
    assert torch.equal(output(model, inputs("dit")), found)
    mhla.remove_mhla(model)
    assert type(model) is DiTTransformer2DModel
    assert not hasattr(model, "attn_processors")


def test_patching_changes_no_class_of_diffusers():
    classes = (WanTransformer3DModel, SanaTransformer2DModel, DiTTransformer2DModel)
    before = [dict(vars(cls)) for cls in classes]
    for name in ("wan", "sana", "dit"):
        output(patched(name), inputs(name))
    assert [dict(vars(cls)) for cls in classes] == before


@pytest.mark.parametrize("name", MODELS)
def test_a_deep_copy_is_patched_and_independent(name):
    """Weights, token grid and removal of the copy do not touch the original, nor the reverse."""
    model = patched(name)
    clone = copy.deepcopy(model)
    expected = output(model, inputs(name))
    ragged = output(clone, inputs(name, ragged=True))
    assert torch.equal(output(clone, inputs(name)), expected)
    assert mhla.describe(model)[-1].grid == FAMILIES[name].grid
    with torch.no_grad():
        for layer in mhla.mhla_layers(clone).values():
            layer.mixing.fill_(0.5)
    assert torch.equal(output(model, inputs(name)), expected)
    mhla.remove_mhla(clone)
    assert not clone._forward_pre_hooks
    assert torch.equal(output(clone, inputs(name)), output(FAMILIES[name].build(), inputs(name)))
    assert mhla.is_patched(model)
    assert torch.equal(output(model, inputs(name, ragged=True)), ragged)


def test_a_model_with_quantised_projections_can_be_patched():
    model = FAMILIES["wan"].build()
    expected = output(patched("wan"), inputs("wan"))
    for block in model.blocks[1:]:
        torch.ao.quantization.quantize_dynamic(block.attn1, {torch.nn.Linear}, inplace=True)
    mhla.apply_mhla(model, sparse="none", blocks=(2, 2, 3))
    found = output(model, inputs("wan"))
    # eight bits: half a percent per projection
    assert 0 < relative_change(found, expected) < 0.05


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_applying_leaves_the_global_generator_as_it_was(name):
    model = FAMILIES[name].build()
    before = torch.get_rng_state()
    mhla.apply_mhla(model, blocks=FAMILIES[name].blocks, sparse="none", **EVERYTHING)
    assert torch.equal(torch.get_rng_state(), before)
