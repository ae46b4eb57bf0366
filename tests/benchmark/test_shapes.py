"""Shapes of attentions, and what they cost."""

from dataclasses import replace

import pytest
import torch

from mhla_diffusers.benchmark.shapes import (
    TINY,
    Shape,
    choose_shapes,
    linear_cost,
    near_field_cost,
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
    assert shapes().keys() == {"tiny"} | REAL.keys()
    assert [shape.name for shape in choose_shapes(None, "cpu")] == ["dit-xl-2-512px"]
    assert choose_shapes(["tiny"], "cuda") == [TINY]


def test_costs_are_those_of_the_paper():
    """Sec. 5.3: N = 31 500, D = 128, M = 105: mixing is about a sixth more arithmetic, and softmax 123 times plain."""
    shape = shapes()["wan2.1-1.3b-480p"]
    plain, mixed = (linear_cost(replace(shape, blocks=blocks), 2, False) for blocks in ((1, 1, 1), (7, 3, 5)))
    assert mixed.flops / plain.flops == pytest.approx(1 + 105**2 / (2 * 31_500))
    assert softmax_cost(shape, 2, False).flops / plain.flops == pytest.approx(31_500**2 / (31_500 * 129))
    assert mixed.bytes == pytest.approx(0.55e9, rel=0.02)


def test_near_field_adds_softmax_inside_the_blocks():
    """300 tokens per block; every axis divides."""
    shape = shapes()["wan2.1-1.3b-480p"]
    added = near_field_cost(shape, 2, False).flops - linear_cost(shape, 2, False).flops
    assert added == softmax_cost(shape, 2, False).flops / 105
    whole = replace(shape, blocks=(1, 1, 1))
    added = near_field_cost(whole, 2, False).flops - linear_cost(whole, 2, False).flops
    assert added == softmax_cost(shape, 2, False).flops


def test_softmax_flops_are_those_that_pytorch_counts():
    from torch.utils.flop_counter import FlopCounterMode

    shape = Shape("", (8, 8), (2, 2), 3, 16)
    inputs = [torch.randn(1, 64, 3, 16) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        softmax_attention("math", *inputs)
    assert softmax_cost(shape, 4, False).flops == counter.get_total_flops()
