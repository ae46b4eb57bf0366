"""What cannot be patched, or not so, is named, and the model stays as it was."""

import math
from types import SimpleNamespace

import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
)
from peft import get_peft_model

import mhla_diffusers as mhla
from mhla_diffusers.families import get_family

from ..families.cases import case_of, drawer
from ..models import FAMILIES, inputs, output, patched, relative_change
from ..pipelines import wan22_pipeline, wan_pipeline
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


def test_a_causal_patch_beside_text_in_the_sequence_is_refused_before_it_runs():
    """Whose first forward would be of more tokens than its grid has."""
    for name in ("flux", "cogvideox"):
        model = case_of(name).transformer()
        before = footprint(model)
        blocks = (2,) * get_family(model).axes
        for sparse in ("none", "own"):
            settings = {"blocks": blocks, "causal": "block", "block_length": 2, "sparse": sparse}
            with pytest.raises(ValueError, match="causal='block' .* extra tokens too.* leave it at None"):
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
        mhla.apply_mhla(model, sparse="none", blocks=FAMILIES[name].blocks)
    assert_same_footprint(model, before)


def test_a_pipeline_of_which_one_transformer_is_patched_is_refused_as_a_whole():
    pipe = wan22_pipeline()
    mhla.apply_mhla(pipe.transformer_2, sparse="none", blocks=(1, 1, 1))
    before = footprint(pipe.transformer), footprint(pipe.transformer_2)
    with pytest.raises(ValueError, match="already patched"):
        mhla.apply_mhla(pipe, sparse="none", blocks=(1, 1, 1))
    assert_same_footprint(pipe.transformer, before[0])
    assert_same_footprint(pipe.transformer_2, before[1])


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_more_blocks_than_tokens_is_refused_at_the_input(name):
    """Only the input tells the grid; the message names the axis, and the model goes on with inputs that fit."""
    case = FAMILIES[name]
    blocks = (*case.blocks[:-1], case.grid[-1])
    model = mhla.apply_mhla(case.build(), sparse="none", blocks=blocks)
    expected = output(model, inputs(name))
    small = inputs(name, ragged=True)
    with pytest.raises(ValueError, match=rf"width axis.* {case.ragged_grid[-1]} tokens.* {blocks[-1]} blocks"):
        output(model, small)
    assert torch.equal(output(model, inputs(name)), expected)


def test_models_that_are_not_supported_are_refused():
    pipe = DDPMPipeline(unet(), DDPMScheduler())
    with pytest.raises(ValueError, match="DDPMPipeline has no transformer.*components: unet, scheduler"):
        mhla.apply_mhla(pipe)
    with pytest.raises(ValueError, match=r"UNet2DModel is not supported; the page.*docs/models.md.*Add a model"):
        mhla.apply_mhla(pipe.unet)
    with pytest.raises(ValueError, match="NoneType"):
        mhla.apply_mhla(None)
    assert not mhla.is_patched(pipe)
    assert mhla.mhla_layers(pipe) == {}


def _of_class(name):
    """A module of that class, which is all that tells its family."""
    return type(name, (torch.nn.Module,), {})()


@pytest.mark.parametrize(
    ("name", "near"),
    [
        ("WanDancerTransformer3DModel", r"the nearest family is 'wan' \(WanTransformer3DModel\)"),
        ("SanaControlTransformer2DModel", r"the nearest family is 'sana' \(SanaTransformer2DModel\)"),
        ("Flux9Transformer2DModel", r"the nearest family is 'flux' \(FluxTransformer2DModel\)"),
    ],
)
def test_a_transformer_that_is_not_supported_names_the_nearest_family(name, near):
    """By itself, and as that of a pipeline, whose other parts are not looked at."""
    pipe = SimpleNamespace(components={"text_encoder": torch.nn.Linear(1, 1), "transformer": _of_class(name)})
    for model in (pipe.components["transformer"], pipe):
        with pytest.raises(ValueError, match=rf"^{name} is not supported; {near}.*Add a model.*register_family\(\)"):
            mhla.apply_mhla(model)


def test_what_is_like_no_transformer_has_no_nearest_family():
    with pytest.raises(ValueError, match="^UNet2DModel is not supported; the page") as error:
        mhla.apply_mhla(unet())
    assert "nearest" not in str(error.value)


@pytest.mark.parametrize("layers", ["all", [1]])
def test_a_pipeline_whose_mask_differs_between_queries_is_named_and_refused(layers):
    """With whatever layers: the mask goes to all of them."""
    pipe = case_of("skyreels_v2_forcing").pipeline()
    mhla.apply_mhla(pipe, sparse="none", blocks=(2, 2, 3), layers=layers)
    with pytest.raises(ValueError, match=r"SkyReels-V2.*differs between queries.*causal_block_size=1.*layers=\["):
        pipe(**case_of("skyreels_v2_forcing").call, generator=torch.Generator().manual_seed(3))


