"""What cannot be patched, or not so, is named, and the model stays as it was."""

import math

import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
)
from peft import get_peft_model

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched
from ..pipelines import wan22_pipeline
from .shared import MODELS, assert_same_footprint, footprint, lora, unet

REFUSED = {
    "too few block counts": ("wan", {"blocks": (2, 2)}, r"blocks=\(2, 2\) has 2 axes.*has 3"),
    "too many block counts": ("sana", {"blocks": (2, 2, 2)}, r"blocks=\(2, 2, 2\) has 3 axes.*has 2"),
    "four axes": ("wan", {"blocks": (1, 1, 1, 1)}, r"\(1, 1, 1, 1\) has 4 axes.*2 \(height, width\) or 3"),
    "zero blocks": ("dit", {"blocks": (0, 2)}, r"blocks=\(0, 2\) must hold positive integers, got 0"),
    "half a block": ("dit", {"blocks": (2.5, 2)}, r"positive integers, got 2\.5"),
    "layer too high": ("dit", {"layers": [0, 4]}, "Layer 4 is out of range.*4 layers, -4 to 3"),
    "layer too low": ("dit", {"layers": [-5]}, "Layer -5 is out of range.*-4 to 3"),
    "layers unknown": ("wan", {"layers": "most"}, r"layers='most'.*'all'.*'2/3'.*\[0, 2, -1\]"),
    "more than all layers": ("wan", {"layers": 1.5}, r"layers=1\.5.*\(0, 1\]"),
    "layers by name": ("wan", {"layers": ["attn1"]}, "layer indices, got 'attn1'"),
    "no layers": ("wan", {"layers": []}, "chooses none of the 4 layers"),
    "feature map misspelt": ("wan", {"feature_map": "rleu"}, "'rleu'; did you mean 'relu'.*Registered: relu"),
    "feature map unknown": ("wan", {"feature_map": "zzz"}, r"'zzz'.*relu.*elu\+1.*register_feature_map"),
    "signed map normalised": ("wan", {"feature_map": "identity"}, "normalize=False with output_norm=True"),
    "no normaliser, no norm": ("wan", {"normalize": False}, "grows with the number of tokens.*output_norm=True"),
    "rope unknown": ("wan", {"rope": "during"}, "rope='during' is unknown; allowed: 'after', 'before'"),
    "initialisation unknown": ("wan", {"mixing_init": "local"}, "mixing_init='local'.*'locality', 'uniform'"),
    "negative eps": ("wan", {"eps": -1.0}, r"eps=-1\.0"),
    "infinite eps": ("wan", {"eps": math.inf}, "eps=inf must be from 0 to 1"),
    "no eps": ("wan", {"eps": math.nan}, "eps=nan must be from 0 to 1"),
    "huge eps": ("wan", {"eps": 1e30}, r"eps=1e\+30 must be from 0 to 1"),
    "even kernel": ("wan", {"convolution": 4}, "convolution=4 must be an odd kernel size"),
    "setting misspelt": ("wan", {"feature_mpa": "relu"}, "'feature_mpa'; did you mean 'feature_map'.*Allowed: blocks"),
    "backend misspelt": ("wan", {"backend": "eagre"}, "'eagre'; allowed: auto, eager.*'eager'"),
    "no backend": ("wan", {"backend": None}, "Unknown backend None; allowed: auto, eager"),
    "patch misspelt": ("wan", {"patch": "wan2.1-t2v-1b"}, r"'wan2\.1-t2v-1b'; did you mean 'wan2\.1-t2v-1"),
    "patch of another family": ("wan", {"patch": "dit-xl-2-256"}, r"for the 'dit' family.*belongs to 'wan'"),
    "patch file missing": ("wan", {"patch": "nowhere.yaml"}, r"nowhere\.yaml does not exist"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_bad_settings_are_named_and_change_nothing(case):
    name, settings, message = REFUSED[case]
    model = FAMILIES[name].build()
    before = footprint(model)
    if "patch" not in settings:
        settings = {"blocks": FAMILIES[name].blocks} | settings
    with pytest.raises((ValueError, FileNotFoundError), match=f"(?s){message}"):
        mhla.apply_mhla(model, **settings)
    assert_same_footprint(model, before)


WRONG_TYPES = [
    {"blocks": 4},
    {"blocks": None},
    {"layers": None},
    {"layers": math.inf},
    {"feature_map": 3},
    {"eps": "small"},
    {"convolution": "3"},
    {"convolution": 2.5},
    {"normalize": "false"},
    {"output_norm": "no"},
    {"patch": (4, 2)},
    {"patch": {"blocks": (4, 2)}},
]


@pytest.mark.parametrize("settings", WRONG_TYPES, ids=str)
def test_settings_of_a_wrong_type_are_named(settings):
    model = FAMILIES["sana"].build()
    before = footprint(model)
    given = settings if "patch" in settings else {"blocks": (4, 2)} | settings
    ((field, value),) = settings.items()
    with pytest.raises(ValueError, match=field) as error:
        mhla.apply_mhla(model, **given)
    assert str(value) in str(error.value)
    assert_same_footprint(model, before)


BAD_PATCH_FILES = {
    "unknown key": ("family: sana\nbase_model: a\ndescription: b\nmhla: {blocks: [2, 2]}\nmhal: 1\n", "unknown: mhal"),
    "missing key": ("family: sana\nmhla: {blocks: [2, 2]}\n", "missing: base_model, description"),
    "unknown setting": (
        "family: sana\nbase_model: a\ndescription: b\nmhla: {block: [2, 2]}\n",
        "'block'; did you mean 'blocks'",
    ),
    "no blocks": ("family: sana\nbase_model: a\ndescription: b\nmhla: {eps: 1.0}\n", "need blocks"),
    "settings are a list": ("family: sana\nbase_model: a\ndescription: b\nmhla: [2, 2]\n", r"\[2, 2\]"),
    "empty": ("", "missing: base_model, description, family, mhla"),
    "no YAML": ("{", "expected"),
}


@pytest.mark.parametrize("case", BAD_PATCH_FILES)
def test_bad_patch_files_are_named_and_change_nothing(case, tmp_path):
    content, message = BAD_PATCH_FILES[case]
    path = tmp_path / "bad.yaml"
    path.write_text(content)
    model = FAMILIES["sana"].build()
    before = footprint(model)
    with pytest.raises(ValueError, match=f"(?s)bad.yaml.*{message}"):
        mhla.apply_mhla(model, path)
    assert_same_footprint(model, before)


@pytest.mark.parametrize("name", MODELS)
def test_applying_twice_is_refused_with_the_way_out(name):
    model = patched(name)
    before = footprint(model)
    with pytest.raises(ValueError, match=r"already patched.*remove_mhla\(\)"):
        mhla.apply_mhla(model, exact="none", blocks=FAMILIES[name].blocks)
    assert_same_footprint(model, before)


def test_a_pipeline_of_which_one_transformer_is_patched_is_refused_as_a_whole():
    pipe = wan22_pipeline()
    mhla.apply_mhla(pipe.transformer_2, exact="none", blocks=(1, 1, 1))
    before = footprint(pipe.transformer), footprint(pipe.transformer_2)
    with pytest.raises(ValueError, match="already patched"):
        mhla.apply_mhla(pipe, exact="none", blocks=(1, 1, 1))
    assert_same_footprint(pipe.transformer, before[0])
    assert_same_footprint(pipe.transformer_2, before[1])


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_more_blocks_than_tokens_is_refused_at_the_input(name):
    """Only the input tells the grid; the message names the axis, and the model goes on with inputs that fit."""
    case = FAMILIES[name]
    blocks = (*case.blocks[:-1], case.grid[-1])
    model = mhla.apply_mhla(case.build(), exact="none", blocks=blocks)
    expected = output(model, inputs(name))
    small = inputs(name, ragged=True)
    with pytest.raises(ValueError, match=rf"width axis.* {case.ragged_grid[-1]} tokens.* {blocks[-1]} blocks"):
        output(model, small)
    assert torch.equal(output(model, inputs(name)), expected)


def test_models_that_are_not_supported_are_refused():
    pipe = DDPMPipeline(unet(), DDPMScheduler())
    with pytest.raises(ValueError, match="DDPMPipeline has no transformer.*components: unet, scheduler"):
        mhla.apply_mhla(pipe)
    with pytest.raises(ValueError, match="UNet2DModel is not supported.*WanTransformer3DModel.*Add a model") as error:
        mhla.apply_mhla(pipe.unet)
    for name in ("DiTTransformer2DModel", "SanaTransformer2DModel", "WanVACETransformer3DModel"):
        assert name in str(error.value)
    with pytest.raises(ValueError, match="NoneType"):
        mhla.apply_mhla(None)
    assert not mhla.is_patched(pipe)
    assert mhla.mhla_layers(pipe) == {}


@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
def test_a_transformer_wrapped_by_peft_is_refused_with_the_way_out(component):
    pipe = wan22_pipeline()
    inner = getattr(pipe, component)
    setattr(pipe, component, get_peft_model(inner, lora("to_q")))
    wrapped = getattr(pipe, component)
    for model, name in ((pipe, component), (wrapped, "transformer")):
        with pytest.raises(ValueError, match=rf"{name} is wrapped in PEFT's PeftModel.*{name}\.get_base_model\(\)"):
            mhla.apply_mhla(model, exact="none", blocks=(1, 1, 1))
    assert not mhla.is_patched(pipe)
    setattr(pipe, component, wrapped.get_base_model())
    mhla.apply_mhla(pipe, exact="none", blocks=(1, 1, 1))
    assert len(mhla.mhla_layers(pipe)) == 2 * len(mhla.mhla_layers(inner))
    assert any("lora_A" in name for name in inner.state_dict())


def test_a_failure_half_way_leaves_the_model_as_it_was():
    model = FAMILIES["dit"].build()
    odd = model.transformer_blocks[2].attn1
    odd.to_q, linear = torch.nn.Identity(), odd.to_q
    before = footprint(model)
    with pytest.raises(AttributeError):
        mhla.apply_mhla(model, exact="none", blocks=(4, 2))
    assert_same_footprint(model, before)
    odd.to_q = linear
    mhla.apply_mhla(model, exact="none", blocks=(4, 2))


def test_a_single_number_is_no_choice_of_layers():
    with pytest.raises(ValueError, match=r"layers=1 is ambiguous; write layers=\[1\]"):
        patched("wan", layers=1)
