"""What all engines share: settings, steps and branches of a call that they tell, and a count, never in silence."""

import logging

import pytest
import torch
from torch.nn import functional

from mhla_diffusers.attention import sparse_attention
from mhla_diffusers.config import NOTHING_DENSE, CausalConfig, MHLAConfig, SparseConfig, Step, load_patch
from mhla_diffusers.engines.engine import Engine
from mhla_diffusers.engines.settings import EngineSettings, settings_from_environment
from mhla_diffusers.patching.residual import FIRST_FADING
from mhla_diffusers.patching.route import Request
from tests.refusals import refused

GRID, HEADS, HEAD_DIM = (4, 8, 8), 3, 16


class Owner:
    """What lives as long as an engine's call, such as its request."""


def softmax(query, key, value):
    return functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (query, key, value))).transpose(1, 2)


TENSORS = torch.randn(3, 2, 256, HEADS, HEAD_DIM, generator=torch.Generator().manual_seed(0)).unbind()
EXACT = softmax(*TENSORS)
SPARSE = sparse_attention(*TENSORS, GRID, density=0.1)


def make(min_tokens=0, **settings):
    config = SparseConfig(**{**NOTHING_DENSE, "density": 0.1, **settings})
    return Engine(EngineSettings(config=config, min_tokens=min_tokens), logging.getLogger("test"))


def ask(engine, step=None, layer=0, owner=None, grid=GRID, obstacle=""):
    call = engine.call(grid, (0, 0), step, owner, layer)
    return engine.attend(*TENSORS, call, layer, Request(own=softmax), obstacle)


@pytest.fixture
def lines(caplog):
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage().removeprefix("MHLA: ") for record in caplog.records]


def test_a_reason_and_the_line_of_a_call_are_logged_when_they_are_new(lines):
    engine = make(dense_first=1, dense_layers=1)
    for owner in (Owner(), Owner()):
        for index in range(4):
            for layer in range(3):
                output = ask(engine, Step(index, 4), layer, owner)
                assert torch.equal(output, EXACT) == (index == 0 or layer == 0)
    del owner
    line = "sparse in 6 of 12 attentions, 4 dense: first layers, 2 dense: dense steps"
    reasons = [f"dense attention for query (2, 256, 3, 16): {reason}." for reason in ("first layers", "dense steps")]
    assert lines() == [*reasons, line]


def test_a_call_that_was_stopped_ends_when_the_next_begins(lines):
    engine, owner = make(), Owner()
    for index in (0, 1, 0):
        ask(engine, Step(index, 9), owner=owner)
    assert lines() == ["sparse in 2 of 2 attentions"]


@pytest.mark.parametrize(
    ("settings", "given", "level", "words"),
    [
        ({}, {"grid": ()}, logging.WARNING, "grid is unknown"),
        ({}, {"grid": (4, 8, 7)}, logging.WARNING, "not those of the grid 4x8x7"),
        ({}, {"obstacle": "a reason"}, logging.WARNING, "a reason"),
        ({"dense_first": 2}, {}, logging.WARNING, "the step is unknown, on which dense_first=2 depends"),
        ({"dense_layers": 2}, {"layer": None}, logging.WARNING, "no number, on which dense_layers=2 depends"),
        ({"min_tokens": 257}, {}, logging.INFO, "fewer than 257 tokens"),
    ],
)
def test_what_is_unknown_or_chosen_is_dense_and_logged(caplog, settings, given, level, words):
    caplog.set_level(logging.INFO)
    assert torch.equal(ask(make(**settings), **given), EXACT)
    (record,) = caplog.records
    assert record.levelno == level and words in record.getMessage()


@pytest.mark.parametrize("count", [9, 0], ids=["known", "unknown"])
def test_a_dense_step_corrects_those_that_follow_by_layer_and_branch(count):
    """Two branches by the order of their forwards; a third, another layer and the next call get nothing."""
    engine, owner = make(dense_first=1), Owner()
    for _ in range(2):
        assert torch.equal(ask(engine, Step(0, count), owner=owner), EXACT)
    for index in (1, 4):
        corrected = SPARSE + FIRST_FADING**index * (EXACT - SPARSE)
        for branch in range(3):
            expected = corrected if branch < 2 else SPARSE
            torch.testing.assert_close(ask(engine, Step(index, count), owner=owner), expected, atol=2e-2, rtol=0)
        torch.testing.assert_close(ask(engine, Step(index, count), layer=1, owner=owner), SPARSE, atol=0, rtol=0)
    torch.testing.assert_close(ask(engine, Step(5, count), owner=Owner()), SPARSE, atol=0, rtol=0)
    for index, expected in enumerate((EXACT, SPARSE)):  # a layer without a number is never corrected
        found = ask(engine, Step(index, count), layer=None, owner=Owner())
        torch.testing.assert_close(found, expected, atol=0, rtol=0)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (MHLAConfig(blocks=(1, 1, 1)), "MHLAConfig...SparseConfig"),
        (CausalConfig(blocks=(2,), block_length=8), "CausalConfig...SparseConfig"),
        (SparseConfig(layers="2/3"), "layers='2/3'...'all'"),
    ],
)
def test_other_patches_are_refused(config, words):
    with refused(words):
        EngineSettings(config=config)


def test_settings_from_the_environment():
    read = settings_from_environment
    assert read({"PATH": "/bin", "MHLA_DENSITY": ""}) == EngineSettings()
    given = {"DENSITY": ".1", "ORDER": "curve", "BLOCK_SIZE": "32", "KEY_BLOCK_SIZE": "16", "DENSE_FIRST": "0.1"}
    given |= {"DENSE_LAST": "2", "DENSE_EVERY": "0", "DENSE_LAYERS": "3", "MIN_TOKENS": "100"}
    config = SparseConfig(density=0.1, order="curve", block_size=32, key_block_size=16)
    config = config.replace(dense_first=0.1, dense_last=2, dense_every=0, dense_layers=3)
    assert read({f"MHLA_{name}": text for name, text in given.items()}) == EngineSettings(config=config, min_tokens=100)
    for patch in ("fast", "wan2.1-t2v-1.3b-sparse"):
        found = read({"MHLA_PATCH": patch, "MHLA_DENSITY": "0.1"})
        assert found.config == load_patch(patch).patch.replace(density=0.1)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"MHLA_DENSTY": "0.1"}, "MHLA_DENSTY=0.1...'density'"),
        ({"MHLA_DENSITY": "high"}, "'high'"),
        ({"MHLA_PATCH": "faithfull"}, "'faithful'"),
        ({"MHLA_DENSITY": "2"}, "MHLA_DENSITY=2...density=2"),
        ({"MHLA_DENSE_LAYERS": "-1"}, "dense_layers=-1"),
        ({"MHLA_MIN_TOKENS": "1.5"}, "min_tokens=1.5"),
        ({"MHLA_PATCH": "wan2.1-t2v-1.3b", "MHLA_DENSITY": "0.1"}, "MHLA_PATCH=wan2.1-t2v-1.3b...density"),
    ],
)
def test_wrong_variables_are_refused(variables, words):
    with refused(words):
        settings_from_environment(variables)
