"""Apply, look at, switch off and remove a patch, on tiny instances of every supported diffusers class."""

import copy
import inspect
import math
from typing import ClassVar

import pytest
import torch
from diffusers import (
    DDPMPipeline,
    DDPMScheduler,
    DiTTransformer2DModel,
    PixArtTransformer2DModel,
    SanaTransformer2DModel,
    UNet2DModel,
    WanTransformer3DModel,
)
from diffusers.models.attention_processor import AttnProcessor, AttnProcessor2_0
from torch.nn.functional import scaled_dot_product_attention

import mhla_diffusers as mhla
from mhla_diffusers.attention import Call, reference_attention
from mhla_diffusers.attention.rotary import rotary_table
from mhla_diffusers.patching.plan import choose_layers
from mhla_diffusers.patching.processor import project

from .models import (
    FAMILIES,
    PIPELINES,
    assert_changed,
    generate,
    inputs,
    output,
    patched,
    relative_change,
    wan22_pipeline,
)

MODELS = list(FAMILIES)
OWN_METHODS = [name for name, case in FAMILIES.items() if case.own_methods]


def footprint(model):
    """All that a patch could leave behind in a transformer; processors and hooks compare by identity."""
    return {
        "class": type(model),
        "state": {key: value.clone() for key, value in model.state_dict().items()},
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "signature": inspect.signature(model.forward),
        "modules": [name for name, _ in model.named_modules()],
        "attributes": {name: sorted(vars(module)) for name, module in model.named_modules()},
        "processors": mhla.attn_processors(model),
        "hooks": {
            (name, kind): list(getattr(module, kind).values())
            for name, module in model.named_modules()
            for kind in ("_forward_pre_hooks", "_forward_hooks", "_backward_hooks", "_backward_pre_hooks")
        },
    }


def assert_same_footprint(model, before):
    after = footprint(model)
    assert list(after["state"]) == list(before["state"])
    for key, value in before["state"].items():
        assert torch.equal(after["state"][key], value), key
    for part in before.keys() - {"state"}:
        assert after[part] == before[part], part


# ---------------------------------------------------------------- apply and remove


@pytest.mark.parametrize("name", MODELS)
def test_apply_changes_the_output_and_remove_leaves_no_trace(name):
    model, arguments = FAMILIES[name].build(), inputs(name)
    before, expected = footprint(model), output(model, arguments)
    assert not mhla.is_patched(model)

    assert mhla.apply_mhla(model, blocks=FAMILIES[name].blocks) is model
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

    assert mhla.apply_mhla(pipe, blocks=case.blocks) is pipe
    assert {layer.partition(".")[0] for layer in mhla.mhla_layers(pipe)} == set(case.transformers)
    assert_changed(generate(name, pipe), expected)

    assert mhla.remove_mhla(pipe) is pipe
    assert torch.equal(generate(name, pipe), expected)
    for part, state in before.items():
        assert_same_footprint(getattr(pipe, part), state)


def test_both_transformers_of_wan_2_2_take_part():
    """Patching one of the two only gives another video than patching both."""
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=PIPELINES["wan22"].blocks)
    both = generate("wan22", pipe)
    mhla.remove_mhla(pipe.transformer_2)
    assert mhla.is_patched(pipe)
    assert_changed(generate("wan22", pipe), both)


@pytest.mark.parametrize("name", MODELS)
def test_patching_again_after_removal_gives_the_same_model(name):
    model = patched(name)
    first = output(model, inputs(name))
    mhla.apply_mhla(mhla.remove_mhla(model), blocks=FAMILIES[name].blocks)
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


# ---------------------------------------------------------------- which layers

LAYER_CHOICES = [
    ("all", [0, 1, 2, 3]),
    ("2/3", [1, 2]),
    (0.5, [1, 3]),
    ([2, 0], [0, 2]),
    ([-1], [3]),
    ([-4, 0, 1], [0, 1]),
]


@pytest.mark.parametrize("name", ["wan", "dit"])
@pytest.mark.parametrize(("layers", "indices"), LAYER_CHOICES)
def test_layers_choose_what_is_replaced(name, layers, indices):
    """The others keep their processor and get no weights."""
    model = FAMILIES[name].build()
    before = mhla.attn_processors(model)
    mhla.apply_mhla(model, layers=layers, blocks=FAMILIES[name].blocks)
    prefix = "blocks" if name == "wan" else "transformer_blocks"
    chosen = [f"{prefix}.{index}.attn1" for index in indices]
    assert list(mhla.mhla_layers(model)) == [f"{path}.mhla" for path in chosen]
    for path, processor in mhla.attn_processors(model).items():
        if path.removesuffix(".processor") in chosen:
            assert isinstance(processor, mhla.MHLAProcessor)
        else:
            assert processor is before[path]


