"""Shapes of attentions, and what they cost."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers.attention import initial_mixing, mhla_attention
from mhla_diffusers.benchmark.lists import draw_tiles
from mhla_diffusers.benchmark.problems import make_inputs
from mhla_diffusers.benchmark.shapes import (
    TINY,
    Shape,
    choose_shapes,
    exact_cost,
    linear_cost,
    listed_cost,
    shapes,
    softmax_attention,
    softmax_cost,
)

REAL = {
    "wan2.1-1.3b-480p": 31_500,
    "wan2.1-1.3b-720p": 75_600,
    "wan2.1-14b-480p": 31_500,
    "wan2.1-14b-720p": 75_600,
    "sana-1.6b-1024px": 1024,
    "sana-1.6b-2048px": 4096,
    "sana-1.6b-4096px": 16_384,
    "dit-xl-2-512px": 1024,
    "dit-xl-2-1024px": 4096,
    "dit-xl-2-2048px": 16_384,
}
"""Name → N."""


def test_a_gpu_gets_every_real_shape_and_a_cpu_the_cheapest():
    assert {shape.name: shape.tokens for shape in choose_shapes(None, "cuda")} == REAL
    assert shapes().keys() > {"tiny", "flux-dev-1024px"} | REAL.keys()
    assert [shape.name for shape in choose_shapes(None, "cpu")] == ["dit-xl-2-512px"]
    assert choose_shapes(["tiny"], "cuda") == [TINY]


def test_costs_are_those_of_the_paper():
    """Sec. 5.3: N = 31 500, D = 128, M = 105: mixing is about a sixth more arithmetic, and softmax 123 times plain."""
    shape = shapes()["wan2.1-1.3b-480p"]
    plain, mixed = (linear_cost(replace(shape, blocks=blocks), 2, False) for blocks in ((1, 1, 1), (7, 3, 5)))
    assert mixed.flops / plain.flops == pytest.approx(1 + 105**2 / (2 * 31_500))
    assert softmax_cost(shape, 2, False).flops / plain.flops == pytest.approx(31_500**2 / (31_500 * 129))
    assert mixed.bytes == pytest.approx(0.55e9, rel=0.02)


def test_exact_tiles_are_those_of_the_family():
    """Wan's of 75 and 120 tokens, of images 8 x 8; SANA's own attention is linear, so there are none."""
    tiles = {name: shape.tiles for name, shape in shapes().items()}
    assert tiles["wan2.1-14b-480p"] == (7, 6, 10) and tiles["wan2.1-14b-720p"] == (7, 9, 10)
    assert tiles["dit-xl-2-512px"] == (4, 4) and tiles["dit-xl-2-2048px"] == (16, 16)
    assert tiles["sana-1.6b-1024px"] is None


def test_exact_tiles_cost_their_pairs_and_means():
    """21 of 420 tiles, 5 %, and 32 of 630; every axis divides."""
    for name, listed, tiles in (("480p", 21, 420), ("720p", 32, 630)):
        shape = shapes()[f"wan2.1-1.3b-{name}"]
        softmax = softmax_cost(shape, 2, False).flops
        assert listed_cost(shape, 2, False).flops == softmax * listed / tiles
        means = 4 * shape.tokens * tiles * 128 * 12
        added = exact_cost(shape, 2, False).flops - linear_cost(shape, 2, False).flops
        assert added == softmax * listed / tiles + means
        alone = replace(shape, pooled=False)
        assert exact_cost(shape, 2, False).flops - exact_cost(alone, 2, False).flops == means
        assert exact_cost(shape, 2, True).flops == 3 * exact_cost(shape, 2, False).flops
        assert linear_cost(shape, 2, False).bytes < exact_cost(shape, 2, False).bytes < 1.2e9 * tiles / 420


@pytest.mark.parametrize("backward", [False, True])
def test_flops_of_exact_tiles_are_those_that_pytorch_counts(backward):
    """But that its backward passes are two and a half forwards, since it counts the logits that are formed again."""
    shape = Shape("", (8, 12), (2, 2), 3, 16, tiles=(4, 3), share=0.25)
    inputs = [x.requires_grad_() for x in make_inputs(shape, torch.device("cpu"), torch.float32)]
    exact = {"exact": draw_tiles(shape, torch.device("cpu")), "pooled_bias": torch.zeros(3, requires_grad=True)}
    with FlopCounterMode(display=False) as counter:
        output = mhla_attention(*inputs, initial_mixing(shape.blocks), shape.grid, shape.blocks, **exact)
        if backward:
            output.sum().backward()
    counted = counter.get_flop_counts()["Global"]
    operators = [torch.ops.mhla_diffusers.tile_attention, torch.ops.mhla_diffusers.tile_attention_backward]
    added = exact_cost(shape, 4, False).flops - linear_cost(shape, 4, False).flops
    assert [counted.get(operator, 0) for operator in operators] == [added, 2.5 * added if backward else 0]


def test_softmax_flops_are_those_that_pytorch_counts():
    shape = Shape("", (8, 8), (2, 2), 3, 16)
    inputs = [torch.randn(1, 64, 3, 16) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        softmax_attention("math", *inputs)
    assert softmax_cost(shape, 4, False).flops == counter.get_total_flops()
