"""``mhla bench op`` and ``scaling``: shapes and their costs, what is timed, and that it is right before it is timed."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from mhla_diffusers.attention import initial_mixing, mhla_attention
from mhla_diffusers.benchmark import correctness
from mhla_diffusers.benchmark import shapes as shapes_module
from mhla_diffusers.benchmark.correctness import IncorrectAttentionError, branch_weights, check_operation, make_inputs
from mhla_diffusers.benchmark.operation import GIVEN, default_scaling, fitted_exponent, mixing_overhead
from mhla_diffusers.benchmark.results import CONTENT
from mhla_diffusers.benchmark.shapes import (
    FLASH3,
    PACKAGES,
    TINY,
    Shape,
    choose_shapes,
    cost_of,
    draw_lists,
    flex_over_lists,
    shapes,
    softmax_attention,
    why_no_package,
)

from .commands import bench, measure, medians

CPU = torch.device("cpu")
FLEX = "listed blocks alone FlexAttention"
WAN = {"wan2.1-1.3b-480p": 31_500, "wan2.1-1.3b-720p": 75_600, "wan2.1-14b-480p": 31_500, "wan2.1-14b-720p": 75_600}
SANA = {"sana-1.6b-1024px": 1024, "sana-1.6b-2048px": 4096, "sana-1.6b-4096px": 16_384}
DIT = {"dit-xl-2-512px": 1024, "dit-xl-2-1024px": 4096, "dit-xl-2-2048px": 16_384}
SCALING = ("scaling", "--heads", 1, "--head-dim", 8)


def test_a_gpu_gets_every_real_shape_and_a_cpu_the_cheapest():
    assert {shape.name: shape.tokens for shape in choose_shapes(None, "cuda")} == WAN | SANA | DIT
    assert shapes().keys() > {"tiny", "flux-dev-1024px"} | WAN.keys()
    assert [shape.name for shape in choose_shapes(None, "cpu")] == ["dit-xl-2-512px"]
    assert choose_shapes(["tiny"], "cuda") == [TINY]


def test_costs_are_those_of_the_paper():
    """Sec. 5.3: N = 31 500, D = 128, M = 105: mixing is about a sixth more arithmetic, and softmax 123 times plain."""
    shape = shapes()["wan2.1-1.3b-480p"]
    plain, mixed = (cost_of(replace(shape, blocks=blocks), "linear", 2, False) for blocks in ((1, 1, 1), (7, 3, 5)))
    assert mixed.flops / plain.flops == pytest.approx(1 + 105**2 / (2 * 31_500))
    assert cost_of(shape, "softmax", 2, False).flops / plain.flops == pytest.approx(31_500**2 / (31_500 * 129))
    assert mixed.bytes == pytest.approx(0.55e9, rel=0.02)


@pytest.mark.parametrize(("name", "listed", "blocks"), [("480p", 25, 493), ("720p", 59, 1182)])
def test_the_sparse_branch_costs_its_pairs_and_pooled_keys(name, listed, blocks):
    """SANA's own attention is linear, so its patch has no sparse branch."""
    shape = shapes()[f"wan2.1-1.3b-{name}"]
    softmax, lists, linear, both = (cost_of(shape, work, 2, False) for work in ("softmax", "lists", "linear", "sparse"))
    assert shape.uniform_blocks == blocks and lists.flops == pytest.approx(softmax.flops * listed / blocks)
    assert both.flops - linear.flops == pytest.approx(lists.flops + 4 * shape.tokens * blocks * 128 * 12)
    assert cost_of(shape, "sparse", 2, True).flops == 3 * both.flops
    assert linear.bytes < both.bytes < 1.3e9 * blocks / 493
    with pytest.raises(ValueError, match="'sana-1.6b-1024px' has no sparse branch; give it a block_size"):
        _ = shapes()["sana-1.6b-1024px"].uniform_blocks


def test_flops_are_those_that_pytorch_counts():
    shape = Shape("", (8, 12), (2, 2), 3, 16, block_size=8, density=0.25)
    inputs, mixing = make_inputs(shape, CPU, torch.float32), initial_mixing(shape.blocks)
    sparse = {"sparse": draw_lists(shape, CPU), **branch_weights(3, CPU)}
    counted = []
    for given in (sparse, {}, None):
        with FlopCounterMode(display=False) as counter:
            if given is None:
                softmax_attention("math", *inputs)
            else:
                mhla_attention(*inputs, mixing, shape.grid, shape.blocks, **given)
        counted.append(counter.get_total_flops())
    both, linear, softmax = (cost_of(shape, work, 4, False).flops for work in ("sparse", "linear", "softmax"))
    assert (counted[0] - counted[1], counted[2]) == (both - linear, softmax)