def test_control_layers_of_vace_count_on_after_the_main_ones():
    model = patched("wan_vace", layers=[0, 3])
    assert list(mhla.mhla_layers(model)) == ["blocks.0.attn1.mhla", "vace_blocks.0.attn1.mhla"]


def test_two_thirds_is_the_hybrid_of_the_paper():
    """Every third layer is kept, beginning with layer 0, in a 30-layer and a 40-layer model."""
    for count in (30, 40):
        assert choose_layers("2/3", count) == [index for index in range(count) if index % 3]


def test_a_layer_that_was_kept_counts():
    """Replacing fewer layers changes the output less than replacing all, and differs from it."""
    original = output(FAMILIES["wan"].build(), inputs("wan"))
    some = output(patched("wan", layers=[3]), inputs("wan"))
    every = output(patched("wan"), inputs("wan"))
    assert_changed(some, original)
    assert (some - original).norm() < (every - original).norm()


# ---------------------------------------------------------------- what a patched layer computes


def layer_calls(model, arguments):
    """Arguments and result of every MHLA layer in one forward, by layer name."""
    calls = {}
    handles = [
        layer.register_forward_hook(lambda _, args, result, path=path: calls.update({path: (args, result)}))
        for path, layer in mhla.mhla_layers(model).items()
    ]
    output(model, arguments)
    for handle in handles:
        handle.remove()
    return calls


@pytest.mark.parametrize("ragged", [False, True], ids=["even", "ragged"])
@pytest.mark.parametrize("name", MODELS)
def test_every_layer_computes_equation_4_on_the_grid_of_the_input(name, ragged):
    """Also where the block counts do not divide a grid that is not square."""
    model, case = patched(name), FAMILIES[name]
    grid = case.ragged_grid if ragged else case.grid
    with torch.no_grad():
        for seed, layer in enumerate(mhla.mhla_layers(model).values()):
            noise = torch.rand(layer.mixing.shape, generator=torch.Generator().manual_seed(seed))
            layer.mixing.mul_(0.2).add_(noise)
    calls = layer_calls(model, inputs(name, ragged=ragged))
    assert len(calls) == case.self_attentions
    for path, (arguments, result) in calls.items():
        query, key, value, _, _, rotary, *_ = arguments
        mixing = mhla.mhla_layers(model)[path].mixing.detach()
        table = rotary_table(rotary) if rotary is not None else None
        expected = reference_attention(Call(query, key, value, mixing, grid, case.blocks, rotary=table))
        # float32 sums of at most 96 tokens; RoPE makes the numerator's terms cancel, hence the absolute part
        torch.testing.assert_close(result.double(), expected, rtol=1e-4, atol=1e-5)
        assert (rotary is not None) == name.startswith("wan")


@pytest.mark.parametrize("name", [name for name in MODELS if not name.startswith("sana")])
def test_query_key_and_value_are_those_of_the_replaced_attention(name):
    """Softmax attention over them is what the model's own processor computes (SANA's is linear; see below)."""
    model = FAMILIES[name].build()
    width = model.config.num_attention_heads * model.config.attention_head_dim
    hidden_states = torch.randn(2, 10, width, generator=torch.Generator().manual_seed(0))
    for path, attn in model.named_modules():
        if path.endswith("attn1"):
            with torch.no_grad():
                heads = scaled_dot_product_attention(*(x.transpose(1, 2) for x in project(attn, hidden_states)))
                found = attn.to_out[0](heads.transpose(1, 2).flatten(2))
                # the same operations in another order
                torch.testing.assert_close(found, attn(hidden_states), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{"blocks": (1, 1)}, {"blocks": (4, 2), "mixing_init": "uniform"}])
