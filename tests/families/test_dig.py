"""DiG: directions, parameters, what MHLA takes the place of and what it leaves, DiT's pipeline and its files."""

import copy
import sys
from typing import Any

import pytest
import torch
from diffusers import DiTPipeline

import mhla_diffusers as mhla
from mhla_diffusers.analysis import attention_matrices
from mhla_diffusers.families import AttentionInputs
from mhla_diffusers.generation.pipelines import load_pipeline
from mhla_diffusers.models.dig import DiGTransformer2DModel
from mhla_diffusers.patching import TransformerCall
from mhla_diffusers.training.roles import make_trainable, trainable_names

from ..models import assert_changed, output, relative_change, seeded
from ..patching.shared import with_lora
from ..pipelines import dit_pipeline
from ..refusals import refused
from .cases import case_of

CASE = case_of("dig")
CALL, transformer = CASE.call, CASE.transformer

BLOCKS = {"blocks": (4, 2)}
S_2 = 32_983_328
"""Parameters of DiG-S/2, counted in the authors' code: 12 blocks of 2 669 824 and 945 440 around them."""


def parameters(model: Any) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def generate(pipe: Any) -> torch.Tensor:
    return pipe(**CALL, generator=torch.Generator().manual_seed(3)).images


@torch.no_grad()
def stream_turned_between_blocks(model: Any, arguments: dict[str, Any]) -> tuple[list[torch.Tensor], torch.Tensor]:
    """DiG as its authors wrote it: every block reads rows, and between blocks the tokens change places.

    Returns:
        What every block is given and the output, the tokens put back in raster order.
    """
    model = copy.deepcopy(model)
    given: list[torch.Tensor] = []
    places: list[torch.Tensor] = []  # which token of the picture stands where
    for index, block in enumerate(model.transformer_blocks):
        block.direction = block.attn1.direction = 0
        block.register_forward_pre_hook(lambda _, args: given.append(args[0][:, places[-1].argsort()]))

        def turn(_: Any, args: Any, tokens: torch.Tensor, index: int = index) -> torch.Tensor:
            order = torch.arange(tokens.shape[1]).flip(0)
            if index % 2:
                side = int(len(order) ** 0.5)
                order = order.view(side, side).T.flatten()
            places.append(places[-1][order])
            return tokens[:, order]

        block.register_forward_hook(turn)
    places.append(torch.arange((arguments["hidden_states"].shape[-1] // 2) ** 2))
    model.norm_out.register_forward_pre_hook(lambda _, args: args[0][:, places[-1].argsort()])
    return given, output(model, arguments)


@pytest.mark.parametrize("expand_k", [0.5, 1.0])
def test_blocks_that_turn_are_a_stream_that_is_turned(expand_k):
    """And what a block is given, so also MHLA in its place, is in raster order."""
    model, arguments = transformer(num_layers=6, expand_k=expand_k).double(), CASE.inputs()
    arguments["hidden_states"] = arguments["hidden_states"].double()
    given, expected = stream_turned_between_blocks(model, arguments)
    found = []
    for block in model.transformer_blocks:
        block.register_forward_pre_hook(lambda _, args: found.append(args[0]))
    assert relative_change(output(model, arguments), expected) < 1e-13
    assert len(found) == len(given) == 6
    assert max(relative_change(one, other) for one, other in zip(found, given, strict=True)) < 1e-13
    for block in model.transformer_blocks:
        block.attn1.direction = 0
    assert_changed(output(model, arguments), expected)


def test_a_token_sees_those_before_it_in_its_direction():
    """The directions are rows, rows backwards, columns, columns backwards, here in a grid of 3 x 3."""
    seen = {0: {0, 1, 2, 3}, 1: {3, 4, 5, 6, 7, 8}, 2: {0, 3}, 3: set(range(9)) - {0}}
    model = transformer(num_layers=4).double()
    for direction, expected in seen.items():
        tokens = torch.randn(1, 9, 24, dtype=torch.float64, requires_grad=True)
        model.transformer_blocks[direction].attn1(tokens)[0, 3].sum().backward()
        felt = tokens.grad[0].abs().sum(-1)
        # decays are measured from the middle of a chunk: what is not seen cancels, up to the rounding of float64
        assert set((felt > 1e-12 * felt.max()).nonzero().flatten().tolist()) == expected


def test_parameters():
    """DiG-S/2, with queries and keys as wide as MHLA needs them, and what a patch adds and leaves without work."""
    with torch.device("meta"):
        assert parameters(DiGTransformer2DModel()) == S_2
        model = DiGTransformer2DModel(expand_k=1.0)
    assert parameters(model) == 34_791_968
    model.to_empty(device="cpu")
    mhla.apply_mhla(model)
    idle = sum(parameters(block.attn1.to_decay) for block in model.transformer_blocks)
    assert parameters(model) - idle == 34_642_976


def test_a_fresh_model_changes_nothing_in_its_blocks_and_predicts_zero():
    model = DiGTransformer2DModel(num_attention_heads=2, attention_head_dim=12, num_layers=4, sample_size=16).eval()
    first = []
    model.transformer_blocks[0].register_forward_pre_hook(lambda _, args: first.append(args[0]))
    last = []
    model.transformer_blocks[-1].register_forward_hook(lambda *args: last.append(args[-1]))
    assert not output(model, CASE.inputs()).any()
    assert torch.equal(first[0], last[0])
    # what a token predicts is told row after row of its patch, and then by channel
    with torch.no_grad():
        model.proj_out_2.bias.copy_(torch.arange(32))
    patch = torch.arange(32.0).view(2, 2, 8).permute(2, 0, 1)
    assert torch.equal(output(model, CASE.inputs())[1], patch.repeat(1, 8, 8))


def test_narrow_queries_and_keys_are_refused_with_the_way_out():
    model = transformer(expand_k=0.5)
    with refused(0.5, "DiGTransformer2DModel(expand_k=1.0"):
        mhla.apply_mhla(model)
    assert not mhla.mhla_layers(model)
    with refused("expand_k=0.3", 7, 2):
        transformer(expand_k=0.3)


def test_what_dig_does_not_take_is_refused():
    model, arguments = transformer(), CASE.inputs()
    for changed, message in (
        ({"hidden_states": torch.zeros(2, 4, 16, 12)}, "16x12"),
        ({"class_labels": None}, "class_labels"),
        ({"cross_attention_kwargs": {"scale": 1.0}}, "scale"),
    ):
        with refused(message):
            output(model, arguments | changed)
    with refused("gated linear"):
        mhla.apply_mhla(model, density=0.1)


def test_norm_and_gate_stay_behind_mhla():
    """A patched attention is MHLA's weights, then what DiG's own attention does with the output of its heads."""
    model, arguments = mhla.apply_mhla(transformer(), **BLOCKS), CASE.inputs()
    attn, calls = model.transformer_blocks[1].attn1, []
    attn.register_forward_hook(lambda _, args, result: calls.append((args[0], result)))
    output(model, arguments)
    ((hidden_states, found),) = calls
    query, key, value = (x.unflatten(-1, (2, 12)) for x in attn.project(hidden_states))
    with torch.no_grad():
        weights = attn.mhla.weights(AttentionInputs(query, key, value, query, (8, 8)))
        heads = torch.einsum("bhqk,bkhd->bqhd", weights, value.double()).float()
        normed = heads / (heads.square().mean(-1, keepdim=True) + 1e-6).sqrt() * attn.norm_out.weight
        gate = attn.to_gate(hidden_states)
        expected = attn.to_out[0](normed.flatten(2) * gate * gate.sigmoid())
    assert relative_change(found, expected) < 1e-5  # float32 sums in another order


def test_fused_projections_and_lora():
    arguments = CASE.inputs()
    for settings in ({}, {"expand_k": 0.5}):
        model = transformer(**settings)
        expected = output(model, arguments)
        model.fuse_qkv_projections()
        assert model.transformer_blocks[0].attn1.fused_projections
        assert relative_change(output(model, arguments), expected) < 1e-5
    patched = mhla.apply_mhla(transformer(), **BLOCKS)
    expected = output(patched, arguments)
    patched.fuse_qkv_projections()
    assert relative_change(output(patched, arguments), expected) < 1e-5
    lora = mhla.apply_mhla(with_lora(transformer(), "to_q", "to_k", "to_v"), **BLOCKS)
    assert_changed(output(lora, arguments), expected)


def test_what_is_trained_takes_gradients():
    """All of it, as processes that average gradients expect; a patch leaves the gate of the state without any."""
    model = mhla.apply_mhla(transformer(), **BLOCKS, layers=[1])
    trained = make_trainable(model, trainable_names(model, "all"))
    idle = {name for name, _ in model.named_parameters()} - set(trained)
    assert idle == {f"transformer_blocks.1.attn1.to_decay.{name}" for name in ("0.weight", "1.weight", "1.bias")}
    output_with_gradients = model(**CASE.inputs(), return_dict=False)[0]
    output_with_gradients.square().mean().backward()
    assert all(parameter.grad is not None for parameter in trained.values())


def test_a_pipeline_is_saved_and_loaded(tmp_path, monkeypatch):
    """Patched too: the files are those of the unpatched model, and of the patch."""
    pipe = dit_pipeline(seeded(DiGTransformer2DModel, **dict(CASE.transformer().config)))
    expected = generate(pipe)
    mhla.apply_mhla(pipe, **BLOCKS)
    patched = generate(pipe)
    mhla.save_mhla(pipe, tmp_path / "patch")
    mhla.remove_mhla(pipe)
    pipe.save_pretrained(tmp_path / "model")
    again = DiTPipeline.from_pretrained(tmp_path / "model")
    again.set_progress_bar_config(disable=True)
    assert torch.equal(generate(again), expected)
    assert torch.equal(generate(mhla.load_mhla(again, tmp_path / "patch")), patched)
    # what the mhla command loads needs no import before
    monkeypatch.delitem(sys.modules, "mhla_diffusers.models.dig")
    assert torch.equal(generate(load_pipeline(str(tmp_path / "model"), "dig", "cpu", torch.float32)), expected)


def test_no_matrix_is_told_of_gated_linear_attention():
    model = transformer()
    with refused("'dig'"):
        attention_matrices(model, TransformerCall((), CASE.inputs()))