def test_a_layer_whose_mask_differs_between_queries_is_left_out_with_layers():
    model, arguments = FAMILIES["wan"].build(), inputs("wan")
    tokens = math.prod(FAMILIES["wan"].grid)
    earlier = torch.ones(tokens, tokens, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1)

    def mask(attn, args):
        return args[0], args[1], earlier, args[3]

    model.blocks[1].attn1.register_forward_pre_hook(mask)
    expected = output(model, arguments)
    mhla.apply_mhla(model, sparse="content", density=1.0, blocks=(1, 1, 1))
    with pytest.raises(ValueError, match=r"differs between queries.*layers=\[\.\.\.\]"):
        output(model, arguments)
    mhla.remove_mhla(model)
    mhla.apply_mhla(model, sparse="content", density=1.0, blocks=(1, 1, 1), layers=[0, 2, 3])
    # softmax attention, float32 sums in another order
    assert relative_change(output(model, arguments), expected) < 2e-5


LONG_TEXT = 700
"""Tokens, more than any model here was trained with."""


@pytest.mark.parametrize("name", ["wan", "wan_i2v", "flux", "sd3"])
def test_more_text_than_a_model_was_trained_with_is_taken_as_by_the_model(name):
    if name in FAMILIES:
        model, arguments = FAMILIES[name].build(), inputs(name)
    else:
        model, arguments = case_of(name).transformer(), case_of(name).inputs()
    channels = arguments["encoder_hidden_states"].shape[-1]
    arguments["encoder_hidden_states"] = drawer(2, seed=7)(LONG_TEXT, channels)
    if "txt_ids" in arguments:
        arguments["txt_ids"] = torch.zeros(LONG_TEXT, 3)
    expected = output(model, arguments)
    mhla.apply_mhla(model, sparse="content", density=1.0, blocks=(1,) * get_family(model).axes)
    # float32 sums in another order, through all layers
    assert relative_change(output(model, arguments), expected) < 2e-5


def _texts(pipe, prompt, **call):
    """What a pipeline hands to its transformer as the text of a prompt."""
    given = []
    hook = pipe.transformer.register_forward_pre_hook(lambda _, args, kwargs: given.append(kwargs), with_kwargs=True)
    call = {**call, "num_inference_steps": 1, "guidance_scale": 1.0, "output_type": "latent"}
    try:
        pipe(prompt, **call, generator=torch.Generator().manual_seed(3))
    finally:
        hook.remove()
    return given[0]["encoder_hidden_states"]


@pytest.mark.parametrize("name", ["wan", "flux", "sd3"])
@torch.no_grad()
def test_a_prompt_longer_than_the_pipeline_takes_is_cut_as_by_the_pipeline(name):
    """Patched or not, and as training data is encoded; where the pipeline refuses a length, so it does when patched."""
    if name == "wan":
        pipe, call = wan_pipeline(), {"height": 64, "width": 96, "num_frames": 5, "max_sequence_length": 12}
    else:
        pipe, call = case_of(name).pipeline(), {"height": 32, "width": 32, "max_sequence_length": 12}
    family, prompt = get_family(pipe.transformer), "a cat surfing " * 8
    expected = _texts(pipe, prompt, **call)
    encoded = family.encode_prompt(pipe, prompt, {"max_sequence_length": 12})["encoder_hidden_states"]
    assert torch.equal(encoded[None], expected)
    mhla.apply_mhla(pipe, sparse="none", blocks=(1,) * family.axes)
    assert torch.equal(_texts(pipe, prompt, **call), expected)
    if name != "wan":  # whose pipeline has no limit
        with pytest.raises(ValueError, match="`max_sequence_length` cannot be greater than"):
            _texts(pipe, prompt, **{**call, "max_sequence_length": LONG_TEXT})


@pytest.mark.parametrize("component", ["transformer", "transformer_2"])
def test_a_transformer_wrapped_by_peft_is_refused_with_the_way_out(component):
    pipe = wan22_pipeline()
    inner = getattr(pipe, component)
    setattr(pipe, component, get_peft_model(inner, lora("to_q")))
    wrapped = getattr(pipe, component)
    for model, name in ((pipe, component), (wrapped, "transformer")):
        with pytest.raises(ValueError, match=rf"{name} is wrapped in PEFT's PeftModel.*{name}\.get_base_model\(\)"):
            mhla.apply_mhla(model, sparse="none", blocks=(1, 1, 1))
    assert not mhla.is_patched(pipe)
    setattr(pipe, component, wrapped.get_base_model())
    mhla.apply_mhla(pipe, sparse="none", blocks=(1, 1, 1))
    assert len(mhla.mhla_layers(pipe)) == 2 * len(mhla.mhla_layers(inner))
    assert any("lora_A" in name for name in inner.state_dict())


def test_a_failure_half_way_leaves_the_model_as_it_was():
    model = FAMILIES["dit"].build()
    odd = model.transformer_blocks[2].attn1
    odd.to_q, linear = torch.nn.Identity(), odd.to_q
    before = footprint(model)
    with pytest.raises(AttributeError):
        mhla.apply_mhla(model, sparse="none", blocks=(4, 2))
    assert_same_footprint(model, before)
    odd.to_q = linear
    mhla.apply_mhla(model, sparse="none", blocks=(4, 2))


def test_a_single_number_is_no_choice_of_layers():
    with pytest.raises(ValueError, match=r"layers=1 is ambiguous; write layers=\[1\]"):
        patched("wan", layers=1)
