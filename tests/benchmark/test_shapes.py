"""Shapes of attentions, and what they cost."""

from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers.attention import initial_mixing, mhla_attention
from mhla_diffusers.benchmark.correctness import make_inputs
from mhla_diffusers.benchmark.shapes import TINY, Shape, choose_shapes, cost_of, draw_lists, shapes, softmax_attention

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
    plain, mixed = (cost_of(replace(shape, blocks=blocks), "linear", 2, False) for blocks in ((1, 1, 1), (7, 3, 5)))
    assert mixed.flops / plain.flops == pytest.approx(1 + 105**2 / (2 * 31_500))
    assert cost_of(shape, "softmax", 2, False).flops / plain.flops == pytest.approx(31_500**2 / (31_500 * 129))
    assert mixed.bytes == pytest.approx(0.55e9, rel=0.02)


def test_softmax_models_have_uniform_blocks():
    """Of 64 tokens; SANA's own attention is linear, so its patch has no sparse branch."""
    known = shapes()
    assert [known[f"wan2.1-1.3b-{size}"].uniform_blocks for size in ("480p", "720p")] == [493, 1182]
    assert known["sana-1.6b-1024px"].block_size is None
    with pytest.raises(ValueError, match="'sana-1.6b-1024px' has no sparse branch; give it a block_size"):
        _ = known["sana-1.6b-1024px"].uniform_blocks


def test_the_sparse_branch_costs_its_pairs_and_pooled_keys():
    """25 of 493 blocks, and 59 of 1182."""
    for name, listed, blocks in (("480p", 25, 493), ("720p", 59, 1182)):
        shape = shapes()[f"wan2.1-1.3b-{name}"]
        softmax, lists, linear, both = (
            cost_of(shape, work, 2, False).flops for work in ("softmax", "lists", "linear", "sparse")
        )
        assert lists == pytest.approx(softmax * listed / blocks)
        assert both - linear == pytest.approx(lists + 4 * shape.tokens * blocks * 128 * 12)
        assert cost_of(shape, "sparse", 2, True).flops == 3 * both
        assert (
            cost_of(shape, "linear", 2, False).bytes < cost_of(shape, "sparse", 2, False).bytes < 1.3e9 * blocks / 493
        )


def test_flops_of_the_sparse_branch_are_those_that_pytorch_counts():
    shape = Shape("", (8, 12), (2, 2), 3, 16, block_size=8, density=0.25)
    inputs = make_inputs(shape, torch.device("cpu"), torch.float32)
    sparse = {
        "sparse": draw_lists(shape, torch.device("cpu")),
        "pooled_bias": torch.zeros(3),
        "linear_weight": torch.ones(3),
    }
    mixing = initial_mixing(shape.blocks)
    counted = []
    for given in (sparse, {}):
        with FlopCounterMode(display=False) as counter:
            mhla_attention(*inputs, mixing, shape.grid, shape.blocks, **given)
        counted.append(counter.get_total_flops())
    added = cost_of(shape, "sparse", 4, False).flops - cost_of(shape, "linear", 4, False).flops
    assert counted[0] - counted[1] == added


def test_softmax_flops_are_those_that_pytorch_counts():
    shape = Shape("", (8, 8), (2, 2), 3, 16)
    inputs = [torch.randn(1, 64, 3, 16) for _ in range(3)]
    with FlopCounterMode(display=False) as counter:
        softmax_attention("math", *inputs)
    assert cost_of(shape, "softmax", 4, False).flops == counter.get_total_flops()
