"""``mhla bench parallel`` and ``plan``: counts that one can reckon by hand, arithmetic of them, tables and the page."""

import csv
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from mhla_diffusers import MHLAConfig
from mhla_diffusers.benchmark.forecast import ceilings, total
from mhla_diffusers.benchmark.models import Size, find_models, models
from mhla_diffusers.benchmark.parallel import (
    MHLA,
    SOFTMAX,
    Layout,
    Machines,
    count,
    crossing,
    layouts_of,
    plan,
    pretended,
    sent,
    shape_of,
)
from mhla_diffusers.benchmark.shapes import TINY
from mhla_diffusers.cli import app

ROOT = Path(__file__).parents[2]
STATE = 4 * TINY.heads * 12 * TINY.head_dim * (TINY.head_dim + 1)
"""Bytes of the states of its 12 blocks, float32."""
ALL_TOKENS = 2 * TINY.tokens * TINY.heads * TINY.head_dim
"""Bytes of the queries of all tokens, bfloat16."""
SIZE = Size(64, 96, 9)
ROUND = Machines(tflops=2, utilisation=0.5, nvlink=100, infiniband=10, gpus_per_machine=2)
"""10^12 FLOP/s, 10^11 and 10^10 bytes/s."""


def run(command, folder):
    result = CliRunner().invoke(app, [*f"bench {command} --model tiny-wan --size 64x96 --output".split(), str(folder)])
    assert result.exit_code == 0, result.output
    return result


def tiny_wan():
    return models()["tiny-wan"]


@pytest.mark.parametrize("processes", [2, 4])
def test_bytes_by_hand(processes):
    ring, others = Layout(ring=processes), (processes - 1) / processes
    own = ALL_TOKENS / processes
    assert sent(MHLA, TINY, ring, False).bytes == 2 * others * STATE
    assert sent(MHLA, TINY, ring, True).bytes == 4 * others * STATE
    assert sent(SOFTMAX, TINY, ring, False).bytes == 2 * own * (processes - 1)
    # keys and values once more, and their gradients, in float32, once round the ring
    assert sent(SOFTMAX, TINY, ring, True).bytes == 4 * own * (processes - 1) + 2 * 2 * own * processes


def test_bytes_of_exchanged_heads_by_hand():
    by_heads, half = Layout(ulysses=2), ALL_TOKENS / 2 / 2
    assert sent(SOFTMAX, TINY, by_heads, False).bytes == 4 * half
    assert sent(SOFTMAX, TINY, by_heads, True).bytes == 8 * half
    # and RoPE, which MHLA applies after the feature map: cosine and sine of the own tokens, in float32
    tables = 2 * 4 * math.prod(TINY.grid) // 2 * TINY.head_dim
    assert sent(MHLA, TINY, by_heads, False).bytes == 4 * half + tables
    assert sent(MHLA, TINY, by_heads, True).bytes == 8 * half + tables
    assert {by_heads for _, by_heads in count(shape_of(tiny_wan(), SIZE), 4)} == {False}, "4 do not divide 3 heads"


def test_both_degrees_are_told_apart():
    both = sent(SOFTMAX, TINY, Layout(2, 2), False)
    half = ALL_TOKENS / 4 / 2
    assert (both.ring, both.ulysses) == (2 * 2 * half, 4 * half)
    # what is delivered is keys and values of the ring, and of all exchanged tensors as much as was there before
    assert both.delivered == 2 * 4 * half + 4 * 2 * half


def test_mhla_sends_the_same_however_many_tokens():
    long = replace(TINY, grid=(400, *TINY.grid[1:]))
    ring = Layout(ring=4)
    assert sent(MHLA, long, ring, True).bytes == sent(MHLA, TINY, ring, True).bytes
    assert sent(SOFTMAX, long, ring, True).bytes == 100 * sent(SOFTMAX, TINY, ring, True).bytes


