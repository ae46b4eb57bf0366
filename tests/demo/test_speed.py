"""Whether attention is fast here: where curves cross, when measuring ends, and what the page says of it."""

import json
from dataclasses import replace

import pytest
import torch

from mhla_diffusers.demo import speed
from mhla_diffusers.demo.speed import MHLA, SOFTMAX, SPARSE, Growth, draw_growth, html_speed, measure_growth

from ..refusals import refused
from ..scripts import ROOT

CPU = torch.device("cpu")
TOKENS = (1000, 2000, 4000)


def growth_of(sparse, mhla, softmax=lambda n: 1e-9 * n**2):
    functions = {SOFTMAX: softmax, SPARSE: sparse, MHLA: mhla}
    curves = {name: [(n, f(n)) for n in TOKENS] for name, f in functions.items()}
    return Growth("some CPU", "float32", "2026-11-23", 4, curves, spread=0.1, ended="the budget is spent")


@pytest.fixture
def small(monkeypatch):
    """Three small N, of which each attention runs twice."""
    monkeypatch.setattr(speed, "GRIDS", ((1, 6, 10), (2, 6, 10), (4, 6, 10)))
    monkeypatch.setattr(speed, "_BUDGET", {"seconds": 1e-3, "least": 1, "most": 1})


def test_curves_cross_where_powers_of_n_are_equal():
    """Softmax takes 1e-9 N², the others c N: equal at N = 1e9 c, wherever it lies between the N measured."""
    growth = growth_of(sparse=lambda n: 2.5e-6 * n, mhla=lambda n: 1.3e-6 * n)
    assert growth.crossing(SPARSE) == pytest.approx(2500)
    assert growth.crossing(MHLA) == pytest.approx(1300)
    factors = "0.4 times as fast at 1,000 tokens, 1.6 times as fast at 4,000 tokens"
    assert f"{SPARSE} is faster than softmax from about 2,500 tokens on ({factors})" in str(growth)


def test_curves_that_do_not_cross_are_said_so():
    growth = growth_of(sparse=lambda n: 8e-6 * n, mhla=lambda n: 0.5e-6 * n)
    assert growth.crossing(SPARSE) is None
    assert growth.crossing(MHLA) == 1000
    assert f"{SPARSE} is faster than softmax at no N measured (0.12 times as fast at 1,000 tokens, 0.5" in str(growth)
    assert f"{MHLA} is faster than softmax from about 1,000 tokens on (2 times as fast at 1,000 tokens, 8" in str(
        growth
    )


def test_the_last_crossing_counts_and_a_curve_that_falls_back_has_none():
    softmax = {1000: 1.0, 2000: 1.0, 4000: 1.0}.get
    growth = growth_of({1000: 0.5, 2000: 2.0, 4000: 0.5}.get, {1000: 0.5, 2000: 0.5, 4000: 2.0}.get, softmax)
    assert growth.crossing(SPARSE) == pytest.approx(2000 * 2**0.5)
    assert growth.crossing(MHLA) is None


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("seconds", "tokens"), [(1e-9, [60]), (600, [60, 120, 240])])
def test_the_budget_ends_growth(seconds, tokens):
    growth = measure_growth(CPU, seconds)
    assert [[n for n, _ in curve] for curve in growth.curves.values()] == [tokens] * 3
    assert all(time > 0 for curve in growth.curves.values() for _, time in curve)
    assert (f"{seconds:g} s" in growth.ended) == (seconds < 1)
    assert growth.spread == 0, "of one repetition"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("enough", [60, 0])
def test_an_attention_that_cannot_run_ends_growth_and_is_named(monkeypatch, enough):
    softmax = torch.nn.functional.scaled_dot_product_attention

    def without_memory(query, key, value, **settings):  # settings: by the sparse branch, which runs on
        if query.shape[2] > enough and not settings:
            raise torch.OutOfMemoryError("4 GiB are missing")
        return softmax(query, key, value, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", without_memory)
    if not enough:
        with refused(60, "4 GiB", error=RuntimeError):
            measure_growth(CPU, seconds=600)
        return
    growth = measure_growth(CPU, seconds=600)
    assert [n for n, _ in growth.curves[MHLA]] == [60]
    assert "120 tokens: softmax: 4 GiB are missing" in growth.ended


def test_each_grid_has_twice_the_tokens_of_the_one_before():
    sizes = [torch.Size(grid).numel() for grid in speed.GRIDS]
    assert all(after == 2 * before for before, after in zip(sizes, sizes[1:], strict=False))


def test_the_results_page_says_what_was_measured():
    measured = Growth(**json.loads((ROOT / "assets/demo/speed.json").read_text()))
    page = " ".join((ROOT / "docs/results.md").read_text(encoding="utf-8").split())
    for name, curve in measured.curves.items():
        if name != SOFTMAX:
            assert f"overtakes softmax at about {speed.about(measured.crossing(name))}" in page
        line = " | ".join((name, *(f"{1000 * seconds:,.0f}" for _, seconds in curve)))
        assert f"| {line} |" in page


def test_page_and_picture(tmp_path):
    pytest.importorskip("matplotlib")
    growth = growth_of(sparse=lambda n: 2.5e-6 * n, mhla=lambda n: 1.3e-6 * n)
    draw_growth(growth, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").stat().st_size > 10_000
    page = html_speed(growth, "<img>")
    assert all(part in page for part in ("<img>", str(growth), growth.ended))
    assert "<td>4,000</td><td>16</td><td>10</td><td>5.2</td>" in page
    assert "busy" not in page
    assert "40%" in html_speed(replace(growth, spread=0.4), "")