@pytest.mark.parametrize("name", ["sana", "sana_qk_norm"])
def test_one_block_on_sana_is_its_own_linear_attention(name, settings):
    """So is any number of blocks that are mixed evenly.

    Where every query channel of a head is negative, SANA's ReLU leaves 0 / 1e-15 and it gives 0, where MHLA's weights
    still sum to 1 and it gives the mean of the values; tokens where that may happen are left out. What MHLA adds to
    every feature is made as small as what SANA adds to its normaliser; the rest is float32 rounding.
    """
    own, patched_model = FAMILIES[name].build(), patched(name, eps=1e-12, **settings)
    width = own.transformer_blocks[0].attn1.to_q.in_features
    hidden_states = torch.randn(2, 64, width, generator=torch.Generator().manual_seed(0))
    for block, other in zip(own.transformer_blocks, patched_model.transformer_blocks, strict=True):
        other.attn1.mhla.token_grid.shape = (8, 8)
        alive = (project(block.attn1, hidden_states)[0] > 1e-3).any(dim=-1).all(dim=-1)
        assert alive.float().mean() > 0.9
        expected, found = block.attn1(hidden_states)[alive], other.attn1(hidden_states)[alive]
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert_changed(output(patched(name), inputs(name)), output(own, inputs(name)))


