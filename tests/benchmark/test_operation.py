"""``mhla bench op``."""

from dataclasses import replace

import pytest
import torch

from mhla_diffusers.benchmark import correctness
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError
from mhla_diffusers.benchmark.costs import linear_cost, near_field_cost, softmax_cost
from mhla_diffusers.benchmark.shapes import SHAPES, Shape, choose_shapes
from mhla_diffusers.benchmark.softmax import softmax_attention

from .commands import bench, measure, medians


def test_every_variant_has_a_row(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny")
    for stage in ("forward", "forward+backward"):
        measured = set(medians(run, stage))
        assert {"MHLA eager", "MHLA, near field eager", "plain linear eager", "softmax flash"} <= measured
    absent = {row.variant: row.reason for row in run.rows if row.status == "absent"}
    assert "GPUs only" in absent["softmax cudnn"]
    assert "--compile" in absent["MHLA torch.compile"]
    assert "run on CUDA and ROCm" in absent["MHLA triton"]
    fastest = min(row.median for row in run.rows if row.baseline and row.median and row.stage == "forward")
    row = run.rows[0]
    assert run.times_baseline(row) == pytest.approx(fastest / row.median)
    assert row.matmul_fraction == pytest.approx(row.flops / row.median / run.rates.matmul)


def test_one_stage_alone(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--stage", "forward")
    assert {row.stage for row in run.rows} == {"forward"}


@pytest.mark.slow
def test_torch_compile_is_timed_when_asked_for(tmp_path):
    assert "MHLA torch.compile" in medians(measure(tmp_path, "op", "--shape", "tiny", "--compile"))


@pytest.mark.parametrize("wrong", ["output", "gradient"])
def test_a_wrong_attention_is_not_timed(monkeypatch, tmp_path, wrong):
    right = correctness.mhla_attention

    def attend(query, *args, **options):
        twice = 2 * query - query.detach()  # the right value and a doubled gradient
        return right(twice, *args, **options) if wrong == "gradient" else 1.1 * right(query, *args, **options)

    monkeypatch.setattr(correctness, "mhla_attention", attend)
    with pytest.raises(IncorrectAttentionError, match=f"{wrong} .*relative error .* Nothing was timed"):
        measure(tmp_path, "op", "--shape", "tiny")
    assert not list(tmp_path.rglob("*.json"))


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'wan'.*allowed: tiny, wan2.1-1.3b-480p"):
        bench("op", "--shape", "wan", "--output", tmp_path)
    with pytest.raises(ValueError, match="'float8'.*bfloat16"):
        bench("op", "--dtype", "float8", "--output", tmp_path)
    with pytest.raises(ValueError, match=r"'backward'.*allowed: forward, forward\+backward"):
        bench("op", "--stage", "backward", "--output", tmp_path)
    with pytest.raises(ValueError, match="device='gpu' is unknown; torch sees here: cpu"):
        bench("op", "--device", "gpu", "--output", tmp_path)


def test_a_gpu_gets_every_real_shape():
    names = {shape.name for shape in choose_shapes(None, "cuda")}
    assert names == set(SHAPES) - {"tiny"}
    assert SHAPES["wan2.1-1.3b-480p"].tokens == 31_500
    assert SHAPES["wan2.1-14b-720p"].tokens == 75_600


def test_costs_are_those_of_the_paper():
    """Sec. 5.3: N = 31 500, D = 128, M = 105: mixing is about a sixth more arithmetic, and softmax 123 times plain."""
    shape = SHAPES["wan2.1-1.3b-480p"]
    plain, mixed = (linear_cost(replace(shape, blocks=blocks), 2, False) for blocks in ((1, 1, 1), (7, 3, 5)))
    assert mixed.flops / plain.flops == pytest.approx(1 + 105**2 / (2 * 31_500))
    assert softmax_cost(shape, 2, False).flops / plain.flops == pytest.approx(31_500**2 / (31_500 * 129))
    assert mixed.bytes == pytest.approx(0.55e9, rel=0.02)


def test_near_field_adds_softmax_inside_the_blocks():
    """300 tokens per block; every axis divides."""
    shape = SHAPES["wan2.1-1.3b-480p"]
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
