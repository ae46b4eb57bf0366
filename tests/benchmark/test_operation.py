"""``mhla bench op``."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from mhla_diffusers.attention import initial_mixing, mhla_attention
from mhla_diffusers.benchmark import correctness
from mhla_diffusers.benchmark import shapes as packages
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError, check_operation, make_inputs
from mhla_diffusers.benchmark.operation import GIVEN
from mhla_diffusers.benchmark.results import CONTENT
from mhla_diffusers.benchmark.shapes import Shape, draw_lists, flex_over_lists, shapes

from .commands import bench, measure, medians

CPU = torch.device("cpu")
FLEX = "listed blocks alone FlexAttention"


def test_every_variant_has_a_row(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny")
    for stage in ("forward", "forward+backward"):
        measured = set(medians(run, stage))
        assert {"MHLA eager", f"{CONTENT} eager", f"{GIVEN} eager", "plain linear eager", "softmax flash"} <= measured
    absent = {row.variant: row.reason for row in run.rows if row.status == "absent"}
    assert "GPUs only" in absent["softmax cudnn"]
    assert "--compile" in absent["MHLA torch.compile"] and "--compile" in absent[FLEX]
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
def test_flex_attention_attends_to_the_same_blocks(grid):
    shape = Shape("", grid, (2, 2), 2, 16, block_size=16, density=0.5)
    inputs, lists = make_inputs(shape, CPU, torch.float32), draw_lists(shape, CPU)
    with torch.no_grad():
        found = flex_over_lists(shape, inputs, lists)()
    expected = mhla_attention(*inputs, initial_mixing(shape.blocks), grid, shape.blocks, sparse=lists)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    torch.compiler.reset()


def test_lists_are_the_same_ones_every_time_and_of_one_length():
    shape = Shape("", (5, 8), (1, 1), 3, 16, block_size=1, density=0.1)
    mask = draw_lists(shape, CPU).mask()[0]
    assert mask.shape == (3, 40, 40) and (mask.sum(dim=-1) == 4).all()
    assert torch.equal(mask, draw_lists(shape, CPU).mask()[0]) and not torch.equal(mask[0], mask[1])
    few = draw_lists(replace(shape, grid=(2, 2), density=0.05), CPU)
    assert (few.mask().sum(dim=-1) == 1).all()


def test_flash_attention_3_is_found_under_either_name(monkeypatch):
    """fa3-fwd and flash-attn-3 install modules of different names."""
    gpu = torch.device("cuda")
    assert packages.why_no_package(packages.FLASH3, gpu) == (
        "FlashAttention-3 (fa3-fwd or flash-attn-3) is not installed"
    )
    attend = SimpleNamespace(flash_attn_func=lambda query, key, value: (query + key + value, None))
    monkeypatch.setattr(packages, "find_spec", lambda name: attend if name == "flash_attn_interface" else None)
    monkeypatch.setattr(packages, "import_module", {"flash_attn_interface": attend}.__getitem__)
    assert packages.why_no_package(packages.FLASH3, gpu) is None
    assert packages.PACKAGES[packages.FLASH3](*torch.ones(3, 1)) == 3


@pytest.mark.parametrize("wrong", ["output", "query"])
@pytest.mark.parametrize("kind", ["MHLA", "MHLA with the sparse branch"])
def test_a_wrong_attention_is_not_timed(monkeypatch, tmp_path, wrong, kind):
    """The output, or the gradient of the query alone."""
    right = correctness.mhla_attention

    def attend(query, *args, **options):
        if (kind == "MHLA") == ("sparse" in options):
            return right(query, *args, **options)
        twice = 2 * query - query.detach()  # the right value and a doubled gradient
        return right(twice, *args, **options) if wrong == "query" else 1.1 * right(query, *args, **options)

    monkeypatch.setattr(correctness, "mhla_attention", attend)
    with pytest.raises(IncorrectAttentionError, match=f"{kind} eager on cpu .* {wrong} .* Nothing was timed"):
        measure(tmp_path, "op", "--shape", "tiny")
    assert not list(tmp_path.rglob("*.json"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_check_passes_at_the_blocks_of_real_models(dtype):
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