@pytest.mark.parametrize("name", MODELS)
def test_resolutions_may_alternate(name):
    """A patched model keeps no state of the latest resolution: a forward at another one changes nothing."""
    model = patched(name)
    even, ragged = output(model, inputs(name)), output(model, inputs(name, ragged=True))
    assert torch.equal(output(model, inputs(name)), even)
    assert torch.equal(output(model, inputs(name, ragged=True)), ragged)
    assert torch.equal(output(patched(name), inputs(name, ragged=True)), ragged)


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
@pytest.mark.parametrize("option", [{"output_gate": True}, {"convolution": 3}, {"output_gate": True, "convolution": 5}])
def test_a_fresh_gate_and_convolution_change_nothing(name, option):
    """Within the rounding of SiLU; trained, they do."""
    expected = output(patched(name), inputs(name))
    model = patched(name, **option)
    torch.testing.assert_close(output(model, inputs(name)), expected, rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            for module in filter(None, (layer.gate, layer.convolution)):
                module.weight.add_(0.3)
    assert_changed(output(model, inputs(name)), expected)


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_the_convolution_runs_over_the_token_grid(name):
    """A kernel with a single 1 beside its centre shifts the values by one token along the last axis of the grid."""
    model, case = patched(name, convolution=3), FAMILIES[name]
    plain = layer_calls(model, inputs(name, ragged=True))
    with torch.no_grad():
        for layer in mhla.mhla_layers(model).values():
            layer.convolution.weight.view(layer.convolution.weight.shape[0], -1)[:, -2 - 3 ** len(case.grid) // 2] = 0
            layer.convolution.weight[(..., *[1] * (len(case.grid) - 1), 2)] = 1
    first = next(iter(plain))
    shifted = layer_calls(model, inputs(name, ragged=True))[first][1] - plain[first][1]
    value = plain[first][0][2].unflatten(1, case.ragged_grid)
    axis = len(case.ragged_grid)
    width = value.shape[axis]
    expected = torch.zeros_like(value)
    expected.narrow(axis, 0, width - 1).copy_(value.narrow(axis, 1, width - 1))
    torch.testing.assert_close(shifted, expected.flatten(1, axis), rtol=1e-4, atol=1e-4)


# ---------------------------------------------------------------- calibration


def head_channel_rms(model, arguments):
    """Root mean square of every head channel that an unpatched model's self-attentions hand to ``to_out``."""
    seen = {}
    handles = []
    for path, attn in model.named_modules():
        if path.endswith("attn1"):

            def note(_, args, path=path, heads=attn.heads):
                seen[path] = args[0].unflatten(-1, (heads, -1)).square().mean(dim=(0, 1, 2)).sqrt()

            handles.append(attn.to_out[0].register_forward_pre_hook(note))
    output(model, arguments)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_calibration_gives_the_output_norm_the_scale_of_the_replaced_attention(name):
    expected = head_channel_rms(FAMILIES[name].build(), inputs(name))
    model = patched(name, output_norm=True, normalize=False)
    before = footprint(model)
    mhla.calibrate_output_norm(model, lambda: model(**inputs(name)))
    for path, layer in mhla.mhla_layers(model).items():
        torch.testing.assert_close(layer.output_norm, expected[path.removesuffix(".mhla")], rtol=1e-4, atol=1e-6)
    after = footprint(model)
    for part in before.keys() - {"state"}:
        assert after[part] == before[part], part


def test_calibration_reaches_both_transformers_of_a_pipeline():
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=PIPELINES["wan22"].blocks, output_norm=True)
    mhla.calibrate_output_norm(pipe, lambda: generate("wan22", pipe))
    for layer in mhla.mhla_layers(pipe).values():
        assert layer.output_norm.isfinite().all()
        assert not torch.equal(layer.output_norm, torch.ones_like(layer.output_norm))


def test_calibration_refuses_what_it_cannot_do():
    with pytest.raises(ValueError, match="output_norm=True"):
        mhla.calibrate_output_norm(patched("sana"), lambda: None)
    with pytest.raises(ValueError, match="output_norm=True"):
        mhla.calibrate_output_norm(FAMILIES["sana"].build(), lambda: None)
    model = patched("sana", output_norm=True)
    before = footprint(model)
    with pytest.raises(ValueError, match=r"did not reach 3 of 3 layers.*transformer_blocks\.0\.attn1"):
        mhla.calibrate_output_norm(model, lambda: None)
    with pytest.raises(RuntimeError, match="out of prompts"):
        mhla.calibrate_output_norm(model, lambda: (_ for _ in ()).throw(RuntimeError("out of prompts")))
    assert_same_footprint(model, before)


# ---------------------------------------------------------------- masks


def masked_attention(name, tokens, mask):
    """First self-attention of ``name`` on the first ``tokens`` of 64 tokens on a grid 8 wide."""
    case = FAMILIES[name]
    if len(case.blocks) == 3:
        grid, blocks = (2, tokens // 16, 8), (1, 2, 2)
    else:
        grid, blocks = (tokens // 8, 8), (2, 2)
    model = FAMILIES[name].build()
    attn = next(module for path, module in model.named_modules() if path.endswith("attn1"))
    attn.set_processor(mhla.MHLAProcessor(blocks=blocks, grid=grid))
    width = model.config.num_attention_heads * model.config.attention_head_dim
    x = torch.randn(2, *(grid[:-2] or (1,)), 8, 8, width, generator=torch.Generator().manual_seed(0))
    x = x[..., : grid[-2], :, :].reshape(2, tokens, width)
    with torch.no_grad():
        return attn(x, attention_mask=mask)


def bias(keep, value):
    """The bias that diffusers adds to the scores of keys that are masked out."""
    return torch.zeros(keep.shape).masked_fill_(~keep, value)


MASKS = {
    "bool": lambda keep: keep,
    "bool (B, 1, N)": lambda keep: keep[:, None],
    "bias (B, 1, N) of -10000": lambda keep: bias(keep, -10000.0)[:, None],
    "bias (B, 1, 1, N) of -inf": lambda keep: bias(keep, -math.inf)[:, None, None],
}


@pytest.mark.parametrize("form", MASKS)
@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_key_padding_masks_equal_dropping_the_tokens(name, form):
    """The last row of every frame is masked out: the other tokens see what they see without it."""
    frames = 2 if name == "wan" else 1
    rows = 64 // 8 // frames
    keep = (torch.arange(64) // 8 % rows < rows - 1).expand(2, 64)
    found = masked_attention(name, 64, MASKS[form](keep))[:, keep[0]]
    expected = masked_attention(name, 64 - 8 * frames, None)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert_changed(masked_attention(name, 64, None)[:, keep[0]], expected)


@pytest.mark.parametrize("shape", [(2, 64, 64), (2, 2, 64, 64), (64, 64), (3, 64), (2, 63)])
@pytest.mark.parametrize("name", ["wan", "sana"])
def test_masks_that_differ_between_queries_are_refused(name, shape):
    with pytest.raises(ValueError, match="key-padding") as error:
        masked_attention(name, 64, torch.ones(shape, dtype=torch.bool))
    assert str(shape) in str(error.value)
    assert "(2, 64)" in str(error.value)


def test_a_mask_of_integers_is_refused():
    keep = (torch.arange(64) < 56).expand(2, 64)
    with pytest.raises(ValueError, match="int64 is ambiguous"):
        masked_attention("sana", 64, keep.long())


# ---------------------------------------------------------------- diffusers' own form


def single_instance(name, **settings):
    """Model ``name`` with one MHLAProcessor set on every attention by diffusers' own method."""
    case, model = FAMILIES[name], FAMILIES[name].build()
    model.set_attn_processor(mhla.MHLAProcessor(blocks=case.blocks, grid=case.grid, **settings))
    return model


@pytest.mark.parametrize("name", OWN_METHODS)
def test_one_processor_for_all_attentions_leaves_cross_attention_alone(name):
    """Bit for bit the same as ``apply_mhla``, which touches self-attention only."""
    model = single_instance(name)
    found = output(model, inputs(name))
    assert torch.equal(found, output(patched(name), inputs(name)))
    assert_changed(found, output(FAMILIES[name].build(), inputs(name)))


@pytest.mark.parametrize("name", OWN_METHODS)
def test_one_processor_makes_weights_for_every_layer(name):
    model = single_instance(name)
    assert mhla.is_patched(model)
    first = output(model, inputs(name))
    layers = mhla.mhla_layers(model)
    assert list(layers) == list(mhla.mhla_layers(patched(name)))
    assert len({layer.mixing.data_ptr() for layer in layers.values()}) == FAMILIES[name].self_attentions
    assert torch.equal(output(model, inputs(name)), first)
    with torch.no_grad():
        next(iter(layers.values())).mixing.copy_(torch.eye(math.prod(FAMILIES[name].blocks)))
    assert_changed(output(model, inputs(name)), first)


@pytest.mark.parametrize("ran", [False, True], ids=["before the first forward", "after it"])
@pytest.mark.parametrize("name", OWN_METHODS)
def test_diffusers_own_form_is_removed_too(name, ran):
    """diffusers keeps no record of the old processors: they are fresh ones of the same classes."""
    case, reference = FAMILIES[name], FAMILIES[name].build()
    model = single_instance(name)
    if ran:
        output(model, inputs(name))
    mhla.remove_mhla(model)
    assert not mhla.is_patched(model)
    assert torch.equal(output(model, inputs(name)), output(reference, inputs(name)))
    assert list(model.state_dict()) == list(reference.state_dict())
    kinds = {path: type(processor) for path, processor in model.attn_processors.items()}
    assert kinds == {path: type(processor) for path, processor in reference.attn_processors.items()}
    mhla.apply_mhla(model, blocks=case.blocks)


def test_diffusers_own_form_needs_the_grid():
    model = FAMILIES["wan"].build()
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3)))
    with pytest.raises(ValueError, match="does not know the token grid.*grid=.*apply_mhla.*set_attn_processor"):
        output(model, inputs("wan"))


def test_a_grid_whose_product_is_not_the_number_of_tokens_is_refused():
    model = FAMILIES["wan"].build()
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=(4, 4, 7)))
    with pytest.raises(ValueError, match=r"\(4, 4, 7\) holds 112 tokens.* got 96"):
        output(model, inputs("wan"))


