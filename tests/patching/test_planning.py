"""Grids, costs and block counts of sizes in pixels, before anything runs."""

import math

import pytest
import torch

import mhla_diffusers as mhla

from ..models import FAMILIES, patched
from ..pipelines import PIPELINES, dit_pipeline, sana_pipeline, wan22_pipeline, wan_pipeline


@pytest.mark.parametrize("name", PIPELINES)
def test_the_grid_of_a_size_is_that_of_a_run(name):
    case, pipe = PIPELINES[name], PIPELINES[name].build()
    mhla.apply_mhla(pipe, sparse="none", blocks=case.blocks)
    size = {key: case.call[key] for key in ("height", "width", "num_frames") if key in case.call}
    if name == "dit":  # makes its own size alone
        size = {"height": 32, "width": 32}
    told = [layer.grid for layer in mhla.describe(pipe, **size)]
    pipe(**case.call)
    ran = [layer.grid for layer in mhla.describe(pipe)]
    assert None not in told
    assert told == ran


@pytest.mark.parametrize("num_frames", [6, 8, 9])
def test_frames_are_rounded_as_the_pipeline_does(num_frames):
    pipe = mhla.apply_mhla(wan_pipeline(), sparse="none", blocks=(1, 2, 2))
    call = PIPELINES["wan"].call | {"num_frames": num_frames}
    told = mhla.describe(pipe, height=call["height"], width=call["width"], num_frames=num_frames)[0].grid
    pipe(**call)
    assert mhla.describe(pipe)[0].grid == told


@pytest.mark.parametrize(("settings", "listed"), [({}, 0), ({"layers": [1, 2]}, 2 * 2 * 96**2)])
def test_costs_count_what_is_computed(settings, listed):
    """Two products for every pair of softmax attention; of MHLA those with KV states, the normaliser a column more."""
    described = mhla.describe(patched("wan", **settings), grid=(4, 4, 6))
    assert described.cost.listed_pairs == listed
    assert described.cost.all_pairs == 4 * 2 * 96**2
    assert described.cost.softmax_flops == 4 * 4 * 96**2 * 2 * 12
    layer = next(layer for layer in described if layer.replaced)
    # each head: KV states and reading of 96 tokens, D (D + 1), and 12 x 12 pairs of blocks
    assert layer.cost.flops == 2 * (4 * 96 + 2 * 12**2) * 12 * 13
    # the KV states and their mixtures, in float32
    assert layer.cost.held_bytes == 2 * 4 * 12 * 2 * 12 * 13


def test_costs_of_the_sparse_branch_grow_with_its_density():
    costs = []
    for density in (0.1, 0.5):
        model = patched("wan", sparse="content", block_size=8, density=density)
        costs.append(mhla.describe(model, grid=(4, 4, 6)).cost)
    assert [cost.listed_pairs / cost.all_pairs for cost in costs] == pytest.approx([1 / 12, 0.5])
    assert costs[1].flops - costs[0].flops == 4 * (costs[1].listed_pairs - costs[0].listed_pairs) * 12
    with mhla.mhla_disabled(model):
        assert mhla.describe(model, grid=(4, 4, 6)).cost.flops == costs[0].softmax_flops


@pytest.mark.parametrize("settings", [{"density": 1.0}, {"block_size": 96}], ids=["density 1", "one block"])
def test_where_all_is_listed_softmax_attention_is_all_that_is_computed(settings):
    cost = mhla.describe(patched("wan", sparse="content", **settings), grid=(4, 4, 6)).cost
    assert (cost.flops, cost.listed_pairs, cost.held_bytes) == (cost.softmax_flops, cost.all_pairs, 0)


def test_own_attention_of_sana_is_linear():
    cost = mhla.describe(FAMILIES["sana"].build(), grid=(8, 8)).cost
    assert cost.flops == 3 * 4 * 64 * 2 * 16 * 17


WRONG_SIZES = {
    "half a size": ({"height": 32}, "height=32 and width=None belong together"),
    "frames alone": ({"num_frames": 9}, "height=None and width=None"),
    "a grid as well": ({"grid": (3, 2, 3), "height": 32, "width": 48}, r"either grid=\(3, 2, 3\) or a size"),
    "no token": ({"height": 4, "width": 48, "num_frames": 9}, r"height=4, width=48 is too small.*\(3, 0, 3\)"),
    "more blocks than tokens": ({"height": 32, "width": 16, "num_frames": 9}, "width axis.* 1 tokens.* 2 blocks"),
}


@pytest.mark.parametrize("case", WRONG_SIZES)
def test_sizes_that_do_not_fit_are_named(case):
    settings, message = WRONG_SIZES[case]
    pipe = mhla.apply_mhla(wan_pipeline(), sparse="none", blocks=(3, 2, 2))
    with pytest.raises(ValueError, match=message):
        mhla.describe(pipe, **settings)


def test_sizes_that_a_model_does_not_take_are_named():
    with pytest.raises(ValueError, match="needs the pipeline.*grid="):
        mhla.describe(FAMILIES["wan"].build(), height=32, width=48)
    with pytest.raises(ValueError, match="num_frames=9 was given.*makes images"):
        mhla.describe(sana_pipeline(), height=32, width=48, num_frames=9)
    with pytest.raises(ValueError, match="takes squares only; got height=32, width=48"):
        mhla.describe(dit_pipeline(), height=32, width=48)


def test_suggested_blocks_are_as_long_as_the_default_s():
    """The default at the default size, as many per second of a longer clip; never more than tokens."""
    pipe = wan_pipeline()
    assert mhla.suggest_blocks(pipe, 480, 832) == (7, 3, 5)
    assert mhla.suggest_blocks(pipe, 480, 832, 161) == (14, 3, 5)
    assert mhla.suggest_blocks(pipe, 480, 832, 1) == (1, 3, 5)
    assert mhla.suggest_blocks(pipe, 16, 16, 1) == (1, 1, 1)
    assert mhla.suggest_blocks(wan22_pipeline(), 832, 480, 81) == (7, 5, 3)
    mhla.apply_mhla(pipe, sparse="none", blocks=mhla.suggest_blocks(pipe, 32, 48, 9))
    assert pipe(**PIPELINES["wan"].call).frames.isfinite().all()


def test_mixing_suggested_blocks_costs_no_more_than_their_summaries():
    pipe = wan_pipeline()
    blocks = mhla.suggest_blocks(pipe, 2160, 3840, 321)
    grid = mhla.describe(pipe, height=2160, width=3840, num_frames=321)[0].grid
    assert 0.5 < math.prod(blocks) / math.sqrt(2 * torch.Size(grid).numel()) <= 1.2
