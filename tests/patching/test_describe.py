"""The table of what a patch did; grids, costs and block counts of sizes in pixels, before anything runs."""

import logging
import math
import re

import pytest
from diffusers.models.transformers.transformer_wan import WanAttnProcessor

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched, wan
from ..pipelines import dit_pipeline, generate, wan22_pipeline, wan_pipeline
from ..refusals import refused
from .shared import CAUSAL, ONE_PER_CLASS, unet


@pytest.mark.parametrize("name", ONE_PER_CLASS)
def test_describe_tells_what_was_done_to_every_layer(name):
    case = FAMILIES[name]
    model, count = patched(name, layers=[-1]), math.prod(case.blocks)
    *kept, last = mhla.describe(model)
    assert len(kept) == case.self_attentions - 1
    assert not any(layer.config or layer.blocks or layer.extra_parameters for layer in kept)
    assert (last.grid, last.blocks, last.tokens_per_block, last.extra_parameters) == (None, case.blocks, None, count**2)
    assert last.name == list(mhla.mhla_layers(model))[0].removesuffix(".mhla")
    output(model, inputs(name))
    last, size = mhla.describe(model)[-1], math.prod(case.grid) // count
    assert (last.grid, last.tokens_per_block) == (case.grid, (size, size))
    last = mhla.describe(model, grid=case.ragged_grid)[-1]
    low = math.prod(n // b for n, b in zip(case.ragged_grid, case.blocks, strict=True))
    high = math.prod(-(-n // b) for n, b in zip(case.ragged_grid, case.blocks, strict=True))
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
        "3 of 4 self-attentions replaced, 432 extra parameters",
    ]
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    assert {layer.name.partition(".")[0] for layer in mhla.describe(pipe)} == {"transformer", "transformer_2"}


def test_describe_tells_of_sparse_attention():
    model = patched("wan", layers=[1, 2, 3], block_size=4, density=0.26)
    first, *table = str(mhla.describe(model, grid=(4, 4, 5))).splitlines()
    assert "25.0% of the pairs of 20 blocks of 4 queries and 20 of 4 keys" in first
    assert table[2] == "blocks.1.attn1  sparse     4x4x5  25.0%"
    assert "26.0% of the pairs of blocks" in str(mhla.describe(model))
    output(model, inputs("wan"))
    assert "sparse in 3 of 3 attentions" in str(mhla.describe(model)).splitlines()
    kept, patched_one, *_ = mhla.describe(model)
    assert (kept.density, patched_one.density, patched_one.blocks) == (None, 0.25, None)
    mhla.change_mhla(model, dense_first=0.2, dense_last=1, dense_layers=1)
    assert "dense in steps 1-10, 50 of 50 and in layer 0" in str(mhla.describe(model)).splitlines()


def test_describe_of_a_causal_patch_knows_that_a_video_may_end_early():
    """Blocks have one length, and softmax attention of before saw all frames."""
    model = mhla.apply_mhla(wan(), **CAUSAL)
    assert mhla.describe(model)[0].density == 1 / 2
    for frames in (2, 4):
        (layer, *_) = mhla.describe(model, grid=(frames, 4, 6))
        assert (layer.blocks, layer.tokens_per_block) == ((2, 2, 3), (8, 8))
        assert layer.density == pytest.approx(2 / frames)


def test_describe_tells_what_really_runs():
    model = patched("wan", layers=[1, 2])
    assert [layer.runs_mhla for layer in mhla.describe(model)] == [False, True, True, False]
    with mhla.mhla_disabled(model):
        found = mhla.describe(model)
        assert found[1].config is not None and not found[1].runs_mhla
        assert "blocks.1.attn1  off: MHLAProcessor" in str(found)
        assert str(found).endswith("; the patch does not run in 2 of them now")
    assert "off" not in str(mhla.describe(model))
    model.set_attn_processor(WanAttnProcessor())
    assert str(mhla.describe(model)).endswith("; the patch does not run in 2 of them now")


@pytest.mark.parametrize("num_frames", [6, 8])
def test_the_grid_of_a_size_is_that_of_a_run(num_frames):
    """Frames are rounded as the pipeline does."""
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 2, 1))
    told = [layer.grid for layer in mhla.describe(pipe, height=32, width=48, num_frames=num_frames)]
    generate("wan22", pipe, num_frames=num_frames)
    assert told == [layer.grid for layer in mhla.describe(pipe)] and None not in told


SMALL = {"height": 32, "width": 48}
REFUSED = {
    # model, its patch, what it is to be described at, offending value
    "width": (wan, {"blocks": (2, 2, 3)}, {"grid": (4, 4, 2)}, "width...2...3"),
    "axes": (wan, {"blocks": (2, 2, 3)}, {"grid": (4, 4)}, "(4, 4)"),
    "no model": (unet, {}, {}, "UNet2DModel"),
    "frames": (wan, CAUSAL, {"grid": (8, 4, 6)}, "8...2 blocks of 2"),
    "half a size": (wan_pipeline, {}, {"height": 32}, "height=32 and width=None"),
    "a grid as well": (wan_pipeline, {}, SMALL | {"grid": (3, 2, 3)}, "grid=(3, 2, 3)"),
    "no token": (wan_pipeline, {}, {"height": 4, "width": 48, "num_frames": 9}, "4x48...(3, 0, 3)"),
    "blocks": (wan_pipeline, {"blocks": (3, 2, 2)}, {"height": 32, "width": 16, "num_frames": 9}, "width...1...2"),
    "size of a transformer": (wan, {}, SMALL, "the pipeline...grid="),
    "no square": (dit_pipeline, {}, SMALL, "height=32, width=48"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_sizes_that_do_not_fit_are_named(case):
    build, patch, settings, value = REFUSED[case]
    model = mhla.apply_mhla(build(), **patch) if patch else build()
    with refused(value):
        mhla.describe(model, **settings)


def test_a_new_patch_says_what_it_brings_at_most_and_what_it_holds(caplog):
    pipe = wan_pipeline()
    with caplog.at_level(logging.INFO):
        mhla.apply_mhla(pipe, "fast")
    (line,) = [one.getMessage() for one in caplog.records if "block pairs" in one.getMessage()]
    assert line.startswith("fast: 2.5 % of block pairs; dense in steps 1, 11, 21, 31, 41 of 50; at 480x832x81 at most ")
    gain, held = re.search(r"at most (\d+\.\d)x, (\d+) MiB for corrections with guidance", line).groups()
    assert 1 < float(gain) < 50 / 5 and int(held) > 0
    assert line.endswith("; quality not measured, see mhla tune")


def test_a_call_that_is_dense_throughout_warns_once_and_cannot_be_audited(caplog):
    pipe = wan_pipeline()
    mhla.apply_mhla(pipe, "fast", dense_first=2)
    generate("wan", pipe, num_inference_steps=2)
    generate("wan", pipe, num_inference_steps=2)
    assert caplog.text.count("All 2 steps of this call are dense by dense_first=2") == 1
    with refused("Every step", "more steps"):
        mhla.audit(pipe, lambda: generate("wan", pipe, num_inference_steps=2))