def test_a_refused_first_forward_leaves_no_weights_behind():
    model = FAMILIES["wan"].build()
    keys = list(model.state_dict())
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2, 3), grid=(4, 4, 7)))
    with pytest.raises(ValueError, match="holds 112 tokens"):
        output(model, inputs("wan"))
    assert list(model.state_dict()) == keys


def test_diffusers_own_form_does_not_ignore_the_choice_of_layers():
    with pytest.raises(ValueError, match=r"layers=\(1,\) cannot be honoured.*set_attn_processor\(transformer"):
        output(single_instance("wan", layers=[1]), inputs("wan"))


def test_weights_made_under_inference_mode_can_be_trained():
    model = single_instance("wan")
    with torch.inference_mode():
        model(**inputs("wan"))
    model(**inputs("wan")).sample.sum().backward()
    assert all(layer.mixing.grad is not None for layer in mhla.mhla_layers(model).values())


def test_processor_of_other_settings_on_a_patched_attention_is_refused():
    model = patched("wan")
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(1, 1, 1), grid=FAMILIES["wan"].grid))
    with pytest.raises(ValueError, match=r"blocks=\(2, 2, 3\).*blocks=\(1, 1, 1\).*remove_mhla"):
        output(model, inputs("wan"))


def test_processor_arguments_are_checked():
    with pytest.raises(ValueError, match="not both.*eps"):
        mhla.MHLAProcessor(mhla.MHLAConfig(blocks=(2, 2)), eps=0.1)
    with pytest.raises(ValueError, match=r"grid=\(4, 4\).*blocks=\(2, 2, 2\)"):
        mhla.MHLAProcessor(blocks=(2, 2, 2), grid=(4, 4))
    with pytest.raises(ValueError, match="'blocs'.*did you mean 'blocks'"):
        mhla.MHLAProcessor(blocs=(2, 2, 2))
    with pytest.raises(ValueError, match="need blocks"):
        mhla.MHLAProcessor(grid=(2, 2))
    with pytest.raises(ValueError, match="'eagr'.*auto.*eager"):
        mhla.MHLAProcessor(blocks=(2, 2), backend="eagr")


# ---------------------------------------------------------------- our set_attn_processor and attn_processors


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


@pytest.mark.parametrize("name", OWN_METHODS)
def test_attn_processors_is_the_property_of_diffusers(name):
    for model in (FAMILIES[name].build(), patched(name)):
        assert mhla.attn_processors(model) == model.attn_processors


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
    mhla.apply_mhla(model, blocks=(4, 2))
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


