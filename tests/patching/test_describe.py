"""The table of what a patch did."""

import math

import pytest

import mhla_diffusers as mhla

from ..models import FAMILIES, inputs, output, patched
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
        "layer           attention  grid   blocks      tokens per block  extra parameters",
        "blocks.0.attn1  kept       4x4x5  -           -                 0",
        "blocks.1.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            144",
        "blocks.2.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            144",
        "blocks.3.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            144",
        "attention of 80 tokens: 1.18 MFLOP (softmax 2.46 MFLOP), 25.0% of all pairs exact",
        "a layer holds 29.2 KiB beside query, key, value and output (softmax, written out, 50 KiB)",
        "3 of 4 self-attentions replaced, 432 extra parameters",
    ]
    pipe = mhla.apply_mhla(wan22_pipeline(), exact="none", blocks=(1, 1, 1))
    assert {layer.name.partition(".")[0] for layer in mhla.describe(pipe)} == {"transformer", "transformer_2"}


def test_describe_tells_of_exact_tiles():
    model = patched("wan", layers=[1, 2, 3], exact="calibrated", exact_tiles=(4, 2, 2), exact_share=0.25)
    assert str(mhla.describe(model, grid=(4, 4, 5))).splitlines() == [
        "layer           attention  grid   blocks      tokens per block  exact  extra parameters",
        "blocks.0.attn1  kept       4x4x5  -           -                 -      0",
        "blocks.1.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            ?      148",
        "blocks.2.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            ?      148",
        "blocks.3.attn1  MHLA       4x4x5  2x2x3 = 12  4 to 8            ?      148",
        "exact tiles: calibrated, 4x2x2 = 16 of 4 to 6 tokens, not calibrated yet, others through their means",
        "attention of 80 tokens: 2.01 MFLOP (softmax 2.46 MFLOP), 43.8% of all pairs exact",
        "a layer holds 32.2 KiB beside query, key, value and output (softmax, written out, 50 KiB)",
        "3 of 4 self-attentions replaced, 444 extra parameters",
    ]
    arguments = inputs("wan")
    mhla.calibrate_exact_tiles(model, lambda: output(model, arguments))
    found = mhla.describe(model)
    exact = [layer.exact for layer in found[1:]]
    assert found[0].exact is None
    assert {(one.kind, one.tiles, one.tile_means) for one in exact} == {("calibrated", (4, 2, 2), True)}
    assert sum(one.share for one in exact) / 3 == pytest.approx(0.25, abs=0.005)
    assert f"{exact[0].share:.1%}" in str(found).splitlines()[2]
    assert "25.0% of their pairs" in str(found)
    assert max(map(len, str(found).splitlines())) <= 100


@pytest.mark.parametrize(("settings", "share"), [({"exact": "own"}, 1 / 12), ({"exact": "content"}, 1 / 12)])
def test_describe_tells_the_share_of_lists_that_need_no_calibration(settings, share):
    """At least one of twelve tiles, though five percent were asked for."""
    model = patched("wan", **settings, tile_means=False)
    (line,) = [line for line in str(mhla.describe(model)).splitlines() if line.startswith("exact tiles")]
    assert line == f"exact tiles: {settings['exact']}, 2x2x3 = 12, 8.3% of their pairs, without the means of others"
    assert mhla.describe(model)[0].exact.share == pytest.approx(share)
    with mhla.mhla_disabled(model):
        assert mhla.describe(model)[0].exact.share == pytest.approx(share)


def test_describe_refuses_tiles_that_do_not_fit():
    with pytest.raises(ValueError, match="height axis .* 4 tokens, too few for 5 exact_tiles"):
        mhla.describe(patched("wan", exact="own", exact_tiles=(1, 5, 1)), grid=(4, 4, 5))


def test_tiles_by_content_are_told_as_they_are_clamped():
    """A run on this grid is not refused, so neither is the question."""
    model = patched("wan", exact="content", exact_tiles=(4, 9, 10))
    (layer, *_) = mhla.describe(model, grid=(2, 4, 6))
    assert (layer.exact.tiles, layer.exact.tokens_per_tile) == ((2, 4, 6), (1, 1))


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
