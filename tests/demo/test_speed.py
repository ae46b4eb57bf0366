"""Whether attention is fast here: where curves cross, when measuring ends, and what the page says of it."""

import json
from pathlib import Path

import pytest
import torch

from mhla_diffusers.benchmark.timing import Budget
from mhla_diffusers.demo import speed
from mhla_diffusers.demo.speed import (
    MHLA,
    NAMES,
    SOFTMAX,
    SPARSE,
    Growth,
    crossing,
    draw_growth,
    html_speed,
    measure_growth,
    shipped_growth,
    tell_growth,
)

ROOT = Path(__file__).parents[2]
CPU = torch.device("cpu")
TOKENS = (1000, 2000, 4000)


def growth_of(sparse, mhla, softmax=lambda n: 1e-9 * n**2):
    functions = {SOFTMAX: softmax, SPARSE: sparse, MHLA: mhla}
    return Growth(
        "some CPU", "float32", "2026-11-23", 4, {name: [(n, f(n)) for n in TOKENS] for name, f in functions.items()}
    )


@pytest.fixture
def small(monkeypatch):
    """Three small N, of which each attention runs twice."""
    monkeypatch.setattr(speed, "GRIDS", ((1, 6, 10), (2, 6, 10), (4, 6, 10)))
    monkeypatch.setattr(speed, "_BUDGET", Budget(seconds=1e-3, least=1, most=1))


def test_curves_cross_where_powers_of_n_are_equal():
    """Softmax takes 1e-9 N², the others c N: equal at N = 1e9 c, wherever it lies between the N measured."""
    growth = growth_of(sparse=lambda n: 2.5e-6 * n, mhla=lambda n: 1.3e-6 * n)
    assert crossing(growth, SPARSE) == pytest.approx(2500)
    assert crossing(growth, MHLA) == pytest.approx(1300)
    said = tell_growth(growth)
    assert f"{SPARSE} overtakes softmax at about 2,500 tokens and is 1.6 times as fast at 4,000 tokens" in said
    assert f"{MHLA} overtakes softmax at about 1,300 tokens and is 3.1 times as fast" in said


def test_curves_that_do_not_cross_are_said_so():
    growth = growth_of(sparse=lambda n: 8e-6 * n, mhla=lambda n: 0.5e-6 * n)
    assert crossing(growth, SPARSE) is None
    assert crossing(growth, MHLA) == 1000
    said = tell_growth(growth)
    assert f"{SPARSE} is not faster than softmax up to 4,000 tokens (0.5 times as fast)" in said
    assert f"{MHLA} is faster than softmax at every N measured, 2 times as fast at 1,000 tokens and 8 times" in said


def test_the_last_crossing_counts_and_a_curve_that_falls_back_has_none():
    softmax = {1000: 1.0, 2000: 1.0, 4000: 1.0}.get
    growth = growth_of({1000: 0.5, 2000: 2.0, 4000: 0.5}.get, {1000: 0.5, 2000: 0.5, 4000: 2.0}.get, softmax)
    assert crossing(growth, SPARSE) == pytest.approx(2000 * 2**0.5)
    assert crossing(growth, MHLA) is None


@pytest.mark.usefixtures("small")
def test_the_budget_ends_growth():
    growth = measure_growth(CPU, seconds=1e-9)
    assert {name: [n for n, _ in curve] for name, curve in growth.curves.items()} == dict.fromkeys(NAMES, [60])
    assert "1e-09 s" in growth.ended
    growth = measure_growth(CPU, seconds=600)
    assert {name: [n for n, _ in curve] for name, curve in growth.curves.items()} == dict.fromkeys(
        NAMES, [60, 120, 240]
    )
    assert all(seconds > 0 for curve in growth.curves.values() for _, seconds in curve)
    assert growth.spread == 0, "of one repetition"


@pytest.mark.usefixtures("small")
def test_an_attention_that_cannot_run_ends_growth_and_is_named(monkeypatch):
    attentions = speed._attentions

    enough = 60

    def without_memory(shape, device, dtype):
        found = attentions(shape, device, dtype)
        if shape.tokens > enough:
            found[SOFTMAX] = lambda: (_ for _ in ()).throw(torch.OutOfMemoryError("4 GiB are missing"))
        return found

    monkeypatch.setattr(speed, "_attentions", without_memory)
    growth = measure_growth(CPU, seconds=600)
    assert [n for n, _ in growth.curves[MHLA]] == [60]
    assert "120 tokens: softmax: 4 GiB are missing" in growth.ended
    enough = 0
    with pytest.raises(RuntimeError, match="60 tokens: softmax: 4 GiB are missing.*--speed-seconds 0"):
        measure_growth(CPU, seconds=600)


def test_the_results_page_says_what_was_measured():
    measured = Growth(**json.loads((ROOT / "assets/demo/speed.json").read_text()))
    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    for growth in (measured, shipped_growth()):
        assert tell_growth(growth) in page
    for name, curve in measured.curves.items():
        line = " | ".join((name, *(f"{1000 * seconds:,.0f}" for _, seconds in curve)))
        assert f"| {line} |" in page


def test_each_grid_has_twice_the_tokens_of_the_one_before():
    sizes = [torch.Size(grid).numel() for grid in speed.GRIDS]
    assert all(after == 2 * before for before, after in zip(sizes, sizes[1:], strict=False))


def test_times_of_the_card_are_those_that_ship():
    growth = shipped_growth()
    rows = json.loads((ROOT / "assets/benchmarks/nvidia-h100-80gb-hbm3/op.json").read_text())["rows"]
    known = {(row["tokens"], row["median"]) for row in rows if row["stage"] == "forward" and "wan" in row["case"]}
    for curve in growth.curves.values():
        assert [n for n, _ in curve] == [31500, 75600]
        assert known.issuperset(curve)
    softmax = {(row["tokens"], row["median"]) for row in rows if row["variant"] == "softmax FlashAttention-3"}
    assert softmax.issuperset(growth.curves[SOFTMAX])


def test_page_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    growth = growth_of(sparse=lambda n: 2.5e-6 * n, mhla=lambda n: 1.3e-6 * n)
    draw_growth(growth, shipped_growth(), tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    page = html_speed(growth, shipped_growth(), "<img>")
    assert "<img>" in page
    assert tell_growth(growth) in page
    assert tell_growth(shipped_growth()) in page
    assert "<td>4,000</td><td>16</td><td>10</td><td>5.2</td>" in page
    assert "busy" not in page
    assert "40%" in html_speed(Growth(**{**vars(growth), "spread": 0.4}), shipped_growth(), "")
