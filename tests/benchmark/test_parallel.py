"""``mhla bench parallel``: what is counted is what one can reckon by hand, and what the tables and the page say."""

import csv
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from typer.testing import CliRunner

from mhla_diffusers.benchmark.models import Size, find_models
from mhla_diffusers.benchmark.parallel.counting import MHLA, SOFTMAX, count, crossings, name_of, sent, shape_of
from mhla_diffusers.benchmark.parallel.world import Layout, pretended
from mhla_diffusers.benchmark.shapes import TINY
from mhla_diffusers.cli import app

ROOT = Path(__file__).parents[2]
STATE = 4 * TINY.heads * 12 * TINY.head_dim * (TINY.head_dim + 1)
"""Bytes of the summaries of its 12 blocks, float32."""
ALL_TOKENS = 2 * TINY.tokens * TINY.heads * TINY.head_dim
"""Bytes of the queries of all tokens, bfloat16."""


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
    # and RoPE: cosine and sine of every place on an axis, for the axis's channels, added up in float32
    tables = 2 * 4 * sum(places * channels for places, channels in zip(TINY.grid, TINY.rotary_axes, strict=True))
    assert sent(MHLA, TINY, by_heads, False).bytes == 4 * half + tables
    assert sent(MHLA, TINY, by_heads, True).bytes == 8 * half + tables


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


def test_heads_that_cannot_be_exchanged_have_no_count():
    (model,) = find_models(["tiny-wan"], "cpu")
    found = count(model, shape_of(model, Size(64, 96, 9)), 4)
    assert [name_of(variant).split(", ")[-1] for variant in found.sent] == ["ring"] * 2


def test_a_crossing_is_where_less_is_sent():
    (model,) = find_models(["wan2.1-1.3b"], "cpu")
    shape = shape_of(model, Size(480, 832, 81))
    for one in crossings(model, Size(480, 832, 81), 2):
        layout = Layout(ulysses=2) if one.rival[1] else Layout(ring=2)
        for tokens, less in ((one.tokens, True), (one.tokens - 1560, False)):
            at = replace(shape, grid=(tokens // 1560, 30, 52))
            assert (
                sent(MHLA, at, Layout(ring=2), False).bytes < sent(*(one.rival[0], at, layout, False)).bytes
            ) == less


def test_pretended_processes_are_gone_afterwards():
    with pretended(Layout(ring=3), rank=1) as world:
        assert (world.parallel.ring.size, world.parallel.ring.rank, dist.get_world_size()) == (3, 1, 3)
        with pytest.raises(RuntimeError, match="one of several already"), pretended(Layout(ring=2)):
            pass
    assert not dist.is_initialized()


def test_command(tmp_path):
    run = "bench parallel --model tiny-wan --size 64x96 --frames 9 --frames 17 --processes 2 --output"
    result = CliRunner().invoke(app, [*run.split(), str(tmp_path)])
    assert result.exit_code == 0, result.output
    rows = list(csv.DictReader((tmp_path / "sent.csv").read_text().splitlines()))
    assert [(row["tokens"], row["pass"]) for row in rows[:2]] == [("72", "forward"), ("72", "forward+backward")]
    assert len(rows) == 4 and len({row["MHLA, ring, MB"] for row in rows if row["pass"] == "forward"}) == 1
    assert "| tiny-wan | 2 | softmax, ring |" in (tmp_path / "crossings.md").read_text()
    # it takes minutes for the real models, so it says where it is
    assert "counting 2 of 2: tiny-wan at 64x96x17, 2 processes" in result.stderr
    assert "looking for where tiny-wan sends less, 2 processes" in result.stderr and "counting" not in result.stdout


def test_the_page_tells_what_is_counted():
    """Its rows are in the file that the command has written, and those of one size are counted anew."""
    page, folder = (ROOT / "docs/scale.md").read_text(), ROOT / "assets/benchmarks/parallel"
    for name in ("sent", "crossings", "plan"):
        header, _, *rows = (folder / f"{name}.md").read_text().splitlines()
        assert header in page
        assert sum(row in page for row in rows) >= 8
    (model,) = find_models(["wan2.1-14b"], "cpu")
    found = count(model, shape_of(model, Size(480, 832, 81)), 8).sent.values()
    cells = " | ".join(f"{forward / 1e6:,.1f}" for forward, _ in found)
    assert f"| wan2.1-14b | 8 | 32,760 | forward | {cells} |" in page
