"""The attention that engines call: equal to the operator, dense where it has to be, and never in silence."""

import logging
import math
import re

import pytest
import torch
from mhla_diffusers.engines.environment import settings_from_environment
from mhla_diffusers.patching.attend import EngineAttention, EngineSettings
from mhla_diffusers.patching.carry import FIRST_FADING
from torch.nn import functional

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import CausalConfig, MHLAConfig, SparseConfig, Step, load_patch

from ..refusals import refused

GRID, HEADS, HEAD_DIM = (4, 8, 8), 3, 16


def tensors(tokens: int = 256, batch: int = 2) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(batch, tokens, HEADS, HEAD_DIM) for _ in range(3)]


def softmax(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


def attention(min_tokens: int = 0, softmax_layers: tuple[int, ...] = (), **settings: object) -> EngineAttention:
    return EngineAttention(
        EngineSettings(SparseConfig(**settings), softmax_layers, min_tokens), logging.getLogger("test")
    )


def test_density_1_is_softmax_attention_also_beside_extra_tokens():
    query, key, value = tensors(256 + 9)
    output = attention(density=1.0).attend(query, key, value, GRID, extra=(4, 5))
    torch.testing.assert_close(output, softmax(query, key, value), atol=1e-5, rtol=0)


def test_sparse_attention_is_the_operator_and_not_softmax():
    query, key, value = tensors()
    for settings in ({}, {"density": 0.15, "block_size": 16, "key_block_size": 8, "order": "curve", "far": "means"}):
        output = attention(**settings).attend(query, key, value, GRID)
        expected = sparse_attention(query, key, value, GRID, **settings)
        torch.testing.assert_close(output, expected, atol=0, rtol=0)
        assert (output - softmax(query, key, value)).abs().max() > 1e-2


def test_extra_tokens_attend_to_everything():
    query, key, value = tensors(256 + 9)
    output = attention(density=0.15).attend(query, key, value, GRID, extra=(0, 9))
    torch.testing.assert_close(output[:, 256:], softmax(query, key, value)[:, 256:], atol=1e-5, rtol=0)


def test_every_reason_for_dense_is_logged_once_per_shape_and_counted(caplog):
    caplog.set_level(logging.INFO)
    query, key, value = tensors()
    attend = attention(softmax_steps=1, softmax_layers=(0,)).attend
    for index in range(4):
        for layer in range(3):
            output = attend(query, key, value, GRID, layer=layer, step=Step(index, 4))
            assert (output is None) == (index == 0 or layer == 0)
    lines = [record.getMessage() for record in caplog.records]
    assert lines == [
        "MHLA: dense attention for query (2, 256, 3, 16): dense steps",
        "MHLA: dense attention for query (2, 256, 3, 16): layers 0",
        "MHLA: sparse in 6 of 12 attentions, 3 dense: dense steps, 3 dense: layers 0",
    ]


def test_a_call_that_was_stopped_is_told_when_the_next_begins(caplog):
    caplog.set_level(logging.INFO)
    engine = attention()
    for index in (0, 1, 0):
        engine.attend(*tensors(), GRID, step=Step(index, 9))
    assert [record.getMessage() for record in caplog.records] == ["MHLA: sparse in 2 of 2 attentions"]


def test_calls_of_one_step_end_with_an_object_of_the_engine(caplog):
    """Log one line for two forwards of a step, as under guidance, even if the previous request is still alive."""
    caplog.set_level(logging.INFO)
    engine, kept = attention(), []
    for lives_on in (False, True, False):
        owner = attention()
        kept += [owner] * lives_on
        for layer in (0, 1, 0, 1):
            engine.end_with(owner)
            engine.attend(*tensors(), GRID, layer=layer, step=Step(0, 1))
        del owner
    assert [record.getMessage() for record in caplog.records] == ["MHLA: sparse in 4 of 4 attentions"] * 3


def test_settings_of_another_attention_are_refused():
    with refused({"density": 0.1}):
        EngineSettings(config={"density": 0.1})


@pytest.mark.parametrize("grid", [(0, 8), (-4, -64)])
@pytest.mark.parametrize("fits", [True, False])
@pytest.mark.parametrize("min_tokens", [0, 1000])
def test_a_grid_without_tokens_is_refused_by_name(grid, fits, min_tokens):
    with refused(f"grid={grid}") as error:
        attention(min_tokens).attend(*tensors(), grid, extra=(256 - math.prod(grid) if fits else 0, 0))
    assert "clamp_blocks" not in str(error.value)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"grid": None}, "grid is unknown"),
        ({"grid": (4, 8, 7)}, "not those of the grid 4x8x7 and 0 others"),
        ({"extra": (1, 0)}, "and 1 others"),
        ({"key": tensors()[1][:, :20]}, "key \\(2, 20, 3, 16\\)"),
        ({"value": tensors()[2].half()}, "float16"),
        ({"obstacle": "a mask"}, "a mask"),
    ],
)
def test_what_does_not_fit_is_dense_with_a_warning(caplog, given, words):
    names = dict(zip(("query", "key", "value"), tensors(), strict=True))
    assert attention().attend(**{**names, "grid": GRID, **given}) is None
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert re.search(words, record.getMessage())


