"""``mhla bench plan``: arithmetic of what is counted and what is stated."""

import csv

import pytest
from typer.testing import CliRunner

from mhla_diffusers import MHLAConfig
from mhla_diffusers.benchmark.ceilings import ceilings
from mhla_diffusers.benchmark.models import Size, find_models
from mhla_diffusers.benchmark.parallel.counting import MHLA, SOFTMAX, sent, shape_of
from mhla_diffusers.benchmark.parallel.plan import Machines, layouts_of, plan
from mhla_diffusers.benchmark.parallel.world import Layout
from mhla_diffusers.cli import app

SIZE = Size(64, 96, 9)
ROUND = Machines(tflops=2, utilisation=0.5, nvlink=100, infiniband=10, gpus_per_machine=2)
"""10^12 FLOP/s, 10^11 and 10^10 bytes/s."""


def tiny_wan():
    return find_models(["tiny-wan"], "cpu")


def test_seconds_by_hand():
    (model,) = tiny_wan()
    softmax, mhla = plan([model], [SIZE], [2], ROUND)
    whole = ceilings([model])[0].flops  # of its own size, which is this one
    assert softmax.compute == pytest.approx(whole / 2 / 1e12)
    shape = shape_of(model, SIZE)
    for planned, attention in ((softmax, SOFTMAX), (mhla, MHLA)):
        assert planned.attention == attention
        assert planned.sending == pytest.approx(
            model.layers * sent(attention, shape, planned.layout, False).bytes / 1e11
        )
    assert mhla.weight_bytes == softmax.weight_bytes > 0


def test_between_machines_the_slower_rate_counts():
    """A ring over two machines is as slow as what joins them; heads are exchanged within one."""
    ring, heads = 1e10, 1e11
    assert ROUND.sending_seconds(Layout(2, 1), ring, 0) == pytest.approx(0.1)
    assert ROUND.sending_seconds(Layout(4, 1), ring, 0) == pytest.approx(1)
    assert ROUND.sending_seconds(Layout(2, 2), ring, heads) == pytest.approx(1 + 1)
    assert ROUND.sending_seconds(Layout(1, 4), 0, heads) == pytest.approx(10)


def test_layouts_are_those_that_diffusers_allows():
    assert layouts_of(8, 64, 12, 8) == [Layout(8, 1), Layout(4, 2), Layout(2, 4)]
    assert layouts_of(8, 64, 40, 4) == [Layout(8, 1), Layout(4, 2), Layout(2, 4)]
    assert layouts_of(8, 60, 40, 8) == [Layout(8, 1)]
    assert layouts_of(1, 60, 40, 8) == [Layout()]


def test_one_gpu_sends_nothing():
    assert {one.sending for one in plan(tiny_wan(), [SIZE], [1], ROUND)} == {0}


def test_a_hybrid_sends_for_its_softmax_layers_too():
    (model,) = tiny_wan()
    hybrid = MHLAConfig(blocks=(1, 2, 2), layers=(0, 2, 3))
    _, planned = plan([model], [SIZE], [2], ROUND, hybrid)
    shape = shape_of(model, SIZE)
    one, other = (sent(name, shape, planned.layout, False).bytes for name in (MHLA, SOFTMAX))
    assert planned.sending == pytest.approx((3 * one + other) / 1e11)


def test_shares_may_differ_by_a_token():
    """72 tokens on 5 GPUs: the longest share has 15, and the ring waits for it."""
    softmax, _ = plan(tiny_wan(), [SIZE], [5], ROUND)
    alone, _ = plan(tiny_wan(), [SIZE], [1], ROUND)
    assert softmax.layout == Layout(5, 1)
    assert softmax.compute == pytest.approx(alone.compute * 15 / 72)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"tflops": 0.0}, "tflops=0.0 must be positive"), ({"utilisation": 40.0}, "is a part of tflops, so at most 1")],
)
def test_wrong_numbers(wrong, message):
    with pytest.raises(ValueError, match=message):
        Machines(**wrong)


def test_what_cannot_be_planned():
    with pytest.raises(ValueError, match="gpus=0 must be at least 1"):
        plan(tiny_wan(), [SIZE], [0], ROUND)
    with pytest.raises(ValueError, match="sparse='content' sends is not counted"):
        plan(tiny_wan(), [SIZE], [2], ROUND, MHLAConfig(blocks=(1, 2, 2), sparse="content"))


def test_command(tmp_path):
    run = "bench plan --model tiny-wan --size 64x96 --frames 9 --gpus 1 --gpus 4 --tflops 100 --nvlink 10 --output"
    result = CliRunner().invoke(app, [*run.split(), str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "Stated, not measured: a GPU computes at 40% of 100 TFLOP/s and sends 10 GB/s" in result.output
    rows = list(csv.DictReader((tmp_path / "plan.csv").read_text().splitlines()))
    assert [(row["GPUs"], row["attention"]) for row in rows] == [
        ("1", "softmax"),
        ("1", "MHLA"),
        ("4", "softmax"),
        ("4", "MHLA"),
    ]