def test_a_crossing_is_where_less_is_sent():
    (model,) = find_models(["wan2.1-1.3b"], "cpu")
    shape = shape_of(model, Size(480, 832, 81))
    for rival in ((SOFTMAX, False), (SOFTMAX, True)):
        found = crossing(shape, 2, rival, False)
        for tokens, less in ((found, True), (found - 1560, False)):
            sizes = count(replace(shape, grid=(tokens // 1560, 30, 52)), 2)
            assert (sizes[MHLA, False][0] < sizes[rival][0]) == less


def test_pretended_processes_are_gone_afterwards():
    with pretended(Layout(ring=3), rank=1) as world:
        assert (world.parallel.ring.size, world.parallel.ring.rank, dist.get_world_size()) == (3, 1, 3)
        with pytest.raises(RuntimeError, match="one of several already"), pretended(Layout(ring=2)):
            pass
    assert not dist.is_initialized()


def test_command(tmp_path):
    result = run("parallel --frames 9 --frames 17 --processes 2", tmp_path)
    rows = list(csv.DictReader((tmp_path / "sent.csv").read_text().splitlines()))
    assert [(row["tokens"], row["pass"]) for row in rows[:2]] == [("72", "forward"), ("72", "forward+backward")]
    assert len(rows) == 4 and len({row["MHLA, ring, MB"] for row in rows if row["pass"] == "forward"}) == 1
    assert "| tiny-wan | 2 | softmax, ring |" in (tmp_path / "crossings.md").read_text()
    # it takes minutes for the real models, so it says where it is
    assert "counting 2 of 2: tiny-wan at 64x96x17, 2 processes" in result.stderr and "counting" not in result.stdout


def test_the_page_tells_what_is_counted():
    """Its rows are in the file that the command has written, and those of one size are counted anew."""
    page, folder = (ROOT / "docs/scale.md").read_text(), ROOT / "assets/benchmarks/parallel"
    for name in ("sent", "crossings", "plan"):
        header, _, *rows = (folder / f"{name}.md").read_text().splitlines()
        assert header in page
        assert sum(row in page for row in rows) >= 8
    found = count(shape_of(models()["wan2.1-14b"], Size(480, 832, 81)), 8).values()
    cells = " | ".join(f"{forward / 1e6:,.1f}" for forward, _ in found)
    assert f"| wan2.1-14b | 8 | 32,760 | forward | {cells} |" in page


# ---- mhla bench plan


def test_seconds_by_hand():
    model = tiny_wan()
    softmax, mhla = plan(model, SIZE, [2], ROUND)
    whole = total(ceilings([model])[0].unpatched).flops  # of its own size, which is this one
    assert softmax.compute == pytest.approx(whole / 2 / 1e12)
    for planned, attention in ((softmax, SOFTMAX), (mhla, MHLA)):
        assert planned.attention == attention
        one = sent(attention, shape_of(model, SIZE), planned.layout, False).bytes
        assert planned.sending == pytest.approx(model.layers * one / 1e11)
    assert mhla.weight_bytes == softmax.weight_bytes > 0
    assert {one.sending for one in plan(model, SIZE, [1], ROUND)} == {0}


def test_between_machines_the_slower_rate_counts():
    """A ring over two machines is as slow as what joins them; heads are exchanged within one."""
    ring, heads = 1e10, 1e11
    assert ROUND.sending_seconds(Layout(2, 1), ring, 0) == pytest.approx(0.1)
    assert ROUND.sending_seconds(Layout(4, 1), ring, 0) == pytest.approx(1)
    assert ROUND.sending_seconds(Layout(2, 2), ring, heads) == pytest.approx(1 + 1)
    assert ROUND.sending_seconds(Layout(1, 4), 0, heads) == pytest.approx(10)


def test_layouts_are_those_that_diffusers_allows():
    shape = replace(TINY, grid=(64,), heads=12)
    three = [Layout(8, 1), Layout(4, 2), Layout(2, 4)]
    assert layouts_of(8, shape, 8) == three == layouts_of(8, replace(shape, heads=40), 4)
    assert layouts_of(8, replace(shape, grid=(60,), heads=40), 8) == [Layout(8, 1)]
    assert layouts_of(1, shape, 8) == [Layout()]


def test_a_hybrid_sends_for_its_softmax_layers_too():
    hybrid = MHLAConfig(blocks=(1, 2, 2), layers=(0, 2, 3))
    _, planned = plan(tiny_wan(), SIZE, [2], ROUND, hybrid)
    shape = shape_of(tiny_wan(), SIZE)
    one, other = (sent(name, shape, planned.layout, False).bytes for name in (MHLA, SOFTMAX))
    assert planned.sending == pytest.approx((3 * one + other) / 1e11)


def test_shares_may_differ_by_a_token():
    """72 tokens on 5 GPUs: the longest share has 15, and the ring waits for it."""
    alone, _, softmax, _ = plan(tiny_wan(), SIZE, [1, 5], ROUND)
    assert softmax.layout == Layout(5, 1)
    assert softmax.compute == pytest.approx(alone.compute * 15 / 72)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: Machines(tflops=0.0), "tflops=0.0 must be positive"),
        (lambda: Machines(utilisation=40.0), "40.0 .* at most 1"),
        (lambda: plan(tiny_wan(), SIZE, [0], ROUND), "gpus=0 must be at least 1"),
        (
            lambda: plan(tiny_wan(), SIZE, [2], ROUND, MHLAConfig(blocks=(1, 2, 2), sparse="content")),
            "sparse='content' .* not counted",
        ),
    ],
)
def test_what_cannot_be_planned(wrong, message):
    with pytest.raises(ValueError, match=message):
        wrong()


def test_plan_command(tmp_path):
    shown = run("plan --frames 9 --gpus 1 --gpus 4 --tflops 100 --nvlink 10", tmp_path).output
    assert "Stated, not measured: a GPU computes at 40% of 100 TFLOP/s and sends 10 GB/s" in shown
    rows = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    assert [(row["GPUs"], row["attention"]) for row in rows] == [
        ("1", "softmax"),
        ("1", "MHLA"),
        ("4", "softmax"),
        ("4", "MHLA"),
    ]
