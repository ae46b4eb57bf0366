"""The table of what a patch did."""

import math

import pytest

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched, wan
from ..pipelines import wan22_pipeline
from .shared import MODELS, unet


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
        "layer           attention  grid   MHLA blocks  tokens per block  extra parameters",
        "blocks.0.attn1  kept       4x4x5  -            -                 0",
        "blocks.1.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            144",
        "blocks.2.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            144",
        "blocks.3.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            144",
        "attention of 80 tokens: 1.18 MFLOP (softmax 2.46 MFLOP), softmax over 25.0% of all pairs",
        "a layer holds 29.2 KiB beside query, key, value and output (softmax, written out, 50 KiB)",
        "3 of 4 self-attentions replaced, 432 extra parameters",
    ]
    pipe = mhla.apply_mhla(wan22_pipeline(), sparse="none", blocks=(1, 1, 1))
    assert {layer.name.partition(".")[0] for layer in mhla.describe(pipe)} == {"transformer", "transformer_2"}


def test_describe_tells_of_the_sparse_branch():
    model = patched("wan", layers=[1, 2, 3], sparse="content", block_size=4, density=0.26)
    assert str(mhla.describe(model, grid=(4, 4, 5))).splitlines() == [
        "layer           attention  grid   MHLA blocks  tokens per block  density  extra parameters",
        "blocks.0.attn1  kept       4x4x5  -            -                 -        0",
        "blocks.1.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            25.0%    146",
        "blocks.2.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            25.0%    146",
        "blocks.3.attn1  MHLA       4x4x5  2x2x3 = 12   4 to 8            25.0%    146",
        "sparse branch: 20 blocks of 4 tokens along a curve, 25.0% of their pairs listed, others as pooled keys",
        "attention of 80 tokens: 2.11 MFLOP (softmax 2.46 MFLOP), softmax over 43.8% of all pairs",
        "a layer holds 33 KiB beside query, key, value and output (softmax, written out, 50 KiB)",
        "3 of 4 self-attentions replaced, 438 extra parameters",
    ]
    (line,) = [line for line in str(mhla.describe(model)).splitlines() if line.startswith("sparse branch")]
    assert line == "sparse branch: blocks of 4 tokens along a curve, 26.0% of their pairs listed, others as pooled keys"
    output(model, inputs("wan"))
    kept, patched_one, *_ = mhla.describe(model)
    assert kept.sparse is None and (patched_one.sparse.blocks, patched_one.sparse.density) == (24, 0.25)
    with mhla.mhla_disabled(model):
        assert mhla.describe(model)[1].sparse == patched_one.sparse


@pytest.mark.parametrize(
    ("settings", "density", "words"),
    [
        ({"block_size": 8, "pooled": False}, 1 / 12, "8.3% of their pairs listed, others left out"),
        ({"block_size": 96}, 1, "all pairs listed, which is softmax attention"),
    ],
)
def test_describe_tells_the_density_that_is_reached(settings, density, words):
    """At least one of the blocks, though five percent were asked for."""
    found = mhla.describe(patched("wan", sparse="content", **settings), grid=(4, 4, 6))
    assert found[0].sparse.density == pytest.approx(density)
    assert words in str(found)


_CAUSAL = {"blocks": (3, 2, 2), "causal": "block", "block_length": 2, "sparse": "own"}


def test_describe_of_a_causal_patch_knows_that_a_video_may_end_early():
    """Blocks have one length, and softmax attention of before saw all frames."""
    model = mhla.apply_mhla(wan(), **_CAUSAL)
    assert mhla.describe(model)[0].sparse.density == 1 / 3
    for frames in (2, 4, 6):
        (layer, *_) = found = mhla.describe(model, grid=(frames, 4, 6))
        assert (layer.blocks, layer.tokens_per_block) == ((3, 2, 2), (12, 12))
        assert (layer.sparse.kind, layer.sparse.block_size) == ("own", None)
        assert layer.sparse.density == pytest.approx(2 / frames)
        assert found.cost.listed_pairs / found.cost.all_pairs == pytest.approx(2 / frames)
        assert found.cost.softmax_flops == 4 * 4 * 12 * 2 * (24 * frames) ** 2
        assert found.cost.softmax_bytes == 4 * 2 * (24 * frames) ** 2
    with pytest.raises(ValueError, match="8 tokens, more than the 3 blocks of 2"):
        mhla.describe(model, grid=(8, 4, 6))
    with pytest.raises(ValueError, match="width axis.* 1 tokens.* 2 blocks"):
        mhla.describe(model, grid=(4, 4, 1))
    mhla.change_mhla(model, beyond="relative")
    (layer, *_) = mhla.describe(model, grid=(8, 4, 6))
    assert layer.blocks == (4, 2, 2)


def test_describe_after_a_video_that_was_too_long():
    model = mhla.apply_mhla(wan(), **(_CAUSAL | {"blocks": (2, 2, 2), "block_length": 1}))
    with pytest.raises(ValueError, match="more than the 2 blocks of 1"):
        output(model, inputs("wan"))
    (layer, *_) = mhla.describe(model)
    assert (layer.blocks, layer.tokens_per_block) == ((2, 2, 2), None)
    assert layer.sparse.density == 1 / 2


def test_describe_refuses_a_grid_that_does_not_fit():
    with pytest.raises(ValueError, match="width axis.* 2 tokens.* 3 blocks"):
        mhla.describe(patched("wan"), grid=(4, 4, 2))
    with pytest.raises(ValueError, match=r"\(4, 4\)"):
        mhla.describe(patched("wan"), grid=(4, 4))
    with pytest.raises(ValueError, match="UNet2DModel is not supported"):
        mhla.describe(unet())


def test_describe_while_switched_off_and_after_a_refused_grid():
    model = patched("wan")
    output(model, inputs("wan"))
    with mhla.mhla_disabled(model):
        assert mhla.describe(model)[0].tokens_per_block == (8, 8)
    model = patched("wan", blocks=(4, 4, 7))
    with pytest.raises(ValueError, match="too few for 7 blocks"):
        output(model, inputs("wan"))
    assert mhla.describe(model)[0].tokens_per_block is None
