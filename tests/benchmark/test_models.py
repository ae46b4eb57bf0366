"""Models by name, the sizes that they take, and what is built of them."""

import json

import pytest
import torch

from mhla_diffusers.benchmark.models import (
    build_transformer,
    choose_sizes,
    find_models,
    make_forward_inputs,
    models,
    small_size,
)
from mhla_diffusers.families import get_family
from mhla_diffusers.tiny import pipeline_folder

from .commands import bench

META = torch.device("meta")


def test_a_gpu_gets_every_real_model_and_a_cpu_the_smallest():
    real = {model.name for model in find_models(None, "cuda")}
    assert real == {"wan2.1-1.3b", "wan2.1-14b", "sana-0.6b", "sana-1.6b", "dit-s-2", "dit-xl-2"}
    assert models().keys() > real | {"tiny-wan", "tiny-sana", "tiny-dit", "flux-dev"}
    assert [model.name for model in find_models(None, "cpu")] == ["dit-s-2"]


def test_a_family_of_the_users_own_tells_its_models_and_what_conditions_them(auraflow):
    (model,) = find_models(["tiny-auraflow"], "cpu")
    (size,) = choose_sizes(model, ["256"], None, "cpu", batch=3)
    transformer = build_transformer(model, size, None, META, torch.bfloat16)
    inputs = make_forward_inputs(model, transformer, size, META, torch.bfloat16)
    text = inputs["encoder_hidden_states"]
    assert (text.shape, text.dtype) == ((3, 256, 32), torch.bfloat16)


def test_inputs_are_of_the_types_and_sizes_that_the_model_takes():
    """PixArt-α's text has a mask of integers, and at 1024 px it is told the size of the picture."""
    (model,) = find_models(["tiny-pixart"], "cpu")
    (size,) = choose_sizes(model, ["1024"], None, "cpu", batch=3)
    transformer = build_transformer(model, size, None, META, torch.bfloat16)
    inputs = make_forward_inputs(model, transformer, size, META, torch.bfloat16)
    text, mask = inputs["encoder_hidden_states"], inputs["encoder_attention_mask"]
    assert (text.shape, text.dtype) == ((3, 120, 32), torch.bfloat16)
    assert (mask.shape, mask.dtype) == ((3, 120), torch.int64)
    assert inputs["added_cond_kwargs"]["resolution"].shape == (3, 2)


def test_tiny_wan_is_the_transformer_of_the_pipeline_of_this_name():
    """But for the length of its RoPE, which has no weights."""
    ships = json.loads((pipeline_folder("wan") / "transformer" / "config.json").read_text())
    model = models()["tiny-wan"]
    built = build_transformer(model, small_size(model), None, torch.device("meta"), torch.float32).config
    assert {name for name, value in ships.items() if name[0] != "_" and list_of(built.get(name)) != value} == {
        "rope_max_seq_len"
    }
    assert (model.layers, model.heads, model.head_dim) == (4, 3, 32)


def list_of(value):
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("name", ["tiny-wan", "tiny-sana", "tiny-dit"])
def test_the_small_size_has_two_tokens_per_block_and_axis(name):
    model = models()[name]
    size = small_size(model)
    transformer = build_transformer(model, size, None, META, torch.float32)
    latents = make_forward_inputs(model, transformer, size, META, torch.float32)["hidden_states"]
    assert get_family(transformer).token_grid(transformer, latents) == tuple(2 * count for count in model.blocks)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--model", "wan"), "Unknown model 'wan'; the nearest names are wan2.1-1.3b"),
        (("--model", "tiny-wan", "--size", "480x850"), "width=850 is not divisible by 16 .*848 and 864"),
        (("--model", "sana-0.6b", "--size", "500"), "height=500 is not divisible by 32 .*480 and 512"),
        (("--model", "tiny-dit", "--size", "64x80"), "square images only; got 64x80"),
        (("--model", "tiny-wan", "--frames", "80"), "frames=80 .*77 and 81"),
        (("--model", "tiny-dit", "--size", "big"), "size='big' is unknown; write HEIGHTxWIDTH"),
        (("--model", "tiny-dit", "--layers", "9"), "layers=9 must be from 1 to 3"),
        (("--model", "tiny-dit", "--layers", "0"), "layers=0 must be from 1 to 3"),
    ],
)
def test_wrong_sizes_are_refused_before_anything_is_measured(tmp_path, capsys, options, message):
    with pytest.raises(ValueError, match=message):
        bench("transformer", "--device", "cpu", *options, "--output", tmp_path)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "parameters", "tokens"),
    [
        ("wan2.1-1.3b", 1.42e9, 32_760),
        ("wan2.1-14b", 14.3e9, 32_760),
        ("sana-0.6b", 0.59e9, 256),
        ("sana-1.6b", 1.6e9, 256),
        ("dit-s-2", 33e6, 256),
        ("dit-xl-2", 675e6, 256),
    ],
)
def test_configurations_are_those_of_the_real_models(name, parameters, tokens):
    model = models()[name]
    (size,) = choose_sizes(model, None, None, "cpu")
    transformer = build_transformer(model, size, None, META, torch.float32)
    # diffusers' DiT holds class and time embedders in every layer, which the published count does not
    count = sum(parameter.numel() for parameter in transformer.parameters())
    assert count == pytest.approx(parameters, rel=0.25 if "dit" in name else 0.02)
    inputs = make_forward_inputs(model, transformer, size, META, torch.float32)
    grid = get_family(transformer).token_grid(transformer, inputs["hidden_states"])
    assert torch.Size(grid).numel() == tokens
    attn = next(iter(get_family(transformer).self_attentions(transformer).values()))
    assert (attn.heads, attn.inner_dim // attn.heads) == (model.heads, model.head_dim)
