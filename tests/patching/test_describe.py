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
        "3 of 4 self-attentions replaced, 432 extra parameters",
    ]
    pipe = mhla.apply_mhla(wan22_pipeline(), blocks=(1, 1, 1))
    assert {layer.name.partition(".")[0] for layer in mhla.describe(pipe)} == {"transformer", "transformer_2"}


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
