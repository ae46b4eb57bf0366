"""The table of what a patch did; grids, costs and block counts of sizes in pixels, before anything runs."""

import logging
import math
import re

import pytest
import torch
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import mhla_diffusers as mhla
from mhla_diffusers.config import NOTHING_DENSE

from ..models import FAMILIES, inputs, output, patched, wan
from ..pipelines import PIPELINES, dit_pipeline, wan22_pipeline, wan_pipeline
from ..refusals import refused
from .shared import ONE_PER_CLASS, unet


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_describe_tells_what_was_done_to_every_layer(name):
    case = FAMILIES[name]
    model = patched(name, layers=[-1])
    blocks, count = case.blocks, math.prod(case.blocks)
    *kept, last = mhla.describe(model)
    assert len(kept) == case.self_attentions - 1
    assert not any(layer.config or layer.blocks or layer.extra_parameters for layer in kept)
    assert (last.config.blocks, last.grid, last.blocks, last.tokens_per_block) == (blocks, None, blocks, None)
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


def test_describe_prints_a_table(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    model = patched("wan", layers=[1, 2, 3])
    assert str(mhla.describe(model, grid=(4, 4, 5))).splitlines() == [
        "MHLA: every block of queries reads mixed states, nothing with softmax",
        "layer           attention  grid   MHLA blocks  tokens per block  extra parameters",
        "blocks.0.attn1  kept       4x4x5  -            -                 0",
        "blocks.1.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            144",
        "blocks.2.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            144",
        "blocks.3.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            144",
        "attention of 80 tokens: 1.18 MFLOP (softmax 2.46 MFLOP), softmax over 25.0% of all pairs",
        "3 of 4 self-attentions replaced, 432 extra parameters",
    ]
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    assert {layer.name.partition(".")[0] for layer in mhla.describe(pipe)} == {"transformer", "transformer_2"}


def test_describe_tells_of_sparse_attention():
    model = apply(layers=[1, 2, 3], block_size=4, density=0.26)
    first, *table = str(mhla.describe(model, grid=(4, 4, 5))).splitlines()
    assert "25.0% of the pairs of 20 blocks of 4 queries and 20 of 4 keys" in first
    assert table[:3] == [
        "layer           attention  grid   density",
        "blocks.0.attn1  kept       4x4x5  -",
        "blocks.1.attn1  sparse     4x4x5  25.0%",
    ]
    assert table[-1] == "3 of 4 self-attentions replaced, 0 extra parameters"
    assert "26.0% of the pairs of blocks" in str(mhla.describe(model))
    output(model, inputs("wan"))
    assert "sparse in 3 of 3 attentions" in str(mhla.describe(model)).splitlines()
    kept, patched_one, *_ = mhla.describe(model)
    assert (kept.density, patched_one.density, patched_one.blocks) == (None, 0.25, None)
    with mhla.mhla_disabled(model):
        assert mhla.describe(model)[1].density == 0.25


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"dense_first": 0.2, "dense_last": 1, "dense_layers": 1}, "dense in steps 1-10, 50 of 50 and in layer 0"),
        ({"dense_every": 10, "dense_first": 2}, "dense in steps 1-2, 12, 22, 32, 42 of 50"),
        ({"dense_every": 25, "dense_layers": 2}, "dense in steps 25, 50 of 50 and in layers 0-1"),
    ],
)
def test_dense_steps_are_said_in_words(settings, said):
    assert said in str(mhla.describe(apply(**settings))).splitlines()


def apply(**settings):
    """A Wan with sparse attention."""
    return mhla.apply_mhla(wan(), **NOTHING_DENSE | settings)


def totals(described, *names):
    return [sum(getattr(layer.sizes, name) for layer in described) for name in names]


_CAUSAL = {"blocks": (3, 2, 2), "causal": "block", "block_length": 2}


def test_describe_of_a_causal_patch_knows_that_a_video_may_end_early():
    """Blocks have one length, and softmax attention of before saw all frames."""
    model = mhla.apply_mhla(wan(), **_CAUSAL)
    assert mhla.describe(model)[0].density == 1 / 3
    for frames in (2, 4, 6):
        (layer, *_) = found = mhla.describe(model, grid=(frames, 4, 6))
        assert (layer.blocks, layer.tokens_per_block) == ((3, 2, 2), (12, 12))
        assert layer.density == pytest.approx(2 / frames)
        listed, pairs, softmax = totals(found, "listed_pairs", "pairs", "softmax_flops")
        assert listed / pairs == pytest.approx(2 / frames)
        assert softmax == 4 * 4 * 12 * 2 * (24 * frames) ** 2
    mhla.change_mhla(model, beyond="relative")
    (layer, *_) = mhla.describe(model, grid=(8, 4, 6))
    assert layer.blocks == (4, 2, 2)


def test_a_clip_that_frame_blocks_do_not_fit_is_refused_in_words_of_frames():
    model = mhla.apply_mhla(wan(num_layers=1), blocks=(4, 2, 3), causal="block", block_length=2)
    allowed = "5; allowed are 2, 4, 6"
    with torch.no_grad(), refused(allowed):
        model(torch.zeros(1, 16, 5, 8, 12), torch.tensor([500]), torch.zeros(1, 6, 32))
    with refused(allowed):
        mhla.describe(model, grid=(5, 4, 6))
    mhla.describe(model)  # the grid of the call that failed is not an error
    with refused("width", "at most 2"):
        mhla.describe(model, grid=(4, 4, 2))