def test_lists_are_the_same_ones_every_time_and_of_one_length():
    shape = Shape("", (5, 8), (1, 1), 3, 16, block_size=1, density=0.1)
    mask = draw_lists(shape, CPU).mask()[0]
    assert mask.shape == (3, 40, 40) and (mask.sum(dim=-1) == 4).all()
    assert torch.equal(mask, draw_lists(shape, CPU).mask()[0]) and not torch.equal(mask[0], mask[1])
    few = draw_lists(replace(shape, grid=(2, 2), density=0.05), CPU)
    assert (few.mask().sum(dim=-1) == 1).all()


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


def test_flash_attention_3_is_found_under_either_name(monkeypatch):
    """fa3-fwd and flash-attn-3 install modules of different names."""
    gpu = torch.device("cuda")
    assert why_no_package(FLASH3, gpu) == "FlashAttention-3 (fa3-fwd or flash-attn-3) is not installed"
    attend = SimpleNamespace(flash_attn_func=lambda query, key, value: (query + key + value, None))
    monkeypatch.setattr(shapes_module, "find_spec", lambda name: attend if name == "flash_attn_interface" else None)
    monkeypatch.setattr(shapes_module, "import_module", {"flash_attn_interface": attend}.__getitem__)
    assert why_no_package(FLASH3, gpu) is None and PACKAGES[FLASH3](*torch.ones(3, 1)) == 3


def test_every_variant_has_a_row(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny")
    for stage in ("forward", "forward+backward"):
        measured = set(medians(run, stage))
        assert {"MHLA eager", f"{CONTENT} eager", f"{GIVEN} eager", "plain linear eager", "softmax flash"} <= measured
    absent = {row.variant: row.reason for row in run.rows if row.status == "absent"}
    assert "GPUs only" in absent["softmax cudnn"] and "run on CUDA and ROCm" in absent["MHLA triton"]
    assert "--compile" in absent["MHLA torch.compile"] and "--compile" in absent[FLEX]
    fastest = min(row.median for row in run.rows if row.baseline and row.median and row.stage == "forward")
    row = run.rows[0]
    assert run.times_baseline(row) == pytest.approx(fastest / row.median)
    assert row.matmul_fraction == pytest.approx(row.flops / row.median / run.rates.matmul)


@pytest.mark.slow
def test_what_compiles_is_timed_when_asked_for(tmp_path):
    run = measure(tmp_path, "op", "--shape", "tiny", "--compile", "--stage", "forward")
    assert {row.stage for row in run.rows} == {"forward"}
    assert {"MHLA torch.compile", FLEX} <= set(medians(run))
    (flex,) = [row for row in run.rows if row.variant == FLEX]
    assert not flex.baseline and flex.blocks is None


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


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("op", "--shape", "wan"), r"'wan'.*allowed: tiny, .*dit-xl-2-512px"),
        (("op", "--dtype", "float8"), "'float8'.*bfloat16"),
        (("op", "--stage", "backward"), r"'backward'.*allowed: forward, forward\+backward"),
        (("op", "--device", "gpu"), "device='gpu' is unknown; torch sees here: cpu"),
        ((*SCALING, "--tokens", 1000), "tokens=1000 is no square number.*961"),
    ],
)
def test_unknown_values_are_refused(tmp_path, options, message):
    with pytest.raises(ValueError, match=message):
        bench(*options, "--output", tmp_path)


def test_every_n_and_m_is_measured(tmp_path):
    more = ("--tokens", 16, "--tokens", 64, "--blocks", 4, "--blocks", 64, "--softmax-tokens", 16)
    run = measure(tmp_path, *SCALING, *more)
    found = {(row.tokens, row.variant): row.status for row in run.rows}
    names = {16: ("softmax", "plain linear", "MHLA M=4"), 64: ("softmax", "plain linear", "MHLA M=4", "MHLA M=64")}
    expected = {(tokens, name): "measured" for tokens in names for name in names[tokens]}
    assert found == expected | {(64, "softmax"): "absent"}
    plain, mhla = run.rows[1:3]
    assert mixing_overhead(run, mhla) == pytest.approx(mhla.median / plain.median - 1)
    assert mixing_overhead(run, plain) is None
    # the exponent is that of the times, of enough tokens
    rows = [replace(plain, tokens=n, median=3e-9 * n**1.5) for n in (16, 8192, 32768, 131072)]
    rows[0] = replace(rows[0], median=1.0)
    assert fitted_exponent(rows, "plain linear") == pytest.approx(1.5)
    assert fitted_exponent(rows[:2], "plain linear") is None


def test_the_summary_marks_few_blocks(tmp_path):
    shown = bench(*SCALING, "--tokens", 16, "--blocks", 4, "--blocks", 16, "--seconds", 0.01, "--output", tmp_path)
    few, many = (next(line for line in shown.splitlines() if line.startswith(f"│ {m} ")) for m in (4, 16))
    assert "*" in few and "*" not in many and "%" in many


def test_a_gpu_goes_to_a_million_tokens():
    config = default_scaling("cuda")
    assert (max(config.tokens), min(config.blocks), max(config.blocks)) == (2**20, 4, 1024)