# ---------------------------------------------------------------- looking at a patch, switching it off, copying it


@pytest.mark.parametrize("name", MODELS)
def test_disabled_within_the_context_only(name):
    """With the same weights, and also when an exception leaves the context."""
    expected = output(FAMILIES[name].build(), inputs(name))
    model = patched(name)
    before, found = footprint(model), output(model, inputs(name))
    with mhla.mhla_disabled(model):
        assert torch.equal(output(model, inputs(name)), expected)
    with pytest.raises(KeyError), mhla.mhla_disabled(model):
        raise KeyError
    assert_same_footprint(model, before)
    assert torch.equal(output(model, inputs(name)), found)


def test_what_is_not_patched_can_be_neither_disabled_nor_removed():
    model = FAMILIES["sana"].build()
    with pytest.raises(ValueError, match="not patched"):
        mhla.remove_mhla(model)
    with pytest.raises(ValueError, match="not patched"), mhla.mhla_disabled(model):
        pass


@pytest.mark.parametrize("name", MODELS)
def test_mhla_layers_are_modules_of_the_model(name):
    assert mhla.mhla_layers(FAMILIES[name].build()) == {}
    model = patched(name)
    modules = dict(model.named_modules())
    layers = mhla.mhla_layers(model)
    assert len(layers) == FAMILIES[name].self_attentions
    assert all(modules[path] is layer and isinstance(layer, mhla.MHLALayer) for path, layer in layers.items())