def test_describe_tells_what_really_runs():
    model = patched("wan", layers=[1, 2])
    assert [layer.runs_mhla for layer in mhla.describe(model)] == [False, True, True, False]
    with mhla.mhla_disabled(model):
        found = mhla.describe(model)
        assert [(layer.config is not None, layer.runs_mhla, layer.processor) for layer in found[:2]] == [
            (False, False, "WanAttnProcessor"),
            (True, False, "MHLAProcessor"),
        ]
        assert "blocks.1.attn1  off: MHLAProcessor" in str(found)
        assert str(found).endswith("; the patch does not run in 2 of them now")
    assert "off" not in str(mhla.describe(model))
    model.set_attn_processor(WanAttnProcessor())
    assert str(mhla.describe(model)).endswith("; the patch does not run in 2 of them now")


@pytest.mark.parametrize(("name", "num_frames"), [("dit", None), ("sana", None), ("wan22", 9), ("wan", 6), ("wan", 8)])
def test_the_grid_of_a_size_is_that_of_a_run(name, num_frames):
    """Frames are rounded as the pipeline does."""
    case, pipe = PIPELINES[name], PIPELINES[name].build()
    mhla.apply_mhla(pipe, blocks=(1, 2, 1) if num_frames else case.blocks)
    frames = {} if num_frames is None else {"num_frames": num_frames}
    size = frames | {key: case.call.get(key, 32) for key in ("height", "width")}  # DiT makes its own size alone
    told = [layer.grid for layer in mhla.describe(pipe, **size)]
    pipe(**case.call | frames)
    ran = [layer.grid for layer in mhla.describe(pipe)]
    assert None not in told
    assert told == ran


@pytest.mark.parametrize(("settings", "listed"), [({}, 0), ({"layers": [1, 2]}, 2 * 2 * 96**2)])
def test_costs_count_what_is_computed(settings, listed):
    """Two products for every pair of softmax attention; of MHLA those with KV states, the normaliser a column more."""
    described = mhla.describe(patched("wan", **settings), grid=(4, 4, 6))
    expected = [listed, 4 * 2 * 96**2, 4 * 4 * 96**2 * 2 * 12]
    assert totals(described, "listed_pairs", "pairs", "softmax_flops") == expected
    sizes = next(layer.sizes for layer in described if layer.config)
    # each head: KV states and reading of 96 tokens, D (D + 1), and 12 x 12 pairs of blocks
    assert sizes.flops == 2 * (4 * 96 + 2 * 12**2) * 12 * 13


def causal():
    return mhla.apply_mhla(wan(), **_CAUSAL)


def wan_pipe():
    return mhla.apply_mhla(wan_pipeline(), blocks=(3, 2, 2))


SMALL = {"height": 32, "width": 48}
REFUSED = {
    # model, what it is to be described at, offending value
    "width": (lambda: patched("wan"), {"grid": (4, 4, 2)}, "width...2...3"),
    "axes": (lambda: patched("wan"), {"grid": (4, 4)}, "(4, 4)"),
    "no model": (unet, {}, "UNet2DModel"),
    "frames": (causal, {"grid": (8, 4, 6)}, "8...3 blocks of 2"),
    "width of a causal patch": (causal, {"grid": (4, 4, 1)}, "width...1...2"),
    "half a size": (wan_pipe, {"height": 32}, "height=32 and width=None"),
    "frames alone": (wan_pipe, {"num_frames": 9}, "height=None and width=None"),
    "a grid as well": (wan_pipe, SMALL | {"grid": (3, 2, 3)}, "grid=(3, 2, 3)"),
    "no token": (wan_pipe, {"height": 4, "width": 48, "num_frames": 9}, "4x48...(3, 0, 3)"),
    "blocks": (wan_pipe, {"height": 32, "width": 16, "num_frames": 9}, "width...1...2"),
    **{
        name: (dit_pipeline, size, words)
        for name, size, words in (
            ("size as text", {"height": "64", "width": 64}, "height='64'"),
            ("truth as a size", {"height": True, "width": True}, "height=True"),
            ("grid as text", {"grid": "88"}, "grid='88'"),
            ("grid of a number", {"grid": 8}, "grid=8 "),
        )
    },
    "size of a transformer": (wan, SMALL, "the pipeline...grid="),
    "no square": (dit_pipeline, SMALL, "height=32, width=48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_named(case):
    build, settings, value = REFUSED[case]
    with refused(value):
        mhla.describe(build(), **settings)


def test_a_new_patch_says_what_it_brings_at_most_and_what_it_holds(caplog):
    pipe = wan_pipeline()
    with caplog.at_level(logging.INFO):
        mhla.apply_mhla(pipe, "fast")
    (line,) = [one.getMessage() for one in caplog.records if "block pairs" in one.getMessage()]
    assert line.startswith("fast: 2.5 % of block pairs; dense in steps 1, 11, 21, 31, 41 of 50; at 480x832x81 at most ")
    gain, held = re.search(r"at most (\d+\.\d)x, (\d+) MiB for corrections with guidance", line).groups()
    assert 1 < float(gain) < 50 / 5 and int(held) > 0
    assert line.endswith("; quality not measured: mhla tune")


def test_a_call_that_is_dense_throughout_says_so(caplog):
    pipe = wan_pipeline()
    mhla.apply_mhla(pipe, "fast", dense_first=2)
    pipe(**{**PIPELINES["wan"].call, "num_inference_steps": 2})
    assert caplog.text.count("Every step of this call (2) is dense by dense_first=2") == 1