def test_short_sequences_stay_dense():
    assert attention(min_tokens=257).attend(*tensors(), GRID) is None
    assert attention(min_tokens=256).attend(*tensors(), GRID) is not None


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MHLAConfig(blocks=(1, 1, 1)), "MHLA with layers='all'...load_mhla"),
        (CausalConfig(blocks=(2,), block_length=8), "causal MHLA...load_mhla"),
        (SparseConfig(layers="2/3"), "layers='2/3'...softmax_layers"),
        (SparseConfig(layers=[0, 1]), "layers=(0, 1)...softmax_layers"),
    ],
)
def test_other_patches_are_refused_with_the_way_out(config, words):
    with refused(words):
        EngineSettings(config)


def test_settings_from_the_environment():
    read = settings_from_environment
    assert read({"PATH": "/bin", "MHLA_DENSITY": ""}) == EngineSettings()
    settings = read(
        {
            "MHLA_DENSITY": ".1",
            "MHLA_ORDER": "curve",
            "MHLA_BLOCK_SIZE": "32",
            "MHLA_KEY_BLOCK_SIZE": "16",
            "MHLA_SOFTMAX_STEPS": "0.2",
            "MHLA_SOFTMAX_LAYERS": "0,1",
            "MHLA_MIN_TOKENS": "100",
        }
    )
    config = SparseConfig(density=0.1, order="curve", block_size=32, key_block_size=16, softmax_steps=0.2)
    assert settings == EngineSettings(config, (0, 1), 100)
    patched = read({"MHLA_PATCH": "wan2.1-t2v-1.3b-sparse", "MHLA_DENSITY": "0.1"})
    assert patched.config == load_patch("wan2.1-t2v-1.3b-sparse").config.replace(density=0.1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MHLA_DENSTY": "0.1"}, "MHLA_DENSITY"),
        ({"MHLA_DENSITY": "high"}, "'high'"),
        ({"MHLA_REFRESH": "None"}, "refresh='None'"),
        ({"MHLA_DENSITY": "2"}, "MHLA_DENSITY=2...density=2"),
        ({"MHLA_SOFTMAX_LAYERS": "0,-1"}, "softmax_layers"),
        ({"MHLA_MIN_TOKENS": "1.5"}, "min_tokens='1.5'"),
        ({"MHLA_PATCH": "tiny-wan-mhla"}, "load_mhla"),
        ({"MHLA_PATCH": "wan2.1-t2v-1.3b", "MHLA_DENSITY": "0.1"}, "MHLA_PATCH=wan2.1-t2v-1.3b...load_mhla"),
        ({"MHLA_PATCH": "wan2.1-t2v-1.3b-hybrid-sparse"}, "layers='2/3'...softmax_layers"),
    ],
)
def test_wrong_variables_are_refused(variables, words):
    with refused(words):
        settings_from_environment(variables)


def test_what_a_dense_step_shows_is_added_at_the_steps_that_follow():
    """Per half and layer; a call that was stopped, another half and an engine without a dense attention get nothing."""
    query, key, value = tensors()
    exact, sparse = softmax(query, key, value), attention(density=0.1).attend(query, key, value, GRID)
    engine = attention(density=0.1, softmax_steps=1)

    def attend(index, half="0", layer=0, dense=lambda: exact.clone()):
        return engine.attend(query, key, value, GRID, layer=layer, step=Step(index, 9), parts=(half,), dense=dense)

    assert torch.equal(attend(0), exact)
    for index in (1, 4):
        added = sparse + FIRST_FADING**index * (exact - sparse)
        torch.testing.assert_close(attend(index), added, atol=2e-2, rtol=0)  # int8
        assert (attend(index, half="1") - sparse).abs().max() == 0 == (attend(index, layer=1) - sparse).abs().max()
    # the next call begins in the step in which the one before was stopped, and is not dense where nothing asks for it
    assert torch.equal(attend(0, half="1"), exact)
    assert torch.equal(attend(1), sparse) and not torch.equal(attend(1, half="1"), sparse)
    assert attend(0, dense=None) is None
    assert torch.equal(attend(1), sparse)


def test_without_carry_a_dense_step_shows_nothing():
    query, key, value = tensors()
    engine = attention(density=0.1, softmax_steps=1, carry=False)
    step = {"layer": 0, "dense": lambda: softmax(query, key, value)}
    assert engine.attend(query, key, value, GRID, step=Step(0, 3), **step) is None
    expected = attention(density=0.1).attend(query, key, value, GRID)
    assert torch.equal(engine.attend(query, key, value, GRID, step=Step(1, 3), **step), expected)
