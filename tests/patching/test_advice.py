"""What is said of settings that do not suit a size: with which others, and that these do what is said."""

import re

import pytest

from mhla_diffusers.config import MHLAConfig, SparseConfig
from mhla_diffusers.patching.advice import advise

GRID, HEADS, DIM = (9, 8, 8), 3, 32


def cost(config):
    sizes = config.sizes_on(GRID, HEADS, DIM)
    return sizes.flops / sizes.softmax_flops


def test_nothing_is_said_of_settings_that_fit():
    for config in (SparseConfig(density=0.05), SparseConfig(density=1.0), MHLAConfig(blocks=(3, 4, 4))):
        assert advise(config, GRID, HEADS, DIM, 0) == {}
    assert advise(SparseConfig(block_size=64, key_block_size=32), (21, 30, 50), HEADS, DIM, 0) == {}


def test_few_blocks_are_said_with_what_comes_closer():
    config = SparseConfig(block_size=64, density=0.05)
    found = advise(config, GRID, HEADS, DIM, 0)
    assert list(found) == ["blocks"]
    sizes = {name: int(value) for name, value in re.findall(r"(block_size|key_block_size)=(\d+)", found["blocks"])}
    better = config.replace(block_size=sizes["block_size"], key_block_size=sizes["key_block_size"])
    assert better.rule_on(GRID) == config.replace(block_size=None).rule_on(GRID)
    assert f"{cost(better):.0%}" in found["blocks"] and f"{cost(config):.0%}" in found["blocks"]


@pytest.mark.parametrize(
    "config", [SparseConfig(density=0.9, block_size=4), MHLAConfig(blocks=(9, 8, 8))], ids=["sparse", "MHLA"]
)
def test_what_gains_nothing_is_said_with_what_does(config):
    message = advise(config, GRID, HEADS, DIM, 0)["cost"]
    assert f"{cost(config):.0%} of what softmax" in message
    changes = {
        name: eval(value)
        for name, value in re.findall(r"(blocks|density|far|block_size|key_block_size)=(\([^)]*\)|[\w.']+)", message)
    }
    assert changes and cost(config.replace(**changes)) < 1 <= cost(config)
    assert f"{cost(config.replace(**changes)):.0%}" in message


def test_where_nothing_helps_it_is_said():
    assert "leave the model" in advise(MHLAConfig(blocks=(1, 2)), (1, 4), HEADS, DIM, 0)["cost"]


def test_a_grid_of_one_block_is_softmax_attention_to_which_nothing_comes_closer():
    assert list(advise(SparseConfig(block_size=1024), GRID, HEADS, DIM, 0)) == ["cost"]
