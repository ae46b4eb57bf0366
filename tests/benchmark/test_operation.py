"""``mhla bench op``."""

from dataclasses import replace

import pytest
import torch

from mhla_diffusers.attention import initial_mixing, mhla_attention
from mhla_diffusers.benchmark import correctness, problems
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError, check_operation
from mhla_diffusers.benchmark.lists import draw_mask, draw_tiles, flex_over_tiles
from mhla_diffusers.benchmark.problems import make_inputs
from mhla_diffusers.benchmark.shapes import Shape, shapes

from .commands import bench, measure, medians

CPU = torch.device("cpu")
FLEX = "exact tiles alone FlexAttention"


def test_every_variant_has_a_row(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny")
    for stage in ("forward", "forward+backward"):
        measured = set(medians(run, stage))
        assert {"MHLA eager", "MHLA, exact tiles eager", "plain linear eager", "softmax flash"} <= measured
    absent = {row.variant: row.reason for row in run.rows if row.status == "absent"}
    assert "GPUs only" in absent["softmax cudnn"]
    assert "--compile" in absent["MHLA torch.compile"] and "--compile" in absent["exact tiles alone FlexAttention"]
    assert "run on CUDA and ROCm" in absent["MHLA triton"]
    fastest = min(row.median for row in run.rows if row.baseline and row.median and row.stage == "forward")
    row = run.rows[0]
    assert run.times_baseline(row) == pytest.approx(fastest / row.median)
    assert row.matmul_fraction == pytest.approx(row.flops / row.median / run.rates.matmul)


def test_one_stage_alone(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--stage", "forward")
    assert {row.stage for row in run.rows} == {"forward"}


@pytest.mark.slow
def test_what_compiles_is_timed_when_asked_for(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--compile")
    assert {"MHLA torch.compile", FLEX} <= set(medians(run))
    (backward,) = [row for row in run.rows if row.variant == FLEX and row.stage == "forward+backward"]
    assert "no backward pass on CPUs" in backward.reason
    assert not backward.baseline and backward.blocks is None


@pytest.mark.slow
@pytest.mark.parametrize("grid", [(8, 8), (7, 9)])
def test_flex_attention_attends_to_the_same_tiles(grid):
    shape = Shape("", grid, (2, 2), 2, 16, tiles=(2, 2), share=0.5)
    inputs, tiles = make_inputs(shape, CPU, torch.float32), draw_tiles(shape, CPU)
    with torch.no_grad():
        found = flex_over_tiles(shape, inputs, tiles)()
    expected = mhla_attention(*inputs, initial_mixing(shape.blocks), grid, shape.blocks, sparse=tiles)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_lists_are_the_same_ones_every_time_and_of_one_length():
    mask = draw_mask((5, 8), 3, 0.1)
    assert (mask.sum(dim=-1) == 4).all() and torch.equal(mask, draw_mask((5, 8), 3, 0.1))
    assert not torch.equal(mask[0], mask[1])
    assert (draw_mask((2, 2), 1, 0.05).sum(dim=-1) == 1).all()


@pytest.mark.parametrize("wrong", ["output", "query"])
@pytest.mark.parametrize("kind", ["MHLA", "MHLA with exact tiles"])
def test_a_wrong_attention_is_not_timed(monkeypatch, tmp_path, wrong, kind):
    """The output, or the gradient of the query alone."""
    right = problems.mhla_attention

    def attend(query, *args, **options):
        if (kind == "MHLA") == ("exact" in options):
            return right(query, *args, **options)
        twice = 2 * query - query.detach()  # the right value and a doubled gradient
        return right(twice, *args, **options) if wrong == "query" else 1.1 * right(query, *args, **options)

    monkeypatch.setattr(problems, "mhla_attention", attend)
    with pytest.raises(IncorrectAttentionError, match=f"{kind} eager has a relative .* {wrong} .* Nothing was timed"):
        measure(tmp_path, "op", "--shape", "tiny")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_passes_at_the_tiles_of_real_models(dtype):
    shape = replace(shapes()["dit-xl-2-1024px"], head_dim=16)
    assert 0 < check_operation(shape, CPU, dtype, "eager", sparse=True) < correctness.LARGEST_ERROR[dtype]


def test_unknown_names_are_refused(tmp_path):
    with pytest.raises(ValueError, match=r"'wan'.*allowed: tiny, .*dit-xl-2-512px"):
        bench("op", "--shape", "wan", "--output", tmp_path)
    with pytest.raises(ValueError, match="'float8'.*bfloat16"):
        bench("op", "--dtype", "float8", "--output", tmp_path)
    with pytest.raises(ValueError, match=r"'backward'.*allowed: forward, forward\+backward"):
        bench("op", "--stage", "backward", "--output", tmp_path)
    with pytest.raises(ValueError, match="device='gpu' is unknown; torch sees here: cpu"):
        bench("op", "--device", "gpu", "--output", tmp_path)