@pytest.mark.parametrize("name", MODELS)
def test_describe_tells_what_was_done_to_every_layer(name):
    case = FAMILIES[name]
    model = patched(name, layers=[-1])
    blocks, count = case.blocks, math.prod(case.blocks)
    *kept, last = mhla.describe(model)
    assert len(kept) == case.self_attentions - 1
    assert not any(layer.replaced or layer.blocks or layer.extra_parameters for layer in kept)
    assert (last.replaced, last.grid, last.blocks, last.tokens_per_block) == (True, None, blocks, None)
    assert last.name == list(mhla.mhla_layers(model))[0].removesuffix(".mhla")
    assert last.extra_parameters == count**2

    output(model, inputs(name))
    last = mhla.describe(model)[-1]
    size = math.prod(case.grid) // count
    assert (last.grid, last.tokens_per_block) == (case.grid, (size, size))
    last = mhla.describe(model, grid=case.ragged_grid)[-1]
    low = math.prod(n // b for n, b in zip(case.ragged_grid, blocks, strict=True))
    high = math.prod(-(-n // b) for n, b in zip(case.ragged_grid, blocks, strict=True))
    assert (last.grid, last.tokens_per_block) == (case.ragged_grid, (low, high))


def test_describe_prints_a_table():
    model = patched("wan", layers=[1, 2, 3])
    assert str(mhla.describe(model, grid=(4, 4, 5))).splitlines() == [
        "layer           attention  grid   blocks      tokens per block  extra parameters",
        "blocks.0.attn1  kept       4x4x5  -           -                 0",
        "blocks.1.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            144",
        "blocks.2.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            144",
        "blocks.3.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            144",
        "3 of 4 self-attentions replaced, 432 extra parameters",
    ]
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    assert {layer.name.partition(".")[0] for layer in mhla.describe(pipe)} == {"transformer", "transformer_2"}


def test_describe_refuses_a_grid_that_does_not_fit():
    with pytest.raises(ValueError, match="width axis.* 2 tokens.* 3 blocks"):
        mhla.describe(patched("wan"), grid=(4, 4, 2))
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        mhla.describe(patched("wan"), grid=(4, 4))
    with pytest.raises(ValueError, match="UNet2DModel is not supported"):
        mhla.describe(unet())


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


def test_mixing_is_clipped_after_every_step_until_the_hook_is_removed():
    for clip, inside in ((True, True), (False, False)):
        model = patched("sana", mixing_clip=clip)
        matrices = [layer.mixing for layer in mhla.mhla_layers(model).values()]
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        handle = mhla.register_mixing_clip(optimizer, model)
        for direction in (100.0, -100.0):
            for matrix in matrices:
                matrix.grad = torch.full_like(matrix, direction)
            optimizer.step()
            assert all(bool(((matrix > 0) & (matrix < 1)).all()) is inside for matrix in matrices)
        handle.remove()
        optimizer.step()
        assert all(matrix.max() > 1 for matrix in matrices)


def test_mixing_clip_needs_a_patched_model():
    model = FAMILIES["sana"].build()
    with pytest.raises(ValueError, match=r"not patched with MHLA; call apply_mhla\(\)"):
        mhla.register_mixing_clip(torch.optim.SGD(model.parameters()), model)


# ---------------------------------------------------------------- bad input


def unet():
    """A diffusers model without any attention."""
    return UNet2DModel(
        block_out_channels=(8, 8),
        norm_num_groups=4,
        down_block_types=("DownBlock2D",) * 2,
        up_block_types=("UpBlock2D",) * 2,
    )


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
    "even kernel": ("wan", {"convolution": 4}, "convolution=4 must be an odd kernel size"),
    "setting misspelt": ("wan", {"feature_mpa": "relu"}, "'feature_mpa'; did you mean 'feature_map'.*Allowed: blocks"),
    "backend misspelt": ("wan", {"backend": "eagre"}, "'eagre'; allowed: auto, eager.*'eager'"),
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
        mhla.apply_mhla(model, blocks=FAMILIES[name].blocks)
    assert_same_footprint(model, before)


def test_a_pipeline_of_which_one_transformer_is_patched_is_refused_as_a_whole():
    pipe = wan22_pipeline()
    mhla.apply_mhla(pipe.transformer_2, blocks=(1, 1, 1))
    before = footprint(pipe.transformer), footprint(pipe.transformer_2)
    with pytest.raises(ValueError, match="already patched"):
        mhla.apply_mhla(pipe, blocks=(1, 1, 1))
    assert_same_footprint(pipe.transformer, before[0])
    assert_same_footprint(pipe.transformer_2, before[1])


@pytest.mark.parametrize("name", ["wan", "sana", "dit"])
def test_more_blocks_than_tokens_is_refused_at_the_input(name):
    """Only the input tells the grid; the message names the axis, and the model goes on with inputs that fit."""
    case = FAMILIES[name]
    blocks = (*case.blocks[:-1], case.grid[-1])
    model = mhla.apply_mhla(case.build(), blocks=blocks)
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


# ---------------------------------------------------------------- quantised projections


def test_a_model_with_quantised_projections_can_be_patched():
    model = FAMILIES["wan"].build()
    expected = output(patched("wan"), inputs("wan"))
    for block in model.blocks[1:]:
        torch.ao.quantization.quantize_dynamic(block.attn1, {torch.nn.Linear}, inplace=True)
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    found = output(model, inputs("wan"))
    # eight bits: half a percent per projection
    assert 0 < relative_change(found, expected) < 0.05


def test_a_failure_half_way_leaves_the_model_as_it_was():
    model = FAMILIES["dit"].build()
    odd = model.transformer_blocks[2].attn1
    odd.to_out[0], linear = torch.nn.Identity(), odd.to_out[0]
    before = footprint(model)
    with pytest.raises(AttributeError):
        mhla.apply_mhla(model, blocks=(4, 2))
    assert_same_footprint(model, before)
    odd.to_out[0] = linear
    mhla.apply_mhla(model, blocks=(4, 2))


# ---------------------------------------------------------------- a new family


class PixArtFamily(mhla.Family):
    """PixArt: softmax self-attention over a (height, width) grid."""

    name = "pixart"
    transformers = ("PixArtTransformer2DModel",)
    axes = 2
    block_lists = ("transformer_blocks",)
    default_config: ClassVar = mhla.MHLAConfig(blocks=(2, 2))

    def token_grid(self, transformer, hidden_states):
        """Patches of the latents (B, C, H, W) along each axis."""
        patch = transformer.config.patch_size
        return hidden_states.shape[2] // patch, hidden_states.shape[3] // patch

    def self_attention_processor(self):
        """``AttnProcessor2_0``."""
        return AttnProcessor2_0()


@pytest.fixture
def pixart(monkeypatch):
    """A PixArt transformer and its inputs; what a test registers is forgotten after it."""
    monkeypatch.setattr("mhla_diffusers.families._FAMILIES", dict(mhla.families._FAMILIES))
    torch.manual_seed(0)
    model = PixArtTransformer2DModel(
        num_attention_heads=2,
        attention_head_dim=8,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        cross_attention_dim=16,
        caption_channels=8,
        sample_size=16,
        use_additional_conditions=False,
    ).eval()
    generator = torch.Generator().manual_seed(1)
    arguments = {
        "hidden_states": torch.randn(2, 4, 16, 12, generator=generator),
        "encoder_hidden_states": torch.randn(2, 5, 8, generator=generator),
        "timestep": torch.tensor([500, 250]),
        "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }
    return model, arguments


def test_a_new_family_takes_under_60_lines(pixart):
    """Register, patch, run on a grid that is not square, remove."""
    model, arguments = pixart
    assert len(inspect.getsource(PixArtFamily).splitlines()) < 60
    with pytest.raises(ValueError, match=r"PixArtTransformer2DModel is not supported.*register_family\(\)"):
        mhla.apply_mhla(model)
    before, expected = footprint(model), output(model, arguments)
    mhla.register_family(PixArtFamily())
    mhla.apply_mhla(model, layers="2/3")
    assert_changed(output(model, arguments), expected)
    assert [(layer.replaced, layer.grid) for layer in mhla.describe(model)][1:] == [(True, (8, 6))] * 2
    mhla.remove_mhla(model)
    assert_same_footprint(model, before)
    assert torch.equal(output(model, arguments), expected)


def test_a_family_cannot_take_a_name_that_is_taken(pixart):
    class OtherFamily(PixArtFamily):
        pass

    mhla.register_family(PixArtFamily())
    with pytest.raises(ValueError, match=r"'pixart' is already registered by .*PixArtFamily; .* for .*OtherFamily"):
        mhla.register_family(OtherFamily())


def test_a_family_may_be_defined_and_registered_again(pixart):
    """As a notebook does when its cell is run again."""

    def cell():
        class AgainFamily(PixArtFamily):
            pass

        return AgainFamily()

    first, second = cell(), cell()
    assert type(first) is not type(second)
    mhla.register_family(first)
    mhla.register_family(second)
    assert mhla.families.get_family(pixart[0]) is second


def test_cross_attention_of_a_new_family_is_its_own_in_the_single_instance_form(pixart):
    model, arguments = pixart
    mhla.register_family(PixArtFamily())
    kinds = {path: type(processor) for path, processor in mhla.attn_processors(model).items()}
    model.set_attn_processor(mhla.MHLAProcessor(blocks=(2, 2), grid=(8, 6)))
    found = output(model, arguments)
    mhla.remove_mhla(model)
    assert {path: type(processor) for path, processor in mhla.attn_processors(model).items()} == kinds
    assert torch.equal(found, output(mhla.apply_mhla(model), arguments))


# ---------------------------------------------------------------- what careless use found


def test_removal_while_switched_off_stays_removed():
    model, arguments = FAMILIES["wan"].build(), inputs("wan")
    expected = output(model, arguments)
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    with mhla.mhla_disabled(model):
        mhla.remove_mhla(model)
    assert not mhla.is_patched(model)
    assert torch.equal(output(model, arguments), expected)


def test_describe_while_switched_off_and_after_a_refused_grid():
    model = patched("wan")
    output(model, inputs("wan"))
    with mhla.mhla_disabled(model):
        assert mhla.describe(model)[0].tokens_per_block == (8, 8)
    model = patched("wan", blocks=(4, 4, 7))
    with pytest.raises(ValueError, match="too few for 7 blocks"):
        output(model, inputs("wan"))
    assert mhla.describe(model)[0].tokens_per_block is None


def test_before_its_first_forward_diffusers_own_form_says_what_is_missing(tmp_path):
    model = single_instance("wan")
    assert all(layer.replaced and layer.blocks == (2, 2, 3) for layer in mhla.describe(model))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for use in (lambda: mhla.save_mhla(model, tmp_path), lambda: mhla.register_mixing_clip(optimizer, model)):
        with pytest.raises(ValueError, match="no MHLA weights yet.*first forward"):
            use()


def test_an_optimizer_made_too_early_is_refused():
    model = FAMILIES["wan"].build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mhla.apply_mhla(model, blocks=(2, 2, 3))
    with pytest.raises(ValueError, match="optimizer lacks a mixing matrix.*after apply_mhla"):
        mhla.register_mixing_clip(optimizer, model)


def test_a_bias_that_masks_every_key_alike_masks_none():
    """As softmax has it: a constant on all scores of a query changes nothing."""
    tokens = 64
    masked = masked_attention("sana", tokens, torch.full((2, tokens), -10000.0))
    torch.testing.assert_close(masked, masked_attention("sana", tokens, torch.zeros(2, tokens)))


def test_a_single_number_is_no_choice_of_layers():
    with pytest.raises(ValueError, match=r"layers=1 is ambiguous; write layers=\[1\]"):
        patched("wan", layers=1)
